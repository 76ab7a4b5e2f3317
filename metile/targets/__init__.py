"""The machines a kernel can run on: source assembly, compilation, launch and device limits, a module a target."""

from __future__ import annotations

import functools

import mlx.core as mx

from metile.errors import MetileError, mismatch
from metile.targets import cpu
from metile.targets.base import Target

TARGETS = ("auto", "cpu", "cuda", "metal")


@functools.cache
def _cpu() -> Target:
    return cpu.CpuTarget()


def choose_target(name: str = "auto") -> Target:
    """Return the target to run kernels on.

    Args:
        name: ``cpu``, or ``auto`` for what MLX itself runs on here. ``metal`` and ``cuda`` are known names whose
            kernels do not exist yet.

    Raises:
        MetileError: the name is unknown, or the target cannot run here; the message says why.
    """
    if name not in TARGETS:
        raise mismatch("target", f"one of {', '.join(TARGETS)}", repr(name))
    if name == "auto":
        name = "cpu"
        if mx.metal.is_available() or mx.cuda.is_available():
            name = "metal" if mx.metal.is_available() else "cuda"
    if name != "cpu":
        raise MetileError(f"[target] expected cpu, the only target with kernels so far, but got {name}")
    if reason := cpu.available():
        raise MetileError(reason)
    return _cpu()
