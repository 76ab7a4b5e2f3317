"""Hold the GPU kernels against plain MLX and the GPU's limits: ``python benchmarks/gpu_kernels.py --seconds 240``.

Setup: weights, or keys and values, lie in so many places that together they exceed the second-level cache twice. Run:
candidates race, then the best and plain MLX are sampled in turns; a sample is a chain of launches in one evaluation,
built before the clock starts. Verify: every candidate is compared with float32 before it is timed, on outputs that
held NaN. The floor is the larger of the bytes over the rate of a copy and the operations over the rate of a large
product, both measured in the same run. The record is written anew after every line of the table.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_profile
import gpu_record
import mlx.core as mx
from gpu_record import Limits, Point, Run, Sanitizer, Tried
from gpu_work import CONTEXTS, NAMES, ROWS, Chain, Launch, Operation, compiled, operations

from metile.check import fault, first_line, make_case
from metile.errors import MetileError
from metile.measure import halving
from metile.targets import choose_target, nvrtc
from metile.targets.base import Kernel
from metile.targets.compiler import CompileError

RESULTS = Path(__file__).resolve().parent / "results"
ROUNDS = 9
NEAR = 16  # candidates nearest to the default that are tried in any case
SAMPLE_SECONDS = 0.003
LEAST_LAUNCHES, MOST_LAUNCHES = 8, 256
COLD_FACTOR = 2  # of the second-level cache
MEMORY_BYTES = 16 << 30


def timed(end: mx.array) -> float:
    """Return the seconds that evaluating a chain takes, which was built before."""
    start = time.perf_counter()
    mx.eval(end)
    return max(time.perf_counter() - start, 1e-9)


def measure_limits(copied: int = 1 << 30, side: int = 8192) -> Limits:
    """Measure what the GPU can do at most.

    Args:
        copied: elements of bfloat16 that are copied.
        side: of the matrices that are multiplied.
    """
    steps, tries = 8, 5

    def best(first: mx.array, step: Any, count: int) -> float:
        times = []
        for _ in range(tries):
            end = first
            for _ in range(count):
                end = step(end)
            times.append(timed(end) / count)
        return sorted(times)[len(times) // 2]

    source = mx.random.normal((copied,), key=mx.random.key(1), dtype=mx.bfloat16)
    mx.eval(source)
    copy = best(source, lambda a: a + 1, steps)
    square = (mx.random.normal((side, side), key=mx.random.key(2)) * side**-0.5).astype(mx.bfloat16)
    product = best(square, lambda a: a @ square.T, steps)
    launch = best(mx.zeros((32,)), lambda a: mx.abs(a), 200)
    return Limits(
        bytes_per_second=2 * source.nbytes / copy, flops_per_second=2 * side**3 / product, launch_seconds=launch
    )


def candidates_of(space: Sequence[Any], count: int) -> list[Any]:
    """Return so many candidates: the nearest to the default, and the rest spread evenly over the others."""
    near = list(space[: min(NEAR, count)])
    rest, room = space[len(near) :], count - len(near)
    if not rest or room <= 0:
        return near
    step = max(len(rest) / room, 1.0)
    return near + [rest[int(index * step)] for index in range(min(room, len(rest)))]


class Line:
    """One line of the table on its way.

    Args:
        operation: what is measured.
        target: what runs the kernels.
        limits: of the machine.
        cold_bytes: what the weights in rotation exceed.
    """

    def __init__(self, operation: Operation, target: Any, limits: Limits, cold_bytes: int) -> None:
        self.operation, self._target, self._limits = operation, target, limits
        self._chain = Chain(operation, cold_bytes, MEMORY_BYTES)
        self._between = 0.0
        self._sample(None, LEAST_LAUNCHES)  # compiles, loads, and fills the graph's cache
        first = self._sample(None, LEAST_LAUNCHES)
        self.launches = min(max(math.ceil(SAMPLE_SECONDS / first), LEAST_LAUNCHES), MOST_LAUNCHES)
        if operation.normed:
            times = [timed(self._chain.between(self.launches)) / self.launches for _ in range(5)]
            self._between = sorted(times)[2]

    def _sample(self, launch: Launch | None, launches: int) -> float:
        end = self._chain.build(launch or self.operation.plain, launches)
        return max(timed(end) / launches - self._between, 1e-9)

    def kernels(self, count: int) -> tuple[dict[Any, Kernel], list[Tried]]:
        """Return the candidates that compile and are right, and what is wrong with the others."""
        key, rejected = self.operation.key, []
        chosen = candidates_of(key.space(self._target.limits), count)
        kernels = compiled(self._target, [(key, candidate) for candidate in chosen])
        case = make_case(key, self.operation.rows, 3, time.perf_counter)
        right = {}
        for candidate, kernel in zip(chosen, kernels, strict=True):
            wrong = str(kernel) if isinstance(kernel, CompileError) else fault(key, candidate, kernel, case)
            if wrong is None:
                right[candidate] = kernel
            else:
                rejected.append(Tried(candidate=candidate.label(), seconds=None, rejected=wrong))
        return right, rejected

    def launch(self, kernel: Kernel, candidate: Any) -> Launch:
        """Return the launch of a candidate."""
        return lambda inputs: self.operation.key.launch(kernel, candidate, inputs)

    def point(self, count: int, seconds: float) -> Point:
        """Race the candidates and measure the best beside plain MLX."""
        right, tried = self.kernels(count)
        launches = {candidate: self.launch(kernel, candidate) for candidate, kernel in right.items()}

        def measure(candidate: Any | None) -> float:
            launch = launches[candidate] if candidate is not None else None
            try:
                return self._sample(launch, self.launches)
            except Exception as error:
                tried.append(Tried(candidate=candidate.label(), seconds=None, rejected=first_line(error)))
                return math.inf

        for candidate in launches:
            measure(candidate)  # not counted: graphs and caches are new
        race = halving([None, *launches], measure, budget_seconds=seconds, group=8)
        for candidate, result in race.results.items():
            tried.append(Tried(candidate=candidate.label(), seconds=min(result.candidate), rejected=None))
        best = race.survivors[0] if race.survivors and race.survivors[0] in race.results else None
        plain, ours = self._paired(launches[best] if best is not None else None)
        point = self._point(best, plain, ours, tried)
        return point if best is None else point.model_copy(update=self._kernel_times(best, launches[best]))

    def _kernel_times(self, best: Any, launch: Launch) -> dict[str, Any]:
        """Return what the GPU says of both sides, in rounds of their own, the norm between launches left out."""
        own, between = self.operation.key.source(best).name, "rms_norm" if self.operation.normed else "\0"
        launches, sides = self.launches, (None, launch)
        chains = [self._chain.build(side or self.operation.plain, launches) for _ in range(ROUNDS) for side in sides]

        def run() -> None:
            for end in chains:
                mx.eval(end)

        try:
            recorded = gpu_profile.record(run) or []
        except Exception as error:  # the line keeps its other figures
            print(f"the profiler failed: {first_line(error)}", flush=True)
            recorded = []
        events = [event for event in recorded if between not in event[0]]
        total = ROUNDS * launches
        ours = gpu_profile.per_launch([event for event in events if own in event[0]], total)
        plain = gpu_profile.per_launch([event for event in events if own not in event[0]], total)
        return {"plain_kernels": gpu_record.kernel_time(plain), "metile_kernels": gpu_record.kernel_time(ours)}

    def _paired(self, launch: Launch | None) -> tuple[list[float], list[float]]:
        plain: list[float] = []
        ours: list[float] = []
        for index in range(ROUNDS):
            sides = [(plain, None), (ours, launch)] if launch is not None else [(plain, None)]
            for samples, side in sides if index % 2 == 0 else sides[::-1]:
                samples.append(self._sample(side, self.launches))
        return plain, ours

    def _point(self, best: Any | None, plain: list[float], ours: list[float], tried: list[Tried]) -> Point:
        operation = self.operation
        return Point(
            operation=operation.name,
            subject=operation.key.subject(),
            rows=operation.rows,
            context=operation.context,
            launches=self.launches,
            weight_sets=self._chain.sets,
            is_cold=self._chain.is_cold,
            moved_bytes=operation.moved_bytes,
            flops=operation.flops,
            subtracted_seconds=self._between,
            plain_seconds=plain,
            metile_seconds=ours,
            candidate=best.label() if best is not None else None,
            tried=tried,
            figures=gpu_record.figures(plain, ours, operation.moved_bytes, operation.flops, self._limits),
        )


def benchmark(work: Sequence[Operation], target: Any, limits: Limits, run: Run, output: Path, options: Any) -> Run:
    """Measure the lines, as far as the time goes; write the record after each and return it."""
    start, cold = time.perf_counter(), COLD_FACTOR * run.machine.l2_bytes
    for index, operation in enumerate(work):
        left = options.seconds - (time.perf_counter() - start)
        if left <= 0:
            print(f"no time for {', '.join(f'{o.name} {o.context or o.rows}' for o in work[index:])}", flush=True)
            break
        try:
            point = Line(operation, target, limits, cold).point(options.candidates, left / (len(work) - index) / 2)
        except Exception as error:
            print(f"{operation.name} {operation.context or operation.rows}: {first_line(error)}", flush=True)
            continue
        print(gpu_record.line_of(point), flush=True)
        seconds = time.perf_counter() - start
        run = run.model_copy(update={"points": [*run.points, point], "seconds": seconds})
        gpu_record.save(run, output)
        mx.clear_cache()
    return run


def slug(name: str) -> str:
    """Return a GPU's name as part of a file's: ``NVIDIA H200`` is ``h200``."""
    return "-".join(word for word in name.lower().split() if word != "nvidia")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python benchmarks/gpu_kernels.py", description="Measure the GPU kernels.")
    add = parser.add_argument
    add("--seconds", type=float, default=240.0, help="time for the whole table (default: 240)")
    add("--candidates", type=int, default=32, help="most candidates of a line (default: 32)")
    add("--operations", nargs="+", choices=NAMES, default=NAMES)
    add("--rows", nargs="+", type=int, default=ROWS)
    add("--contexts", nargs="+", type=int, default=CONTEXTS)
    add("--sanitizer", type=Path, help="what gpu_sanitize.py wrote, to go into the record")
    add("--output", type=Path, help="the record's file (default: benchmarks/results/CHIP-kernels.json)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 0 where every line has a candidate that is right."""
    options = _parser().parse_args(arguments)
    try:
        target: Any = choose_target("cuda")
    except MetileError as error:
        print(error, file=sys.stderr)
        return 2
    device = target.machine.device
    output = options.output or RESULTS / f"{slug(device.name)}-kernels.json"
    limits = measure_limits()
    mx.clear_cache()
    run = gpu_record.empty(device, nvrtc.version(), limits)
    if options.sanitizer is not None and options.sanitizer.is_file():
        found = [Sanitizer.model_validate(item) for item in json.loads(options.sanitizer.read_text())]
        run = run.model_copy(update={"sanitizer": found})
    print(
        f"{device.name}: copy {limits.bytes_per_second / 1e12:.2f} TB/s, product {limits.flops_per_second / 1e12:.0f}"
        f" TFLOP/s, a launch {limits.launch_seconds * 1e6:.1f} us\n"
        f"{'':20} {'chain: MLX':>9} {'ours us':>9}  ratio {'GPU: MLX':>8} {'ours us':>9}  ratio {'floor us':>9}",
        flush=True,
    )
    work = operations(options.operations, options.rows, options.contexts)
    run = benchmark(work, target, limits, run, output, options)
    complete = len(run.points) == len(work) and all(point.candidate for point in run.points)
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
