"""The compiler of the CPU target, and its cache of shared libraries on disk.

Either the clang that the PyPI package ``ziglang`` ships, which brings its own linker, or a clang on PATH.
Libraries are kept by a digest of everything that went into them, so a file in the cache is never stale.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from metile.errors import MetileError
from metile.files import cache_root, data_root

_FLAGS = (
    "-shared",
    "-fPIC",
    "-O3",
    "-std=c++17",
    "-nostdinc++",
    "-nostdlib",
    "-fno-sanitize=all",
    "-fno-exceptions",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-Wno-psabi",
)
_TIMEOUT_SECONDS = 120


class CompileError(MetileError):
    """A kernel that the compiler rejects; the message is the compiler's first error line."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the command that begins every call, its version, and its spelling of CPU levels."""

    command: tuple[str, ...]
    version: str
    separator: str

    def flags(self, isa_flags: tuple[str, ...]) -> tuple[str, ...]:
        """Return the full flags for a kernel: the common ones and an instruction set's."""
        system = ("-undefined", "dynamic_lookup") if platform.system() == "Darwin" else ()
        return (*_FLAGS, *system, *(flag.replace("{sep}", self.separator) for flag in isa_flags))


def _version(command: tuple[str, ...]) -> str | None:
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None


def zig_command() -> tuple[str, ...] | None:
    """Return the command of the C++ compiler inside the ``ziglang`` package, or None where it is missing."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    binary = Path(spec.submodule_search_locations[0]) / ("zig.exe" if os.name == "nt" else "zig")
    return (str(binary), "c++") if binary.is_file() else None


@functools.cache
def find_compiler() -> Compiler:
    """Return the compiler to use: ziglang's clang, else a clang++ on PATH.

    Raises:
        MetileError: neither is there; the message names what to install.
    """
    zig = zig_command()
    if zig is not None and (version := _version(zig)):
        return Compiler(zig, version, "_")
    clang = shutil.which("clang++")
    if clang is not None and (version := _version((clang,))):
        return Compiler((clang,), version, "-")
    raise MetileError("[cpu] expected a compiler (pip install ziglang, or clang++ on PATH) but got none")


@functools.cache
def sources_digest() -> str:
    """Return a digest of every kernel source file, names included."""
    root = data_root("kernels")
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _first_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if "error:" in line]
    return lines[0] if lines else (stderr.strip().splitlines() or ["no message"])[-1]


def compile_library(text: str, isa_flags: tuple[str, ...], name: str) -> Path:
    """Compile C++ text to a shared library, or find it in the cache.

    Args:
        text: the translation unit; it may include files below ``kernels/``.
        isa_flags: flags of the instruction set.
        name: begins the file's name, for people who look into the cache.

    Returns:
        The library's path.

    Raises:
        CompileError: the compiler rejects the text, or the cache cannot be written.
    """
    compiler = find_compiler()
    flags = compiler.flags(isa_flags)
    parts = "\0".join((text, sources_digest(), compiler.version, platform.machine(), *flags))
    digest = hashlib.sha256(parts.encode()).hexdigest()[:24]
    library = cache_root() / "kernels" / f"{name}-{digest}.so"
    if not library.is_file():
        try:
            _build(compiler, flags, text, library)
        except OSError as error:
            raise CompileError(f"[compile] expected a cache that can be written but got {error}") from error
    return library


def _build(compiler: Compiler, flags: tuple[str, ...], text: str, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build-") as folder:
        source, built = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        source.write_text(text)
        command = [*compiler.command, *flags, f"-I{data_root('kernels')}", "-o", str(built), str(source)]
        environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(cache_root() / "zig")}
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_SECONDS,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CompileError(
                f"[compile] expected a result in {_TIMEOUT_SECONDS} s but got none for {library.stem}"
            ) from None
        if done.returncode != 0:
            raise CompileError(f"[compile] {_first_error(done.stderr)}")
        os.replace(built, library)
