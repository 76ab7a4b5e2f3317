"""Hold the CPU kernels against this machine's limits: ``python benchmarks/cpu_kernels.py``.

Setup: each layer's weights, in bfloat16, lie in so many places that together they exceed 64 MB, on huge
pages. Run: a small search finds the candidate of each layer and bucket of rows; then kernel, streaming read
and multiply-accumulate peak are sampled side by side. Verify: every candidate is compared with float32 before
it is timed, on outputs that held NaN. The limit is the roofline: min(peak, bandwidth * flops / bytes), the
bytes being weights, x and y once. One JSON record holds all samples.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import cpu_record
import mlx.core as mx
from cpu_limits import Meter
from cpu_record import Point, Run, Search, Summary
from cpu_shapes import (
    GEMM_ROWS,
    GEMV_ROWS,
    MODELS,
    QUICK_ROWS,
    QUICK_SHAPES,
    ROWS,
    Shape,
    checked_rows,
    shapes_of,
)
from cpu_trial import QUICK, Effort, Layer, measure, tune
from rich import box
from rich.console import Console
from rich.table import Table

from metile.errors import MetileError, mismatch
from metile.ops.base import row_bucket
from metile.targets import cpu
from metile.targets.cpu import CpuTarget
from metile.targets.isa import Isa, current_isa, supported_isas

RESULTS = Path(__file__).resolve().parent / "results"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/cpu_kernels.py",
        description="Measure the CPU kernels against this machine's limits.",
    )
    add = parser.add_argument
    names = ", ".join(isa.name for isa in supported_isas())
    add("--isa", help=f"instruction set, one of {names} (default: the best)")
    add("--models", nargs="+", metavar="MODEL", help=f"some of {', '.join(MODELS)} (default: all)")
    add("--rows", nargs="+", type=int, metavar="N", help=f"rows of x (default: {' '.join(map(str, ROWS))})")
    add("--cold-megabytes", type=int, metavar="N", help="what the weights in rotation exceed (default: 64)")
    add(
        "--quick",
        action="store_true",
        help="a smoke run: few layers, rows and candidates; figures mean nothing",
    )
    add(
        "--output",
        type=Path,
        help="the record's file (default: benchmarks/results/cpu-kernels-CHIP.json; no file with --quick)",
    )
    return parser


def _isa(name: str | None) -> Isa:
    if name is None:
        return current_isa()
    found = {isa.name: isa for isa in supported_isas()}
    if name not in found:
        raise mismatch("isa", f"one of {', '.join(found)} on this machine", repr(name))
    return found[name]


def _effort(options: argparse.Namespace) -> Effort:
    effort = QUICK if options.quick else Effort()
    if options.cold_megabytes is None:
        return effort
    if options.cold_megabytes < 1:
        raise mismatch("cold-megabytes", "at least 1", options.cold_megabytes)
    return dataclasses.replace(effort, cold_bytes=options.cold_megabytes << 20)


def _work(options: argparse.Namespace) -> list[tuple[Shape, list[int]]]:
    """Return each layer with the rows it is measured at."""
    shapes = QUICK_SHAPES if options.quick and not options.models else shapes_of(options.models or MODELS)
    rows = checked_rows(options.rows or (QUICK_ROWS if options.quick else ROWS))
    pairs = ((shape, [count for count in rows if shape.takes(count)]) for shape in shapes)
    return [(shape, counts) for shape, counts in pairs if counts]


def run_layer(
    shape: Shape, rows: Sequence[int], meter: Meter, target: CpuTarget, effort: Effort
) -> Iterator[Point | Search]:
    """Yield the search of each bucket of `rows`, ascending, and after it the bucket's points."""
    layer = Layer(shape, max(rows), target, effort)
    for _, counts in itertools.groupby(rows, key=row_bucket):
        bucket = list(counts)
        choice = tune(layer, bucket[-1])
        yield choice.search
        for count in bucket:
            yield measure(layer, count, choice, meter)
    del layer
    mx.clear_cache()


def benchmark(work: Sequence[tuple[Shape, Sequence[int]]], target: CpuTarget, effort: Effort, console: Console) -> Run:
    """Measure everything and return the record.

    Raises:
        MetileError: a layer has no candidate that verifies.
    """
    start, before, versions = time.perf_counter(), cpu_record.load_average(), cpu_record.versions()
    machine = cpu_record.machine_of(target)
    meter = Meter(target)
    points: list[Point] = []
    searches: list[Search] = []
    total = sum(len(rows) for _, rows in work)
    with console.status("") as status:
        for shape, rows in work:
            for item in run_layer(shape, rows, meter, target, effort):
                (points if isinstance(item, Point) else searches).append(item)  # type: ignore[arg-type]
                status.update(f"{len(points)} of {total}: {shape.model} {shape.layer} ({shape.n} x {shape.k})")
    return Run(
        benchmark="cpu_kernels",
        recorded_at=cpu_record.timestamp(),
        seconds=time.perf_counter() - start,
        machine=machine,
        versions=versions,
        precision=cpu_record.PRECISION,
        cold_bytes=effort.cold_bytes,
        load_average_before=before,
        load_average_after=cpu_record.load_average(),
        summary=cpu_record.summarize(points),
        points=points,
        searches=searches,
    )


def tables(run: Run) -> Iterator[Table]:
    """Yield a table a model: a line for each layer and number of rows, with its shares of stream and limit."""
    for model, points in itertools.groupby(run.points, key=lambda point: point.model):
        table = Table(title=model, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("layer")
        for name in ("rows", "GB/s", "GFLOP/s", "stream", "limit", "bound by", "vs MLX"):
            table.add_column(name, justify="right", no_wrap=True, min_width=9 if name == "bound by" else len(name))
        for point in points:
            table.add_row(f"{point.layer} {point.n}x{point.k}", *_cells(point))
        yield table


def _cells(point: Point) -> tuple[str, ...]:
    made, plain = point.figures, point.plain.seconds
    return (
        str(point.rows),
        f"{made.gigabytes_per_second:.1f}",
        f"{made.gigaflops_per_second:.0f}",
        f"{made.share_of_stream:.0%}",
        f"{made.share_of_limit:.0%}",
        made.binds,
        f"{plain / made.seconds:.1f}x" if plain else "-",
    )


def summary_line(summary: Summary) -> str:
    """Return the two figures that stand for a run, in a line."""

    def percent(share: float | None) -> str:
        return "not measured" if share is None else f"{share:.0%}"

    return (
        f"GEMV at rows < {GEMV_ROWS}: {percent(summary.gemv_share_of_stream)} of the streaming read. "
        f"GEMM at rows >= {GEMM_ROWS}: {percent(summary.gemm_share_of_limit)} of the limit. "
        "Medians over the layers."
    )


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Run the command; return its exit code: 0, 1 where a kernel fails, 2 for bad input."""
    options = _parser().parse_args(arguments)
    console = console or Console()
    complain = Console(stderr=True)
    try:
        work, effort, isa = _work(options), _effort(options), _isa(options.isa)
        if reason := cpu.available():
            raise MetileError(reason)
    except MetileError as error:
        complain.print(str(error), highlight=False, markup=False, soft_wrap=True)
        return 2
    target = CpuTarget(isa)
    try:
        run = benchmark(work, target, effort, console)
    except MetileError as error:
        complain.print(str(error), highlight=False, markup=False, soft_wrap=True)
        return 1
    machine = run.machine
    console.print(f"{machine.chip}, {machine.isa}, {machine.threads} threads", highlight=False)
    for table in tables(run):
        console.print(table)
    console.print(summary_line(run.summary), highlight=False)
    name = cpu_record.slug(target.chip())
    output = options.output or (None if options.quick else RESULTS / f"cpu-kernels-{name}.json")
    if output is not None:
        cpu_record.save(run, output)
        console.print(f"Record: {output}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
