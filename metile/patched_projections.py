"""The q, k and v projections of a patched attention module in one launch, where the three linears are as they were."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from metile.decoder import Projected
from metile.instances import STATE
from metile.patched import Entry, Part, Runtime
from metile.sites import Site
from metile.tracing import is_traced


class Projections:
    """Three linears of an attention module, which may be patched themselves.

    What is not run here is left to them: they say for themselves why plain MLX ran.

    Attributes:
        parts: q, k and v as they were when patched.
        entries: by number of rows, the kernel, or why there is none.
    """

    __slots__ = ("bias", "entries", "feature", "op", "parts", "runtime", "width")

    def __init__(self, site: Site, runtime: Runtime) -> None:
        layout = site.layout
        op: Any = site.ops["projections"]
        self.op, self.bias, self.width = op, op.bias, op.inputs
        self.feature, self.runtime = site.features.get("projections", site.feature), runtime
        self.parts = tuple(Part(name, site.module[name]) for name in (layout.q, layout.k, layout.v))
        self.entries: dict[int, Entry | str] = {}

    def unchanged(self, module: Any) -> bool:
        """Return whether the linears have the class and the very weights of before."""
        return all(part.unchanged(module[part.name]) for part in self.parts)

    def run(self, module: Any, x: mx.array) -> Projected | None:
        """Return q, k and v of `x` [..., K], which is of the weights' dtype, or None where the linears are to run."""
        rows = x.size // self.width
        entry = self.entries.get(rows)
        if entry is None:
            entry = self.entries[rows] = self.runtime.entry(self.feature, self.op, rows)
        if isinstance(entry, str):
            return None
        inputs, biases = [x], []
        for part in self.parts:
            linear = module[part.name]
            if not part.unchanged(linear) or not _runs(linear):
                return None
            inputs += part.matrix(linear)
            if self.bias:
                biases.append(linear["bias"])
        if is_traced(x):
            return None
        q, k, v = entry.run_all(inputs + biases)
        return q, k, v


def _runs(linear: Any) -> bool:
    """Return whether a linear is not in training mode, and not left to plain MLX by a patch of its own."""
    attributes = vars(linear)
    state = attributes.get(STATE)
    return not attributes.get("_training", False) and (state is None or type(linear) is state.cls)
