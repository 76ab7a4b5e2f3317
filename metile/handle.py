"""The handle of a patched model: what runs kernels, what does not and why, switching it, and the way back."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import mlx.core as mx
import mlx.nn as nn

from metile.dispatch import FEATURES, Plan
from metile.instances import attach, detach, plain_class, state_of, swap
from metile.ops.base import OpKey
from metile.patched import Entry, Runtime, State
from metile.sites import Declined


@dataclass(frozen=True)
class Kept:
    """A module that runs kernels: its path in the model, and the plan feature it belongs to."""

    path: str
    feature: str


class Handle:
    """What `metile.patch.apply` did to a model: true when it changed something, and the way back.

    As a context manager it restores the model on leaving.

    Attributes:
        plan: what was applied.
        kept: the modules that run kernels.
        reason: why nothing was changed, or an empty string.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        states: Sequence[State] = (),
        runtime: Runtime | None = None,
        declined: Sequence[Declined] = (),
        reason: str = "",
    ) -> None:
        self.plan, self.reason = plan, reason
        self.kept = tuple(Kept(state.path, state.feature) for state in states if state.runs_kernels)
        self._declined, self._runtime = tuple(declined), runtime
        self._states = list(states)
        for state, module in self._present():
            detach(module)  # from the handle of a part of the model, or of a model that shares it
            attach(module, state)
        self.enable()

    def __bool__(self) -> bool:
        """Return whether anything was changed."""
        return bool(self.kept)

    def __enter__(self) -> Self:
        """Return the handle; the plan is applied already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the model."""
        self.restore()

    @property
    def declined(self) -> tuple[Declined, ...]:
        """What was left to plain MLX and why, modules whose kernel raised meanwhile included."""
        return (*self._declined, *(self._runtime.failed if self._runtime else ()))

    @property
    def applied(self) -> bool:
        """Whether the model runs kernels right now: neither disabled nor restored."""
        return any(type(module) is state.cls for state, module in self._living())

    def disable(self) -> None:
        """Let the model run plain MLX until `enable`; costs well under a microsecond a module."""
        for state, module in self._living():
            if type(module) is state.cls:
                swap(module, plain_class(module))

    def enable(self) -> None:
        """Let the model run its kernels again; nothing after `restore`."""
        for state, module in self._living():
            if not state.failed and type(module) is not state.cls:
                swap(module, state.cls)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Run plain MLX within a ``with`` block."""
        were_applied = self.applied
        self.disable()
        try:
            yield
        finally:
            if were_applied:
                self.enable()

    def restore(self) -> None:
        """Give every module back what it was before; once or often."""
        with lock:
            for _, module in list(self._living()):
                detach(module)
            self._states.clear()
            for name in [name for name, (_, handle) in _handles.items() if handle is self]:
                del _handles[name]

    def weights(self) -> list[mx.array]:
        """Return the weight matrices that kernels read, each once."""
        held = (array for state in self._states for part in state.read for array in part.held())
        return list({id(weight): weight for weight in held if weight is not None and weight.ndim > 1}.values())

    def engaged(self) -> dict[str, int]:
        """Return how many kernels each feature of the plan launched."""
        counts = dict.fromkeys((name for name in FEATURES if name in self.plan.features), 0)
        for (feature, _), entry in self._entries():
            counts[feature] += entry.engaged
        return counts

    def engaged_keys(self) -> dict[OpKey, int]:
        """Return how many kernels were launched of each key."""
        counts: Counter[OpKey] = Counter()
        for (_, key), entry in self._entries():
            counts[key] += entry.engaged
        return dict(counts)

    def passed(self) -> dict[str, dict[str, int]]:
        """Return how many calls of patched modules went to plain MLX, by feature and reason."""
        counts: dict[str, dict[str, int]] = {}
        for (feature, reason), count in (self._runtime.passed if self._runtime else Counter()).items():
            counts.setdefault(feature, {})[reason] = count
        return counts

    def reset_engaged(self) -> None:
        """Set all counts to zero."""
        for _, entry in self._entries():
            entry.engaged = 0
        if self._runtime:
            self._runtime.passed.clear()

    def __repr__(self) -> str:
        """Return what was changed, in a line."""
        return f"<Handle: {str(self).splitlines()[0]}>"

    def __str__(self) -> str:
        """Return what runs kernels, and below it what does not and why."""
        if self:
            counts = Counter(kept.feature for kept in self.kept)
            parts = ", ".join(f"{name} ({counts[name]})" for name in FEATURES if name in counts)
            head = f"metile runs kernels in {len(self.kept)} modules: {parts}"
        else:
            head = f"metile changed nothing: {self.reason}"
        reasons = Counter(item.reason for item in self.declined)
        examples = {item.reason: item.path or "the model" for item in reversed(self.declined)}
        lines = [
            f"  left alone: {examples[reason]}{f' and {count - 1} more' if count > 1 else ''}: {reason}"
            for reason, count in reasons.most_common()
        ]
        return "\n".join([head, *lines])

    def _entries(self) -> list[tuple[tuple[str, OpKey], Entry]]:
        runtime = self._runtime
        return [*runtime.entries.items(), *runtime.counted_entries.items()] if runtime else []

    def _present(self) -> Iterator[tuple[State, nn.Module]]:
        """Yield the modules that still exist."""
        for state in self._states:
            module = state.module()
            if module is not None:
                yield state, module

    def _living(self) -> Iterator[tuple[State, nn.Module]]:
        """Yield the modules that still exist and still are this handle's."""
        return ((state, module) for state, module in self._present() if state_of(module) is state)

    def stands_for(self, plan: Plan, runtime_target: object) -> bool:
        """Return whether applying `plan` now would give the same: no module has other weights since."""
        if self.plan != plan or self._runtime is None or self._runtime.target is not runtime_target:
            return False
        living = list(self._living())
        changed = any(state.outdated(module) for state, module in living)
        return len(living) == len(self._states) and not changed


lock = threading.RLock()
_handles: dict[int, tuple[weakref.ref[nn.Module], Handle]] = {}  # by the id of the model


def current(model: nn.Module) -> Handle | None:
    """Return the handle of a patched model, or None."""
    known, handle = _handles.get(id(model), (None, None))
    return handle if known is not None and known() is model else None


def remember(model: nn.Module, handle: Handle) -> None:
    """Let `current` find the handle for as long as the model exists."""
    number = id(model)

    def forget(gone: weakref.ref[nn.Module]) -> None:
        if number in _handles and _handles[number][0] is gone:
            del _handles[number]

    _handles[number] = weakref.ref(model, forget), handle
