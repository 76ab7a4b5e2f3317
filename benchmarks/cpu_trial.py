"""One layer on the bench: its weights in many places, a search, verification and timing."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import mlx.core as mx
from cpu_limits import Meter
from cpu_record import Plain, Point, Round, Search, Tried, figures
from cpu_shapes import Shape

from metile.check import Case, fault
from metile.errors import MetileError
from metile.measure import sample, sets_needed
from metile.ops.base import row_bucket
from metile.ops.linear import LinearKey
from metile.ops.linear_tile import LinearTile
from metile.search import sampled
from metile.targets.base import Kernel
from metile.targets.compiler import CompileError
from metile.targets.cpu import CpuTarget
from metile.trial import available_bytes

ALLOWED_ERROR = 2.0**-7  # of the largest value: two roundings to bfloat16
PLAIN_LIMIT_SECONDS = 0.5
WARM_PLAIN_SECONDS = 0.05  # plain MLX below this is called a second time, and that counts
_BLOCK_ROWS = 8192  # rows of random weights made anew; more are these, scaled row by row


@dataclass(frozen=True)
class Effort:
    """How much is spent.

    Attributes:
        candidates: tried for each layer and bucket of rows.
        search_seconds: after which no further candidate is tried.
        finalists: candidates that are timed again.
        rounds: of the measurement.
        sample_seconds: that a sample of the kernel lasts about.
        cold_bytes: that the weights in rotation exceed.
    """

    candidates: int = 36
    search_seconds: float = 2.0
    finalists: int = 5
    rounds: int = 7
    sample_seconds: float = 0.004
    cold_bytes: int = 64 << 20


QUICK = Effort(candidates=4, search_seconds=0.5, finalists=2, rounds=3, sample_seconds=0.001, cold_bytes=4 << 20)


class Layer:
    """A layer set up for measuring: x, and its weights in several places on huge pages.

    Args:
        shape: the layer.
        most_rows: of x.
        target: what the kernels run on.
        effort: how much is spent.
    """

    def __init__(self, shape: Shape, most_rows: int, target: CpuTarget, effort: Effort) -> None:
        self.shape, self.target, self.effort = shape, target, effort
        self._x = mx.random.normal((most_rows, shape.k), key=mx.random.key(1)).astype(mx.bfloat16)
        weight = _weight(shape.n, shape.k)
        widened = self._x.astype(mx.float32) @ weight.astype(mx.float32).T
        mx.eval(self._x, weight, widened)
        self._reference = widened
        count = sets_needed(
            weight.nbytes,
            cold_bytes=max(effort.cold_bytes, weight.nbytes),
            memory_bytes=max(available_bytes() // 4, 2 * weight.nbytes),
        )
        self.stack = mx.contiguous(mx.broadcast_to(weight, (count, *weight.shape)))
        mx.eval(self.stack)
        target.prepare([self.stack])
        self._places = [self.stack[index] for index in range(count)]
        mx.eval(self._places)
        self._turns: Iterator[mx.array] = itertools.cycle(self._places)
        self._cases: dict[int, Case] = {}
        self._plain: tuple[int, float] | None = None

    def key(self, rows: int) -> LinearKey:
        """Return the operation at the bucket of `rows`."""
        return LinearKey("store", row_bucket(rows) or rows, self.shape.n, self.shape.k, "bfloat16")

    def _case(self, rows: int) -> Case:
        if rows not in self._cases:
            x, reference = mx.contiguous(self._x[:rows]), mx.contiguous(self._reference[:rows])
            mx.eval(x, reference)
            inputs = [x, self._places[0]]
            self._cases = {rows: Case(rows, inputs, [reference], [mx.bfloat16], [ALLOWED_ERROR], 0.0)}
        return self._cases[rows]

    def verify(self, rows: int, candidate: LinearTile, kernel: Kernel) -> str | None:
        """Return what is wrong with a candidate, against float32 and with outputs that were NaN; or None."""
        return fault(self.key(rows), candidate, kernel, self._case(rows))

    def work(self, rows: int, candidate: LinearTile, kernel: Kernel) -> Callable[[], object]:
        """Return a call of a kernel that finds the weights in another place each time."""
        key, x = self.key(rows), self._case(rows).inputs[0]
        return lambda: mx.eval(key.launch(kernel, candidate, [x, next(self._turns)]))

    def repeats(self, work: Callable[[], object]) -> int:
        """Return how many calls make a sample."""
        work()
        return max(1, math.ceil(self.effort.sample_seconds / sample(work)))

    def plain(self, rows: int) -> Plain:
        """Time one call of plain MLX, unless fewer rows have shown that it takes too long; ascending rows."""
        if self._plain is not None:
            expected = self._plain[1] * rows / self._plain[0]
            if expected > PLAIN_LIMIT_SECONDS:
                text = f"a call would take about {expected:.2g} s, more than {PLAIN_LIMIT_SECONDS} s"
                return Plain(seconds=None, reason=text)
        key, x = self.key(rows), self._case(rows).inputs[0]

        def work() -> None:
            mx.eval(key.reference([x, next(self._turns)]))

        seconds = sample(work)
        if seconds < WARM_PLAIN_SECONDS:
            seconds = sample(work)
        self._plain = rows, seconds
        return Plain(seconds=seconds, reason=None)


def _weight(n: int, k: int) -> mx.array:
    """Return weights of variance about 1/k, rows beyond the first 8192 being earlier ones scaled anew."""
    made = min(n, _BLOCK_ROWS)
    block = (mx.random.normal((made, k), key=mx.random.key(0)) / math.sqrt(k)).astype(mx.bfloat16)
    if made == n:
        return block
    scale = mx.random.uniform(0.5, 1.5, (n, 1), key=mx.random.key(2)).astype(mx.bfloat16)
    return mx.concatenate([block] * -(-n // made))[:n] * scale


@dataclass(frozen=True)
class Choice:
    """The outcome of a search: the winner, its kernel, and what was tried."""

    candidate: LinearTile
    kernel: Kernel
    search: Search


def tune(layer: Layer, rows: int) -> Choice:
    """Search the space of a layer at `rows` and keep the fastest candidate that verifies.

    Raises:
        MetileError: no candidate compiles and verifies; the message has the default's reason.
    """
    key, target, effort = layer.key(rows), layer.target, layer.effort
    candidates = sampled(key, target, effort.candidates, 0)
    kernels = target.compile_all([key.source(candidate) for candidate in candidates])
    passed: dict[LinearTile, Kernel] = {}
    times: dict[LinearTile, list[float]] = {}
    rejected: dict[LinearTile, str] = {}
    end = time.perf_counter() + effort.search_seconds
    for candidate, kernel in zip(candidates, kernels, strict=True):
        if passed and time.perf_counter() > end:
            rejected[candidate] = "not tried: the search had no time left"
        elif isinstance(kernel, CompileError):
            rejected[candidate] = str(kernel).splitlines()[0]
        elif reason := layer.verify(rows, candidate, kernel):
            rejected[candidate] = reason
        else:
            passed[candidate] = kernel
            times[candidate] = [_timed(layer, rows, candidate, kernel)]
    if not passed:
        raise MetileError(f"[{key.subject()}] expected a candidate that verifies but got {rejected[candidates[0]]}")
    for _ in range(2):
        for candidate in sorted(times, key=lambda one: median(times[one]))[: effort.finalists]:
            times[candidate].append(_timed(layer, rows, candidate, passed[candidate]))
    finalists = [candidate for candidate in times if len(times[candidate]) > 1]
    best = min(finalists, key=lambda one: median(times[one]))
    return Choice(best, passed[best], _search_record(layer, key, candidates, times, rejected))


def _timed(layer: Layer, rows: int, candidate: LinearTile, kernel: Kernel) -> float:
    work, enough = layer.work(rows, candidate, kernel), layer.effort.sample_seconds
    once = sample(work)  # verification has warmed it up
    return once if once >= enough else sample(work, math.ceil(enough / once))


def _search_record(
    layer: Layer,
    key: LinearKey,
    candidates: Sequence[LinearTile],
    times: dict[LinearTile, list[float]],
    rejected: dict[LinearTile, str],
) -> Search:
    tried = [
        Tried(
            candidate=candidate.label(),
            seconds=median(times[candidate]) if candidate in times else None,
            rejected=rejected.get(candidate),
        )
        for candidate in candidates
    ]
    return Search(model=layer.shape.model, layer=layer.shape.layer, bucket=key.rows, tried=tried)


def measure(layer: Layer, rows: int, choice: Choice, meter: Meter) -> Point:
    """Verify the choice at `rows`, then time it beside both limits, in an order that alternates.

    The streaming read goes over the very memory in which the weights take turns, so whatever part of it a
    cache holds, it holds for both.

    Raises:
        MetileError: it does not verify.
    """
    shape = layer.shape
    if reason := layer.verify(rows, choice.candidate, choice.kernel):
        raise MetileError(
            f"[{layer.key(rows).subject()}] expected {choice.candidate.label()} to verify but got {reason}"
        )
    work = layer.work(rows, choice.candidate, choice.kernel)
    repeats = layer.repeats(work)
    parts: list[tuple[str, Callable[[], float]]] = [
        ("stream_bytes_per_second", lambda: meter.bandwidth(layer.stack)),
        ("kernel_seconds", lambda: sample(work, repeats)),
        ("peak_flops_per_second", meter.peak),
    ]
    rounds = []
    for number in range(layer.effort.rounds):
        order: list[Any] = parts[:: -1 if number % 2 else 1]
        rounds.append(Round(**{name: take() for name, take in order}))
    flops, moved = shape.flops(rows), shape.moved_bytes(rows)
    return Point(
        model=shape.model,
        layer=shape.layer,
        n=shape.n,
        k=shape.k,
        rows=rows,
        bucket=layer.key(rows).rows,
        candidate=choice.candidate.label(),
        weight_sets=len(layer.stack),
        weight_set_bytes=layer.stack.nbytes // len(layer.stack),
        flops=flops,
        moved_bytes=moved,
        rounds=rounds,
        figures=figures(rounds, flops, moved),
        plain=layer.plain(rows),
    )
