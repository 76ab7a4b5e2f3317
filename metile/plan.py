"""From features to a plan: measured alone and together on the model, then confirmed on the whole workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import mlx.core as mx
import mlx.nn as nn

from metile import verify
from metile.dispatch import FEATURES, Plan
from metile.patch import apply
from metile.report_rules import Sample
from metile.suites import Workload
from metile.targets.base import Target
from metile.workload import Generation, Probe, generate, probe

Note = Callable[[str, int, int], None]

_WARM_TOKENS = 4  # of the untimed run before a timed one
_WARM_STEPS = 3  # of decoding in it: the first two are what a repeated step is made of
_NOISE = 0.02  # two sets of features closer than this are equally fast
_VERIFIED_STEPS = 8  # decode steps of a verification, after the prefix
_HARMLESS = 0.995  # a feature that costs less than this on its own is left to the joint measurement


@dataclass(frozen=True)
class Trial:
    """A set of features measured on the model.

    Attributes:
        features: what was on.
        speedup: median over rounds of plain MLX's time for the workload to this set's, in the same round.
        rounds: how many rounds that is the median of.
    """

    features: frozenset[str]
    speedup: float
    rounds: int

    def label(self) -> str:
        """Return the features in one line."""
        return " + ".join(name for name in FEATURES if name in self.features) or "plain MLX"


def useful_features(plan: Plan, features_of: Iterable[tuple[str, object]]) -> list[str]:
    """Return the features for which some key has a kernel decided.

    Args:
        plan: the decisions.
        features_of: pairs of a feature and a key that it meets.
    """
    with_kernel = {feature for feature, key in features_of if plan.choices.get(key) is not None}  # type: ignore[call-overload]
    return [name for name in FEATURES if name in with_kernel]


class PlanSearch:
    """Measures sets of features against plain MLX in shared rounds and keeps the best set."""

    def __init__(
        self, model: nn.Module, base: Plan, target: Target, prompt: mx.array, workload: Workload, note: Note
    ) -> None:
        self.model, self.base, self.target = model, base, target
        self.prompt, self.workload, self.note = prompt, workload, note
        self._is_warm = False

    def _warm(self) -> None:
        """Run a few steps. What is done once, such as loading kernels, is no part of the pace."""
        probe(self.model, self.prompt[:_WARM_TOKENS], self.workload.replace(plan_decode_steps=_WARM_STEPS))

    def _time(self, features: frozenset[str]) -> Probe:
        if not features:
            if not self._is_warm:  # plain MLX compiles kernels of its own on some machines
                self._warm()
                self._is_warm = True
            return probe(self.model, self.prompt, self.workload)
        with apply(self.model, self.base.only(features), self.target):
            self._warm()
            return probe(self.model, self.prompt, self.workload)

    def measure(self, sets: Sequence[frozenset[str]], rounds: int, stage: str) -> list[Trial]:
        """Measure `sets` in `rounds` rounds, each with its own plain run; the order turns from round to round."""
        ratios: dict[frozenset[str], list[float]] = {chosen: [] for chosen in sets}
        for index in range(rounds):
            order = [frozenset[str](), *sets]
            order = order[index % len(order) :] + order[: index % len(order)]
            seconds: dict[frozenset[str], float] = {}
            for step, chosen in enumerate(order):
                self.note(f"{stage}: {Trial(chosen, 1, 0).label()}", index * len(order) + step, rounds * len(order))
                seconds[chosen] = self._time(chosen).total(self.workload)
            for chosen in sets:
                ratios[chosen].append(seconds[frozenset()] / seconds[chosen])
        return [Trial(chosen, median(values), rounds) for chosen, values in ratios.items()]

    def run(self, features: Sequence[str]) -> tuple[Trial | None, list[Trial]]:
        """Return the best set of `features` and everything measured; None where plain MLX is the best.

        Every feature is measured alone, in a third of the rounds. All of them together, and all but each one, are
        measured in every round: what a feature is worth beside the others decides whether it stays. A feature alone is
        the plan only where no other set beats plain MLX: it was measured in fewer rounds.
        """
        if not features:
            return None, []
        everything = frozenset(features)
        alone = [frozenset({name}) for name in features]
        trials = self.measure(alone, max(1, self.workload.plan_trials // 3), "alone")
        if len(features) == 1:
            joint = self.measure([everything], self.workload.plan_trials, "together")
            return best_of(joint), trials + joint
        without = [everything - {name} for name in features]
        joint = self.measure([everything, *without], self.workload.plan_trials, "together")
        whole = joint[0].speedup
        kept = frozenset(
            name for name, trial in zip(features, joint[1:], strict=True) if trial.speedup * _HARMLESS <= whole
        )
        if kept and kept != everything and kept not in without:
            joint += self.measure([kept], self.workload.plan_trials, "together")
        return best_of(joint) or best_of(trials), trials + joint


def best_of(trials: Iterable[Trial]) -> Trial | None:
    """Return the fastest trial, of those within the noise the one with most features, or None where none beats MLX."""
    tried = list(trials)
    fastest = max((trial.speedup for trial in tried), default=0.0)
    equals = [trial for trial in tried if trial.speedup * (1 + _NOISE) >= fastest > 1]
    return max(equals, key=lambda trial: (len(trial.features), trial.speedup), default=None)


def paired_generations(
    model: nn.Module,
    plan: Plan,
    target: Target,
    prompt: mx.array,
    workload: Workload,
    *,
    trials: int,
    note: Callable[[int, int], None],
) -> list[tuple[Generation, Generation]]:
    """Run the workload in pairs, plain MLX and the plan, which of them first alternating from pair to pair."""
    pairs = []
    with apply(model, plan, target) as handle:

        def plain() -> Generation:
            with handle.suspended():
                return generate(model, prompt, workload)

        generate(model, prompt, workload.replace(generation_tokens=_WARM_TOKENS, delay_seconds=0.0))
        for index in range(trials):
            note(index, trials)
            if index % 2:
                ours = generate(model, prompt, workload)
                pairs.append((plain(), ours))
            else:
                native = plain()
                pairs.append((native, generate(model, prompt, workload)))
    return pairs


def samples_of(pairs: Sequence[tuple[Generation, Generation]]) -> tuple[list[Sample], list[Sample]]:
    """Return the figures of both sides of `pairs`."""
    return [plain.sample for plain, _ in pairs], [ours.sample for _, ours in pairs]


def judge_plan(model: nn.Module, plan: Plan, target: Target, tokens: Sequence[int]) -> verify.Verdict:
    """Judge a plan by the logits of a prompt's prefix and of its last tokens, one by one, over the cache.

    A float32 run of the same weights stands beside them. Several positions tell MLX's own noise better than one.

    Args:
        model: the unpatched model.
        plan: what to judge.
        target: what runs the kernels.
        tokens: at least two token ids.
    """
    steps = min(_VERIFIED_STEPS, len(tokens) - 1)
    reference = verify.logits(model, tokens, steps=steps)
    exact = verify.float32_logits(model, tokens, steps=steps)
    with apply(model, plan, target) as handle:
        handle.reset_engaged()
        actual = verify.logits(model, tokens, steps=steps)
        engaged = handle.engaged()
    return verify.judge(
        reference=reference, actual=actual, float32=exact, engaged=engaged, features=sorted(plan.features)
    )
