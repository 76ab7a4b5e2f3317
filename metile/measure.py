"""Fair timing: alternating paired trials, cold weights, robust statistics and successive halving.

Nothing here knows of MLX. What is timed is a callable that returns when its work is done (it evaluates its
result), and every clock can be replaced, so that the tests run on made-up time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from metile.errors import mismatch

Clock = Callable[[], float]
Work = Callable[[], object]

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

TICK_SECONDS = 1e-9  # what a sample lasts at least, so that a clock that stood still divides by no zero


def _middle(values: Sequence[float]) -> float:
    """Return the median; of an even number, the geometric mean of the two in the middle.

    So the median of the inverses is the inverse of the median: neither side of a ratio is favoured.
    """
    ordered = sorted(values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return low if low == high else math.sqrt(low) * math.sqrt(high)


@dataclass(frozen=True)
class Paired:
    """Samples of two sides that were measured in the same rounds.

    Attributes:
        baseline: Seconds a call of the baseline in each round.
        candidate: Seconds a call of the candidate in the same rounds; infinite where it failed to run.
    """

    baseline: tuple[float, ...]
    candidate: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse sides of different length, and a baseline that has no finite positive time."""
        if not self.baseline or len(self.baseline) != len(self.candidate):
            raise mismatch("paired", "as many samples of each side", f"{len(self.baseline)} and {len(self.candidate)}")
        if not all(0 < seconds < math.inf for seconds in self.baseline):
            raise mismatch("paired", "finite positive seconds of the baseline", self.baseline)
        if not all(seconds > 0 for seconds in self.candidate):
            raise mismatch("paired", "positive seconds of the candidate", self.candidate)

    @property
    def ratios(self) -> tuple[float, ...]:
        """The speedup in each round: baseline over candidate, above 1 where the candidate is faster."""
        return tuple(base / other for base, other in zip(self.baseline, self.candidate, strict=True))

    @property
    def ratio(self) -> float:
        """The speedup: the median of the rounds' own ratios, not the ratio of two medians."""
        return _middle(self.ratios)

    @property
    def deviation(self) -> float:
        """Median absolute deviation of the rounds' ratios from their median."""
        return statistics.median(abs(ratio - self.ratio) for ratio in self.ratios)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Lower and upper quartile of the rounds' ratios."""
        if len(self.ratios) == 1:
            return self.ratios[0], self.ratios[0]
        lower, _, upper = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return lower, upper

    def swapped(self) -> Paired:
        """Return the same rounds with the sides exchanged."""
        return Paired(self.candidate, self.baseline)

    def wins(self, margin: float) -> bool:
        """Tell whether the candidate is faster by `margin` (0.02 is 2%), and not by a few lucky rounds.

        The median speedup must reach 1 + margin, and the lower quartile must not be below 1: at least three
        rounds in four went the candidate's way.
        """
        if not margin >= 0:
            raise mismatch("paired", "a margin of at least 0", margin)
        return self.ratio >= 1 + margin and self.ratio > 1 and self.quartiles[0] >= 1


def sample(work: Work, repeats: int = 1, *, clock: Clock = time.perf_counter) -> float:
    """Return the seconds that one of `repeats` calls of `work` in a row takes.

    A work with a method ``prepare`` makes of the number of calls what runs them, before the clock starts.
    """
    if repeats < 1:
        raise mismatch("sample", "at least 1 repeat", repeats)
    prepare = getattr(work, "prepare", None)
    run, calls = (work, repeats) if prepare is None else (prepare(repeats), 1)
    start = clock()
    for _ in range(calls):
        run()
    return max(clock() - start, TICK_SECONDS) / repeats


def repeat_for(
    work: Work, target_seconds: float = 0.002, *, clock: Clock = time.perf_counter, limit: int = 1 << 20
) -> int:
    """Return how many calls of `work` one sample needs to last `target_seconds`, at most `limit`.

    The first call is not counted: it may compile, or touch memory for the first time.
    """
    work()
    repeats = 1
    while repeats < limit:
        elapsed = sample(work, repeats, clock=clock) * repeats
        if elapsed >= target_seconds:
            break
        wanted = 1.1 * repeats * target_seconds / elapsed
        repeats = min(limit, max(repeats + 1, math.ceil(min(wanted, 16 * repeats))))
    return repeats


def paired(
    baseline: Work,
    candidate: Work,
    *,
    trials: int,
    clock: Clock = time.perf_counter,
    repeats: tuple[int, int] = (1, 1),
    fresh: Work | None = None,
) -> Paired:
    """Time both sides once in each of `trials` rounds: baseline first, then candidate first, and so on.

    Args:
        baseline: The side to beat.
        candidate: The other side.
        trials: Number of rounds, fixed beforehand; an even number balances the order exactly.
        clock: Returns seconds.
        repeats: Calls in a sample of the baseline and of the candidate, from `repeat_for`.
        fresh: Called, untimed, before every sample, to bring both sides into the same state.

    Returns:
        The samples, in seconds a call.
    """
    if trials < 1:
        raise mismatch("paired", "at least 1 trial", trials)
    sides = (baseline, candidate)
    seconds: tuple[list[float], list[float]] = ([], [])
    for round_number in range(trials):
        for side in (0, 1) if round_number % 2 == 0 else (1, 0):
            if fresh is not None:
                fresh()
            seconds[side].append(sample(sides[side], repeats[side], clock=clock))
    return Paired(tuple(seconds[0]), tuple(seconds[1]))


def sets_needed(set_bytes: int, *, cold_bytes: int, memory_bytes: int) -> int:
    """Return how many buffer sets exceed `cold_bytes` together, at least 1 and within `memory_bytes`."""
    if set_bytes < 1:
        raise mismatch("rotation", "at least 1 byte in a buffer set", set_bytes)
    return max(1, min(cold_bytes // set_bytes + 1, memory_bytes // set_bytes))


class Rotation(Generic[T]):
    """Takes turns among several equal buffer sets, so that none is cache-resident by accident.

    A model reads each layer's weights once a token; a loop over one layer would read them from the cache.

    Args:
        factory: Makes the buffer set of an index, filled and evaluated.
        set_bytes: Size of one set.
        cold_bytes: What all sets together must exceed: the last-level cache, with room to spare.
        memory_bytes: What they may not exceed. A single set is made even when it does.
    """

    def __init__(self, factory: Callable[[int], T], set_bytes: int, *, cold_bytes: int, memory_bytes: int) -> None:
        count = sets_needed(set_bytes, cold_bytes=cold_bytes, memory_bytes=memory_bytes)
        self.is_cold = count * set_bytes > cold_bytes
        self._sets = [factory(index) for index in range(count)]
        self._turn = 0

    def __len__(self) -> int:
        """Return the number of buffer sets."""
        return len(self._sets)

    def next(self) -> T:
        """Return the set that was used the longest ago."""
        chosen = self._sets[self._turn]
        self._turn = (self._turn + 1) % len(self._sets)
        return chosen

    def bind(self, work: Callable[[T], object]) -> Work:
        """Return `work` on the next set at each call; all that is bound shares one order of turns."""
        return lambda: work(self.next())


@dataclass(frozen=True)
class Progress(Generic[K]):
    """What a search is trying, and how far it is.

    Attributes:
        candidate: What is about to be sampled.
        done: Samples taken of candidates other than the incumbent.
        total: Samples to take if the budget lasts.
        seconds_left: Estimate from the pace so far, at most what is left of the budget.
    """

    candidate: K
    done: int
    total: int
    seconds_left: float


@dataclass(frozen=True)
class Halving(Generic[K]):
    """The state, or the outcome, of a search by successive halving.

    Attributes:
        incumbent: Candidate zero, which is never dropped.
        survivors: Challengers still in the race, the fastest first.
        results: All samples of each challenger that was measured, paired with the incumbent's.
        rounds: Completed rounds.
        finished: One finalist is left; false where the budget or the user ended the search first.
    """

    incumbent: K
    survivors: tuple[K, ...]
    results: Mapping[K, Paired]
    rounds: int
    finished: bool

    @property
    def best(self) -> K:
        """The fastest survivor, or the incumbent where none is faster. Confirm it with `paired`."""
        measured = [name for name in self.survivors if name in self.results]
        return measured[0] if measured and self.results[measured[0]].ratio > 1 else self.incumbent


def halving(
    candidates: Sequence[K],
    measure: Callable[[K], float],
    *,
    budget_seconds: float,
    clock: Clock = time.perf_counter,
    keep: float = 0.5,
    repetitions: int = 1,
    group: int = 8,
    progress: Callable[[Progress[K]], None] | None = None,
    record: Callable[[Halving[K]], None] | None = None,
) -> Halving[K]:
    """Narrow many candidates down to one, spending the time on those that are still in the race.

    In each round every survivor is measured, paired with a sample of the incumbent taken beside it; then the
    better half stays and the repetitions double. The samples of all rounds count together. The order is
    reversed with every repetition. Given the clock and the samples, the outcome is determined.

    Args:
        candidates: All of them, different from each other; the first one is the incumbent, plain MLX.
        measure: Takes one fresh sample and returns seconds a call; infinity for a candidate that fails.
        budget_seconds: When it is spent, no more samples are begun.
        clock: Returns seconds.
        keep: Fraction of the survivors that a round keeps, rounded up, and at least one less than before.
        repetitions: Samples of each survivor in the first round.
        group: Challengers that share one sample of the incumbent.
        progress: Called before each sample of a challenger.
        record: Called after each round, and with what was measured so far when anything, such as Ctrl-C,
            interrupts the search; the exception goes on to the caller.
    """
    _check_halving(candidates, keep, repetitions, group)
    race = _Race(candidates, measure, budget_seconds, clock, progress)
    race.plan(keep, repetitions)
    report = record if record is not None else lambda _: None
    try:
        while race.survivors and not race.finished and race.run_round(repetitions, group):
            race.narrow(keep)
            repetitions *= 2
            report(race.state())
    except BaseException:
        race.rank()
        report(race.state())
        raise
    race.rank()
    return race.state()


def _check_halving(candidates: Sequence[Hashable], keep: float, repetitions: int, group: int) -> None:
    if not candidates or len(set(candidates)) != len(candidates):
        raise mismatch("halving", "an incumbent and candidates that all differ", list(candidates))
    if not 0 < keep < 1:
        raise mismatch("halving", "a fraction to keep between 0 and 1", keep)
    if repetitions < 1 or group < 1:
        raise mismatch("halving", "at least 1 repetition and a group of 1", (repetitions, group))


def _kept(count: int, keep: float) -> int:
    """Return how many of `count` survivors a round keeps."""
    return max(1, min(count - 1, math.ceil(count * keep)))


class _Race(Generic[K]):
    """The moving parts of `halving`."""

    def __init__(
        self,
        candidates: Sequence[K],
        measure: Callable[[K], float],
        budget_seconds: float,
        clock: Clock,
        progress: Callable[[Progress[K]], None] | None,
    ) -> None:
        self.incumbent, *self.survivors = candidates
        self.finished = not self.survivors
        self._measure, self._clock, self._progress = measure, clock, progress
        self._pairs: dict[K, list[tuple[float, float]]] = {name: [] for name in self.survivors}
        self._start = clock()
        self._budget = budget_seconds
        self._rounds = self._sweeps = self._done = self._total = 0

    def plan(self, keep: float, repetitions: int) -> None:
        """Count the samples that all rounds will take."""
        count = len(self.survivors)
        self._total = count * repetitions
        while (count := _kept(count, keep)) > 1:
            repetitions *= 2
            self._total += count * repetitions

    def run_round(self, repetitions: int, group: int) -> bool:
        """Measure every survivor `repetitions` times; False when the budget ran out on the way."""
        for _ in range(repetitions):
            backwards = self._sweeps % 2 == 1
            self._sweeps += 1
            order = self.survivors[::-1] if backwards else self.survivors
            for start in range(0, len(order), group):
                if not self._run_group(order[start : start + group], incumbent_last=backwards):
                    return False
        self._rounds += 1
        return True

    def _run_group(self, names: Sequence[K], *, incumbent_last: bool) -> bool:
        if self._left() <= 0:
            return False
        base = math.nan if incumbent_last else self._measure(self.incumbent)
        times: list[float] = []
        for name in names:
            if self._left() <= 0:
                break
            self._tell(name)
            times.append(self._measure(name))
            self._done += 1
        if incumbent_last:
            base = self._measure(self.incumbent)
        for name, seconds in zip(names, times, strict=False):
            self._pairs[name].append((base, seconds))
        return len(times) == len(names)

    def _left(self) -> float:
        return self._budget - (self._clock() - self._start)

    def _tell(self, name: K) -> None:
        if self._progress is not None:
            left = self._left()
            if self._done:
                left = min(left, (self._budget - left) / self._done * (self._total - self._done))
            self._progress(Progress(name, self._done, self._total, max(left, 0.0)))

    def rank(self) -> None:
        """Sort the survivors, the fastest first; among equals, and without samples, the given order."""
        results = self._results()
        self.survivors.sort(key=lambda name: -results[name].ratio if name in results else 0.0)

    def narrow(self, keep: float) -> None:
        """Drop the slower survivors."""
        self.rank()
        self.survivors = self.survivors[: _kept(len(self.survivors), keep)]
        self.finished = len(self.survivors) == 1

    def _results(self) -> dict[K, Paired]:
        def sides(pairs: list[tuple[float, float]]) -> Paired:
            return Paired(tuple(base for base, _ in pairs), tuple(seconds for _, seconds in pairs))

        return {name: sides(pairs) for name, pairs in self._pairs.items() if pairs}

    def state(self) -> Halving[K]:
        """Return what is known now."""
        return Halving(self.incumbent, tuple(self.survivors), self._results(), self._rounds, self.finished)
