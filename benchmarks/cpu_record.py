"""The record of a run: what was measured on which machine, and the figures that follow from the samples."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from cpu_shapes import GEMM_ROWS, GEMV_ROWS

from metile.files import write_atomic
from metile.report import software
from metile.report_base import Record
from metile.targets.cpu import CpuTarget, thread_count
from metile.trial import available_bytes

PRECISION = "bfloat16 x and weights, float32 accumulation, bfloat16 y"
Side = Literal["bandwidth", "multiply"]


class Roofline(NamedTuple):
    """The most that a machine can do of some work, in flop/s, and which of its limits that is."""

    flops_per_second: float
    binds: Side


def roofline(flops: float, moved_bytes: float, bandwidth: float, peak: float) -> Roofline:
    """Return min(peak, bandwidth * flops / bytes).

    Args:
        flops: of the work.
        moved_bytes: that must be moved for it at least.
        bandwidth: bytes/s.
        peak: flop/s.
    """
    streamed = bandwidth * flops / moved_bytes
    return Roofline(streamed, "bandwidth") if streamed < peak else Roofline(peak, "multiply")


class Round(Record):
    """Samples taken side by side: a call of the kernel, and both limits."""

    kernel_seconds: float
    stream_bytes_per_second: float
    peak_flops_per_second: float


class Figures(Record):
    """Medians over the rounds; a share is the median of the rounds' own shares.

    Attributes:
        seconds: a call of the kernel.
        gigabytes_per_second: weights, x and y moved once, over `seconds`.
        gigaflops_per_second: of the kernel.
        stream_gigabytes_per_second: of the streaming read.
        peak_gigaflops_per_second: of the multiply-accumulate unit.
        limit_gigaflops_per_second: of the roofline.
        binds: the side of the roofline.
        share_of_stream: of the streaming read's bytes/s.
        share_of_limit: of the roofline's flop/s.
    """

    seconds: float
    gigabytes_per_second: float
    gigaflops_per_second: float
    stream_gigabytes_per_second: float
    peak_gigaflops_per_second: float
    limit_gigaflops_per_second: float
    binds: Side
    share_of_stream: float
    share_of_limit: float


def figures(rounds: Sequence[Round], flops: int, moved_bytes: int) -> Figures:
    """Return what follows from the rounds of one layer at one number of rows."""
    seconds = median(one.kernel_seconds for one in rounds)
    stream = median(one.stream_bytes_per_second for one in rounds)
    peak = median(one.peak_flops_per_second for one in rounds)
    limits = [roofline(flops, moved_bytes, one.stream_bytes_per_second, one.peak_flops_per_second) for one in rounds]
    return Figures(
        seconds=seconds,
        gigabytes_per_second=moved_bytes / seconds / 1e9,
        gigaflops_per_second=flops / seconds / 1e9,
        stream_gigabytes_per_second=stream / 1e9,
        peak_gigaflops_per_second=peak / 1e9,
        limit_gigaflops_per_second=median(limit.flops_per_second for limit in limits) / 1e9,
        binds=roofline(flops, moved_bytes, stream, peak).binds,
        share_of_stream=median(moved_bytes / one.kernel_seconds / one.stream_bytes_per_second for one in rounds),
        share_of_limit=median(
            flops / one.kernel_seconds / limit.flops_per_second for one, limit in zip(rounds, limits, strict=True)
        ),
    )


class Tried(Record):
    """A candidate of the search: seconds a call, or why it is out."""

    candidate: str
    seconds: float | None
    rejected: str | None


class Plain(Record):
    """One call of plain MLX on the same inputs, or why there is none."""

    seconds: float | None
    reason: str | None


class Point(Record):
    """One layer at one number of rows.

    Attributes:
        model: whose layer it is.
        layer: what it is there.
        n: outputs.
        k: inputs.
        rows: of x.
        bucket: upper end of the bucket of rows that the candidate was tuned for.
        candidate: the label of what was measured.
        weight_sets: places in memory that the weights took turns in.
        weight_set_bytes: of one of them.
        flops: of a call.
        moved_bytes: weights, x and y once.
        rounds: the samples.
        figures: what follows from them.
        plain: plain MLX.
    """

    model: str
    layer: str
    n: int
    k: int
    rows: int
    bucket: int
    candidate: str
    weight_sets: int
    weight_set_bytes: int
    flops: int
    moved_bytes: int
    rounds: list[Round]
    figures: Figures
    plain: Plain


class Search(Record):
    """What was tried for one layer and one bucket of rows; the order is that of the search."""

    model: str
    layer: str
    bucket: int
    tried: list[Tried]


class Summary(Record):
    """Medians over layers and row counts; None where nothing of the kind was measured."""

    gemv_share_of_stream: float | None
    gemm_share_of_limit: float | None


class Machine(Record):
    """What ran it."""

    chip: str
    isa: str
    threads: int
    system: str
    architecture: str
    memory_bytes_available: int


class Versions(Record):
    """What was run."""

    metile: str
    mlx: str
    python: str
    commit: str | None


class Run(Record):
    """The whole record."""

    benchmark: Literal["cpu_kernels"]
    recorded_at: str
    seconds: float
    machine: Machine
    versions: Versions
    precision: str
    cold_bytes: int
    load_average_before: list[float]
    load_average_after: list[float]
    summary: Summary
    points: list[Point]
    searches: list[Search]


def summarize(points: Sequence[Point]) -> Summary:
    """Return the two figures that stand for a run."""
    gemv = [point.figures.share_of_stream for point in points if point.rows < GEMV_ROWS]
    gemm = [point.figures.share_of_limit for point in points if point.rows >= GEMM_ROWS]
    return Summary(
        gemv_share_of_stream=median(gemv) if gemv else None,
        gemm_share_of_limit=median(gemm) if gemm else None,
    )


def machine_of(target: CpuTarget) -> Machine:
    """Describe what runs the kernels."""
    return Machine(
        chip=target.chip().rpartition(" (")[0],
        isa=target.isa.name,
        threads=thread_count(),
        system=platform.system() or "unknown",
        architecture=platform.machine() or "unknown",
        memory_bytes_available=available_bytes(),
    )


def versions() -> Versions:
    """Name the versions of what is measured."""
    from metile import __version__

    found = software()
    return Versions(metile=__version__, mlx=found.mlx, python=found.python, commit=_commit())


def _commit() -> str | None:
    """Return the commit of the checkout, marked where files differ from it, or None outside of one."""
    command = [
        "git",
        "-C",
        str(Path(__file__).resolve().parent),
        "describe",
        "--always",
        "--abbrev=40",
        "--dirty",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def load_average() -> list[float]:
    """Return the load averages over 1, 5 and 15 minutes; nothing where the system has none."""
    return list(os.getloadavg()) if hasattr(os, "getloadavg") else []


def timestamp() -> str:
    """Return the time, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def slug(chip: str) -> str:
    """Return a chip's name as part of a file name: ``Intel(R) Xeon(R)`` is ``intel-xeon``."""
    bare = re.sub(r"\((r|tm|c)\)", "", chip.lower())
    return re.sub(r"[^a-z0-9]+", "-", bare).strip("-") or "unknown"


def save(run: Run, path: Path) -> None:
    """Write a record, whole or not at all."""
    write_atomic(path, (run.model_dump_json(indent=1) + "\n").encode())


def load(path: Path) -> Run:
    """Read a record.

    Raises:
        pydantic.ValidationError: the file is not one.
    """
    return Run.model_validate_json(path.read_bytes())
