"""Rotary position embedding of q and k, with k and v laid out for the cache: a step before the attention family.

Schema v8 has no family for it. It is part of the feature attention because plain MLX spends more time on it than on
attention itself where every operation is a launch of its own. The kernel is ``kernels/rope.metal``; what it must equal
stands in `RopeKey.reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from metile.errors import mismatch
from metile.ops.base import DTYPES, check_arrays, count_reasons
from metile.targets.base import KERNEL_TYPES, Kernel, KernelSource, Limits, Output


@dataclass(frozen=True)
class RopeTile:
    """A point of the search space of a rope kernel: `block` positions a threadgroup of so many simdgroups."""

    block: int
    simdgroups: int = 1

    def label(self) -> str:
        """Return the fields as one word."""
        return f"b{self.block}" + (f"_s{self.simdgroups}" if self.simdgroups > 1 else "")


def _product(limits: Limits) -> list[RopeTile]:
    """Return blocks of positions for one thread on a CPU; on a GPU simdgroups share the heads."""
    simdgroups = (8, 4, 2, 16) if limits.is_gpu else (1,)
    return [RopeTile(block, count) for block in (1, 4, 16) for count in simdgroups]


@dataclass(frozen=True)
class RopeKey:
    """Rope at one bucket of positions.

    Attributes:
        rows: upper end of the bucket of positions.
        query_heads: heads of q.
        key_value_heads: heads of k and v.
        dimension: of a head; pairs (i, i + dimension/2) are turned.
        dtype: of q, k and v.
    """

    rows: int
    query_heads: int
    key_value_heads: int
    dimension: int
    dtype: str

    family = "rope"
    margin = 0.02

    def subject(self) -> str:
        """Return the key as one line."""
        heads = f"{self.query_heads}/{self.key_value_heads}"
        return f"rope rows={self.rows} heads={heads} dim={self.dimension} {self.dtype}"

    def space(self, limits: Limits) -> list[RopeTile]:
        """Return the admissible candidates, the untuned default first."""
        return [tile for tile in _product(limits) if is_valid(self, tile, limits) is None]

    def pruned(self, limits: Limits) -> dict[str, int]:
        """Return why candidates were left out."""
        return count_reasons([reason for tile in _product(limits) if (reason := is_valid(self, tile, limits))])

    def source(self, candidate: RopeTile) -> KernelSource:
        """Return the kernel of a candidate; the offset and the numbers of heads are numbers of its launch."""
        t, d = KERNEL_TYPES[DTYPES[self.dtype]], self.dimension
        ins = ", ".join(f"heads_inside<const device {t}>({n})" for n in ("q, heads", "k, shared", "v, shared"))
        body = f"""rope<{t}, {d}, {candidate.block}>(
      {ins}, matrix_of<const device float>(table), heads_inside<device {t}>(q_out, heads), ::heads<device {t}>(k_out),
      ::heads<device {t}>(v_out), offset, group);"""
        return KernelSource(
            f"rope_{self.dtype}_d{d}_{candidate.label()}",
            "rope.metal",
            body,
            ("q", "k", "v", "table"),
            ("q_out", "k_out", "v_out"),
            ("offset", "heads", "shared"),
            simdgroups=candidate.simdgroups,
        )

    def turn(
        self,
        kernel: Kernel,
        candidate: RopeTile,
        inputs: Sequence[mx.array],
        *,
        offset: int,
        poison: bool = False,
    ) -> list[mx.array]:
        """Run on q [B, L, H * D], k and v [B, L, H_kv * D] and the table [positions, D], float32.

        Args:
            kernel: of the candidate.
            candidate: from `space`.
            inputs: q, k, v and the table, which must reach `offset + L` positions.
            offset: position of the first row.
            poison: let outputs hold NaN until they are written.

        Returns:
            q [B, L, H * D], k and v [B, H_kv, L, D].

        Raises:
            MetileError: an array of another shape or dtype, or a table that ends too early.
        """
        q = inputs[0]
        batch, length = (*q.shape[:2], 0, 0)[:2]
        self._check(inputs, batch, length, offset)
        cached = Output((batch, self.key_value_heads, length, self.dimension), q.dtype)
        groups = batch * -(-length // candidate.block)
        numbers = (offset, self.query_heads, self.key_value_heads)
        return kernel(inputs, (Output(q.shape, q.dtype), cached, cached), groups=groups, numbers=numbers, poison=poison)

    def _check(self, inputs: Sequence[mx.array], batch: int, length: int, offset: int) -> None:
        """Check what the kernel would read."""
        shapes = [
            (batch, length, heads * self.dimension)
            for heads in (self.query_heads, self.key_value_heads, self.key_value_heads)
        ]
        check_arrays("rope", inputs[:3], shapes, self.dtype)
        table = inputs[3] if len(inputs) == 4 else None
        if table is None or table.ndim != 2 or table.shape[1] != self.dimension or table.dtype != mx.float32:
            got = f"{len(inputs)} arrays" if table is None else f"one of {table.shape} {table.dtype}"
            raise mismatch("rope", f"q, k, v and a table of float32 and {self.dimension} columns", got)
        if not 0 <= offset <= table.shape[0] - length:
            raise mismatch("rope", f"positions of a table of {table.shape[0]}", f"{offset} to {offset + length - 1}")

    def launch(
        self, kernel: Kernel, candidate: RopeTile, inputs: Sequence[mx.array], *, poison: bool = False
    ) -> list[mx.array]:
        """Run at offset 3."""
        return self.turn(kernel, candidate, inputs, offset=_OFFSET, poison=poison)

    def reference(self, inputs: Sequence[mx.array]) -> list[mx.array]:
        """Return what plain MLX gives at offset 3 and base 10000."""
        q, k, v, _ = inputs
        batch, length, _ = q.shape

        def split(x: mx.array, heads: int) -> mx.array:
            return x.reshape(batch, length, heads, self.dimension).transpose(0, 2, 1, 3)

        def turned(x: mx.array) -> mx.array:
            return mx.fast.rope(x, self.dimension, traditional=False, base=_BASE, scale=1.0, offset=_OFFSET)

        queries = turned(split(q, self.query_heads)).transpose(0, 2, 1, 3).reshape(batch, length, -1)
        return [queries, turned(split(k, self.key_value_heads)), split(v, self.key_value_heads)]

    def example(self, rows: int, seed: int) -> list[mx.array]:
        """Return q, k, v ~ N(0, 1) and the table of base 10000."""
        keys = mx.random.split(mx.random.key(seed), 3)
        widths = (self.query_heads, self.key_value_heads, self.key_value_heads)
        arrays = [
            mx.random.normal((1, rows, heads * self.dimension), key=key).astype(DTYPES[self.dtype])
            for heads, key in zip(widths, keys, strict=True)
        ]
        half = mx.ones((1, 1, rows + _OFFSET, self.dimension // 2))
        ones = mx.concatenate([half, mx.zeros_like(half)], axis=-1)
        table = mx.fast.rope(ones, self.dimension, traditional=False, base=_BASE, scale=1.0, offset=0)[0, 0]
        table = mx.contiguous(table)
        mx.eval(arrays, table)
        return [*arrays, table]

    def weight_inputs(self) -> tuple[int, ...]:
        """Return no position: all inputs were just computed."""
        return ()

    def dispatch(self, candidate: RopeTile | None) -> dict[str, Any]:
        """Return the decision's fields; no family of schema v8 lists them."""
        return {
            "algorithm": "mlx" if candidate is None else "metile",
            "block": 0 if candidate is None else candidate.block,
            "rows": self.rows,
        }


_OFFSET, _BASE = 3, 10000.0


def is_valid(key: RopeKey, tile: RopeTile, limits: Limits) -> str | None:
    """Return why a candidate is inadmissible, or None where it may run."""
    if key.dimension % 2:
        return "head_dim is odd"
    if limits.is_gpu and tile.simdgroups * limits.lanes > limits.threads:
        return f"more threads than the device's {limits.threads}"
    return "block is taller than the bucket" if tile.block > key.rows else None
