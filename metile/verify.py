"""Does a plan still compute the model? Logits are compared with plain MLX and with a float32 run.

A check passes only on evidence: what is not finite fails, and a feature that did not run while checking
counts as unverified.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from metile.errors import mismatch

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Limits:
    """How far a plan's logits may be from plain MLX's.

    Attributes:
        kl: Kullback-Leibler divergence of the next-token distributions, in nats.
        mean: Mean absolute logit error.
        maximum: Largest absolute logit error.
        float32_factor: The plan's own error, against a float32 run of the same weights, may be this many
            times plain MLX's error, for the mean and for the maximum. Two ways of rounding at one precision
            differ by well under 2; a kernel that accumulates in too few bits differs by more.
        float32_floor: An absolute error that is always allowed: plain MLX in float32 has an error of zero
            against itself, and summing in another order is no fault.
    """

    kl: float = 1e-3
    mean: float = 0.05
    maximum: float = 0.5
    float32_factor: float = 2.0
    float32_floor: float = 1e-3


@dataclass(frozen=True)
class Fidelity:
    """How two sets of logits differ; the fields of a report's ``verification``, and `finite`.

    Where either side is not finite, the errors are infinite.
    """

    next_token: int
    actual_next_token: int
    kl_divergence: float
    max_logit_error: float
    mean_logit_error: float
    reference_dtype: str
    finite: bool


def _rows(logits: mx.array) -> Floats:
    """Return logits of any float dtype and shape [..., vocabulary] as float64 [positions, vocabulary]."""
    wide: Floats = np.array(logits.astype(mx.float32)).astype(np.float64)
    return wide.reshape(-1, wide.shape[-1])


def _log_softmax(rows: Floats) -> Floats:
    shifted = rows - rows.max(axis=-1, keepdims=True)
    normalised: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalised


def _top(row: Floats) -> int:
    """Return the index of the largest logit, NaN being the smallest."""
    return int(np.argmax(np.where(np.isnan(row), -np.inf, row)))


def compare(reference: mx.array, actual: mx.array) -> Fidelity:
    """Compare logits of shape [..., vocabulary] with those they should equal.

    The divergence is KL(reference || actual) of their softmax. It and both errors are those of the position
    where each is largest; the tokens are those of the last position.

    Raises:
        MetileError: the shapes differ, or there are no logits.
    """
    if reference.shape != actual.shape or reference.ndim == 0 or reference.size == 0:
        raise mismatch("verify", f"logits of shape {tuple(reference.shape)}", tuple(actual.shape))
    wanted, got = _rows(reference), _rows(actual)
    finite = bool(np.isfinite(wanted).all() and np.isfinite(got).all())
    divergence = worst = mean = math.inf
    if finite:
        ours, theirs = _log_softmax(wanted), _log_softmax(got)
        divergence = max(0.0, float((np.exp(ours) * (ours - theirs)).sum(axis=-1).max()))
        error = np.abs(wanted - got)
        worst, mean = float(error.max()), float(error.mean(axis=-1).max())
    return Fidelity(
        next_token=_top(wanted[-1]),
        actual_next_token=_top(got[-1]),
        kl_divergence=divergence,
        max_logit_error=worst,
        mean_logit_error=mean,
        reference_dtype=str(reference.dtype),
        finite=finite,
    )


def logits(model: Any, tokens: Sequence[int], *, steps: int = 1) -> list[mx.array]:
    """Run `model` as generation does: a prefix at once, then single tokens, with a cache.

    So both regimes of a plan are exercised, many rows and one row.

    Args:
        model: An mlx-lm model.
        tokens: The prompt.
        steps: How many tokens at the end are fed one at a time.

    Returns:
        Evaluated logits [vocabulary] at the prefix's last position (left out where the steps are all tokens)
        and at each single token.
    """
    if not tokens or not 0 <= steps <= len(tokens):
        raise mismatch("verify", "a prompt with at least as many tokens as steps", f"{len(tokens)} and {steps}")
    cache = make_prompt_cache(model)
    split = len(tokens) - steps
    pieces = [tokens[:split]] if split else []
    pieces += [[token] for token in tokens[split:]]
    results = []
    for piece in pieces:
        last = model(mx.array([list(piece)]), cache=cache)[0, -1]
        mx.eval(last)
        results.append(last)
    return results


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Hold the floating-point parameters of an unpatched model in float32, then put the same arrays back.

    Quantized weights stay packed; their scales and biases become float32. The copies take memory: twice that
    of the model's 16-bit weights.
    """
    originals = model.parameters()
    try:
        model.update(
            tree_map(
                lambda leaf: leaf.astype(mx.float32) if mx.issubdtype(leaf.dtype, mx.floating) else leaf,
                originals,
            )
        )
        yield
    finally:
        model.update(originals)


def float32_logits(model: Any, tokens: Sequence[int], *, steps: int = 1) -> list[mx.array]:
    """Return what `logits` would, computed with the same weights in float32.

    Call it on the unpatched model: a patched one would run the very kernels that are to be judged.
    """
    with in_float32(model):
        return logits(model, tokens, steps=steps)


@dataclass(frozen=True)
class Verdict:
    """Whether a plan may be used.

    Attributes:
        ok: It may.
        reasons: Why not; empty if `ok`.
        fidelity: The plan against plain MLX.
        plan_error: The plan against the float32 run, where there is one and all is finite.
        plain_error: Plain MLX against it.
        near_tie: A token differed, and the float32 run showed a near-tie each time.
        excused: Limits that were exceeded where plain MLX's own rounding exceeds them too.
        unverified: Features that the check did not exercise.
    """

    ok: bool
    reasons: tuple[str, ...]
    fidelity: Fidelity
    plan_error: Fidelity | None
    plain_error: Fidelity | None
    near_tie: bool
    unverified: tuple[str, ...]
    excused: tuple[str, ...] = ()


def judge(
    *,
    reference: Sequence[mx.array],
    actual: Sequence[mx.array],
    float32: Sequence[mx.array] | None = None,
    engaged: Mapping[str, int],
    features: Iterable[str],
    limits: Limits | None = None,
) -> Verdict:
    """Judge a plan by its logits at one or more positions, as `logits` returns them.

    A plan passes if at every position all logits are finite, the next token is plain MLX's, and divergence
    and errors are within `limits`; if its error against float32 is not much above plain MLX's own; and if
    every one of its features ran.

    **Below the noise.** In 16 bits a deep model amplifies every rounding: exchanging one RMSNorm for another that
    rounds a single element differently moves the logits of a 30-layer model as far as plain MLX itself stands from
    float32. A limit below that distance e tells nothing about a plan, and one that computed exactly would fail it. By
    the triangle inequality a plan no less accurate than plain MLX stands within 2e of it, for the errors, and within
    4 times plain MLX's divergence, which grows with the square. The allowance is the limit, or that where it is more;
    what needed it is listed in the verdict, and the rule against float32 below holds without any.

    **Near-ties.** Where the plan's next token u is not plain MLX's t, float32 decides. Let e be plain MLX's
    largest logit error against float32 at that position, and g = float32[t] - float32[u]. The flip passes if
    g <= 0, for then float32 prefers the plan's token and it was plain MLX that erred; or if g < e, for then
    t leads u by less than plain MLX's rounding moves a logit, and its choice was an accident too. Otherwise
    it fails, and also without a float32 run. Only the token is forgiven: all other limits still hold. And e
    is plain MLX's error, never the plan's, so that no plan passes a wrong token by being wrong everywhere.

    Args:
        reference: Logits of plain MLX, each [vocabulary].
        actual: Logits of the plan at the same positions.
        float32: Logits of the float32 run, or None where it doesn't fit: then its rule is left out.
        engaged: How often each feature ran while `actual` was computed.
        features: The features that the plan has switched on.
        limits: What is allowed; the defaults if not given.
    """
    limits = limits or Limits()
    if not len(reference) == len(actual) == len(reference if float32 is None else float32) > 0:
        raise mismatch("verify", "logits of the same positions", [len(reference), len(actual)])
    fidelity = compare(mx.stack(list(reference)), mx.stack(list(actual)))
    plan_error = plain_error = None
    near_tie, excused = False, list[str]()
    reasons = _not_finite({"plan": actual, "plain MLX": reference, "float32 run": float32 or ()})
    if not reasons:
        reasons, near_tie = _token_reasons(reference, actual, float32)
        if float32 is not None:
            exact = mx.stack(list(float32))
            plan_error = compare(exact, mx.stack(list(actual)))
            plain_error = compare(exact, mx.stack(list(reference)))
            reasons += _float32_reasons(plan_error, plain_error, limits)
        refused, excused = _limit_reasons(fidelity, plain_error, limits)
        reasons += refused
    unverified = tuple(feature for feature in features if engaged.get(feature, 0) <= 0)
    reasons += [f"not exercised: {feature}" for feature in unverified]
    return Verdict(not reasons, tuple(reasons), fidelity, plan_error, plain_error, near_tie, unverified, tuple(excused))


def _not_finite(runs: Mapping[str, Sequence[mx.array]]) -> list[str]:
    """Name every run that has NaN or infinite logits, and how many."""
    reasons = []
    for name, run in runs.items():
        rows = [_rows(one) for one in run]
        nan, infinite = (sum(int(test(row).sum()) for row in rows) for test in (np.isnan, np.isinf))
        if nan or infinite:
            reasons.append(f"logits of the {name} are not finite: {nan} NaN, {infinite} infinite")
    return reasons


def _limit_reasons(fidelity: Fidelity, noise: Fidelity | None, limits: Limits) -> tuple[list[str], list[str]]:
    """Return the limits that are exceeded, and those exceeded within plain MLX's own noise; see `judge`."""
    measured = (
        ("KL divergence", "kl_divergence", limits.kl, 4.0),
        ("mean logit error", "mean_logit_error", limits.mean, 2.0),
        ("max logit error", "max_logit_error", limits.maximum, 2.0),
    )
    refused, excused = [], []
    for name, field, limit, times in measured:
        value = getattr(fidelity, field)
        own = getattr(noise, field) if noise is not None else 0.0
        if value <= limit:
            continue
        if value <= times * own:
            excused.append(f"{name} {value:.3g} is above {limit:g}, but plain MLX's own against float32 is {own:.3g}")
        else:
            refused.append(f"{name} {value:.3g} is above {limit:g}")
    return refused, excused


def _float32_reasons(plan: Fidelity, plain: Fidelity, limits: Limits) -> list[str]:
    errors = (
        ("max", plan.max_logit_error, plain.max_logit_error),
        ("mean", plan.mean_logit_error, plain.mean_logit_error),
    )
    return [
        f"{name} error against float32 is {error:.3g}, plain MLX's own {own:.3g}"
        for name, error, own in errors
        if not error <= limits.float32_factor * own + limits.float32_floor
    ]


@dataclass(frozen=True)
class Tie:
    """Two tokens at one position, as plain MLX and the float32 run see them.

    Attributes:
        reference_gap: Plain MLX's logit of its token minus that of the other.
        float32_gap: The same in the float32 run; negative where that prefers the other token.
        plain_error: Plain MLX's largest logit error against float32 at this position.
    """

    reference_gap: float
    float32_gap: float
    plain_error: float

    @property
    def is_near(self) -> bool:
        """Either token is as right as the other, by the rule that `judge` states."""
        return self.float32_gap <= 0 or self.float32_gap < self.plain_error


def _tie(reference: mx.array, float32: mx.array, token: int, other: int) -> Tie:
    plain, exact = _rows(reference)[-1], _rows(float32)[-1]
    return Tie(
        reference_gap=float(plain[token] - plain[other]),
        float32_gap=float(exact[token] - exact[other]),
        plain_error=float(np.abs(plain - exact).max()),
    )


def _token_reasons(
    reference: Sequence[mx.array], actual: Sequence[mx.array], float32: Sequence[mx.array] | None
) -> tuple[list[str], bool]:
    """Return complaints about next tokens, and whether some differ and all that do are near-ties."""
    reasons, flips = [], 0
    for position, (ours, theirs) in enumerate(zip(reference, actual, strict=True)):
        token, other = _top(_rows(ours)[-1]), _top(_rows(theirs)[-1])
        if token == other:
            continue
        flips += 1
        said = f"next token at check {position} is {other}, plain MLX's {token}"
        if float32 is None:
            reasons.append(f"{said}, and there is no float32 run to decide")
            continue
        tie = _tie(ours, float32[position], token, other)
        if not tie.is_near:
            reasons.append(f"{said}, by {tie.float32_gap:.3g} in float32 (error {tie.plain_error:.3g})")
    return reasons, bool(flips and not reasons)


@dataclass(frozen=True)
class TokenDifference:
    """The first greedy token in which two generations differ, and whether it matters.

    Attributes:
        index: Its place among the generated tokens.
        token: Plain MLX's token, None where its generation had ended.
        other: The plan's.
        tie: How close the two are; None where one side had ended.
    """

    index: int
    token: int | None
    other: int | None
    tie: Tie | None

    @property
    def near_tie(self) -> bool:
        """The float32 run shows that either token is as right as the other."""
        return self.tie is not None and self.tie.is_near


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """Return the first index at which two generations differ, or None; an end counts as a difference."""
    for index, (token, other) in enumerate(zip(tokens, others, strict=False)):
        if token != other:
            return index
    return None if len(tokens) == len(others) else min(len(tokens), len(others))


def explain_difference(
    model: Any, prompt: Sequence[int], tokens: Sequence[int], others: Sequence[int]
) -> TokenDifference | None:
    """Show whether the first difference of two greedy generations is a near-tie by the float32 run.

    The model is run up to that token as generation runs it: the prompt but its last token at once, then token
    by token.

    Args:
        model: The unpatched model.
        prompt: The prompt of both.
        tokens: What plain MLX generated.
        others: What the plan generated.

    Returns:
        None if both are the same.
    """
    index = first_difference(tokens, others)
    if index is None:
        return None
    if index >= min(len(tokens), len(others)):
        ends = [run[index] if index < len(run) else None for run in (tokens, others)]
        return TokenDifference(index, ends[0], ends[1], None)
    context = [*prompt, *tokens[:index]]
    plain = logits(model, context, steps=index + 1)[-1]
    exact = float32_logits(model, context, steps=index + 1)[-1]
    tie = _tie(plain, exact, tokens[index], others[index])
    return TokenDifference(index, tokens[index], others[index], tie)
