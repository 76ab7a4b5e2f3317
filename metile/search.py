"""The search: for each operation and shape bucket, the candidate that runs it, or plain MLX.

A key goes through the stages compile, verify, time and confirm; its decision is stored the moment it is made.
Keys share one budget: each takes its part of what is left, so what ends early leaves its time to the others.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import mlx.core as mx

from metile.dispatch import Decision
from metile.measure import Clock
from metile.ops.base import OpKey, buckets_apart, operation
from metile.store import DecisionStore
from metile.targets.base import EAGER_TARGETS, Kernel, KernelSource, Target
from metile.targets.compiler import CompileError
from metile.traffic import CountsTraffic, decide_by_traffic
from metile.trial import Contest, Tell, decide

Stage = Literal["compile", "verify", "time", "count", "confirm", "decided"]

MAX_CANDIDATES = 48
NEAR = 24  # candidates that are tried in any case; the rest is sampled
COMPILE_SHARE = 0.4  # of the budget; what is not compiled by then is not tried
COMPILED_AT_ONCE = 8
NEIGHBOUR_WEIGHT = 0.25  # a neighbour's part of the budget, beside a full search's
NEIGHBOUR_CANDIDATES = 3  # tried for each decision nearby
COMPILE_SECONDS = 0.08  # a kernel, as `estimate` reckons
TRIAL_SECONDS = 2.0  # the rest of a key


@dataclass(frozen=True)
class Progress:
    """What a search is doing.

    Attributes:
        subject: the key, as one line.
        stage: what is done with it, ``count`` in place of ``time`` where nothing can be timed; ``decided`` comes last,
            when the decision is stored.
        candidate: label of what is being tried; of a decision the winner, ``mlx`` for plain MLX.
        done: steps of this stage that are behind, kernels in ``compile``; in ``decided``, keys of the search.
        total: steps of this stage.
        seconds_left: what is left of the budget.
    """

    subject: str
    stage: Stage
    candidate: str
    done: int
    total: int
    seconds_left: float


class Estimate(NamedTuple):
    """What a search would do for a key: candidates, kernels no earlier key compiles, and seconds."""

    key: OpKey
    candidates: int
    kernels: int
    seconds: float


@runtime_checkable
class CompilesMany(Protocol):
    """A target that compiles kernels in parallel."""

    def compile_all(self, sources: Sequence[KernelSource]) -> Sequence[Kernel | CompileError]:
        """Compile kernels; a rejected one gives its error in place of the kernel."""


def search(
    keys: Sequence[OpKey],
    target: Target,
    *,
    budget_seconds: float,
    store: DecisionStore | None = None,
    neighbours: Sequence[OpKey] = (),
    seed: int = 0,
    fresh: bool = False,
    progress: Callable[[Progress], None] | None = None,
    max_candidates: int = MAX_CANDIDATES,
    clock: Clock = time.perf_counter,
) -> dict[OpKey, Decision]:
    """Decide every key, and its neighbours from what was decided for it.

    Args:
        keys: what the workload meets; each is searched in full, and decided even when the budget is spent.
        target: what the kernels run on.
        budget_seconds: time for everything, compiling included.
        store: where decisions are kept; None keeps them nowhere.
        neighbours: other buckets of the same operations, decided by `extend` as far as the budget reaches.
        seed: of the sample of candidates and of the inputs.
        fresh: decide anew what is stored already.
        progress: called before each step; what it raises, such as KeyboardInterrupt, ends the search.
        max_candidates: most candidates tried for a key.
        clock: returns seconds.

    Returns:
        The decisions of `keys` and of the neighbours that were reached.
    """
    run = _Search(target, budget_seconds, store, seed, progress, clock)
    if not fresh:
        run.recall([*keys, *neighbours])
    todo = [key for key in dict.fromkeys(keys) if key not in run.decided]
    near = [key for key in dict.fromkeys(neighbours) if key not in run.decided and key not in todo]
    run.fully({key: sampled(key, target, max_candidates, seed) for key in todo}, near)
    run.extend(near)
    return run.decided


def extend(
    decisions: Mapping[OpKey, Decision],
    keys: Sequence[OpKey],
    target: Target,
    *,
    budget_seconds: float,
    store: DecisionStore | None = None,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
    clock: Clock = time.perf_counter,
) -> dict[OpKey, Decision]:
    """Decide other buckets of operations in `decisions`, trying only what stands nearest to the winners.

    Returns:
        The decisions of those `keys` that the budget reached.
    """
    run = _Search(target, budget_seconds, store, seed, progress, clock)
    run.decided.update(decisions)
    new = [key for key in dict.fromkeys(keys) if key not in decisions]
    run.extend(new)
    return {key: run.decided[key] for key in new if key in run.decided}


def estimate(
    keys: Sequence[OpKey],
    target: Target,
    *,
    budget_seconds: float,
    neighbours: Sequence[OpKey] = (),
    seed: int = 0,
    max_candidates: int = MAX_CANDIDATES,
) -> list[Estimate]:
    """Return what `search` would do if nothing was stored, without compiling or running anything."""
    seen: set[KernelSource] = set()
    rows: list[Estimate] = []
    for key in dict.fromkeys([*keys, *neighbours]):
        if key in keys:
            candidates, trial = sampled(key, target, max_candidates, seed), TRIAL_SECONDS
        else:  # its winners are not known yet: their number is
            candidates = key.space(target.limits)[: 1 + 2 * NEIGHBOUR_CANDIDATES]
            trial = TRIAL_SECONDS * NEIGHBOUR_WEIGHT
        new = {key.source(candidate) for candidate in candidates} - seen
        seen |= new
        seconds = COMPILE_SECONDS * len(new) + (trial if candidates else 0.0)
        rows.append(Estimate(key, len(candidates), len(new), seconds))
    scale = min(1.0, budget_seconds / max(sum(row.seconds for row in rows), 1e-9))
    return [row._replace(seconds=row.seconds * scale) for row in rows]


def sampled(key: OpKey, target: Target, max_candidates: int, seed: int) -> list[Any]:
    """Return the candidates to try: the first of the key's space, and one out of each stretch of the rest."""
    space = key.space(target.limits)
    near, rest = space[: min(NEAR, max_candidates)], space[NEAR:]
    room = min(max_candidates - len(near), len(rest))
    draw = random.Random(f"{seed} {key.subject()}")
    ends = [len(rest) * place // max(room, 1) for place in range(room + 1)]
    return near + [rest[draw.randrange(start, end)] for start, end in itertools.pairwise(ends)]


def nearest(key: OpKey, target: Target, decisions: Mapping[OpKey, Decision]) -> list[Any]:
    """Return the few candidates nearest to what won in the closest buckets of the same operation.

    The untuned default is always among them; where plain MLX won nearby it stands alone.
    """
    space = key.space(target.limits)
    relatives = [decision for decision in decisions.values() if operation(decision.key) == operation(key)]
    relatives.sort(key=lambda decision: buckets_apart(decision.key, key))
    picks = space[:1] if relatives else space[:NEIGHBOUR_CANDIDATES]
    for decision in relatives[:2]:
        if decision.candidate is not None:
            winner, kernel = asdict(decision.candidate), decision.key.source(decision.candidate)
            order = sorted(space, key=lambda tile: (key.source(tile) != kernel, _apart(asdict(tile), winner)))
            picks += order[:NEIGHBOUR_CANDIDATES]
    return list(dict.fromkeys(picks))


def _apart(fields: Mapping[str, Any], others: Mapping[str, Any]) -> float:
    """Return how far two candidates stand apart: a doubling of a number counts 1, another word counts 1."""

    def distance(a: Any, b: Any) -> float:
        if isinstance(a, int) and isinstance(b, int):
            return abs(math.log2((1 + abs(a)) / (1 + abs(b))))
        return float(a != b)

    return sum(distance(value, others.get(name)) for name, value in fields.items())


def _compiled(target: Target, sources: Sequence[KernelSource]) -> Sequence[Kernel | CompileError]:
    """Return the kernel of each source, or the error with which it was rejected."""
    if isinstance(target, CompilesMany):
        return target.compile_all(sources)
    results: list[Kernel | CompileError] = []
    for source in sources:
        try:
            results.append(target.compile(source))
        except CompileError as error:
            results.append(error)
    return results


class _Search:
    """The state of a search: its clock, the kernels compiled so far, and the decisions."""

    def __init__(
        self,
        target: Target,
        budget_seconds: float,
        store: DecisionStore | None,
        seed: int,
        progress: Callable[[Progress], None] | None,
        clock: Clock,
    ) -> None:
        self.decided: dict[OpKey, Decision] = {}
        self._target, self._store, self._seed = target, store, seed
        self._progress, self._clock = progress, clock
        self._budget, self._end = budget_seconds, clock() + budget_seconds
        self._kernels: dict[KernelSource, Kernel | CompileError] = {}

    def recall(self, keys: Sequence[OpKey]) -> None:
        """Adopt what is stored, unless the candidate is none of the key's space any more."""
        for key in keys:
            stored = self._store.get(key) if self._store is not None else None
            if stored is None:
                continue
            if stored.candidate is None or stored.candidate in key.space(self._target.limits):
                self.decided[key] = stored

    def fully(self, chosen: Mapping[OpKey, Sequence[Any]], near: Sequence[OpKey]) -> None:
        """Decide keys among many candidates, leaving time for the neighbours."""
        self._compile(chosen, self._left() * COMPILE_SHARE)
        for number, (key, candidates) in enumerate(chosen.items()):
            parts = len(chosen) - number + NEIGHBOUR_WEIGHT * len(near)
            self._decide(key, candidates, self._left() / parts, (number + 1, len(chosen)))

    def extend(self, keys: Sequence[OpKey]) -> None:
        """Decide keys among few candidates, until the budget is spent."""
        for number, key in enumerate(keys):
            share = self._left() / (len(keys) - number)
            if share <= 0:
                return
            candidates = nearest(key, self._target, self.decided)
            self._compile({key: candidates}, share)
            self._decide(key, candidates, share, (number + 1, len(keys)))

    def _left(self) -> float:
        return max(self._end - self._clock(), 0.0)

    def _compile(self, chosen: Mapping[OpKey, Sequence[Any]], seconds: float) -> None:
        """Compile what is chosen, in turn among the keys; each key's first even when the time is up."""
        ranks = itertools.zip_longest(*([(key, tile) for tile in tiles] for key, tiles in chosen.items()))
        wanted = {key.source(tile): (key, tile) for rank in ranks for key, tile in (pair for pair in rank if pair)}
        sources = [source for source in wanted if source not in self._kernels]
        end = self._clock() + seconds
        for start in range(0, len(sources), COMPILED_AT_ONCE):
            if start >= len(chosen) and self._clock() >= end:
                return
            batch = sources[start : start + COMPILED_AT_ONCE]
            key, tile = wanted[batch[0]]
            self._teller(key)("compile", tile.label(), start, len(sources))
            self._kernels.update(zip(batch, _compiled(self._target, batch), strict=True))

    def _decide(self, key: OpKey, candidates: Sequence[Any], seconds: float, place: tuple[int, int]) -> None:
        pruned = key.pruned(self._target.limits)
        rejected = {f"pruned: {reason}": f"{count} candidates" for reason, count in pruned.items()}
        kernels: dict[Any, Kernel] = {}
        for candidate in candidates:
            found = self._kernels.get(key.source(candidate))
            if isinstance(found, CompileError):
                rejected[candidate.label()] = (str(found).splitlines() or ["rejected by the compiler"])[0]
            elif found is not None:
                kernels[candidate] = found
            else:
                rejected[candidate.label()] = "not tried: no time was left to compile it"
        tell = self._teller(key)
        contest = Contest(key, kernels, rejected, seconds, self._seed, self._target.name not in EAGER_TARGETS)
        if isinstance(self._target, CountsTraffic):
            decision = decide_by_traffic(contest, self._target, self._clock, tell)
        else:
            decision = decide(contest, self._clock, tell)
        mx.clear_cache()
        self.decided[key] = decision
        if self._store is not None:
            self._store.put(decision)
        tell("decided", decision.candidate.label() if decision.candidate else "mlx", *place)

    def _teller(self, key: OpKey) -> Tell:
        subject = key.subject()

        def tell(stage: Any, candidate: str, done: int, total: int) -> None:
            if self._progress is not None:
                self._progress(Progress(subject, stage, candidate, done, total, self._left()))

        return tell
