"""Instruction sets of the CPU target: what this machine has, and what each means for the tile vocabulary."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

from metile.errors import mismatch

ISA_VARIABLE = "METILE_CPU_ISA"


@dataclass(frozen=True)
class Isa:
    """One way to compile the CPU header.

    Attributes:
        name: as it stands in reports and in ``METILE_CPU_ISA``.
        macro: what the header tests, ``METILE_ISA_<macro>``.
        lanes: fp32 elements of a vector register.
        registers: vector registers, which bound the register tile.
        flags: compiler flags; ``{sep}`` in an architecture level stands for the compiler's separator.
        features: CPU flags, as the kernel names them, that must all be present.
    """

    name: str
    macro: str
    lanes: int
    registers: int
    flags: tuple[str, ...]
    features: frozenset[str]

    @property
    def has_tiles(self) -> bool:
        """Whether bf16 products run on a matrix unit with its own tile registers."""
        return self.name == "amx"


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_AVX512_BF16 = _AVX512 | {"avx512_bf16"}
_LEVEL4 = ("-march=x86{sep}64{sep}v4", "-mprefer-vector-width=512")

# Best first.
ISAS = (
    Isa(
        "amx",
        "AMX",
        16,
        32,
        (*_LEVEL4, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        _AVX512_BF16 | {"amx_tile", "amx_bf16"},
    ),
    Isa("avx512_bf16", "AVX512_BF16", 16, 32, (*_LEVEL4, "-mavx512bf16"), _AVX512_BF16),
    Isa("avx512", "AVX512", 16, 32, _LEVEL4, _AVX512),
    Isa("avx2", "AVX2", 8, 16, ("-march=x86{sep}64{sep}v3",), _AVX2),
    Isa("neon", "NEON", 4, 32, (), frozenset({"asimd"})),
    Isa("generic", "GENERIC", 4, 16, (), frozenset()),
)


def _cpu_flags() -> frozenset[str]:
    """Return the CPU's feature flags as Linux names them; on Apple silicon, NEON's."""
    if platform.system() == "Darwin":
        return frozenset({"asimd"}) if platform.machine() == "arm64" else _darwin_flags()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _darwin_flags() -> frozenset[str]:
    names = ("machdep.cpu.features", "machdep.cpu.leaf7_features")
    done = subprocess.run(["sysctl", "-n", *names], capture_output=True, text=True, check=False)
    return frozenset(done.stdout.lower().split())


@functools.cache
def _tiles_permitted() -> bool:
    """Ask Linux for this process's use of the tile registers (arch_prctl ARCH_REQ_XCOMP_PERM, XTILEDATA)."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0)


def supported_isas() -> tuple[Isa, ...]:
    """Return every instruction set that this machine can run, the best first."""
    flags = _cpu_flags()
    if "amx_tile" in flags and not _tiles_permitted():
        flags -= {"amx_tile"}
    return tuple(isa for isa in ISAS if isa.features <= flags)


@functools.cache
def _choose(forced: str) -> Isa:
    if not forced:
        return supported_isas()[0]
    for isa in supported_isas():
        if isa.name == forced:
            return isa
    names = ", ".join(isa.name for isa in supported_isas())
    raise mismatch(ISA_VARIABLE, f"one of {names} on this machine", repr(forced))


def current_isa() -> Isa:
    """Return the instruction set kernels are compiled for: the best here, or what ``METILE_CPU_ISA`` names.

    Raises:
        MetileError: the variable names no instruction set of this machine.
    """
    return _choose(os.environ.get(ISA_VARIABLE, ""))
