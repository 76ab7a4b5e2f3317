"""The two shared libraries of the runtime, fast and checked: compiled once, cached, and loaded."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

from metile.errors import mismatch
from metile.files import cache_root
from metile.targets.compiler import CompileError, find_compiler

_FLAGS = (
    "-shared",
    "-fPIC",
    "-O3",
    "-g1",
    "-std=c++17",
    "-march=native",
    "-nostdinc++",
    "-fno-sanitize=all",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-stack-protector",
    "-fno-math-errno",
    "-Wno-psabi",
)
_TIMEOUT_SECONDS = 120


class Fault(ctypes.Structure):
    """Why a launch ended early; as in the native sources."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("signal", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("site", ctypes.c_uint64),
        ("other_site", ctypes.c_uint64),
    )


class Outcome(ctypes.Structure):
    """What a launch came to; as in the native sources."""

    _fields_ = (
        ("fault", Fault),
        ("switches", ctypes.c_uint64),
        ("collectives", ctypes.c_uint64),
        ("barriers", ctypes.c_uint64),
        ("matrix_operations", ctypes.c_uint64),
        ("threads", ctypes.c_uint64),
        ("threadgroup_bytes", ctypes.c_uint64),
        ("faulted", ctypes.c_uint32),
        ("stopped", ctypes.c_uint32),
    )


class Request(ctypes.Structure):
    """What to launch; as in the native sources."""

    _fields_ = (
        ("entry", ctypes.c_uint64),
        ("image_begin", ctypes.c_uint64),
        ("image_end", ctypes.c_uint64),
        ("buffers", ctypes.c_uint64 * 32),
        ("argument_bytes", ctypes.c_uint64 * 8),
        ("threadgroup_limit", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("workers", ctypes.c_int32),
    )


def _sources() -> Path:
    return Path(__file__).resolve().parent


@functools.cache
def _processor_features() -> str:
    """Return what code compiled for this very processor depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "model name"))}))


@functools.cache
def _digest(check: bool) -> str:
    root = _sources()
    digest = hashlib.sha256()
    for path in (root / "abi.h", *sorted((root / "native").rglob("*.*"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for part in (find_compiler().version, _processor_features(), *_FLAGS, str(check)):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


@functools.cache
def library(check: bool) -> Path:
    """Return the runtime's shared library, compiled at first use; its soname is its file's name.

    Args:
        check: the library of checked mode, which programs compiled for it need.

    Raises:
        CompileError: it cannot be compiled here.
        MetileError: the processor is not one the runtime has a context switch for.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise mismatch("simulator", "an x86-64 processor", platform.machine())
    path = cache_root() / "simulator" / f"libmetile_simulator_{'check' if check else 'fast'}-{_digest(check)}.so"
    if not path.is_file():
        try:
            _build(path, check)
        except OSError as error:
            raise CompileError(f"[simulator] expected a cache that can be written but got {error}") from error
    return path


def _build(path: Path, check: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as folder:
        built = Path(folder) / path.name
        command = [*find_compiler().command, *_FLAGS, *(("-DMETILE_CHECK",) if check else ())]
        command += [f"-Wl,-soname,{path.name}", "-o", str(built), str(_sources() / "native" / "runtime.cpp")]
        environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(cache_root() / "zig")}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, env=environment, check=False
        )
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if "error:" in line] or [done.stderr.strip()]
            raise CompileError(f"[simulator] expected a runtime that compiles but got {errors[0]}")
        os.replace(built, path)


@functools.cache
def loaded(check: bool) -> ctypes.CDLL:
    """Return the runtime, loaded; a program that needs it must be loaded after it."""
    native = ctypes.CDLL(str(library(check)))
    native.metile_allocate.argtypes = (ctypes.c_uint64,)
    native.metile_allocate.restype = ctypes.c_uint64
    native.metile_release.argtypes = (ctypes.c_uint64, ctypes.c_uint64)
    native.metile_release.restype = None
    native.metile_start.argtypes = (ctypes.POINTER(Request),)
    native.metile_wait.argtypes = (ctypes.c_int,)
    native.metile_stop.restype = None
    native.metile_outcome.argtypes = (ctypes.POINTER(Outcome),)
    native.metile_outcome.restype = None
    return native
