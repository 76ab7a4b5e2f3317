"""Metal source compiled to a shared library whose entry points the runtime calls."""

from __future__ import annotations

import ctypes
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import mlx.core as mx

from metile.errors import mismatch
from metile.simulator import clang
from metile.simulator.clang import Build
from metile.simulator.library import library
from metile.simulator.library import loaded as loaded_runtime
from metile.simulator.parameters import Parameter, RawParameter, counts_symbol, entry_symbol, entry_text
from metile.simulator.repair import compile_text
from metile.simulator.rewrite import KernelFunction, Rewritten, rewrite
from metile.simulator.strict import check_strict
from metile.targets.compiler import CompileError

__all__ = ["Entry", "Options", "Parameter", "Program", "compile_program"]

Constants = Mapping[int, bool | int | float] | tuple[tuple[int, bool | int | float], ...]

_MATRICES = re.compile(r"\bsimdgroup_(matrix\b|(half|float|bfloat)8x8\b)")
_programs: dict[Path, Program] = {}


@dataclass(frozen=True)
class Options:
    """How a program is compiled.

    Attributes:
        check: instrument it for checked mode.
        strict: reject what Apple's compiler rejects.
        constants: values of function constants by index.
        include: folders for ``#include``, before MLX's own.
        defines: macros, ``NAME`` or ``NAME=value``.
        once_per_simdgroup: let the simdgroup, not each lane, do the operations on a simdgroup_matrix; None: where the
            source has any, and the program is not checked.
    """

    check: bool = False
    strict: bool = False
    constants: Constants = field(default=())
    include: tuple[Path, ...] = ()
    defines: tuple[str, ...] = ()
    once_per_simdgroup: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "constants", tuple(sorted(dict(self.constants).items())))
        object.__setattr__(self, "include", tuple(Path(path) for path in self.include))
        object.__setattr__(self, "defines", tuple(self.defines))

    @property
    def folders(self) -> tuple[Path, ...]:
        """All folders for ``#include``; MLX's is last."""
        return (*self.include, Path(mx.__file__).parent / "include")


@dataclass(frozen=True)
class Entry:
    """A kernel that can be launched.

    Attributes:
        name: as asked for.
        parameters: of the kernel function; an array of buffers counts as that many.
        address: of the function that the runtime calls once a thread.
        max_threads: of a threadgroup, where the source says it.
    """

    name: str
    parameters: tuple[Parameter, ...]
    address: int
    max_threads: int | None = None


@dataclass(frozen=True)
class Program:
    """A loaded shared library.

    Attributes:
        path: of the library.
        check: whether it is instrumented.
        entries: by name.
    """

    path: Path
    check: bool
    entries: dict[str, Entry]
    library: ctypes.CDLL = field(repr=False, compare=False)


@dataclass(frozen=True)
class _Wanted:
    """An entry before it is compiled."""

    name: str
    function: str
    kernel: KernelFunction


def compile_program(
    text: str,
    entries: Mapping[str, str] | None = None,
    options: Options | None = None,
    *,
    file: str = "program_source",
) -> Program:
    """Compile Metal source, or find it in the cache, and load it.

    Args:
        text: the source.
        entries: names and the kernel functions, with their template arguments, that they stand for. None: every kernel
            that is not a template, and every instantiation with a ``host_name``.
        options: how to compile.
        file: the name of the source in messages.

    Raises:
        CompileError: the source does not compile, with clang's errors; or strict mode rejects it.
        MetileError: an entry names no kernel of the source.
    """
    options = options or Options()
    # The name stands in a line marker, which knows quotes and backslashes only as escapes.
    file = re.sub(r'["\\\n]', "_", file)
    source = clang.preprocess(text, options.folders, options.defines, file)
    rewritten = rewrite(source, dict(options.constants))
    wanted = _wanted(rewritten, entries)
    once = options.once_per_simdgroup
    if once is None:
        once = not options.check and _MATRICES.search(rewritten.text) is not None
    build = Build(options.check, once)
    body = "".join(entry_text(number, want.function, want.kernel.parameters) for number, want in enumerate(wanted))
    unit = f'{rewritten.text}\n# 1 "<entries>"\n{body}'
    if options.strict:
        check_strict(unit, text, source, file, options.folders)
    path = _library(unit, build, text, file, options)
    program = _programs.get(path)
    if program is None or list(program.entries) != [want.name for want in wanted]:
        program = _programs[path] = _load(path, wanted, rewritten, options.check)
    return program


def _wanted(rewritten: Rewritten, entries: Mapping[str, str] | None) -> list[_Wanted]:
    if entries is None:
        plain = {name: name for name, kernel in rewritten.kernels.items() if not kernel.template}
        entries = {**plain, **rewritten.instantiations}
    return [_find(rewritten, name, function) for name, function in entries.items()]


def _find(rewritten: Rewritten, name: str, function: str) -> _Wanted:
    """Find the kernel function that an entry stands for; `function` may be a host name too."""
    function = rewritten.instantiations.get(function, function)
    base, angle, arguments = function.partition("<")
    base = base.strip().removeprefix("::")
    found = rewritten.kernels.get(base)
    if found is None:
        same = [kernel for kernel in rewritten.kernels.values() if kernel.name.split("::")[-1] == base.split("::")[-1]]
        found = same[0] if len(same) == 1 else None
    if found is None:
        known = ", ".join(sorted({*rewritten.kernels, *rewritten.instantiations})) or "none"
        raise mismatch("compile", f"a kernel of the source ({known})", f"'{function}'")
    if found.template and not angle:
        raise mismatch("compile", f"template arguments for kernel '{found.name}'", f"'{function}'")
    if found.returns != "void":
        raise CompileError(f"[compile] expected kernel '{found.name}' to return void but got {found.returns}")
    return _Wanted(name, found.name + angle + arguments, found)


def _library(unit: str, build: Build, text: str, file: str, options: Options) -> Path:
    """Return the library compiled from `unit`, from the cache where it is there and whole."""
    runtime = library(build.check)
    path = clang.folder() / f"{clang.key(build, unit, runtime.name)}.so"
    if clang.is_intact(path):
        return path
    with tempfile.TemporaryDirectory(prefix="metile-") as temporary:
        compiled, linked = Path(temporary) / "kernel.o", Path(temporary) / "kernel.so"
        compile_text(unit, build, ("-c", "-o", str(compiled)), text, file, options.folders)
        done = clang.run(
            [clang.zig(), "ld.lld", "-shared", "-Bsymbolic", "-o", str(linked), str(compiled), str(runtime)]
        )
        if done.returncode != 0:
            raise CompileError(f"[compile] {clang.without_folder(done.stderr, temporary)}")
        clang.write_sealed(path, linked.read_bytes())
    return path


def _load(path: Path, wanted: list[_Wanted], rewritten: Rewritten, check: bool) -> Program:
    ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    loaded_runtime(check)
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise _missing(str(error), rewritten) from None
    entries = {want.name: _entry(loaded, number, want) for number, want in enumerate(wanted)}
    return Program(path, check, entries, loaded)


def _missing(message: str, rewritten: Rewritten) -> CompileError:
    """Say what the library lacks: a function constant that has no value, or a function that has no body."""
    symbol = message.rpartition("undefined symbol: ")[2]
    for name, index in rewritten.undefined.items():
        if symbol == name or re.search(rf"\d{name}(?!\w)", symbol):
            return CompileError(f"[compile] expected a value for function constant {index} ('{name}') but got none")
    return CompileError(f"[compile] expected a library that loads but got: {message.rpartition('/')[2]}")


def _entry(loaded: ctypes.CDLL, number: int, want: _Wanted) -> Entry:
    address = ctypes.cast(getattr(loaded, entry_symbol(number)), ctypes.c_void_p).value or 0
    raw = want.kernel.parameters
    counts = (ctypes.c_int * max(1, len(raw))).in_dll(loaded, counts_symbol(number))
    parameters = tuple(one for source, count in zip(raw, counts, strict=False) for one in _expanded(source, count))
    return Entry(want.name, parameters, address, want.kernel.max_threads)


def _expanded(raw: RawParameter, count: int) -> list[Parameter]:
    """Return the parameter, or the buffers of an array."""
    one = raw.parameter
    if not raw.array:
        return [one]
    return [replace(one, index=one.index + place, name=f"{one.name}[{place}]") for place in range(count)]
