"""Plans that outlive the process: kept in the plan cache by the tuner, found again by `metile.patch`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from metile.cache import EntryKey, MachineKey, PlanCache, model_digest
from metile.dispatch import Plan
from metile.store import machine_key
from metile.suites import Workload
from metile.targets.base import Target

_SUBJECT = "selected plan"


def _config(model: nn.Module) -> Mapping[str, Any]:
    """Return what an mlx-lm model was built from, as plain values."""
    arguments = getattr(model, "args", None)
    if dataclasses.is_dataclass(arguments) and not isinstance(arguments, type):
        return {name: _plain(value) for name, value in dataclasses.asdict(arguments).items()}
    return {"class": type(model).__qualname__}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def _weights(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...], str]]:
    for name, array in tree_flatten(model.parameters()):
        if isinstance(array, mx.array):
            yield name, tuple(array.shape), str(array.dtype)


def digest_of(model: nn.Module) -> str:
    """Return the digest that a model's plan file is named by: its configuration and the format of its weights.

    The weights' values are not part of it: fine-tuned models of one shape share a plan.
    """
    return model_digest(_config(model), _weights(model))


def _workload_line(workload: Workload) -> str:
    return f"prompt={workload.prompt_tokens} generation={workload.generation_tokens}"


def save_plan(cache: PlanCache, target: Target, plan: Plan, workload: Workload, facts: Mapping[str, Any]) -> None:
    """Keep the plan that was confirmed, or the empty one where none was, for this machine and workload."""
    key = EntryKey(machine_key(target), cache.model, "plan", _SUBJECT, _workload_line(workload))
    cache.put(key, {"plan": plan.to_json(), **facts})


def cached_plan(model: nn.Module, target: Target) -> Plan | None:
    """Return the plan decided for this model on this machine, or None.

    Of plans for several workloads, the one for the longest prompt: it has decided the most buckets.
    """
    cache = PlanCache(digest_of(model))
    machine: MachineKey = machine_key(target)
    found = [
        (entry.key.workload, plan)
        for entry in cache.entries()
        if entry.key.machine == machine and entry.key.kind == "plan" and isinstance(entry.value, dict)
        if (plan := Plan.from_json(entry.value.get("plan"))) is not None and plan.target == target.name
    ]
    return max(found, key=lambda item: (len(item[1].choices), item[0]))[1] if found else None
