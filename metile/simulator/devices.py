"""Apple GPUs as data: the limits that a launch is held to, and what their makers publish about them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from metile.errors import mismatch


@dataclass(frozen=True)
class Device:
    """A GPU to simulate. Limits are Apple's feature-set tables; cores and bandwidth its technical specifications.

    Attributes:
        name: short name, such as ``m3-max``.
        family: Metal GPU family, such as ``apple9``.
        gpu_cores: of the largest GPU sold under the name.
        memory_gb_per_s: bandwidth of its unified memory, in 1e9 bytes a second.
        max_threads_per_threadgroup: what the device allows.
        threadgroup_bytes: threadgroup memory of one threadgroup.
        simd_width: threads in a simdgroup.
        pipeline_threads: ``maxTotalThreadsPerThreadgroup`` of each pipeline, which a kernel that uses many registers
            has below the device's; None for no such cap.
    """

    name: str
    family: str
    gpu_cores: int
    memory_gb_per_s: float
    max_threads_per_threadgroup: int = 1024
    threadgroup_bytes: int = 32 << 10
    simd_width: int = 32
    pipeline_threads: int | None = None

    @property
    def max_threads(self) -> int:
        """The most threads that a threadgroup of a launch may have."""
        cap = self.max_threads_per_threadgroup
        return cap if self.pipeline_threads is None else min(cap, self.pipeline_threads)

    def with_pipeline_threads(self, threads: int) -> Device:
        """Return this device with pipelines that allow at most `threads` threads in a threadgroup."""
        return _checked(dataclasses.replace(self, pipeline_threads=threads))


def _checked(device: Device) -> Device:
    numbers = ("gpu_cores", "max_threads_per_threadgroup", "threadgroup_bytes", "pipeline_threads")
    for field in numbers:
        value = getattr(device, field)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise mismatch("device", f"{field} to be a positive integer", repr(value))
    if device.simd_width != 32:
        raise mismatch("device", "simd_width 32, as on every Apple GPU", repr(device.simd_width))
    if not device.memory_gb_per_s > 0:
        raise mismatch("device", "memory_gb_per_s to be positive", repr(device.memory_gb_per_s))
    return device


_TABLE = (
    Device("m1", "apple7", 8, 68.25),
    Device("m1-pro", "apple7", 16, 200),
    Device("m1-max", "apple7", 32, 400),
    Device("m1-ultra", "apple7", 64, 800),
    Device("m2", "apple8", 10, 100),
    Device("m2-pro", "apple8", 19, 200),
    Device("m2-max", "apple8", 38, 400),
    Device("m2-ultra", "apple8", 76, 800),
    Device("m3", "apple9", 10, 100),
    Device("m3-pro", "apple9", 18, 150),
    Device("m3-max", "apple9", 40, 400),
    Device("m3-ultra", "apple9", 80, 819),
    Device("m4", "apple9", 10, 120),
    Device("m4-pro", "apple9", 20, 273),
    Device("m4-max", "apple9", 40, 546),
    Device("m5", "apple10", 10, 153),
    Device("m5-pro", "apple10", 20, 307),
    Device("m5-max", "apple10", 40, 614),
)
DEVICES: dict[str, Device] = {device.name: device for device in _TABLE}
DEFAULT = DEVICES["m1"]  # the strictest family that MLX runs on


def find_device(device: str | Device | None) -> Device:
    """Return a device by its name (``m2-max``, ``M2 Max`` and ``Apple M2 Max`` are one); None is the M1.

    Raises:
        MetileError: no device has the name; the message lists those that do.
    """
    if device is None:
        return DEFAULT
    if isinstance(device, Device):
        return device
    name = "-".join(str(device).lower().removeprefix("apple").replace("_", " ").replace("-", " ").split())
    if name not in DEVICES:
        raise mismatch("device", f"one of {', '.join(DEVICES)}", repr(device))
    return DEVICES[name]


def custom(
    name: str = "custom",
    *,
    base: str | Device = DEFAULT,
    max_threads_per_threadgroup: int | None = None,
    threadgroup_bytes: int | None = None,
    pipeline_threads: int | None = None,
    gpu_cores: int | None = None,
    memory_gb_per_s: float | None = None,
) -> Device:
    """Return a device that nobody sells: `base` with what is given changed.

    Raises:
        MetileError: a limit is not positive, or `base` is unknown.
    """
    changes = {
        "max_threads_per_threadgroup": max_threads_per_threadgroup,
        "threadgroup_bytes": threadgroup_bytes,
        "pipeline_threads": pipeline_threads,
        "gpu_cores": gpu_cores,
        "memory_gb_per_s": memory_gb_per_s,
    }
    given = {field: value for field, value in changes.items() if value is not None}
    return _checked(dataclasses.replace(find_device(base), name=name, **given))  # type: ignore[arg-type]
