"""What a user calls."""

from __future__ import annotations

from typing import Literal, get_args

import mlx.nn as nn

from metile.dispatch import Plan
from metile.errors import MetileError, mismatch, wrong_type
from metile.handle import Handle
from metile.patch import apply
from metile.plans import cached_plan
from metile.quick import quick_plan
from metile.targets import choose_target
from metile.toolchain import ensure_compile

Tune = Literal["cached", "quick", "never"]


def patch(model: nn.Module, *, plan: Plan | None = None, tune: Tune = "cached") -> Handle:
    """Let a model run metile's kernels where they beat plain MLX.

    Args:
        model: an mlx-lm model, or any tree of MLX modules; changed in place.
        plan: what to apply; without one, `tune` says where it comes from.
        tune: ``cached``, the plan that an earlier tuning of this model left, if any; ``quick``, one decided
            now, in seconds; ``never``, none.

    Returns:
        A handle: false when nothing was changed, and then it says why. ``handle.restore()``, or leaving a
        ``with`` block, brings back the model as it was.

    Raises:
        MetileTypeError: `model` is not a module, or `plan` not a plan.
        MetileError: `tune` is none of the choices, or the plan is of another target.
    """
    if not isinstance(model, nn.Module):
        raise wrong_type("patch", "a model, an mlx.nn.Module,", type(model).__name__)
    if plan is not None and not isinstance(plan, Plan):
        raise wrong_type("patch", "a metile.Plan or None", type(plan).__name__)
    if tune not in get_args(Tune):
        raise mismatch("patch", f"tune to be one of {', '.join(get_args(Tune))}", repr(tune))
    if plan is None:
        plan, reason = _tuned(model, tune)
        if plan is None:
            return Handle(Plan("", frozenset(), {}), reason=reason)
    return apply(model, plan, choose_target(plan.target))


def _tuned(model: nn.Module, tune: Tune) -> tuple[Plan | None, str]:
    """Return the plan that `tune` asks for, or None and why there is none."""
    try:
        target = choose_target()
    except MetileError as error:
        return None, str(error)
    if tune != "quick":
        plan = cached_plan(model, target)
        if plan is not None:
            return plan, ""
        if tune == "never":
            return None, "no plan is kept for this model on this machine; python -m metile.tune makes one"
    ensure_compile()
    return quick_plan(model, target)
