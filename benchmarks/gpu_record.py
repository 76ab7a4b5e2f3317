"""The record of a GPU's kernel table: what was measured, on what, and the figures that follow."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from statistics import median
from typing import Any, Literal

import mlx.core as mx
from cpu_record import timestamp, versions

from metile.files import write_atomic
from metile.report_base import Record

PRECISION = "bfloat16 inputs and outputs, float32 accumulation"


class Limits(Record):
    """What the machine can do at most, measured in the same run.

    Attributes:
        bytes_per_second: of a copy, read and written bytes together.
        flops_per_second: of a large product of random bfloat16 matrices.
        launch_seconds: of a dependent launch that moves next to nothing.
    """

    bytes_per_second: float
    flops_per_second: float
    launch_seconds: float


class Tried(Record):
    """A candidate: seconds a launch, or why it is out."""

    candidate: str
    seconds: float | None
    rejected: str | None


class KernelTime(Record):
    """How long the kernels of a launch kept the GPU busy, as the GPU says: see gpu_profile.py.

    Attributes:
        launches: that were recorded.
        lower_seconds: first quartile.
        median_seconds: median.
        upper_seconds: third quartile.
    """

    launches: int
    lower_seconds: float
    median_seconds: float
    upper_seconds: float


def kernel_time(seconds: list[float]) -> KernelTime | None:
    """Return the figures of such times, or None where there are none."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    lower, upper = (ordered[len(ordered) * quarter // 4] for quarter in (1, 3))
    return KernelTime(launches=len(ordered), lower_seconds=lower, median_seconds=median(ordered), upper_seconds=upper)


class Point(Record):
    """One operation at one size, plain MLX and ours in the same rounds.

    Attributes:
        operation: swiglu, matmul, rms_norm, add_rms_norm or attention.
        subject: the key, printed.
        rows: of x; queries of attention.
        context: keys of attention, 0 elsewhere.
        launches: launches in a sample, each waiting for the one before.
        weight_sets: places in memory that weights, or keys and values, take turns in.
        is_cold: whether these exceed the second-level cache together.
        moved_bytes: what a launch must read and write.
        flops: of a launch.
        subtracted_seconds: of the norm that stands between two launches and is no part of them, 0 where none does.
        plain_seconds: samples of plain MLX, a launch, the norm subtracted.
        metile_seconds: samples of ours in the same rounds.
        plain_kernels: what the GPU says of plain MLX's kernels in more rounds, or None where nothing could tell.
        metile_kernels: the same of ours.
        candidate: ours; None where no candidate is right.
        tried: all candidates that were compiled.
    """

    operation: str
    subject: str
    rows: int
    context: int
    launches: int
    weight_sets: int
    is_cold: bool
    moved_bytes: int
    flops: int
    subtracted_seconds: float
    plain_seconds: list[float]
    metile_seconds: list[float]
    plain_kernels: KernelTime | None = None
    metile_kernels: KernelTime | None = None
    candidate: str | None
    tried: list[Tried]
    figures: Figures


class Figures(Record):
    """Medians, and what they are worth.

    Attributes:
        plain_microseconds: of plain MLX.
        metile_microseconds: of ours, None where there is none.
        floor_microseconds: what the machine's limits allow.
        binds: the limit that sets the floor.
        speedup: the median of the rounds' ratios.
    """

    plain_microseconds: float
    metile_microseconds: float | None
    floor_microseconds: float
    binds: Literal["bytes", "flops"]
    speedup: float | None


class Sanitizer(Record):
    """What compute-sanitizer said of small launches of every kernel."""

    tool: str
    kernels: int
    summary: str


class Machine(Record):
    """The GPU and its driver."""

    name: str
    driver: str
    cuda: str
    capability: str
    processors: int
    l2_bytes: int
    threadgroup_bytes: int


class Run(Record):
    """The whole record; written anew after each point."""

    benchmark: Literal["gpu_kernels"]
    recorded_at: str
    seconds: float
    machine: Machine
    versions: dict[str, str | None]
    precision: str
    limits: Limits
    points: list[Point]
    sanitizer: list[Sanitizer]


Point.model_rebuild()


def figures(plain: list[float], ours: list[float], moved: int, flops: int, limits: Limits) -> Figures:
    """Return what follows from the samples of a point."""
    streamed, multiplied = moved / limits.bytes_per_second, flops / limits.flops_per_second
    return Figures(
        plain_microseconds=median(plain) * 1e6,
        metile_microseconds=median(ours) * 1e6 if ours else None,
        floor_microseconds=max(streamed, multiplied) * 1e6,
        binds="bytes" if streamed >= multiplied else "flops",
        speedup=median(a / b for a, b in zip(plain, ours, strict=True)) if ours else None,
    )


def machine_of(device: Any) -> Machine:
    """Describe a GPU, a `metile.targets.cuda_device.CudaDevice`."""
    return Machine(
        name=device.name,
        driver=_driver(),
        cuda=".".join(map(str, device.driver)),
        capability=".".join(map(str, device.capability)),
        processors=device.processors,
        l2_bytes=device.l2_bytes,
        threadgroup_bytes=device.threadgroup_bytes,
    )


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (done.stdout.strip().splitlines() or ["unknown"])[0]


def versions_of(nvrtc: tuple[int, int]) -> dict[str, str | None]:
    """Name the versions of what is measured."""
    return {**versions().model_dump(), "nvrtc": ".".join(map(str, nvrtc)), "mlx": mx.__version__}


def empty(device: Any, nvrtc: tuple[int, int], limits: Limits) -> Run:
    """Return the record before the first point."""
    return Run(
        benchmark="gpu_kernels",
        recorded_at=timestamp(),
        seconds=0.0,
        machine=machine_of(device),
        versions=versions_of(nvrtc),
        precision=PRECISION,
        limits=limits,
        points=[],
        sanitizer=[],
    )


def save(run: Run, path: Path) -> None:
    """Write a record, whole or not at all."""
    write_atomic(path, (run.model_dump_json(indent=1) + "\n").encode())


def load(path: Path) -> Run:
    """Read a record."""
    return Run.model_validate_json(path.read_bytes())


def sanitized(text: str, tool: str, kernels: int) -> Sanitizer:
    """Return what a tool's output says, by its last line of summary."""
    lines = [line.strip("= \n") for line in text.splitlines()]
    found = [line for line in lines if re.search(r"SUMMARY", line)]
    return Sanitizer(tool=tool, kernels=kernels, summary=found[-1] if found else "no summary: " + " ".join(lines[-2:]))


def line_of(point: Point) -> str:
    """Return a point as a line of the table."""
    f = point.figures
    ours = f"{f.metile_microseconds:9.1f}" if f.metile_microseconds is not None else "        -"
    speedup = f"{f.speedup:6.2f}" if f.speedup is not None else "     -"
    size = f"{point.context or point.rows:6}"
    plain, own = point.plain_kernels, point.metile_kernels
    kernels = "        -         -      -"
    if plain is not None and own is not None:
        ratio = plain.median_seconds / own.median_seconds
        kernels = f"{plain.median_seconds * 1e6:9.1f} {own.median_seconds * 1e6:9.1f} {ratio:6.2f}"
    what = f"{f.plain_microseconds:9.1f} {ours} {speedup} {kernels} {f.floor_microseconds:9.1f} {f.binds}"
    return f"{point.operation:13} {size} {what}  {point.candidate or 'no candidate'} ({len(point.tried)} tried)"
