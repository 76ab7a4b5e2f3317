"""The trial of one key: candidates are verified, race each other, and the finalist meets plain MLX.

Plain MLX may be a hundred times slower than what is tried here, so it is sampled sparingly: its share of the
race is bounded, and the pairs of the confirmation are few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from metile.chain import Chain, Launch
from metile.check import Case, fault, first_line, make_case, row_counts
from metile.dispatch import Decision
from metile.measure import Clock, Halving, Paired, Rotation, Work, halving, paired, sample
from metile.measure import Progress as RaceProgress
from metile.ops.base import OpKey
from metile.targets.base import Kernel

Tell = Callable[[str, str, int, int], None]  # stage, candidate, done, total

SAMPLE_SECONDS = 0.002
MOST_REPEATS = 64
SLOW_SECONDS = 0.02  # plain MLX above this, warmed by smaller cases, is not called once more for its time
COLD_BYTES, MOST_SETS = 64 << 20, 8
GRAPH_COLD_BYTES, GRAPH_MOST_SETS = 192 << 20, 256  # a GPU's second-level cache may hold 60 MB
GRAPH_LEAST_REPEATS = 16  # the wait for an evaluation is then shared by so many
LEAST_RACE_SECONDS = 0.05
PAIRS = 9  # of the confirmation; fewer where plain MLX is slow ...
LEAST_PAIRS = 3  # ... but never fewer than these


@dataclass(frozen=True)
class Contest:
    """What a trial is given.

    Attributes:
        key: the operation and its bucket.
        kernels: the compiled kernel of each candidate, in the order in which they are tried.
        rejected: candidates that are out already, with the reason.
        seconds: time for all of it.
        seed: of the inputs.
        is_graph: whether launches are nodes of MLX's graph, which are timed many at once: see `metile.chain`.
    """

    key: OpKey
    kernels: Mapping[Any, Kernel]
    rejected: Mapping[str, str]
    seconds: float
    seed: int = 0
    is_graph: bool = False


class Bench:
    """Samples of one key's candidates and of plain MLX, on weights in rotation.

    Args:
        contest: the key and its kernels.
        case: the inputs, at the full bucket.
        clock: returns seconds.
    """

    def __init__(self, contest: Contest, case: Case, clock: Clock) -> None:
        self._contest, self._clock = contest, clock
        self._next = _rotated(contest.key, case.inputs, contest.is_graph)
        self._repeats: dict[Any | None, int] = {}
        self._plain_total = self._others_total = 0.0
        self.plain_seconds = case.plain_seconds
        if self.plain_seconds < SLOW_SECONDS or case.rows == 1:
            self.plain_seconds = self._timed(None)

    def work(self, candidate: Any | None) -> Work:
        """Return a call of a candidate, or of plain MLX, that returns when its work is done."""
        launch = self._launch(candidate)
        if self._contest.is_graph:
            return Chain(launch, self._next)
        return lambda: mx.eval(launch(self._next()))

    def _launch(self, candidate: Any | None) -> Launch:
        key = self._contest.key
        if candidate is None:
            return key.reference
        kernel = self._contest.kernels[candidate]
        return lambda inputs: key.launch(kernel, candidate, inputs)

    def repeats(self, candidate: Any | None) -> int:
        """Return how many calls a sample takes to last long enough for the clock."""
        if candidate not in self._repeats:
            seconds = self.plain_seconds if candidate is None else self._warm(candidate)
            wanted = math.ceil(SAMPLE_SECONDS / max(seconds, SAMPLE_SECONDS / MOST_REPEATS))
            self._repeats[candidate] = max(wanted, GRAPH_LEAST_REPEATS if self._contest.is_graph else 1)
        return self._repeats[candidate]

    def measure(self, candidate: Any | None) -> float:
        """Return seconds a call, infinite where a candidate fails.

        Plain MLX is measured anew only where it will then have taken no more time than the candidates did
        together; otherwise its last sample stands.
        """
        start = self._clock()
        if candidate is None:
            repeats = self.repeats(None)
            if self._plain_total + self.plain_seconds * repeats <= self._others_total:
                self.plain_seconds = self._timed(None, repeats)
                self._plain_total += self._clock() - start
            return self.plain_seconds
        try:
            return self._timed(candidate, self.repeats(candidate))
        except Exception:
            return math.inf
        finally:
            self._others_total += self._clock() - start

    def _warm(self, candidate: Any) -> float:
        self.work(candidate)()
        return self._timed(candidate)

    def _timed(self, candidate: Any | None, repeats: int = 1) -> float:
        return sample(self.work(candidate), repeats, clock=self._clock)


def _rotated(key: OpKey, inputs: list[mx.array], is_graph: bool) -> Callable[[], list[mx.array]]:
    """Return a function that gives `inputs` with the weights in another place at each call."""
    places = key.weight_inputs()
    set_bytes = sum(inputs[place].nbytes for place in places)
    if not set_bytes:
        return lambda: inputs

    def make(index: int) -> list[mx.array]:
        copied = [a + 0 if index and place in places else a for place, a in enumerate(inputs)]
        mx.eval(copied)
        return copied

    wanted, sets = (GRAPH_COLD_BYTES, GRAPH_MOST_SETS) if is_graph else (COLD_BYTES, MOST_SETS)
    cold = min(wanted, (sets - 1) * set_bytes)
    return Rotation(make, set_bytes, cold_bytes=cold, memory_bytes=available_bytes() // 10).next


def available_bytes() -> int:
    """Return the memory that can be had without pushing anything out; 4 GiB where nothing says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 4 << 30
    values = (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return next(values, 4 << 30)


def decide(contest: Contest, clock: Clock, tell: Tell) -> Decision:
    """Hold the trial of one key.

    Returns:
        The winner, or plain MLX with the reason why it stays.
    """
    start = clock()
    rejected = dict(contest.rejected)
    passed = verified_candidates(contest, rejected, clock, tell)
    if isinstance(passed, Decision):
        return passed
    verified, case = passed
    bench = Bench(contest, case, clock)
    left = contest.seconds - (clock() - start)
    a_pair = _pair_seconds(bench)
    pairs = max(LEAST_PAIRS, min(PAIRS, int(left / 2 / a_pair)))
    race = _race(bench, verified, left - pairs * a_pair, clock, tell)
    if race.best is None:
        return _stay(contest, rejected, _lost(race))
    tell("confirm", race.best.label(), 0, pairs)
    return _confirm(contest, bench, race.best, pairs, rejected, clock)


def verified_candidates(
    contest: Contest, rejected: dict[str, str], clock: Clock, tell: Tell
) -> tuple[list[Any], Case] | Decision:
    """Return the candidates that compute what they should, and the case of the full bucket.

    What does not is noted in `rejected`; where nothing is left, the decision for plain MLX is returned.
    """
    start = clock()
    if not contest.kernels:
        return _stay(contest, rejected, "no candidate is admissible and compiles")
    try:
        cases = [make_case(contest.key, rows, contest.seed, clock) for rows in row_counts(contest.key.rows)]
    except Exception as error:
        return _stay(contest, rejected, f"the reference raised {first_line(error)}")
    verified = _verified(contest, cases, rejected, lambda: clock() - start, tell)
    if not verified:
        label = next(candidate.label() for candidate in contest.kernels)
        reason = f"no candidate passed verification; the default, {label}, {rejected[label]}"
        return _stay(contest, rejected, reason)
    return verified, cases[-1]


def _stay(contest: Contest, rejected: Mapping[str, str], reason: str) -> Decision:
    return Decision(contest.key, None, 1.0, reason, rejected)


def _verified(
    contest: Contest, cases: Sequence[Case], rejected: dict[str, str], spent: Callable[[], float], tell: Tell
) -> list[Any]:
    """Return the candidates that pass every case; note the others in `rejected`.

    When half of the time is gone, what has passed by then is enough.
    """
    passed: list[Any] = []
    for number, (candidate, kernel) in enumerate(contest.kernels.items()):
        if passed and spent() > contest.seconds / 2:
            break
        tell("verify", candidate.label(), number, len(contest.kernels))
        faults = (fault(contest.key, candidate, kernel, case) for case in cases)
        reason = next((reason for reason in faults if reason), None)
        if reason is None:
            passed.append(candidate)
        else:
            rejected[candidate.label()] = reason
    return passed


def _pair_seconds(bench: Bench) -> float:
    """Return what a pair of the confirmation takes at most: the finalist is no slower than plain MLX."""
    return 2 * bench.plain_seconds * bench.repeats(None)


def _race(bench: Bench, verified: Sequence[Any], seconds: float, clock: Clock, tell: Tell) -> Halving[Any | None]:
    def show(state: RaceProgress[Any | None]) -> None:
        tell("time", state.candidate.label() if state.candidate else "mlx", state.done, state.total)

    return halving(
        [None, *verified],
        bench.measure,
        budget_seconds=max(seconds, LEAST_RACE_SECONDS),
        clock=clock,
        repetitions=2,
        group=len(verified),
        progress=show,
    )


def _lost(race: Halving[Any | None]) -> str:
    measured = [(name, race.results[name].ratio) for name in race.survivors if name in race.results]
    if not measured:
        return "no candidate could be timed"
    best: Any = measured[0][0]
    return f"plain MLX is faster: the best, {best.label()}, reached {measured[0][1]:.3g}x"


def _confirm(
    contest: Contest,
    bench: Bench,
    finalist: Any,
    pairs: int,
    rejected: dict[str, str],
    clock: Clock,
) -> Decision:
    repeats = (bench.repeats(None), bench.repeats(finalist))
    work = (bench.work(None), bench.work(finalist))
    try:
        result = paired(*work, trials=pairs, clock=clock, repeats=repeats)
    except Exception as error:
        rejected[finalist.label()] = f"raised {first_line(error)}"
        return _stay(contest, rejected, "the finalist failed while it was confirmed")
    text = _outcome(finalist, result)
    if not result.wins(contest.key.margin):
        return _stay(contest, rejected, f"{text}: not the margin of {contest.key.margin:.0%}")
    return Decision(contest.key, finalist, result.ratio, text, rejected)


def _outcome(finalist: Any, result: Paired) -> str:
    lower, upper = result.quartiles
    return (
        f"{finalist.label()} is {result.ratio:.3g}x plain MLX in {len(result.ratios)} pairs, "
        f"quartiles {lower:.3g} and {upper:.3g}"
    )
