"""Where decisions of the search are kept: entries of the plan cache under the key of this machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from dataclasses import asdict

from metile.cache import EntryKey, JsonValue, MachineKey, PlanCache
from metile.dispatch import Decision
from metile.ops.base import OpKey
from metile.targets.base import Limits, Target
from metile.targets.compiler import sources_digest


def machine_key(target: Target) -> MachineKey:
    """Return where a decision taken now on `target` holds."""
    return MachineKey(
        target=target.name,
        chip=target.chip(),
        limits=_printed(target.limits),
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        mlx=importlib.metadata.version("mlx"),
        metile=importlib.metadata.version("metile"),
        kernels=sources_digest()[:32],
    )


def _printed(limits: Limits) -> str:
    """Return the limits for a person to read, and a digest for one who only compares."""
    text = ", ".join(f"{name}={value}" for name, value in asdict(limits).items())
    return f"{text} ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


class DecisionStore:
    """The decisions of one model on one machine.

    Args:
        cache: the model's plan file.
        machine: from `machine_key`.
    """

    def __init__(self, cache: PlanCache, machine: MachineKey) -> None:
        self._cache = cache
        self._machine = machine

    def get(self, key: OpKey) -> Decision | None:
        """Return what was decided for `key`, or None."""
        value: JsonValue | None = self._cache.get(self._entry(key))
        return None if value is None else Decision.from_json(key, value)

    def put(self, decision: Decision) -> None:
        """Keep a decision, in the file by the time this returns."""
        self._cache.put(self._entry(decision.key), decision.to_json())

    def _entry(self, key: OpKey) -> EntryKey:
        return EntryKey(self._machine, self._cache.model, "dispatch", key.subject())
