"""What the GPU itself says of how long kernels ran: NVIDIA's CUPTI, through PyTorch's profiler where that is installed.

A chain of launches timed from outside also holds what the host takes to hand launches over. On a slow host that is more
than the kernels take, on both sides, so the record holds both figures.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx

Event = tuple[str, float]  # a kernel's name, and the seconds that it ran


def record(run: Callable[[], None]) -> list[Event] | None:
    """Return the kernels that `run` launched, in the order in which they began, or None where nothing can tell.

    Args:
        run: launches, and waits.
    """
    with contextlib.suppress(ImportError):
        import torch  # type: ignore[import-not-found]
        from torch.profiler import ProfilerActivity, profile  # type: ignore[import-not-found]

        if not torch.cuda.is_available():
            return None
        torch.cuda.init()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
            mx.synchronize()
            torch.cuda.synchronize()
        return _kernels(profiler.profiler.kineto_results.events())
    return None


def _kernels(events: Iterable[Any]) -> list[Event]:
    ran = [event for event in events if str(event.device_type()).endswith("CUDA") and event.duration_ns() > 0]
    ran.sort(key=lambda event: event.start_ns())
    names = ((event.name(), event.duration_ns() * 1e-9) for event in ran)
    return [(name, seconds) for name, seconds in names if not name.startswith(("Memcpy", "Memset"))]


def per_launch(events: Iterable[Event], launches: int) -> list[float]:
    """Return the seconds that each of so many launches kept the GPU busy, all its kernels together.

    Each launch runs the same kernels; where their number says otherwise, the mean stands for all.
    """
    by_name: dict[str, list[float]] = {}
    for name, seconds in events:
        by_name.setdefault(name, []).append(seconds)
    if not by_name:
        return []
    if any(len(seconds) % launches for seconds in by_name.values()):
        return [sum(map(sum, by_name.values())) / launches]
    totals = [0.0] * launches
    for seconds in by_name.values():
        each = len(seconds) // launches
        for index in range(launches):
            totals[index] += sum(seconds[index * each : (index + 1) * each])
    return totals
