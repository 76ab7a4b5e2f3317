"""The machines a kernel can run on: source assembly, compilation, launch and device limits, a module a target."""

from __future__ import annotations

import functools

import mlx.core as mx

from metile.errors import MetileError, mismatch
from metile.targets import cpu
from metile.targets.base import Target

TARGETS = ("auto", "cpu", "cuda", "metal", "simulator")


@functools.cache
def _cpu() -> Target:
    if reason := cpu.available():
        raise MetileError(reason)
    return cpu.CpuTarget()


@functools.cache
def _cuda() -> Target:
    from metile.targets.cuda import CudaTarget

    return CudaTarget()


@functools.cache
def _metal() -> Target:
    from metile.targets.metal import MetalTarget

    return MetalTarget()


@functools.cache
def _simulator() -> Target:
    from metile.targets.simulated import SimulatedTarget

    return SimulatedTarget()


def choose_target(name: str = "auto") -> Target:
    """Return the target to run kernels on.

    Args:
        name: ``cpu``, ``cuda``, ``metal``, ``simulator`` (Apple's GPU, simulated: right, and never timed), or ``auto``
            for what MLX itself runs on here.

    Raises:
        MetileError: the name is unknown, or the target cannot run here; the message says why.
    """
    if name not in TARGETS:
        raise mismatch("target", f"one of {', '.join(TARGETS)}", repr(name))
    has_metal = mx.metal.is_available()
    if name == "auto":
        name = "metal" if has_metal else "cuda" if mx.cuda.is_available() else "cpu"
    if name == "metal" and not has_metal:
        expected = "a machine with Metal (the target simulator runs the same kernels here, untimed)"
        raise mismatch("target", expected, "one without")
    if name == "cuda" and not mx.cuda.is_available():
        expected = "a target of this machine (for cuda, one with an NVIDIA GPU and `pip install 'mlx[cuda13]'`)"
        raise mismatch("target", expected, "cuda")
    return {"cpu": _cpu, "cuda": _cuda, "metal": _metal, "simulator": _simulator}[name]()
