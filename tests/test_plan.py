"""Sets of features are compared in shared rounds; a plan that computes something else is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from tiny_models import TARGET, plan_for, tiny, tokens

from metile import plan as module
from metile.dispatch import FEATURES, Plan
from metile.handle import Handle
from metile.ops.linear import LinearKey
from metile.ops.linear_tile import LinearTile
from metile.ops.norm import NormKey, NormTile
from metile.plan import (
    PlanSearch,
    Trial,
    best_of,
    judge_plan,
    paired_generations,
    samples_of,
    useful_features,
)
from metile.report import Sample
from metile.suites import Workload
from metile.workload import Generation, Probe

WORK = Workload(9, 4, 1, 3, 2, 1, 0.0, 2048, 0)
PROMPT = mx.arange(9)
PLAIN = frozenset[str]()


class Measured(PlanSearch):
    """A plan search whose times come from a function of the features, in place of a model's."""

    def __init__(self, seconds: Callable[[frozenset[str], int], float], work: Workload = WORK) -> None:
        base = Plan("cpu", frozenset(), {})
        self.order: list[frozenset[str]] = []
        self.notes: list[tuple[str, int, int]] = []
        self.seconds = seconds
        super().__init__(None, base, TARGET, PROMPT, work, lambda *note: self.notes.append(note))  # type: ignore[arg-type]

    def _time(self, features: frozenset[str]) -> Probe:
        turn = self.order.count(features)
        self.order.append(features)
        return Probe(self.seconds(features, turn), 0.0)


def worth(**factors: float) -> Callable[[frozenset[str], int], float]:
    """Return seconds of a model on which each feature divides the time by its factor."""
    return lambda features, _: 10.0 / math.prod(factors[name] for name in features)


def sets(*names: str) -> list[frozenset[str]]:
    return [frozenset(name.split()) for name in names]


# ---- rounds ----


def test_the_order_turns_from_round_to_round() -> None:
    search = Measured(lambda *_: 1.0)
    a, b = sets("attention", "rms_norm")
    search.measure([a, b], 4, "alone")
    rounds = [search.order[i : i + 3] for i in range(0, 12, 3)]
    assert rounds == [[PLAIN, a, b], [a, b, PLAIN], [b, PLAIN, a], [PLAIN, a, b]]
    assert search.notes[0] == ("alone: plain MLX", 0, 12)
    assert search.notes[5] == ("alone: plain MLX", 5, 12)
    assert search.notes[-1] == ("alone: rms_norm", 11, 12)


def test_a_speedup_is_the_median_of_ratios_within_rounds() -> None:
    # The machine is ten times slower in the second round; the set gains 2, 4 and 3 times.
    plain, ours = [6.0, 80.0, 6.0], [3.0, 20.0, 2.0]
    search = Measured(lambda features, turn: ours[turn] if features else plain[turn])
    (chosen,) = sets("attention")
    assert search.measure([chosen], 3, "alone") == [Trial(chosen, 3.0, 3)]


def test_the_time_is_that_of_the_whole_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    # plain and the set, each after warming up
    probes = iter([Probe(9.0, 9.0), Probe(1.0, 0.25), Probe(9.0, 9.0), Probe(1.0, 0.0)])
    monkeypatch.setattr(module, "probe", lambda *_: next(probes))
    search = PlanSearch(model, plan_for(model), TARGET, PROMPT, WORK, lambda *_: None)
    (trial,) = search.measure([frozenset({"dense_mlp"})], 1, "alone")
    assert trial.speedup == 2.0  # 1 s and 4 tokens of 0.25 s, to 1 s


def test_each_set_runs_its_own_features_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    before = [type(part) for _, part in model.named_modules()]
    seen: list[frozenset[str]] = []

    def watched(model: Any, plan: Plan, target: Any) -> Handle:
        seen.append(plan.features)
        return apply(model, plan, target)

    apply = module.apply
    monkeypatch.setattr(module, "apply", watched)
    search = PlanSearch(model, plan_for(model), TARGET, PROMPT, WORK, lambda *_: None)
    chosen = sets("dense_mlp", "rms_norm attention")
    search.measure(chosen, 2, "alone")
    assert seen == [*chosen, *chosen]
    assert [type(part) for _, part in model.named_modules()] == before


# ---- which set ----


def test_useful_features_are_those_with_a_kernel() -> None:
    norm, other = NormKey(False, 1, 64, 1e-5, "float32"), NormKey(True, 1, 64, 1e-5, "float32")
    plan = Plan("cpu", frozenset(), {norm: NormTile(1), other: None})
    met = [("rms_norm", norm), ("graph_fusion", other), ("attention", "a key that nothing was decided for")]
    assert useful_features(plan, met) == ["rms_norm"]
    assert useful_features(plan, [("graph_fusion", norm), ("attention", norm)]) == ["attention", "graph_fusion"]
    assert useful_features(plan, []) == []


def test_a_harmful_feature_is_dropped() -> None:
    search = Measured(worth(attention=2.0, dense_mlp=3.0, rms_norm=0.5))
    best, trials = search.run(["attention", "dense_mlp", "rms_norm"])
    assert best is not None
    assert best.features == {"attention", "dense_mlp"}
    assert best.speedup == pytest.approx(6.0)
    assert [trial.rounds for trial in trials] == [1, 1, 1, 3, 3, 3, 3]


def test_two_harmful_features_are_dropped_together() -> None:
    search = Measured(worth(attention=2.0, dense_mlp=3.0, rms_norm=0.5, graph_fusion=0.8))
    best, trials = search.run(["attention", "dense_mlp", "graph_fusion", "rms_norm"])
    assert best is not None
    assert best.features == {"attention", "dense_mlp"}
    assert trials[-1].features == best.features  # no round of all but one had left out both


def test_features_that_only_help_together_stay() -> None:
    def seconds(features: frozenset[str], _: int) -> float:
        return {0: 10.0, 1: 12.0, 2: 5.0}[len(features)]

    best, _ = Measured(seconds).run(["attention", "graph_fusion"])
    assert best is not None
    assert best.features == {"attention", "graph_fusion"}


def test_plain_mlx_stays_where_nothing_helps() -> None:
    best, trials = Measured(worth(attention=0.9, dense_mlp=0.7)).run(["attention", "dense_mlp"])
    assert best is None
    assert len(trials) == 5
    best, trials = Measured(worth(attention=0.9)).run(["attention"])
    assert best is None
    assert [trial.rounds for trial in trials] == [1, 3]
    assert Measured(worth()).run([]) == (None, [])


@pytest.mark.parametrize("plan_trials", [1, 2, 7])
def test_rounds_follow_the_workload(plan_trials: int) -> None:
    search = Measured(worth(attention=2.0, dense_mlp=3.0), WORK.replace(plan_trials=plan_trials))
    best, trials = search.run(["attention", "dense_mlp"])
    assert best is not None
    assert [trial.rounds for trial in trials] == [max(1, plan_trials // 3)] * 2 + [plan_trials] * 3


def test_the_best_of_trials() -> None:
    one, two, both = sets("attention", "dense_mlp", "attention dense_mlp")
    slow, fast = Trial(one, 1.2, 3), Trial(two, 2.0, 3)
    assert best_of([slow, fast]) is fast
    wide = Trial(both, 2.0001, 3)
    assert best_of([wide, fast]) is best_of([fast, wide]) is wide  # as fast as makes no difference, and more of it
    assert best_of([Trial(both, 1.9999, 3), fast]).features == both  # type: ignore[union-attr]
    assert best_of([Trial(one, 1.0, 3), Trial(two, 0.9, 3)]) is None
    assert best_of([]) is None


def test_labels() -> None:
    assert Trial(PLAIN, 1.0, 1).label() == "plain MLX"
    assert Trial(frozenset({"rms_norm", "attention"}), 1.0, 1).label() == "attention + rms_norm"
    assert Trial(frozenset(FEATURES), 1.0, 1).label().count("+") == len(FEATURES) - 1


# ---- pairs ----


def test_pairs_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ran, notes = tiny(), [], list[tuple[int, int]]()
    plain_types = [type(part) for _, part in model.named_modules()]

    def run(model: Any, prompt: mx.array, work: Workload) -> Generation:
        ours = [type(part) for _, part in model.named_modules()] != plain_types
        ran.append("plan" if ours else "plain")
        speed = 2.0 if ours else 1.0
        return Generation(
            Sample(
                decode_tokens_per_second=speed,
                elapsed_seconds=1,
                prefill_tokens_per_second=1,
                time_to_first_token_seconds=1,
            ),
            (len(ran),),
        )

    monkeypatch.setattr(module, "generate", run)
    pairs = paired_generations(
        model, plan_for(model), TARGET, PROMPT, WORK, trials=3, note=lambda *note: notes.append(note)
    )
    assert ran == ["plan", "plain", "plan", "plan", "plain", "plain", "plan"]  # the first to warm up
    plain, ours = samples_of(pairs)
    assert [sample.decode_tokens_per_second for sample in plain] == [1.0] * 3
    assert [sample.decode_tokens_per_second for sample in ours] == [2.0] * 3
    assert [pair[0].tokens[0] for pair in pairs] == [2, 5, 6]
    assert notes == [(0, 3), (1, 3), (2, 3)]
    assert [type(part) for _, part in model.named_modules()] == plain_types


# ---- verification on the model ----


def prompt_tokens(length: int = 17) -> list[int]:
    return [int(token) for token in tokens(1, length)[0].tolist()]  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
def test_a_true_plan_passes(dtype: mx.Dtype) -> None:
    model = tiny(dtype=dtype)
    verdict = judge_plan(model, plan_for(model, ["dense_mlp", "rms_norm", "attention"]), TARGET, prompt_tokens())
    assert verdict.ok, verdict.reasons
    assert verdict.unverified == ()
    assert verdict.fidelity.finite
    assert verdict.plan_error is not None


@pytest.mark.parametrize("length", [2, 3, 9])
def test_short_prompts_are_judged(length: int) -> None:
    model = tiny()
    assert judge_plan(model, plan_for(model, ["dense_mlp"]), TARGET, prompt_tokens(length)).ok


def wrong(change: Callable[[mx.array], mx.array], rows: Iterable[int]) -> Callable[..., list[mx.array]]:
    launch, hit = LinearKey.launch, set(rows)

    def launched(
        self: LinearKey, kernel: Any, candidate: LinearTile, inputs: Sequence[mx.array], *, poison: bool = False
    ) -> list[mx.array]:
        found = launch(self, kernel, candidate, inputs, poison=poison)
        return [change(y) for y in found] if self.rows in hit else found

    return launched


FAULTS: dict[str, tuple[Callable[[mx.array], mx.array], str]] = {
    "noise": (lambda y: y + 0.5 * mx.random.normal(y.shape, key=mx.random.key(0)).astype(y.dtype), ""),
    "zeros": (mx.zeros_like, ""),
    "NaN": (lambda y: y * mx.array(float("nan"), y.dtype), "logits of the plan are not finite"),
    "one NaN": (lambda y: mx.where(mx.arange(y.size).reshape(y.shape) == 5, mx.array(float("nan"), y.dtype), y), "NaN"),
    "infinite": (lambda y: y / mx.zeros_like(y), "not finite"),
}


@pytest.mark.parametrize("regime", ["prefill", "decode"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_fails(fault: str, regime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, said = FAULTS[fault]
    model = tiny(dtype=mx.bfloat16)
    monkeypatch.setattr(LinearKey, "launch", wrong(change, [1] if regime == "decode" else [8, 16]))
    before = [type(part) for _, part in model.named_modules()]
    verdict = judge_plan(model, plan_for(model, ["dense_mlp"]), TARGET, prompt_tokens())
    assert not verdict.ok
    assert verdict.reasons
    assert said in "; ".join(verdict.reasons)
    assert [type(part) for _, part in model.named_modules()] == before


def test_a_kernel_that_raises_is_not_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> list[mx.array]:
        raise RuntimeError("no")

    model = tiny()
    monkeypatch.setattr(LinearKey, "launch", broken)
    verdict = judge_plan(model, plan_for(model, ["dense_mlp", "rms_norm"]), TARGET, prompt_tokens())
    assert not verdict.ok
    assert verdict.unverified == ("dense_mlp",)
    assert verdict.reasons == ("not exercised: dense_mlp",)
