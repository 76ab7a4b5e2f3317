"""Places in a model where kernels could run: what is known of one, and what a finder may ask of the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from metile.linears import LINEARS, is_embedding
from metile.ops.attention import AttentionKey, token_bucket
from metile.ops.base import OpKey, row_bucket
from metile.ops.linear import FEW_ROWS


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
        layout: names and numbers that the patch works by, beyond `parts`.
        rows_per_row: rows that its kernels meet for each row of the model's input. A norm of attention heads
            meets as many as there are heads; where structure leaves several numbers possible, all of them.
        fixed: attributes of the module that its kernels have taken for given, and their values.
        most_rows: above this many rows there is nothing to decide; 0 for no limit.
        features: the plan features of those of its kernels that are not of `feature`, by what they are called.
    """

    path: str
    module: nn.Module
    kind: str
    feature: str
    ops: Mapping[str, OpKey]
    parts: Mapping[str, str] = field(default_factory=dict)
    layout: Any = None
    rows_per_row: tuple[int, ...] = (1,)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    most_rows: int = 0
    features: Mapping[str, str] = field(default_factory=dict)

    def under(self, features: Collection[str]) -> Site | None:
        """Return the site with the kernels of these features alone, or None where it has none."""
        own = {name: self.features.get(name, self.feature) for name in self.ops}
        on = {
            name: feature
            for name, feature in own.items()
            if not {feature, prefill_feature(feature)}.isdisjoint(features)
        }
        if len(on) == len(own):
            return self
        if not on:
            return None
        feature = self.feature if self.feature in features else next(iter(on.values()))
        return dataclasses.replace(self, feature=feature, ops={name: self.ops[name] for name in on})

    def keys(self, rows: Iterable[int], context: int = 0) -> list[OpKey]:
        """Return the keys it meets in calls of the model; see `pairs`."""
        return list(dict.fromkeys(key for _, key in self.pairs(rows, context)))

    def pairs(self, rows: Iterable[int], context: int = 0) -> list[tuple[str, OpKey]]:
        """Return pairs of a feature and a key that it meets in calls of the model, each once.

        Args:
            rows: of the calls: batch times positions.
            context: tokens that a cache holds at most, for kinds that depend on it.
        """
        counts = [count for count in rows if not self.most_rows or count <= self.most_rows]
        met = (
            (feature_at(self.features.get(name, self.feature), count * factor), key_at(op, count * factor, context))
            for count in counts
            for factor in self.rows_per_row
            for name, op in self.ops.items()
        )
        return list(dict.fromkeys((feature, key) for feature, key in met if key is not None))


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
        """Return pairs of a feature and a key it meets, each once; see `Site.pairs`."""
        counts = list(rows)
        return list(dict.fromkeys(pair for site in self.sites for pair in site.pairs(counts, context)))


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
        return frozenset(m["weight"].shape[0] for m in self.root.modules() if is_embedding(m) and "weight" in m)

    @cached_property
    def output_rows(self) -> frozenset[int]:
        """The number of outputs of each layer that multiplies by a matrix and is no embedding."""
        layers = (m for m in self.root.modules() if is_weighted(m) and not is_embedding(m))
        return frozenset(m["weight"].shape[-2] for m in layers if "weight" in m)

    def take(self, modules: Iterable[nn.Module]) -> None:
        """Leave `modules` and everything below them out of the rest of the walk."""
        self.taken.update(id(module) for module in modules)


def prefill_feature(feature: str) -> str:
    """Return the feature of the same layers at more rows than a decode step has."""
    return "affine_prefill" if feature == "quantized_mlp" else feature


def feature_at(feature: str, rows: int) -> str:
    """Return the feature that `feature` is at a number of rows: schema v8 has two for quantized MLPs."""
    return prefill_feature(feature) if rows > FEW_ROWS else feature


def key_at(op: OpKey, rows: int, tokens: int = 0) -> OpKey | None:
    """Return a key at the buckets that hold `rows` and `tokens`, or None where no bucket does."""
    bucket = row_bucket(rows)
    if bucket is None:
        return None
    fields: dict[str, int] = {"rows": bucket}
    if isinstance(op, AttentionKey):
        fields["tokens"] = token_bucket(max(tokens, rows))
    return dataclasses.replace(op, **fields)  # type: ignore[type-var]


def children_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules directly below `module`, those in its lists and dictionaries too, by name."""
    tree: Any = module
    flat: Any = tree_flatten(tree.children(), is_leaf=nn.Module.is_module)
    return [(name, child) for name, child in flat if isinstance(child, nn.Module)]


def arrays_of(module: nn.Module) -> dict[str, mx.array]:
    """Return the arrays that `module` itself holds."""
    return {name: value for name, value in module.items() if isinstance(value, mx.array)}


def is_weighted(module: nn.Module) -> bool:
    """Return whether a module multiplies by a matrix of its own, like a linear layer or an embedding."""
    if isinstance(module, LINEARS) or is_embedding(module):
        return True
    weight = module.get("weight")
    return isinstance(weight, mx.array) and weight.ndim >= 2
