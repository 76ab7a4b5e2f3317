"""What a patched module does when it is called: a kernel where one was decided, plain MLX otherwise.

This runs once a layer and token, so what can be known beforehand is: a call compares what it meets with that,
finds its kernels by the number of rows, and launches.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metile.dispatch import Plan
from metile.instances import STATE, patched_class, plain_class, swap
from metile.linears import MATRIX, dtype_of, matrix_of, shape_of
from metile.ops.base import OpKey, buckets_apart, operation
from metile.rotary import rope_table
from metile.sites import Declined, Site, feature_at, key_at
from metile.targets.base import EAGER_TARGETS, Kernel, Output, Target
from metile.tracing import is_traced

_MOST_BOUND = 256  # launches that an entry keeps

TRACED = "a transformation traces its input"  # why plain MLX ran


class Entry:
    """A kernel ready to run one key, and how often it did."""

    __slots__ = ("bound", "candidate", "engaged", "kernel", "key")

    def __init__(self, key: OpKey, candidate: Any, kernel: Kernel) -> None:
        self.key, self.candidate, self.kernel, self.engaged = key, candidate, kernel, 0
        self.bound: dict[Any, Callable[[Sequence[mx.array]], list[mx.array]]] = {}

    def run(self, inputs: Sequence[mx.array]) -> mx.array:
        """Launch on `inputs` and return the last output."""
        return self.run_all(inputs)[-1]

    def run_all(self, inputs: Sequence[mx.array]) -> list[mx.array]:
        """Launch on `inputs` and return all outputs.

        The first launch on a shape of x checks the inputs and works the rest out; those after it find that done.
        """
        return self.run_bound(inputs[0].shape, lambda kernel: self.key.launch(kernel, self.candidate, inputs), inputs)

    def run_bound(
        self, place: Any, launch: Callable[[Kernel], list[mx.array]], inputs: Sequence[mx.array]
    ) -> list[mx.array]:
        """Run the launch kept at `place`, or the one that `launch` makes of the kernel, which is then kept."""
        call = self.bound.get(place)
        if call is None:
            binder = _Binder(self.kernel)
            outputs = launch(binder)
            if len(self.bound) >= _MOST_BOUND:  # the place of a launch that counts positions is new at every token
                self.bound.clear()
            self.bound[place] = binder.bound
        else:
            outputs = call(inputs)
        self.engaged += 1
        return outputs


class _Binder:
    """Stands in for a kernel once, to keep the launch that an op makes of it."""

    def __init__(self, kernel: Kernel) -> None:
        self.source, self.bind = kernel.source, kernel.bind
        self.bound: Callable[[Sequence[mx.array]], list[mx.array]]

    def __call__(
        self,
        inputs: Sequence[mx.array],
        outputs: Sequence[Output],
        *,
        groups: int,
        numbers: Sequence[int] = (),
        poison: bool = False,
    ) -> list[mx.array]:
        """Bind the launch, and run it."""
        self.bound = self.bind(outputs, groups=groups, numbers=numbers)
        return self.bound(inputs)


def pick(plan: Plan, op: OpKey, rows: int, tokens: int = 0) -> tuple[OpKey, Any] | str:
    """Return the key and the candidate that run `op` on `rows` rows, or why plain MLX does.

    A decision holds for its own bucket of rows only; of attention's buckets of context the nearest one holds.
    """
    key = key_at(op, rows, tokens)
    if key is None:
        return "nothing was decided for so many rows"
    if key not in plan.choices:
        same = [other for other in plan.choices if other.rows == key.rows and operation(other) == operation(key)]
        if not same:
            return "nothing was decided for so many rows"
        wanted = key
        key = min(same, key=lambda other: buckets_apart(other, wanted))
    candidate = plan.choices[key]
    return "plain MLX was decided for so many rows" if candidate is None else (key, candidate)


class Runtime:
    """What the patched modules of one model share: the plan, its kernels and the counters.

    Attributes:
        entries: the kernels met so far, by feature and key.
        counted_entries: those of attention that read the number of tokens when they run.
        passed: calls left to plain MLX, by feature and reason.
        failed: modules whose kernel raised, which are plain since.
    """

    def __init__(self, plan: Plan, target: Target) -> None:
        self.plan, self.target = plan, target
        self.entries: dict[tuple[str, OpKey], Entry] = {}
        self.counted_entries: dict[tuple[str, OpKey], Entry] = {}
        self.tables: dict[Any, mx.array] = {}
        self.passed: Counter[tuple[str, str]] = Counter()
        self.failed: list[Declined] = []

    def entry(self, feature: str, op: OpKey, rows: int, tokens: int = 0) -> Entry | str:
        """Return the kernel of `op` for `rows` rows, compiled, or why plain MLX runs it."""
        feature = feature_at(feature, rows)
        if feature not in self.plan.features:
            return f"the plan has {feature} off"
        picked = pick(self.plan, op, rows, tokens)
        if isinstance(picked, str):
            return picked
        place = feature, picked[0]
        if place not in self.entries:
            self.entries[place] = Entry(*picked, self.target.compile(picked[0].source(picked[1])))
        return self.entries[place]

    def counted(self, feature: str, op: OpKey, tokens: int) -> Entry | str:
        """Return the kernel of attention for one query that reads the number of tokens when it runs, or why not."""
        picked = pick(self.plan, op, 1, tokens)
        if isinstance(picked, str):
            return picked
        key: Any = picked[0]
        if picked[1].program != "rows":
            return "a kernel for blocks of queries was decided"
        place = feature, key
        if place not in self.counted_entries:
            self.counted_entries[place] = Entry(*picked, self.target.compile(key.source(picked[1], counted=True)))
        return self.counted_entries[place]

    def all_entries(self) -> list[Entry]:
        """Return the kernels met so far, those that read the number of tokens among them."""
        return [*self.entries.values(), *self.counted_entries.values()]

    def table(self, kind: Any, rope: Any, positions: int, dimension: int) -> mx.array:
        """Return the table of a rope module for at least so many positions; layers of one kind share it."""
        table = self.tables.get(kind)
        if table is None or table.shape[0] < positions:
            table = self.tables[kind] = rope_table(rope, positions, dimension)
        return table


class Part:
    """A module that holds weights of a patched one (itself or a child), as it was when patched.

    Weights are told by identity, and held weakly: a layer quantized or fused meanwhile frees its old ones.
    """

    __slots__ = ("bias", "cls", "fields", "name", "others", "weight")

    def __init__(self, name: str, holder: nn.Module) -> None:
        self.name, self.cls, self.fields = name, plain_class(holder), len(holder)
        self.weight, *others = map(weakref.ref, matrix_of(holder))
        self.others = tuple(zip(MATRIX[1:], others, strict=False))  # scales and biases of a quantized matrix
        self.bias = weakref.ref(holder["bias"]) if "bias" in holder else None

    def unchanged(self, holder: nn.Module) -> bool:
        """Return whether `holder` has the class and the very weights of before."""
        weight = holder.get("weight")
        return (
            weight is not None
            and weight is self.weight()
            and (self.bias is None or holder.get("bias") is self.bias())
            and (not self.others or all(holder.get(name) is array() for name, array in self.others))
            and len(holder) == self.fields
            and (type(holder) is self.cls or plain_class(holder) is self.cls)
        )

    def matrix(self, holder: nn.Module) -> tuple[mx.array, ...]:
        """Return the arrays of the matrix, as kernels take them."""
        return (holder["weight"], *(holder[name] for name, _ in self.others))

    def held(self) -> list[mx.array]:
        """Return the arrays of the matrix that still exist."""
        references = (self.weight, *(array for _, array in self.others))
        return [array for reference in references if (array := reference()) is not None]


class State:
    """What one patched module knows of itself, and how it is called.

    Attributes:
        path: the module's path in the model.
        module: the module, weakly.
        cls: its class while patched.
        plain: the method that the patch replaces.
        read: the parts whose weights its kernels read.
        entries: by number of rows, what runs each of its ops, or why nothing of it is a kernel's.
    """

    __slots__ = (
        "cls",
        "dtype",
        "entries",
        "failed",
        "feature",
        "fixed",
        "module",
        "one_position",
        "ops",
        "parts",
        "path",
        "plain",
        "read",
        "runtime",
        "width",
    )

    method = "__call__"  # what the patch replaces
    runs_kernels = True  # itself, or only those of modules below it
    reads_input = True  # whether a kernel reads the very array that the module is called with

    def __init__(self, site: Site, runtime: Runtime) -> None:
        plain = plain_class(site.module)
        self.path, self.feature, self.runtime = site.path, site.feature, runtime
        self.module = weakref.ref(site.module)
        self.cls = patched_class(plain, site.kind, {self.method: _method(type(self))})
        self.plain: Callable[..., Any] = getattr(plain, self.method)
        self.ops, self.fixed = tuple(site.ops.values()), tuple(site.fixed.items())
        holders = [(name, site.module[name]) for name in site.parts.values()] or [("", site.module)]
        self.parts = self.read = tuple(Part(name, holder) for name, holder in holders)
        first = holders[0][1]
        self.dtype, self.width = (
            dtype_of(first),
            shape_of(first)[1] if first["weight"].ndim > 1 else first["weight"].size,
        )
        # The logits of a prompt are never read; computing them at once is work that plain MLX leaves undone.
        self.one_position = bool(site.most_rows) and runtime.target.name in EAGER_TARGETS
        self.entries: dict[int, tuple[Entry | str, ...] | str] = {}
        self.failed = False

    def changed(self, module: nn.Module) -> str | None:
        """Return what is not as it was when `module` was patched, or None."""
        for part in self.parts:
            if not part.unchanged(module[part.name] if part.name else module):
                return "its weights were replaced"
        for name, value in self.fixed:
            if vars(module).get(name) != value:
                return f"its {name} was changed"
        return None

    def outdated(self, module: nn.Module) -> bool:
        """Return whether patching `module` anew may let more kernels run."""
        return self.changed(module) is not None

    def ready(self, module: nn.Module, x: Any) -> tuple[Entry | str, ...] | None:
        """Return what runs each op of a call on `x`, or None for plain MLX, with the reason counted."""
        training = vars(module).get("_training", False)
        reason = "the module is in training mode" if training else self.changed(module) or self._unfit(x)
        if reason is None:
            rows = x.size // self.width
            entries = self.entries.get(rows)
            if entries is None:
                entries = self.entries[rows] = self._resolve(rows)
            if isinstance(entries, str):
                reason = entries
            elif self.reads_input and is_traced(x):
                reason = TRACED
            else:
                return entries
        self.runtime.passed[self.feature, reason] += 1
        return None

    def runs(self, module: Any) -> bool:
        """Return whether `module` is patched by this state, and neither disabled nor failed."""
        return type(module) is self.cls

    def fail(self, module: nn.Module, error: Exception) -> None:
        """Leave the module to plain MLX from now on."""
        lines = str(error).splitlines() or [""]
        self.failed = True
        swap(module, plain_class(module))
        self.runtime.failed.append(Declined(self.path, f"a kernel raised {type(error).__name__}: {lines[0]}"))
        self.runtime.passed[self.feature, "a kernel raised"] += 1

    def _unfit(self, x: Any) -> str | None:
        if not isinstance(x, mx.array):
            return "its input is not an array"
        shape = x.shape
        if not shape or shape[-1] != self.width or not x.size:
            return "its input is empty or of another width"
        if x.dtype != self.dtype:
            return "its input is of another dtype"
        if self.one_position and len(shape) > 1 and shape[-2] > 1:
            return "logits of several positions are left for when they are read"
        return None

    def _resolve(self, rows: int) -> tuple[Entry | str, ...] | str:
        entries = tuple(self.runtime.entry(self.feature, op, rows) for op in self.ops)
        reasons = [entry for entry in entries if isinstance(entry, str)]
        return reasons[0] if len(reasons) == len(entries) else entries

    def call(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run the module: its kernels if they fit the call, plain MLX otherwise, or if one raises."""
        if len(arguments) == 1 and not named:
            try:
                entries = self.ready(module, arguments[0])
                if entries is not None:
                    return self.run(module, arguments[0], entries)
            except Exception as error:
                self.fail(module, error)
        return self.plain(module, *arguments, **named)

    def run(self, module: Any, x: mx.array, entries: tuple[Any, ...]) -> mx.array:
        """Compute the module on `x` with the kernels that `ready` gave."""
        raise NotImplementedError


def _method(kind: type[State]) -> Callable[..., Any]:
    """Return the method of a patched class."""
    call = kind.call

    def method(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        return call(vars(self)[STATE], self, arguments, named)

    return method


class WeightedState(State):
    """A module of one kernel, which takes x, its weight, and its bias where it has one."""

    __slots__ = ()

    def run(self, module: Any, x: mx.array, entries: tuple[Any, ...]) -> mx.array:
        """See `State.run`."""
        part = self.parts[0]
        bias = (module["bias"],) if part.bias else ()
        return entries[0].run((x, *part.matrix(module), *bias))  # type: ignore[no-any-return]


class VocabularyState(WeightedState):
    """An embedding that is the vocabulary projection as well."""

    __slots__ = ()
    method = "as_linear"


class MlpState(State):
    """A SwiGLU block: one kernel up to the product of its halves, one for the way down."""

    __slots__ = ()

    def hidden(self, module: Any, x: mx.array, entry: Entry | str) -> mx.array:
        """Return silu(gate(x)) * up(x)."""
        first, second, _ = self.parts
        gate, up = module[first.name], module[second.name]
        if isinstance(entry, str):
            return nn.silu(gate(x)) * up(x)  # type: ignore[no-any-return]
        return entry.run((x, *first.matrix(gate), *second.matrix(up)))

    def run(self, module: Any, x: mx.array, entries: tuple[Any, ...]) -> mx.array:
        """See `State.run`."""
        down = module[self.parts[2].name]
        hidden = self.hidden(module, x, entries[0])
        if isinstance(entries[1], str):
            return down(hidden)  # type: ignore[no-any-return]
        bias = (down["bias"],) if self.parts[2].bias else ()
        return entries[1].run((hidden, *self.parts[2].matrix(down), *bias))  # type: ignore[no-any-return]
