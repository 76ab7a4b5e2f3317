"""Verification that can fail: each way of being wrong is found, and named."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs

from metile.errors import MetileError
from metile.verify import (
    Limits,
    Verdict,
    compare,
    explain_difference,
    first_difference,
    float32_logits,
    judge,
    logits,
)

TOKENS = [5, 17, 3, 88, 41, 2, 60]
LOOSE = Limits(kl=math.inf, mean=math.inf, maximum=math.inf, float32_factor=math.inf)

vectors = st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=20)


def llama(dtype: mx.Dtype = mx.bfloat16, *, tied: bool = True, seed: int = 0) -> Model:
    mx.random.seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    model = Model(ModelArgs(model_type="llama", tie_word_embeddings=tied, **sizes, **heads))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def judged(
    reference: Sequence[float],
    actual: Sequence[float],
    float32: Sequence[float] | None = None,
    limits: Limits | None = None,
) -> Verdict:
    """Judge a plan at one position, with nothing to exercise."""
    return judge(
        reference=[mx.array(reference)],
        actual=[mx.array(actual)],
        float32=None if float32 is None else [mx.array(float32)],
        engaged={},
        features=[],
        limits=limits,
    )


def test_compare_against_figures_by_hand() -> None:
    reference, actual = mx.log(mx.array([0.5, 0.25, 0.25])), mx.log(mx.array([0.25, 0.5, 0.25]))
    result = compare(reference, actual)
    assert (result.next_token, result.actual_next_token) == (0, 1)
    assert result.kl_divergence == pytest.approx(0.25 * math.log(2), rel=1e-6)
    assert result.max_logit_error == pytest.approx(math.log(2), rel=1e-6)
    assert result.mean_logit_error == pytest.approx(2 / 3 * math.log(2), rel=1e-6)
    assert result.finite


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_compare_names_the_dtype_as_reports_do(dtype: mx.Dtype) -> None:
    result = compare(mx.zeros((1, 3, 8), dtype), mx.zeros((1, 3, 8)))
    assert result.reference_dtype == f"mlx.core.{str(dtype).rsplit('.', 1)[-1]}"


@given(vectors)
def test_logits_equal_themselves(values: list[float]) -> None:
    for dtype in (mx.float32, mx.bfloat16):
        row = mx.array(values).astype(dtype)
        result = compare(row, row)
        assert (result.kl_divergence, result.max_logit_error, result.mean_logit_error) == (0, 0, 0)
        assert result.next_token == result.actual_next_token == int(mx.argmax(row))


@given(vectors, st.integers(-64, 64))
def test_divergence_ignores_a_shift(values: list[float], shift: int) -> None:
    row = mx.array([round(value * 16) / 16 for value in values])  # so that adding the shift is exact
    base = compare(row, row[::-1]).kl_divergence
    assert base >= 0
    assert compare(row, row[::-1] + shift).kl_divergence == pytest.approx(base, abs=1e-9)


@given(vectors, vectors)
def test_errors_are_symmetric_and_the_mean_is_no_larger(left: list[float], right: list[float]) -> None:
    size = min(len(left), len(right))
    forth = compare(mx.array(left[:size]), mx.array(right[:size]))
    back = compare(mx.array(right[:size]), mx.array(left[:size]))
    assert forth.max_logit_error == back.max_logit_error
    assert forth.mean_logit_error == pytest.approx(back.mean_logit_error)
    assert forth.mean_logit_error <= forth.max_logit_error * (1 + 1e-12)


def test_several_positions_are_as_bad_as_the_worst() -> None:
    reference = mx.zeros((2, 4))
    actual = mx.array([[0.0, 0, 0, 1], [0, 2e-3, 0, 0]])
    result = compare(reference, actual)
    assert result.max_logit_error == 1
    assert result.mean_logit_error == 0.25, "a good position doesn't dilute a bad one"
    assert result.kl_divergence == compare(reference[0], actual[0]).kl_divergence
    assert result.actual_next_token == 1, "the token is that of the last"


@pytest.mark.parametrize(("left", "right"), [((3,), (4,)), ((1, 3), (3,)), ((), ()), ((0,), (0,))])
def test_shapes_that_cannot_be_compared(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    with pytest.raises(MetileError, match=r"\[verify\] expected logits of shape"):
        compare(mx.zeros(left), mx.zeros(right))


# --- judge: case 10 -------------------------------------------------------------------------------------


def test_equal_logits_pass() -> None:
    verdict = judged([0, 3, 1], [0, 3, 1], [0, 3, 1])
    assert verdict.ok
    assert verdict.reasons == ()
    assert not verdict.near_tie


@pytest.mark.parametrize(
    ("actual", "count"),
    [
        ([math.nan] * 4, "4 NaN, 0 infinite"),
        ([5.0, math.nan, 1, 0], "1 NaN, 0 infinite"),
        ([5.0, 4, 1, math.inf], "0 NaN, 1 infinite"),
        ([5.0, 4, 1, -math.inf], "0 NaN, 1 infinite"),
    ],
    ids=["all NaN", "one NaN", "infinite", "minus infinite"],
)
def test_what_is_not_finite_fails_by_name(actual: list[float], count: str) -> None:
    verdict = judged([5, 4, 1, 0], actual, [5, 4, 1, 0], LOOSE)
    assert not verdict.ok
    assert verdict.reasons == (f"logits of the plan are not finite: {count}",)
    assert not verdict.fidelity.finite
    assert verdict.fidelity.max_logit_error == math.inf


def test_an_earlier_position_that_is_not_finite_fails_too() -> None:
    good, bad = mx.array([5.0, 4]), mx.array([math.nan, 4])
    assert not judge(reference=[good, good], actual=[bad, good], engaged={}, features=[], limits=LOOSE).ok


def test_a_broken_baseline_is_named_and_fails() -> None:
    verdict = judged([math.nan, 1], [2, 1], [2, math.inf], LOOSE)
    assert [reason.split(" are ")[0] for reason in verdict.reasons] == [
        "logits of the plain MLX",
        "logits of the float32 run",
    ]


def test_zeros_fail() -> None:
    model = llama()
    reference, exact = logits(model, TOKENS), float32_logits(model, TOKENS)
    zeros = [mx.zeros_like(row) for row in reference]
    verdict = judge(reference=reference, actual=zeros, float32=exact, engaged={}, features=[])
    assert not verdict.ok
    assert any("KL divergence" in reason for reason in verdict.reasons)
    assert any("against float32" in reason for reason in verdict.reasons)


NEAR = Limits(kl=0.05, mean=0.2)  # few logits: one error weighs more than in a whole vocabulary


def test_a_near_tie_that_flips_is_decided_by_float32() -> None:
    """A top-2 gap of 0.05, an error of 0.125 (one step of bfloat16 at 16 to 32)."""
    flip = {"reference": [20.05, 20.0, 3.0], "actual": [19.925, 20.0, 3.0], "limits": NEAR}
    undecided = judged(**flip)  # type: ignore[arg-type]
    assert not undecided.ok
    assert "no float32 run to decide" in undecided.reasons[0]

    plan_is_right = judged(**flip, float32=[19.95, 20.0, 3.0])  # type: ignore[arg-type]
    assert plan_is_right.ok, plan_is_right.reasons
    assert plan_is_right.near_tie
    assert (plan_is_right.fidelity.next_token, plan_is_right.fidelity.actual_next_token) == (0, 1)

    within_rounding = judged(**flip, float32=[20.03, 20.0, 3.1])  # type: ignore[arg-type]
    assert within_rounding.ok, within_rounding.reasons
    assert within_rounding.near_tie


def test_a_flip_that_float32_rejects_fails() -> None:
    flip = judged([20.05, 20.0, 3.0], [19.925, 20.0, 3.0], [20.06, 20.0, 3.0], NEAR)
    assert not flip.ok
    assert not flip.near_tie
    assert "next token at check 0 is 1, plain MLX's 0, by 0.06 in float32 (error 0.01)" in flip.reasons


def test_a_near_tie_forgives_the_token_and_nothing_else() -> None:
    verdict = judged([20.05, 20.0, 3.0], [19.925, 20.0, 9.0], [19.95, 20.0, 3.0])
    assert not verdict.ok
    assert any("max logit error" in reason for reason in verdict.reasons)


def test_a_plan_cannot_excuse_its_flip_by_its_own_error() -> None:
    verdict = judged([10.0, 8.0, 0.0], [8.0, 10.0, 0.0], [10.0, 8.0, 0.0], LOOSE)
    assert not verdict.ok


def test_a_flip_at_an_earlier_position_counts() -> None:
    high, low = mx.array([2.0, 0]), mx.array([0, 2.0])
    verdict = judge(
        reference=[high, high],
        actual=[low, high],
        float32=[high, high],
        engaged={},
        features=[],
        limits=LOOSE,
    )
    assert not verdict.ok
    assert verdict.fidelity.next_token == verdict.fidelity.actual_next_token


class CountedMLP(nn.Module):
    """Stands for a patched MLP whose kernel is gated to one row."""

    def __init__(self, inner: nn.Module, counts: Counter[str]) -> None:
        super().__init__()
        self._inner, self._counts = inner, counts

    def __call__(self, x: mx.array) -> mx.array:
        if x.shape[-2] == 1:
            self._counts["dense_mlp"] += 1
        result: mx.array = self._inner(x)
        return result


@pytest.mark.parametrize(("steps", "ok"), [(0, False), (1, True)])
def test_a_gated_feature_that_only_saw_five_tokens_is_not_exercised(steps: int, ok: bool) -> None:
    model, counts = llama(), Counter[str]()
    reference = logits(model, TOKENS[:5], steps=steps)
    for layer in model.layers:
        layer.mlp = CountedMLP(layer.mlp, counts)
    actual = logits(model, TOKENS[:5], steps=steps)
    verdict = judge(reference=reference, actual=actual, engaged=counts, features=["dense_mlp"])
    assert verdict.fidelity.max_logit_error == 0
    assert verdict.ok is ok
    assert verdict.unverified == (() if ok else ("dense_mlp",))
    assert verdict.reasons == (() if ok else ("not exercised: dense_mlp",))


@pytest.mark.parametrize(
    ("actual", "named"),
    [
        ([10.0, 0.6, 0.0, 0.0], "max logit error 0.6 is above 0.5"),
        ([10.07, 0.07, 0.07, 0.07], "mean logit error 0.07 is above 0.05"),
        ([1.0, 0.45, 0.0, 0.0], "KL divergence"),
    ],
)
def test_each_limit_fails_by_name(actual: list[float], named: str) -> None:
    reference = [1.0 if actual[0] < 2 else 10.0, 0, 0, 0]
    assert any(named in reason for reason in judged(reference, actual).reasons)


def test_float32_catches_what_stays_within_the_other_limits() -> None:
    """The plan is 0.04 from plain MLX, which is 0.01 from float32: four times its error."""
    exact, plain = np.zeros(100), np.full(100, 0.01)
    exact[0] = plain[0] = 10.0
    coarse = plain + np.where(np.arange(100) == 0, 0, 0.03)
    assert judged(plain.tolist(), coarse.tolist()).ok
    verdict = judged(plain.tolist(), coarse.tolist(), exact.tolist())
    assert not verdict.ok
    assert "max error against float32 is 0.04, plain MLX's own 0.01" in verdict.reasons
    assert judged(plain.tolist(), exact.tolist(), exact.tolist()).ok, "a plan may be nearer to float32"


def test_a_float32_model_may_be_summed_in_another_order() -> None:
    assert judged([5.0, 1.0], [5.0 + 1e-5, 1.0], [5.0, 1.0]).ok


def test_runs_of_different_length_are_refused() -> None:
    row = mx.zeros(3)
    for reference, actual, exact in (([row], [], None), ([], [], None), ([row], [row], [row, row])):
        with pytest.raises(MetileError, match="same positions"):
            judge(reference=reference, actual=actual, float32=exact, engaged={}, features=[])


# --- running a model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 3, 7])
def test_logits_are_those_of_the_whole_prompt(steps: int) -> None:
    model = llama(mx.float32)
    whole = model(mx.array([TOKENS]))[0]
    positions = [index for index in range(len(TOKENS)) if index >= len(TOKENS) - steps - 1]
    rows = logits(model, TOKENS, steps=steps)
    assert len(rows) == len(positions) == min(steps + 1, len(TOKENS))
    for row, position in zip(rows, positions, strict=True):
        assert row.shape == (97,)
        assert mx.allclose(row, whole[position], atol=1e-4)


@pytest.mark.parametrize(("tokens", "steps"), [([], 0), ([1], 2), ([1, 2], -1)])
def test_steps_beyond_the_prompt_are_refused(tokens: list[int], steps: int) -> None:
    with pytest.raises(MetileError, match=r"\[verify\] expected a prompt"):
        logits(llama(), tokens, steps=steps)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_float32_runs_the_same_weights_and_puts_the_same_arrays_back(quantized: bool, tied: bool) -> None:
    model = llama(tied=tied)
    if quantized:
        nn.quantize(model, group_size=32, bits=4)
        mx.eval(model.parameters())
    before = tree_flatten(model.parameters())
    plain, exact = logits(model, TOKENS), float32_logits(model, TOKENS)
    after = tree_flatten(model.parameters())
    assert [name for name, _ in before] == [name for name, _ in after]
    assert all(old is new for (_, old), (_, new) in zip(before, after, strict=True))
    assert {row.dtype for row in plain} == {mx.bfloat16}
    assert {row.dtype for row in exact} == {mx.float32}
    result = compare(mx.stack(exact), mx.stack(plain))
    assert 0 < result.max_logit_error < 0.1, "near, but not the same"


def test_a_float32_run_that_fails_puts_the_arrays_back() -> None:
    model = llama()
    before = [array for _, array in tree_flatten(model.parameters())]
    with pytest.raises(MetileError):
        float32_logits(model, [])
    after = [array for _, array in tree_flatten(model.parameters())]
    assert all(old is new for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_plain_mlx_passes_its_own_check(dtype: mx.Dtype) -> None:
    model = llama(dtype)
    reference, exact = logits(model, TOKENS), float32_logits(model, TOKENS)
    verdict = judge(reference=reference, actual=logits(model, TOKENS), float32=exact, engaged={}, features=[])
    assert verdict.ok, verdict.reasons
    assert verdict.plan_error == verdict.plain_error
    assert verdict.fidelity.reference_dtype == str(dtype)


tokens = st.lists(st.integers(0, 3), max_size=8)


@given(tokens, tokens)
def test_first_difference(left: list[int], right: list[int]) -> None:
    index = first_difference(left, right)
    assert index == first_difference(right, left)
    if index is None:
        assert left == right
    else:
        assert left[:index] == right[:index]
        assert left[index : index + 1] != right[index : index + 1]


def greedy(model: Model, prompt: Sequence[int], count: int) -> list[int]:
    generated: list[int] = []
    for _ in range(count):
        generated.append(int(mx.argmax(logits(model, [*prompt, *generated], steps=len(generated) + 1)[-1])))
    return generated


def test_a_first_difference_is_explained() -> None:
    model = llama()
    plain = greedy(model, TOKENS, 4)
    assert explain_difference(model, TOKENS, plain, list(plain)) is None

    row = np.array(float32_logits(model, [*TOKENS, *plain[:2]], steps=3)[-1])
    worst = int(row.argmin())
    wrong = explain_difference(model, TOKENS, plain, [*plain[:2], worst, 0])
    assert wrong is not None
    assert (wrong.index, wrong.token, wrong.other) == (2, plain[2], worst)
    assert wrong.tie is not None
    assert wrong.tie.float32_gap == pytest.approx(row[plain[2]] - row[worst])
    assert not wrong.near_tie


def test_two_tokens_of_equal_weights_are_a_near_tie() -> None:
    model = llama(tied=False)
    plain = greedy(model, TOKENS, 2)
    twin = 96 if plain[1] != 96 else 95
    model.lm_head.weight[twin] = model.lm_head.weight[plain[1]]
    found = explain_difference(model, TOKENS, plain, [plain[0], twin])
    assert found is not None
    assert found.tie is not None
    assert found.tie.reference_gap == found.tie.float32_gap == 0
    assert found.near_tie


def test_a_generation_that_ends_early_is_no_near_tie() -> None:
    found = explain_difference(llama(), TOKENS, [1, 2], [1])
    assert found is not None
    assert (found.index, found.token, found.other, found.near_tie) == (1, 2, None, False)
