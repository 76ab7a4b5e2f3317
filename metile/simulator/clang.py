"""The compiler of the simulator: clang in its C++ for OpenCL mode, its flags, its precompiled prelude, its cache."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from metile.errors import MetileError
from metile.files import cache_root, write_atomic
from metile.simulator.parameters import glue_text
from metile.targets.compiler import CompileError, zig_command

_TIMEOUT_SECONDS = 300
_EXTENSIONS = (
    "+cl_khr_fp16",
    "-cl_khr_fp64",
    "-__opencl_c_fp64",
    "+__cl_clang_non_portable_kernel_param_types",
    "+__cl_clang_function_pointers",
)
_LANGUAGE = (
    "-x",
    "clcpp",
    "-cl-std=clc++2021",
    "-cl-no-stdinc",
    "-Xclang",
    f"-cl-ext={','.join(_EXTENSIONS)}",
    "-Wno-everything",
    "-ferror-limit=50",
)
# Signed overflow wraps, loops may run forever and pointers of any two types may meet: as on the GPU.
_CODE = (
    "-march=native",
    "-fPIC",
    "-fwrapv",
    "-fno-finite-loops",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fno-stack-protector",
    "-fno-unwind-tables",
    "-fno-asynchronous-unwind-tables",
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-fbfloat16-excess-precision=none",
)
_CHECKED = (
    "-O1",
    "-gline-tables-only",
    "-fdebug-compilation-dir=/",  # where this process stands is no part of a file's name
    "-fsanitize=thread,bounds",
    "-fsanitize-trap=bounds",
    "-fno-sanitize-merge",
    "-mllvm",
    "-tsan-instrument-read-before-write=1",
)
# From the compiler's input, so that no path is in it and a cache may be moved.
_PRECOMPILE = ("-c", "-Xclang", "-emit-pch", "-Xclang", "-fno-pch-timestamp")
DEFINES = ("__METAL_VERSION__=310", "__METAL__=1")
_SEAL_BYTES = hashlib.sha256().digest_size
_intact: set[tuple[Path, int, int]] = set()


@dataclass(frozen=True)
class Build:
    """One way to compile: whether instrumented, and the macros that the prelude is told of."""

    check: bool = False
    once_per_simdgroup: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """All flags of clang that change what it makes."""
        macros = [*DEFINES]
        if self.check:
            macros.append("METILE_CHECK")
        if self.once_per_simdgroup:
            macros.append("METILE_ONCE_PER_SIMDGROUP")
        target = ("-target", f"{platform.machine()}-linux-gnu")
        code = (*_CODE, *(_CHECKED if self.check else ("-O2",)))
        return (*_LANGUAGE, *target, *code, *(f"-D{macro}" for macro in macros))


@functools.cache
def zig() -> str:
    """Return the path of the program that holds clang and the linker.

    Raises:
        MetileError: the package ``ziglang`` is missing.
    """
    command = zig_command()
    if command is None:
        raise MetileError("[simulator] expected a compiler (pip install ziglang) but got none")
    return command[0]


@functools.cache
def version() -> str:
    """Return clang's version, with its path."""
    return run([zig(), "clang", "--version"]).stdout


@functools.cache
def processor() -> str:
    """Return the processor and its features as the compiler sees them, for they are part of what it makes."""
    said = run([zig(), "clang", "-march=native", "-###", "-x", "c", "-E", "-"], "").stderr
    return " ".join(re.findall(r'"-target-(?:cpu|feature)" "([^"]*)"', said))


@functools.cache
def prelude() -> str:
    """Return the text that is precompiled before every kernel."""
    from metile.simulator.prelude_text import prelude_text

    return f'{prelude_text()}\n# 1 "<glue>" 3\n#pragma clang system_header\n{glue_text()}'


def digest(*parts: str) -> str:
    """Return a digest of `parts`, each apart from the next."""
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()[:32]


def run(command: Sequence[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the compiler on `text`; the caller looks at the exit status.

    Raises:
        CompileError: it takes too long, or cannot run at all.
    """
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(cache_root() / "zig")}
    try:
        return subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CompileError(f"[compile] expected a result in {_TIMEOUT_SECONDS} s but got none") from None
    except OSError as error:
        raise CompileError(f"[compile] expected a compiler that runs but got {error}") from error


def folder() -> Path:
    """Return the folder of everything the simulator caches, links followed: a precompiled file names its source."""
    return (cache_root() / "simulator").resolve()


def key(build: Build, *parts: str) -> str:
    """Return the name of what comes from `parts`: compiler, processor, prelude and every flag belong to it."""
    return digest(*parts, *build.flags, version(), processor(), prelude())


def write_sealed(path: Path, data: bytes) -> None:
    """Write `data` with its digest after it, whole or not at all.

    Raises:
        CompileError: the cache cannot be written.
    """
    try:
        write_atomic(path, data + hashlib.sha256(data).digest())
    except OSError as error:
        raise CompileError(f"[compile] expected a cache that can be written but got {error}") from error


def is_intact(path: Path) -> bool:
    """Tell whether `path` is there with all of what `write_sealed` wrote; read once while it does not change."""
    try:
        status = path.stat()
        state = (path, status.st_mtime_ns, status.st_size)
        if state in _intact:
            return True
        data = path.read_bytes()
    except OSError:
        return False
    if hashlib.sha256(data[:-_SEAL_BYTES]).digest() != data[-_SEAL_BYTES:]:
        return False
    _intact.add(state)
    return True


def read_sealed(path: Path) -> bytes:
    """Return what `write_sealed` wrote, without its digest."""
    return path.read_bytes()[:-_SEAL_BYTES]


def precompiled_prelude(build: Build) -> Path:
    """Return the precompiled prelude for a build, compiled where the cache has none.

    Raises:
        CompileError: the prelude does not compile.
    """
    name = key(build, *_PRECOMPILE)
    compiled = folder() / f"prelude-{name}.pch"
    if is_intact(compiled):
        return compiled
    # The name is for line tables.
    text = f'# 1 "prelude-{name}.h"\n{prelude()}'
    with tempfile.TemporaryDirectory(prefix="metile-") as temporary:
        built = Path(temporary) / "prelude.pch"
        done = run([zig(), "clang", *build.flags, *_PRECOMPILE, "-o", str(built), "-"], text)
        if done.returncode != 0:
            raise CompileError(f"[compile] the prelude does not compile:\n{done.stderr}")
        write_sealed(compiled, built.read_bytes())
    return compiled


def command(build: Build, *arguments: str) -> list[str]:
    """Return the command that compiles the text on its input, after the prelude."""
    include = ("-Xclang", "-include-pch", "-Xclang", str(precompiled_prelude(build)))
    return [zig(), "clang", *build.flags, *include, "-fno-caret-diagnostics", *arguments, "-"]


def preprocess(text: str, include: Sequence[Path], defines: Sequence[str], file: str) -> str:
    """Carry out the directives of `text`.

    Raises:
        CompileError: with clang's errors.
    """
    from metile.simulator.diagnostics import raise_errors

    folders = [Path(__file__).parent / "prelude", *include]
    arguments = [
        *("-E", "-x", "c++", "-std=c++17", "-nostdinc", "-nostdinc++", "-Wno-everything", "-fno-caret-diagnostics"),
        *(f"-I{path}" for path in folders),
        *(f"-D{macro}" for macro in (*DEFINES, *defines)),
        *("-U__linux__", "-U__linux", "-Ulinux", "-Uunix", "-U__unix__", "-U__unix"),
    ]
    source = f'# 1 "{file}"\n{text}\n'
    done = run([zig(), "clang", *arguments, "-"], source)
    if done.returncode != 0:
        raise_errors(done.stderr, text, file, include)
    return done.stdout


def without_folder(text: str, temporary: str) -> str:
    """Return the first line of `text`, without the path of a temporary folder."""
    return (text.strip().splitlines() or ["no message"])[0].replace(f"{temporary}/", "")
