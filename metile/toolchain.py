"""A compiler for `mx.compile` on a Linux machine that has none.

On a Linux CPU MLX writes C++ for each compiled function, runs ``g++`` on it and loads the result; it asks
once a process whether ``g++`` answers, and where it does not, functions run uncompiled. The clang inside the
PyPI package ``ziglang`` can take that place: a script named ``g++`` at the end of PATH calls it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from metile.files import cache_root, write_atomic
from metile.targets.compiler import zig_command

_PROBE_SECONDS = 120

# Compiled and linked in two steps: one step would first build all of libc++, most of a minute. The code needs
# only its headers, and finds the C library in the process that loads it.
_SHIM = """#!/bin/sh
# Stands for g++ when MLX compiles a function and the machine has no compiler; written by metile.
ZIG_GLOBAL_CACHE_DIR={cache}
export ZIG_GLOBAL_CACHE_DIR
previous= library=
for argument do
  shift
  case $previous in -o) library=$argument argument=$argument.o ;; esac
  previous=$argument
  case $argument in -shared) argument=-c ;; esac
  set -- "$@" "$argument"
done
[ -n "$library" ] || exec {zig} "$@"
{zig} -w "$@" && {zig} -shared -nostdlib -o "$library" "$library.o"
status=$?
/bin/rm -f "$library.o"
exit $status
"""

_PROBE = "import sys; from metile.toolchain import compiles; sys.exit(0 if compiles() else 3)"


@dataclass(frozen=True)
class Toolchain:
    """What compiles the functions given to `mx.compile` in this process.

    Attributes:
        compiler: ``"g++"``, ``"ziglang"``, ``"mlx"`` where MLX needs neither, or ``"none"``: compile is off.
        note: one line for the user, empty where there is nothing to say.
    """

    compiler: str
    note: str = ""


@functools.cache
def ensure_compile() -> Toolchain:
    """Give `mx.compile` a compiler, or turn it off and print one line that says so.

    Call it before the first compiled function runs: MLX looks for ``g++`` only once. Where ``g++`` exists,
    on a GPU, or off Linux, it does nothing.

    Returns:
        What compiles from now on.
    """
    if platform.system() != "Linux" or mx.default_device().type != mx.cpu or os.environ.get("MLX_DISABLE_COMPILE"):
        return Toolchain("mlx")
    if shutil.which("g++"):
        return Toolchain("g++")
    reason = _install()
    if not reason:
        return Toolchain("ziglang", "mx.compile: no g++ here, compiling with the clang of ziglang")
    mx.disable_compile()
    note = f"mx.compile is off: no g++ on PATH, and {reason}"
    print(note, file=sys.stderr)
    return Toolchain("none", note)


def compiles() -> bool:
    """Return whether a function given to `mx.compile` is compiled, run, and right in this process."""
    traces = []

    def function(a: mx.array, b: mx.array) -> mx.array:
        traces.append(1)  # at every call when not compiled; when compiled, once or twice
        return mx.exp(a) * b + 2.0 * a

    compiled = mx.compile(function)
    a, b = mx.array([0.0, 1.0]), mx.array([3.0, 0.0])
    try:
        values = [compiled(a, b).tolist() for _ in range(4)]
    except RuntimeError:
        return False
    return len(traces) < len(values) and values == [[3.0, 2.0]] * len(values)


def _install() -> str:
    """Put the shim on PATH; return why it does not work, or an empty text."""
    zig = zig_command()
    if zig is None:
        return "no ziglang package (pip install ziglang, or install g++)"
    path = os.environ.get("PATH", "")
    try:
        shim = _write_shim(zig)
        os.environ["PATH"] = f"{path}{os.pathsep}{shim.parent}" if path else str(shim.parent)
        reason = _reason(shim)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = f"ziglang's clang cannot take its place ({error})"
    if reason:
        os.environ["PATH"] = path
    return reason


def _reason(shim: Path) -> str:
    if not _probed(shim):
        return "ziglang's clang does not work in its place (install g++)"
    return "" if compiles() else "MLX had looked for it before metile could offer ziglang's clang"


def _write_shim(zig: tuple[str, ...]) -> Path:
    shim = cache_root() / "bin" / "g++"
    text = _SHIM.format(zig=shlex.join(zig), cache=shlex.quote(str(cache_root() / "zig")))
    if shim.is_file() and os.access(shim, os.X_OK) and shim.read_text() == text:
        return shim
    shim.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=shim.parent, prefix=".write-") as folder:
        written = Path(folder) / "g++"
        written.write_text(text)
        written.chmod(0o755)  # before it takes its name: no reader finds it unready
        os.replace(written, shim)
    return shim


def _probed(shim: Path) -> bool:
    """Return whether the shim compiles for MLX, tried once a version in a process of its own."""
    stamp = shim.with_name("g++.works")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("mlx", "ziglang")]
    wanted = "\n".join([*versions, shim.read_text()]).encode()
    if stamp.is_file() and stamp.read_bytes() == wanted:
        return True
    with tempfile.TemporaryDirectory(prefix="metile-") as folder:  # where MLX finds nothing compiled before
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env={**os.environ, "TMPDIR": folder},
            capture_output=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    if done.returncode == 0:
        write_atomic(stamp, wanted)
    return done.returncode == 0
