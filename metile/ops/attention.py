"""Scaled dot-product attention over a KV cache: the family attention.

The kernels are ``kernels/attention.metal``: one for blocks of queries (prefill) and one for a single query (decode).
What they must equal stands in `AttentionKey.reference`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from metile.errors import mismatch
from metile.ops.base import DTYPES, check_arrays, count_reasons
from metile.targets.base import KERNEL_TYPES, Kernel, KernelSource, Limits, Output

# Upper ends of the buckets of context length; the last also holds everything longer.
TOKEN_BUCKETS = (256, 1024, 4096, 16384, 65536)
_HEAD_DIMS = (64, 80, 96, 128, 256)
_FRAGMENT = 8  # rows and columns of a fragment of a GPU's matrix unit
_MOST_FLOATS = 256  # of scores and outputs that a lane may hold


def token_bucket(tokens: int) -> int:
    """Return the upper end of the bucket that holds a context of `tokens`."""
    return next((bucket for bucket in TOKEN_BUCKETS if tokens <= bucket), TOKEN_BUCKETS[-1])


@dataclass(frozen=True)
class AttentionTile:
    """A point of the search space of an attention kernel.

    Attributes:
        program: ``rows``, one query of all heads that share a key head, or ``matrix``, blocks of queries.
        block: queries a threadgroup takes.
        block_keys: keys taken between two updates of the running maximum.
        simdgroups: simdgroups of a threadgroup on a GPU; they share the queries of a block, or the keys.
    """

    program: Literal["rows", "matrix"]
    block: int
    block_keys: int
    simdgroups: int = 1

    def label(self) -> str:
        """Return the fields as one word."""
        ending = f"_s{self.simdgroups}" if self.simdgroups > 1 else ""
        return f"{self.program}_b{self.block}_bk{self.block_keys}{ending}"


@dataclass(frozen=True)
class AttentionKey:
    """Attention at one bucket of queries and one of context.

    Attributes:
        rows: upper end of the bucket of queries.
        tokens: upper end of the bucket of context, the queries included.
        query_heads: heads of q.
        key_value_heads: heads of k and v; divides `query_heads`.
        dimension: of a head.
        dtype: of q, k, v and the output.
        batch: sequences.
    """

    rows: int
    tokens: int
    query_heads: int
    key_value_heads: int
    dimension: int
    dtype: str
    batch: int = 1

    family = "attention"
    margin = 0.02

    def subject(self) -> str:
        """Return the key as one line."""
        return (
            f"attention rows={self.rows} tokens={self.tokens} heads={self.query_heads}/{self.key_value_heads}"
            f" dim={self.dimension} batch={self.batch} {self.dtype}"
        )

    def space(self, limits: Limits) -> list[AttentionTile]:
        """Return the admissible candidates, the untuned default first."""
        return [tile for tile in _product(self, limits) if is_valid(self, tile, limits) is None]

    def pruned(self, limits: Limits) -> dict[str, int]:
        """Return why candidates were left out."""
        reasons = (is_valid(self, tile, limits) for tile in _product(self, limits))
        return count_reasons([reason for reason in reasons if reason])

    def source(self, candidate: AttentionTile) -> KernelSource:
        """Return the kernel of a candidate; scale (as the bits of a float) and causal are numbers of its launch."""
        t, c, d = KERNEL_TYPES[DTYPES[self.dtype]], candidate, self.dimension
        if c.program == "rows":
            shared = self.query_heads // self.key_value_heads
            call, tail = f"attention_rows<{t}, {d}, {shared}, {c.block_keys}>", "group"
            scratch = (
                f"RowAccumulator<{t}, 1, {shared}, {c.block_keys}, row_wn({c.block_keys}, {shared}), 1, {d}>::bytes"
                f" + QueryRows<{t}, {shared}, {c.block_keys}, {d}>::bytes + RowStage<{t}, {shared}>::bytes({d})"
            )
            name = f"attention_{self.dtype}_d{d}_h{shared}_{c.label()}"
        else:
            call, tail = f"attention_matrix<{t}, {d}, {c.block}, {c.block_keys}>", "causal, group"
            tile = f"{c.block}, {c.block_keys}, score_wm({c.block}), score_wn({c.block_keys}), 1, 0"
            scratch = (
                f"Accumulator<{t}, 1, {tile}>::bytes({d})"
                f" + QueryBlock<{t}, {c.block}, {c.block_keys}, {d}>::bytes + Stage<{t}, {c.block}, {d}>::bytes({d})"
            )
            name = f"attention_{self.dtype}_d{d}_{c.label()}"
        device = f"const device {t}"
        arrays = f"queries<{device}>(q, heads), ::heads<{device}>(k), ::heads<{device}>(v)"
        return KernelSource(
            name=name,
            program="attention.metal",
            body=f"{call}({arrays}, heads_inside<device {t}>(y, heads), float_of_bits(scale), {tail});",
            inputs=("q", "k", "v"),
            outputs=("y",),
            numbers=("scale", "causal", "heads"),
            scratch=scratch,
            strided=("q", "k", "v"),
            simdgroups=c.simdgroups,
        )

    def attend(
        self,
        kernel: Kernel,
        candidate: AttentionTile,
        inputs: Sequence[mx.array],
        *,
        scale: float,
        causal: bool,
        poison: bool = False,
    ) -> mx.array:
        """Run on q [B, H, L, D] or [B, L, H * D], and k, v [B, H_kv, S, D]; return [B, L, H * D].

        Raises:
            MetileError: an input is of another shape or dtype, a causal mask has no key for the first query, or the
                candidate takes one query and there are more.
        """
        if [array.ndim for array in inputs] not in ([4, 4, 4], [3, 4, 4]):
            expected = "q [B, H, L, D] or [B, L, H * D], and k, v [B, H_kv, S, D]"
            raise mismatch(self.family, expected, ", ".join(str(array.shape) for array in inputs))
        q, k, _ = inputs
        batch, rows, tokens = q.shape[0], q.shape[-2 if q.ndim == 4 else 1], k.shape[2]
        query_heads, dimension = self.query_heads, self.dimension
        queries = (batch, query_heads, rows, dimension) if q.ndim == 4 else (batch, rows, query_heads * dimension)
        cached = (batch, self.key_value_heads, tokens, dimension)
        check_arrays(self.family, inputs, (queries, cached, cached), self.dtype)
        if causal and rows > tokens:
            raise mismatch(self.family, "a key for each query", f"{rows} queries and {tokens} keys")
        if candidate.program == "rows" and rows != 1:
            raise mismatch(self.family, f"one query for {candidate.label()}", rows)
        if candidate.program == "rows":
            groups = batch * self.key_value_heads
        else:
            groups = batch * query_heads * -(-rows // candidate.block)
        bits = struct.unpack("<i", struct.pack("<f", scale))[0]
        output = Output((batch, rows, query_heads * dimension), q.dtype)
        return kernel(inputs, (output,), groups=groups, numbers=(bits, int(causal), query_heads), poison=poison)[0]

    def launch(
        self, kernel: Kernel, candidate: AttentionTile, inputs: Sequence[mx.array], *, poison: bool = False
    ) -> list[mx.array]:
        """Run with the scale and mask of `reference`."""
        scale = 1 / math.sqrt(self.dimension)
        return [self.attend(kernel, candidate, inputs, scale=scale, causal=True, poison=poison)]

    def reference(self, inputs: Sequence[mx.array]) -> list[mx.array]:
        """Return plain MLX's causal attention at scale 1/sqrt(D), as [B, L, H * D]."""
        q, k, v = inputs
        mask = "causal" if q.shape[2] > 1 else None
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=1 / math.sqrt(self.dimension), mask=mask)
        return [y.transpose(0, 2, 1, 3).reshape(*y.shape[::2], -1)]

    def example(self, rows: int, seed: int) -> list[mx.array]:
        """Return q, k, v ~ N(0, 1); k and v are slices of a longer cache, as in use."""
        keys = mx.random.split(mx.random.key(seed), 3)
        context = max(rows, self.tokens * 3 // 4)
        cached = self.key_value_heads, max(context, self.tokens)
        shapes = ((self.query_heads, rows), cached, cached)
        q, k, v = (
            mx.random.normal((self.batch, heads, length, self.dimension), key=key).astype(DTYPES[self.dtype])
            for (heads, length), key in zip(shapes, keys, strict=True)
        )
        mx.eval(q, k, v)
        arrays = [q, k[..., :context, :], v[..., :context, :]]
        mx.eval(arrays)
        return arrays

    def weight_inputs(self) -> tuple[int, ...]:
        """Return the positions of k and v, which a decode step finds cold as it finds weights."""
        return (1, 2)

    def dispatch(self, candidate: AttentionTile | None) -> dict[str, Any]:
        """Return the entry of ``selected_dispatches``; v8 lists the decode step."""
        return {
            "algorithm": "mlx" if candidate is None else "metile",
            "batch": self.batch,
            "block": 0 if candidate is None else candidate.block_keys,
            "dimension": self.dimension,
            "dtype": f"mlx.core.{self.dtype}",
            "key_value_heads": self.key_value_heads,
            "query_heads": self.query_heads,
            "token_bucket": self.tokens,
        }


def _product(key: AttentionKey, limits: Limits) -> list[AttentionTile]:
    if limits.is_gpu:
        keys = [(64, 8), (32, 8), (32, 4), (64, 16), (128, 16), (128, 32)]
        rows = [AttentionTile("rows", 1, block_keys, count) for block_keys, count in keys]
        blocks = [(32, 4), (16, 2), (32, 2), (64, 4), (64, 8), (8, 1)]
        matrix = [AttentionTile("matrix", block, keys, count) for block, count in blocks for keys in (32, 16, 64)]
    else:
        rows = [AttentionTile("rows", 1, block_keys) for block_keys in (128, 64, 256)]
        heights = dict.fromkeys((2 * limits.lanes, limits.lanes, 4 * limits.lanes))
        matrix = [AttentionTile("matrix", height, keys) for height in heights for keys in (64, 32, 128)]
    return rows + matrix if key.rows == 1 else matrix + rows


def is_valid(key: AttentionKey, tile: AttentionTile, limits: Limits) -> str | None:
    """Return why a candidate is inadmissible for `key` on a device, or None where it may run."""
    if key.dimension not in _HEAD_DIMS or key.dimension % (_FRAGMENT if limits.is_gpu else limits.lanes):
        return f"head_dim is none of {', '.join(map(str, _HEAD_DIMS))}"
    if key.query_heads % key.key_value_heads or key.query_heads // key.key_value_heads > 16:
        return "more than 16 query heads share a key head, or an uneven number"
    if tile.program == "rows" and key.rows > 1:
        return "more than one query"
    return _gpu_fault(key, tile, limits) if limits.is_gpu else _cpu_fault(key, tile, limits)


def _cpu_fault(key: AttentionKey, tile: AttentionTile, limits: Limits) -> str | None:
    if tile.program == "rows":
        return None
    if key.rows < limits.lanes // 2:
        return "fewer queries than half the lanes"
    if tile.block > max(limits.lanes, -(-key.rows // limits.lanes) * limits.lanes):
        return "block is taller than the bucket"
    scores, outputs = tile.block * tile.block_keys, (tile.block + tile.block_keys) * key.dimension
    if 4 * (scores + 2 * outputs) > limits.threadgroup_bytes:
        return "a block does not fit threadgroup memory"
    return None


def _gpu_fault(key: AttentionKey, tile: AttentionTile, limits: Limits) -> str | None:
    if tile.simdgroups * limits.lanes > limits.threads:
        return f"more threads than the device's {limits.threads}"
    columns = -(-key.dimension // limits.lanes)  # of a row that a lane holds
    if tile.program == "rows":
        shared = key.query_heads // key.key_value_heads
        floats = shared * (tile.block_keys // tile.simdgroups + 2 * columns)
        memory = 4 * tile.simdgroups * (columns * limits.lanes + 2)
    else:
        if tile.block > max(_FRAGMENT, -(-key.rows // _FRAGMENT) * _FRAGMENT):
            return "block is taller than the bucket"
        fragments = tile.block // tile.simdgroups // _FRAGMENT
        floats = fragments * (tile.block_keys + key.dimension) // 4
        memory = tile.block * (key.dimension * DTYPES[key.dtype].size + 16)
    if floats > _MOST_FLOATS:
        return "scores and outputs do not fit the registers"
    return "a block does not fit threadgroup memory" if memory > limits.threadgroup_bytes else None
