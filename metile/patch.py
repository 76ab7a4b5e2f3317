"""Putting a plan's kernels into one model.

Only instances are changed, never a class that another model uses: see `metile.instances` for how,
`metile.patched` for what a patched module does, and `metile.handle` for what is handed back.
"""

from __future__ import annotations

import threading
import weakref

import mlx.nn as nn

from metile.decode_step import StepState
from metile.dispatch import FEATURES, Plan
from metile.errors import mismatch, wrong_type
from metile.handle import Handle, current, lock, remember
from metile.kinds import state_for
from metile.models import find
from metile.ops.base import OpKey, operation
from metile.patched import Runtime, State
from metile.patched_decoder import AttentionState
from metile.sites import Declined, Found, Site
from metile.tape_step import TapeState
from metile.targets.base import EAGER_TARGETS, Target
from metile.targets.cpu import CpuTarget


def apply(model: nn.Module, plan: Plan, target: Target, *, found: Found | None = None) -> Handle:
    """Let the modules of `model` run the kernels of `plan`.

    Applying a plan twice is applying it once: the same handle comes back. Another plan takes the place of the
    first.

    Args:
        model: the model, changed in place.
        plan: the features and the candidates.
        target: what the plan was decided on.
        found: what `metile.models.find` gives for the model, where that is at hand.

    Raises:
        MetileError: the plan is of another target.
        MetileTypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise wrong_type("patch", "a model, an mlx.nn.Module,", type(model).__name__)
    if plan.target != target.name:
        raise mismatch("patch", f"a plan for the target {target.name}", f"one for {plan.target}")
    with lock:
        before = current(model)
        if before is not None:
            if before.stands_for(plan, target):
                before.enable()
                return before
            before.restore()
        handle = _patch(model, plan, target, found or find(model))
        if handle:
            remember(model, handle)
            weights = handle.weights()
            target.expect(weights)
            held = [weakref.ref(weight) for weight in weights]
            living = (weight for reference in held if (weight := reference()) is not None)
            threading.Thread(target=target.prepare, args=(living,), daemon=True).start()  # nothing waits for it
            del weights
        return handle


def _patch(model: nn.Module, plan: Plan, target: Target, found: Found) -> Handle:
    runtime = Runtime(plan, target)
    states: list[State] = []
    declined = list(found.declined)
    faults: dict[OpKey, str | None] = {}
    for whole in found.sites:
        site = whole.under(plan.features)
        if site is None:
            continue
        reason = _undecided(site, plan, faults)
        if reason is None:
            states.append(state_for(site, runtime))
        else:
            declined.append(Declined(site.path, reason))
    attentions = [state for state in states if isinstance(state, AttentionState) and state.op is not None]
    if attentions and all(state.module() is not model for state in states):
        if isinstance(target, CpuTarget):
            states.append(TapeState(model, runtime))
        elif target.name not in EAGER_TARGETS:
            states.append(StepState(model, attentions, runtime))
    return Handle(plan, states=states, runtime=runtime, declined=declined, reason=_nothing(plan, found))


def _undecided(site: Site, plan: Plan, known: dict[OpKey, str | None]) -> str | None:
    """Return why no kernel runs a site at any number of rows, or None; `known` keeps what was found."""
    for op in site.ops.values():
        if op not in known:
            chosen = [choice for key, choice in plan.choices.items() if operation(key) == operation(op)]
            decided = "plain MLX was decided for it" if chosen else "nothing was decided for it"
            known[op] = None if any(item is not None for item in chosen) else decided
    reasons = [known[op] for op in site.ops.values()]
    return None if None in reasons else reasons[0]


def _nothing(plan: Plan, found: Found) -> str:
    """Return what to say where nothing is changed."""
    if not plan.features:
        return "the plan is plain MLX"
    if not any(site.under(plan.features) for site in found.sites):
        names = ", ".join(name for name in FEATURES if name in plan.features)
        return f"the model has nothing that is of the plan's features ({names})"
    return "the plan has no kernel for any of the model's modules"
