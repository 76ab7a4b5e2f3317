"""Letting other people's code find Metal where there is none: `mx.fast.metal_kernel` answers through the simulator.

What code asks before it uses a Metal kernel is `mx.metal.is_available()` and `mx.default_device() == mx.gpu`. While
installed, the first says yes, and `mx.gpu` is the processor: arrays, streams and devices stay what they are, and every
``stream=mx.gpu`` works. `mx.compile` is off, because a kernel that runs at once cannot be traced.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from metile.errors import MetileError
from metile.simulator import settings
from metile.simulator.devices import Device, find_device
from metile.simulator.kernel import metal_kernel
from metile.simulator.settings import Settings
from metile.tracing import compiling

_KERNEL_NAME = re.compile(r"kernel(_|$)")
_MEMORY_BYTES = 16 << 30  # what a device says it has


@dataclass(frozen=True)
class _Installed:
    """What was there before, to be put back."""

    attributes: tuple[tuple[Any, str, Any], ...]
    compiling: bool
    settings: Settings


_installed: list[_Installed] = []
_real_available: Callable[[], bool] = mx.metal.is_available


def install(device: str | Device | None = None, check: bool | None = None) -> Settings:
    """Let `mx.fast.metal_kernel` make simulated kernels, and `mx.metal.is_available` say that there is Metal.

    Call it before importing modules that make their kernels when imported, as those of mlx-lm do. A second call
    changes the device and the mode only.

    Args:
        device: what to simulate; an M1 by default.
        check: whether every launch is checked; by default ``METILE_SIMULATOR_CHECK`` says so.

    Returns:
        The settings in force; their ``launches`` count launches by kernel name.

    Raises:
        MetileError: the machine has Metal, or no device has the name.
    """
    if not _installed and _real_available():
        raise MetileError(
            "[simulator.install] expected a machine without Metal but got one with it;"
            " metile.simulator.metal_kernel simulates here too"
        )
    chosen = Settings(find_device(device), check)
    if _installed:
        chosen.launches = settings.current().launches
        settings.replace(chosen)
        return chosen
    attributes = _replacements()
    saved = tuple((owner, name, getattr(owner, name)) for owner, name, _ in attributes)
    _installed.append(_Installed(saved, compiling(), settings.replace(chosen)))
    for owner, name, value in attributes:
        setattr(owner, name, value)
    mx.disable_compile()
    _warn_of_early_imports()
    return chosen


def uninstall() -> None:
    """Put back everything that `install` replaced; without it, do nothing."""
    if not _installed:
        return
    before = _installed.pop()
    for owner, name, value in before.attributes:
        setattr(owner, name, value)
    settings.replace(before.settings)
    if before.compiling:
        mx.enable_compile()


@contextmanager
def installed(device: str | Device | None = None, check: bool | None = None) -> Iterator[Settings]:
    """Install the simulator for a ``with`` statement; what held before holds again after it.

    Args:
        device: as for `install`.
        check: as for `install`.

    Yields:
        The settings in force; their ``launches`` count the launches of this block by kernel name.
    """
    outer = settings.current() if _installed else None
    chosen = install(device, check)
    if outer is not None:
        chosen.launches = type(chosen.launches)()
    try:
        yield chosen
    finally:
        if outer is None:
            uninstall()
        else:
            settings.replace(outer)
            outer.launches.update(chosen.launches)


def is_installed() -> bool:
    """Return whether the simulator stands in for Metal now."""
    return bool(_installed)


def _replacements() -> Sequence[tuple[Any, str, Any]]:
    replaced: list[tuple[Any, str, Any]] = [
        (mx.fast, "metal_kernel", metal_kernel),
        (mx.metal, "is_available", _available),
        (mx.metal, "device_info", _device_info),
        (mx, "device_info", _device_info),
    ]
    if mx.device_count(mx.gpu) == 0:  # with CUDA, mx.gpu is a device that other code uses
        replaced.append((mx, "gpu", mx.cpu))
    return replaced


def _available() -> bool:
    return True


def _device_info(device: object = None) -> dict[str, str | int]:
    """Return what MLX would say of the simulated device."""
    simulated = settings.current().device
    return {
        "device_name": f"Simulated {simulated.name}",
        "architecture": f"simulated_{simulated.family}",
        "memory_size": _MEMORY_BYTES,
        "max_recommended_working_set_size": _MEMORY_BYTES * 3 // 4,
        "max_buffer_length": _MEMORY_BYTES // 2,
        "resource_limit": 499000,
    }


def _warn_of_early_imports() -> None:
    """Name modules whose kernels were made, or left out, before the simulator was there."""
    early = sorted(
        name
        for name, module in list(sys.modules.items())
        if name.startswith("mlx_lm.models.") and any(map(_is_early, *zip(*vars(module).items(), strict=True)))
    )
    if early:
        warnings.warn(
            f"imported before the simulator was installed, so without its kernels: {', '.join(early)}", stacklevel=3
        )


def _is_early(name: str, value: object) -> bool:
    unmade = value is None or type(value).__name__ == "nb_func"
    return name.startswith("_") and unmade and _KERNEL_NAME.search(name) is not None
