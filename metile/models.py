"""What in a model a kernel could run, found by structure: by types, shapes and what a module computes.

`find` walks a tree of modules and asks each finder of `FINDERS` about each. What looks like something that a
kernel could run but is not, a LoRA layer for instance, is listed with the reason. Names decide nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from metile.errors import wrong_type
from metile.instances import plain_class
from metile.ops.base import OpKey, dtype_name, row_bucket
from metile.ops.linear import LinearKey
from metile.ops.norm import NormKey
from metile.swiglu import arrange_swiglu, is_fused_swiglu

# Logits of more positions at once are those of a prompt: nobody reads them, and plain MLX leaves them undone.
VOCABULARY_ROWS = 16


@dataclass(frozen=True, eq=False)
class Site:
    """A module of the model that kernels can run.

    Attributes:
        path: the module's path in the model; empty for the model itself.
        module: the instance.
        kind: which finder found it, and which patch fits.
        feature: the plan feature that turns it on.
        ops: what each of its kernels is called, and its key at one row.
        parts: the names of its children by what they are.
        rows_per_row: rows that its kernels meet for each row of the model's input. A norm of attention heads
            meets as many as there are heads; where structure leaves several numbers possible, all of them.
        fixed: attributes of the module that its kernels have taken for given, and their values.
        most_rows: above this many rows there is nothing to decide; 0 for no limit.
    """

    path: str
    module: nn.Module
    kind: str
    feature: str
    ops: Mapping[str, OpKey]
    parts: Mapping[str, str] = field(default_factory=dict)
    rows_per_row: tuple[int, ...] = (1,)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    most_rows: int = 0

    def keys(self, rows: Iterable[int], context: int = 0) -> list[OpKey]:
        """Return the keys it meets in calls of the model.

        Args:
            rows: of the calls: batch times positions.
            context: tokens that a cache holds at most, for kinds that depend on it.
        """
        del context
        counts = [count for count in rows if not self.most_rows or count <= self.most_rows]
        met = (
            key_at(op, count * factor)
            for count in counts
            for factor in self.rows_per_row
            for op in self.ops.values()
        )
        return list(dict.fromkeys(key for key in met if key is not None))


@dataclass(frozen=True)
class Declined:
    """Something left to plain MLX, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class Found:
    """What `find` found in a model."""

    sites: tuple[Site, ...]
    declined: tuple[Declined, ...]

    def keys(self, rows: Iterable[int], context: int = 0) -> list[tuple[str, OpKey]]:
        """Return pairs of a feature and a key it meets, each once; see `Site.keys`."""
        counts = list(rows)
        met = ((site.feature, key) for site in self.sites for key in site.keys(counts, context))
        return list(dict.fromkeys(met))


@dataclass
class Survey:
    """What a finder may know beside the module it is asked about.

    Attributes:
        root: the model.
        parent: the module that holds the one at hand, or None at the root.
        taken: ids of modules that belong to one already dealt with.
        verdicts: what numeric checks said, by what was checked: layers of a stack are checked once.
    """

    root: Any
    parent: nn.Module | None = None
    taken: set[int] = field(default_factory=set)
    verdicts: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def table_rows(self) -> frozenset[int]:
        """The number of rows of each embedding in the model."""
        return frozenset(
            m["weight"].shape[0] for m in self.root.modules() if isinstance(m, nn.Embedding) and "weight" in m
        )

    @cached_property
    def output_rows(self) -> frozenset[int]:
        """The number of outputs of each layer that multiplies by a matrix and is no embedding."""
        layers = (m for m in self.root.modules() if _is_weighted(m) and not isinstance(m, nn.Embedding))
        return frozenset(m["weight"].shape[-2] for m in layers if "weight" in m)

    def take(self, modules: Iterable[nn.Module]) -> None:
        """Leave `modules` and everything below them out of the rest of the walk."""
        self.taken.update(id(module) for module in modules)


Finder = Callable[[str, nn.Module, Survey], Site | Declined | None]


def find(model: nn.Module) -> Found:
    """Find what kernels could run in a model.

    Args:
        model: any tree of MLX modules, patched or not.

    Raises:
        MetileTypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise wrong_type("find", "an mlx.nn.Module", type(model).__name__)
    survey = Survey(model)
    sites: list[Site] = []
    declined: list[Declined] = []
    for path, module, parent in _walk("", model, None, survey.taken):
        survey.parent = parent
        answers = (finder(path, module, survey) for finder in FINDERS)
        answer = next((answer for answer in answers if answer is not None), None)
        if isinstance(answer, Site):
            sites.append(answer)
        elif answer is not None:
            declined.append(answer)
    return Found(tuple(sites), tuple(declined))


def key_at(op: OpKey, rows: int) -> OpKey | None:
    """Return a key at the bucket that holds `rows`, or None where no bucket does."""
    bucket = row_bucket(rows)
    return None if bucket is None else dataclasses.replace(op, rows=bucket)  # type: ignore[type-var]


def children_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules directly below `module`, those in its lists and dictionaries too, by name."""
    tree: Any = module
    flat: Any = tree_flatten(tree.children(), is_leaf=nn.Module.is_module)
    return [(name, child) for name, child in flat if isinstance(child, nn.Module)]


def arrays_of(module: nn.Module) -> dict[str, mx.array]:
    """Return the arrays that `module` itself holds."""
    return {name: value for name, value in module.items() if isinstance(value, mx.array)}


def _walk(
    path: str, module: nn.Module, parent: nn.Module | None, done: set[int]
) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Yield each module once, parents first; what is `done` meanwhile is passed over."""
    if id(module) in done:
        return
    done.add(id(module))
    yield path, module, parent
    for name, child in children_of(module):
        yield from _walk(f"{path}.{name}" if path else name, child, module, done)


def _is_weighted(module: nn.Module) -> bool:
    """Return whether a module multiplies by a matrix of its own, like a linear layer or an embedding."""
    if isinstance(module, nn.Linear | nn.Embedding):
        return True
    weight = module.get("weight")
    return isinstance(weight, mx.array) and weight.ndim >= 2


def _is_wrapper(module: nn.Module) -> bool:
    """Return whether a module adds matrices to one linear layer or embedding, as LoRA layers do."""
    inner = [child for _, child in children_of(module) if _is_weighted(child)]
    return len(inner) == 1 and any(array.ndim >= 2 for array in arrays_of(module).values())


def _is_linear_like(module: nn.Module) -> bool:
    embedding = isinstance(module, nn.Embedding)
    return not embedding and (_is_weighted(module) or _is_wrapper(module))


def _named(module: nn.Module) -> str:
    """Return a class's name, with its module's where the name alone would say nothing."""
    cls = plain_class(module)
    plain = cls.__name__ in ("Linear", "RMSNorm", "Embedding")
    return f"{cls.__name__} of {cls.__module__}" if plain else cls.__name__


def _fault(module: nn.Module, cls: type, what: str) -> str | None:
    """Return why `module` is not a plain instance of `cls` with weights that kernels take, or None."""
    arrays = arrays_of(module)
    if plain_class(module) is not cls:
        return f"{_named(module)} is not {what}"
    if extra := set(module) - {"weight", "bias"}:
        return f"{cls.__name__} holds {', '.join(sorted(extra))} besides its weights"
    if "weight" not in arrays or not arrays["weight"].size:
        return f"{cls.__name__} has no weight"
    dtypes = {array.dtype for array in arrays.values()}
    if len(dtypes) > 1 or dtype_name(arrays["weight"].dtype) is None:
        names = " and ".join(sorted(str(dtype).removeprefix("mlx.core.") for dtype in dtypes))
        return f"weights of {names}, not of one of bfloat16, float16 and float32"
    return None


def linear_fault(module: nn.Module) -> str | None:
    """Return why a module is not a linear layer that kernels can run, or None."""
    return _fault(module, nn.Linear, "a plain linear")


def linear_op(module: nn.Module) -> LinearKey:
    """Return the key of a plain linear layer, or of an embedding used as one, at one row."""
    weight = module["weight"]
    outputs, inputs = weight.shape
    return LinearKey(
        "bias" if "bias" in module else "store", 1, outputs, inputs, dtype_name(weight.dtype) or ""
    )


def swiglu_mlp(path: str, module: nn.Module, survey: Survey) -> Site | Declined | None:
    """Find down(silu(gate(x)) * up(x)), whatever its parts are called."""
    children = children_of(module)
    linears = {name: child for name, child in children if _is_linear_like(child)}
    if len(linears) not in (2, 3) or arrays_of(module) or _has_more(children, linears):
        return None
    faults = {name: linear_fault(child) for name, child in linears.items()}
    for name, reason in faults.items():
        if reason:
            return Declined(path, f"{name}: {reason}") if _may_be_gated(linears.values()) else None
    if len(linears) == 2:
        fused = is_fused_swiglu(module, linears, survey.verdicts)
        return Declined(path, "gate and up are one fused linear") if fused else None
    layout, reason = arrange_swiglu(module, linears, survey.verdicts)
    if layout is None:
        return Declined(path, reason) if reason else None
    gate, up, down = (linears[name] for name in layout)
    if "bias" in gate or "bias" in up:
        return Declined(path, "gate and up have biases")
    survey.take((gate, up, down))
    ops = {"swiglu": dataclasses.replace(linear_op(gate), epilogue="swiglu"), "down": linear_op(down)}
    parts = dict(zip(("gate", "up", "down"), layout, strict=True))
    return Site(path, module, "swiglu_mlp", "dense_mlp", ops, parts)


def _has_more(children: Iterable[tuple[str, nn.Module]], linears: Mapping[str, nn.Module]) -> bool:
    """Return whether other children than `linears` have parameters."""
    others: list[Any] = [child for name, child in children if name not in linears]
    return any(tree_flatten(child.parameters()) for child in others)


def _may_be_gated(linears: Collection[nn.Module]) -> bool:
    """Return whether the plain ones among three linears may be gate, up and down projections."""
    shapes = [child["weight"].shape for child in linears if linear_fault(child) is None]
    return len(linears) == 3 and all(a in (b, b[::-1]) for a in shapes for b in shapes)


def linear(path: str, module: nn.Module, survey: Survey) -> Site | Declined | None:
    """Find linear layers, the vocabulary projection among them."""
    if not _is_linear_like(module):
        return None
    if reason := linear_fault(module):
        survey.take(child for _, child in children_of(module))
        return Declined(path, reason)
    op = linear_op(module)
    limit = VOCABULARY_ROWS if op.outputs in survey.table_rows else 0
    return Site(path, module, "linear", "dense_projections", {"linear": op}, most_rows=limit)


def vocabulary(path: str, module: nn.Module, survey: Survey) -> Site | Declined | None:
    """Find the embedding that projects to the vocabulary as well: the largest, if no linear has its rows."""
    if not isinstance(module, nn.Embedding) or "weight" not in module:
        return None
    rows = module["weight"].shape[0]
    if rows < max(survey.table_rows) or rows in survey.output_rows:
        return None
    if reason := _fault(module, nn.Embedding, "a plain embedding"):
        return Declined(path, reason)
    ops = {"linear": linear_op(module)}
    return Site(path, module, "vocabulary", "dense_projections", ops, most_rows=VOCABULARY_ROWS)


def rms_norm(path: str, module: nn.Module, survey: Survey) -> Site | Declined | None:
    """Find RMSNorm layers."""
    weight = module.get("weight")
    if plain_class(module) is not nn.RMSNorm:
        norm = isinstance(weight, mx.array) and weight.ndim == 1 and not children_of(module)
        return Declined(path, f"{_named(module)} is not mlx.nn.RMSNorm") if norm else None
    if reason := _fault(module, nn.RMSNorm, "mlx.nn.RMSNorm"):
        return Declined(path, reason)
    assert isinstance(weight, mx.array)
    key = NormKey(False, 1, weight.size, float(module.eps), dtype_name(weight.dtype) or "")
    heads = _heads(weight.size, survey.parent)
    return Site(
        path, module, "rms_norm", "rms_norm", {"norm": key}, rows_per_row=heads, fixed={"eps": module.eps}
    )


def _heads(width: int, parent: nn.Module | None) -> tuple[int, ...]:
    """Return how many rows of `width` a row of the model may be cut into where `parent` applies a norm.

    A norm beside linear layers that give rows of several times its width is one of attention heads.
    """
    siblings = children_of(parent) if parent is not None else []
    shapes = [child["weight"].shape for _, child in siblings if linear_fault(child) is None]
    widths = {side for shape in shapes for side in shape}
    if width in widths:
        return (1,)
    return tuple(sorted({n // width for n, _ in shapes if n % width == 0})) or (1,)


# Asked in this order; the first that knows a module decides.
FINDERS: tuple[Finder, ...] = (swiglu_mlp, linear, vocabulary, rms_norm)
