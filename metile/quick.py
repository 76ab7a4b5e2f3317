"""A plan in seconds: untuned kernels, taken only if they verify on this very model and beat plain MLX there."""

from __future__ import annotations

import mlx.nn as nn

from metile.dispatch import Plan
from metile.models import find
from metile.ops.base import ROW_BUCKETS
from metile.plan import PlanSearch, judge_plan, useful_features
from metile.suites import Workload
from metile.targets.base import Target
from metile.workload import random_prompt, token_ids

_MOST_ROWS, _CONTEXT = 512, 1024  # the buckets that a quick plan covers
_TOKENS = 24  # of the prompt it is tried on


def quick_plan(model: nn.Module, target: Target) -> tuple[Plan | None, str]:
    """Decide a plan of untuned defaults.

    Every kernel is the default of its space. A short prompt is run on plain MLX, in float32 and on the plan, which
    must verify, and then once more for time, which it must win.

    Args:
        model: the unpatched model.
        target: what runs the kernels.

    Returns:
        The plan, or None and the reason.
    """
    rows = [bucket for bucket in ROW_BUCKETS if bucket <= _MOST_ROWS]
    pairs = find(model).keys(rows, _CONTEXT)
    choices = {key: next(iter(key.space(target.limits)), None) for _, key in pairs}
    features = useful_features(Plan(target.name, frozenset(), choices), pairs)
    if not features:
        return None, "the model holds nothing that metile knows how to patch"
    plan = Plan(target.name, frozenset(features), choices)
    prompt = random_prompt(model, _TOKENS, seed=0)
    verdict = judge_plan(model, plan, target, token_ids(prompt))
    if not verdict.ok:
        return None, f"untuned kernels do not verify on this model: {'; '.join(verdict.reasons)}"
    short = Workload(_TOKENS, 4, 1, 1, 2, 1, 0.0, 2048, 0)
    search = PlanSearch(model, plan, target, prompt, short, lambda *_: None)
    (trial,) = search.measure([plan.features], 2, "quick")
    if trial.speedup <= 1:
        return None, f"untuned kernels run at {trial.speedup:.2f} times the speed of plain MLX"
    return plan, ""
