"""NVRTC, NVIDIA's run-time compiler: text to the binary of one GPU architecture, kept by digest on disk.

MLX's own ``cuda_kernel`` includes headers that take NVRTC almost two seconds a kernel. What is compiled here includes
none, is compiled in many threads at once, and needs no GPU.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metile.errors import mismatch
from metile.files import cache_root, write_atomic
from metile.targets.compiler import CompileError

_OPTIONS = ("--std=c++17",)
_MOST_ERRORS = 2  # lines of the log that an error tells
_LIBRARY = re.compile(r"libnvrtc\.so(\.\d+)*")


@dataclass(frozen=True)
class Program:
    """A text to compile.

    Attributes:
        name: begins the file's name in the cache, for people who look there.
        text: the translation unit, includes written out.
        constants: names of constexpr functions without arguments whose values are wanted.
        options: of NVRTC, beside the architecture and the language.
    """

    name: str
    text: str
    constants: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Binary:
    """A compiled program: the cubin, and the values of its constants."""

    cubin: bytes
    constants: tuple[int, ...] = ()


def library_paths() -> Iterator[Path]:
    """Yield where NVRTC's library lies: in NVIDIA's Python packages first, then in a CUDA toolkit."""
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    folders = [
        folder
        for place in places
        for pattern in ("cu*/lib", "cuda_nvrtc/lib")
        for folder in sorted(Path(place).glob(pattern), reverse=True)
    ]
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders += [Path(home) / part for home in homes if home for part in ("lib64", "lib")]
    for folder in folders:
        for path in sorted(folder.glob("libnvrtc.so*"), reverse=True):
            if _LIBRARY.fullmatch(path.name):
                yield path


@functools.cache
def library() -> Any:
    """Return NVRTC, loaded.

    Raises:
        CompileError: it is nowhere to be found.
    """
    system = ctypes.util.find_library("nvrtc")
    for place in [*map(str, library_paths()), *([system] if system else [])]:
        try:
            loaded = ctypes.CDLL(place)
        except OSError:
            continue
        loaded.nvrtcGetErrorString.restype = ctypes.c_char_p
        return loaded
    raise CompileError(str(mismatch("cuda", "NVRTC (pip install nvidia-cuda-nvrtc)", "none")))


@functools.cache
def version() -> tuple[int, int]:
    """Return NVRTC's version."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _check(status: int) -> None:
    if status:
        raise CompileError(f"[cuda] NVRTC: {library().nvrtcGetErrorString(status).decode()}")


def compile_program(program: Program, architecture: str) -> Binary:
    """Compile a program, or find it in the cache.

    Args:
        program: what to compile.
        architecture: as NVRTC names it: ``sm_80``, ``sm_90a``.

    Raises:
        CompileError: NVRTC rejects the text; the message is the first of its errors.
    """
    options = (f"--gpu-architecture={architecture}", *_OPTIONS, *program.options)
    parts = "\0".join((program.text, *program.constants, *options, str(version())))
    digest = hashlib.sha256(parts.encode()).hexdigest()[:24]
    path = cache_root() / "cuda" / f"{program.name}-{architecture}-{digest}.cubin"
    binary = _read(path, len(program.constants))
    if binary is None:
        binary = _compile(program, options)
        try:
            write_atomic(path, _packed(binary))
        except OSError as error:
            raise CompileError(f"[cuda] expected a cache that can be written but got {error}") from error
    return binary


def compile_all(programs: Sequence[Program], architecture: str, threads: int | None = None) -> list[Any]:
    """Compile programs in parallel: a `Binary` of each, or the CompileError in its place."""

    def attempt(program: Program) -> Binary | CompileError:
        try:
            return compile_program(program, architecture)
        except CompileError as error:
            return error

    with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        return list(pool.map(attempt, programs))


def _packed(binary: Binary) -> bytes:
    """Return what the cache holds: a line of facts, then the cubin."""
    facts = {"sha256": hashlib.sha256(binary.cubin).hexdigest(), "constants": binary.constants}
    return json.dumps(facts).encode() + b"\n" + binary.cubin


def _read(path: Path, constants: int) -> Binary | None:
    """Return the binary in a file of the cache, or None where there is none that is whole."""
    try:
        line, _, cubin = path.read_bytes().partition(b"\n")
        facts = json.loads(line)
        binary = Binary(cubin, tuple(map(int, facts["constants"])))
        whole = facts["sha256"] == hashlib.sha256(cubin).hexdigest() and len(binary.constants) == constants
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return binary if whole else None


def _expression(constant: str) -> str:
    """Return a name whose lowered form carries the constant's value."""
    return f"metile_value<{constant}()>"


def _compile(program: Program, options: Sequence[str]) -> Binary:
    nvrtc = library()
    text = program.text
    if program.constants:
        text += "\ntemplate <int VALUE> __global__ void metile_value() {}\n"
    handle = ctypes.c_void_p()
    _check(_create(nvrtc, handle, text, program.name))
    try:
        expressions = [_expression(constant).encode() for constant in program.constants]
        for expression in expressions:
            _check(nvrtc.nvrtcAddNameExpression(handle, expression))
        given = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        status = nvrtc.nvrtcCompileProgram(handle, len(options), given)
        if status:
            raise CompileError(f"[cuda] {_first_errors(_log(nvrtc, handle))}")
        values = tuple(_value(nvrtc, handle, expression) for expression in expressions)
        size = ctypes.c_size_t()
        _check(nvrtc.nvrtcGetCUBINSize(handle, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(handle, cubin))
        return Binary(cubin.raw, values)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(handle))


def _create(nvrtc: Any, handle: ctypes.c_void_p, text: str, name: str) -> int:
    """Create NVRTC's program of a text; return its status."""
    file = f"{name}.cu".encode()
    status: int = nvrtc.nvrtcCreateProgram(ctypes.byref(handle), text.encode(), file, 0, None, None)
    return status


def _log(nvrtc: Any, handle: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(handle, ctypes.byref(size))
    log = ctypes.create_string_buffer(max(size.value, 1))
    nvrtc.nvrtcGetProgramLog(handle, log)
    return log.value.decode(errors="replace")


def _first_errors(log: str) -> str:
    """Return the first errors of a log on one line."""
    lines = [line.strip() for line in log.splitlines()]
    errors = [line for line in lines if "error:" in line or "error :" in line]
    return "; ".join(errors[:_MOST_ERRORS]) or next(filter(None, lines), "no message")


def _value(nvrtc: Any, handle: ctypes.c_void_p, expression: bytes) -> int:
    """Return the number in a lowered name such as ``_Z12metile_valueILi4096EEvv``."""
    name = ctypes.c_char_p()
    _check(nvrtc.nvrtcGetLoweredName(handle, expression, ctypes.byref(name)))
    found = re.search(r"ILi(n?)(\d+)E", (name.value or b"").decode())
    if found is None:
        raise CompileError(str(mismatch("cuda", f"a number in {expression.decode()}", name.value)))
    return -int(found[2]) if found[1] else int(found[2])
