"""Scaled dot-product attention over a KV cache: the family attention.

The kernels are ``kernels/attention.metal``: one for blocks of queries (prefill) and one for a single query (decode),
which several threadgroups may share where the device lets them. What they must equal stands in
`AttentionKey.reference`; the space is `metile.ops.attention_space`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from metile.errors import mismatch
from metile.ops.attention_space import AttentionTile, is_valid, product, taken_heads
from metile.ops.base import DTYPES, check_arrays, count_reasons
from metile.ops.counters import COUNTERS
from metile.targets.base import KERNEL_TYPES, Kernel, KernelSource, Limits, Output

# Upper ends of the buckets of context length; the last also holds everything longer.
TOKEN_BUCKETS = (256, 1024, 4096, 16384, 65536)


def token_bucket(tokens: int) -> int:
    """Return the upper end of the bucket that holds a context of `tokens`."""
    return next((bucket for bucket in TOKEN_BUCKETS if tokens <= bucket), TOKEN_BUCKETS[-1])


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
        return [tile for tile in product(self, limits) if is_valid(self, tile, limits) is None]

    def pruned(self, limits: Limits) -> dict[str, int]:
        """Return why candidates were left out."""
        reasons = (is_valid(self, tile, limits) for tile in product(self, limits))
        return count_reasons([reason for reason in reasons if reason])

    def source(self, candidate: AttentionTile, counted: bool = False) -> KernelSource:
        """Return the kernel of a candidate; scale (as the bits of a float) and causal are numbers of its launch.

        The number of parts is one as well, so that one kernel serves all contexts and all candidates that share it.

        Args:
            candidate: from `space`.
            counted: whether the number of tokens is read from an array, ``count``, when the kernel runs.
        """
        t, c, d = KERNEL_TYPES[DTYPES[self.dtype]], candidate, self.dimension
        numbers: tuple[str, ...] = ("scale", "causal", "heads", "tokens", "whole")
        inputs: tuple[str, ...] = ("q", "k", "v")
        outputs: tuple[str, ...] = ("y",)
        more, tail = "", "group"
        if c.program == "rows":
            shared = taken_heads(self, c)
            program = f"attention_rows<{t}, {d}, {shared}, {c.block_keys}>"
            scratch = (
                f"RowAccumulator<{t}, 1, {shared}, {c.block_keys}, row_wn({c.block_keys}, {shared}), 1, {d}>::bytes"
                f" + QueryRows<{t}, {shared}, {c.block_keys}, {d}>::bytes + RowStage<{t}, {shared}>::bytes({d})"
            )
            name = f"attention_{self.dtype}_d{d}_h{shared}_{replace(c, parts=1, heads=0).label()}"
            if c.parts > 1:
                program, name = program.replace("rows", "rows_split"), f"{name}_split"
                # A kernel reads inputs only, as MLX sees it; these it counts in, and leaves as they were.
                more = "(device float*)partials.data, (device uint*)counters.data, "
                tail = "parts, group"
                inputs, outputs, numbers = (*inputs, "counters"), (*outputs, "partials"), (*numbers, "parts")
        else:
            program, tail = f"attention_matrix<{t}, {d}, {c.block}, {c.block_keys}>", "causal, group"
            tile = f"{c.block}, {c.block_keys}, score_wm({c.block}), score_wn({c.block_keys}), 1, 0"
            scratch = (
                f"Accumulator<{t}, 1, {tile}>::bytes({d})"
                f" + QueryBlock<{t}, {c.block}, {c.block_keys}, {d}>::bytes + Stage<{t}, {c.block}, {d}>::bytes({d})"
            )
            name = f"attention_{self.dtype}_d{d}_{c.label()}"
        device = f"const device {t}"
        tokens = "*(const device int*)count.data" if counted else "tokens"
        k, v = (f"upto(::heads<{device}>({name}), {tokens})" for name in "kv")
        arrays = f"queries<{device}>(q, heads), {k}, {v}"
        if counted:
            inputs, name = (*inputs, "count"), f"{name}_counted"
        return KernelSource(
            name=name,
            program="attention.metal",
            body=f"{program}({arrays}, heads_inside<device {t}>(y, heads), {more}float_of_bits(scale), {tail});",
            inputs=inputs,
            outputs=outputs,
            numbers=numbers,
            scratch=scratch,
            strided=inputs,  # and so the counters are handed over as they lie, never as a copy
            simdgroups=c.simdgroups,
        )

    def parts(self, candidate: AttentionTile, tokens: int) -> int:
        """Return how many threadgroups share the keys of a head in a launch: none that would have no block of them."""
        return max(1, min(candidate.parts, -(-tokens // candidate.block_keys)))

    def arrays(self, candidate: AttentionTile, inputs: Sequence[mx.array]) -> list[mx.array]:
        """Return all that a launch of a candidate reads: q, k, v and, where threadgroups share the keys, counters."""
        if candidate.parts == 1:
            return list(inputs)
        return [*inputs, COUNTERS.take(max(1, inputs[0].shape[0] * self.query_heads // taken_heads(self, candidate)))]

    def attend(
        self,
        kernel: Kernel,
        candidate: AttentionTile,
        inputs: Sequence[mx.array],
        *,
        scale: float,
        causal: bool,
        tokens: int = 0,
        whole: bool = False,
        count: mx.array | None = None,
        counters: mx.array | None = None,
        poison: bool = False,
    ) -> mx.array:
        """Run on q [B, H, L, D] or [B, L, H * D], and k, v [B, H_kv, S, D]; return [B, L, H * D].

        Args:
            kernel: of the candidate.
            candidate: from `space`.
            inputs: q, k and v.
            scale: of the scores.
            causal: whether a query sees only the keys up to its own; the last query sees all.
            tokens: keys that count, the first ones of k and v; 0 for all.
            whole: whether q, k and v are contiguous, so that a target need not read their strides.
            count: the same number as an array int32 [1], for a kernel that reads it there.
            counters: zeros to count in, in place of some of the pool's, uint32, one for each threadgroup of a part.
            poison: let the output hold NaN until it is written.

        Raises:
            MetileError: an input is of another shape or dtype, a causal mask has no key for the first query, or the
                candidate takes one query and there are more.
        """
        if [array.ndim for array in inputs] not in ([4, 4, 4], [3, 4, 4]):
            expected = "q [B, H, L, D] or [B, L, H * D], and k, v [B, H_kv, S, D]"
            raise mismatch(self.family, expected, ", ".join(str(array.shape) for array in inputs))
        q, k, _ = inputs
        batch, rows, room = q.shape[0], q.shape[-2 if q.ndim == 4 else 1], k.shape[2]
        query_heads, dimension = self.query_heads, self.dimension
        queries = (batch, query_heads, rows, dimension) if q.ndim == 4 else (batch, rows, query_heads * dimension)
        cached = (batch, self.key_value_heads, room, dimension)
        check_arrays(self.family, inputs, (queries, cached, cached), self.dtype)
        if not 0 <= tokens <= room:
            raise mismatch(self.family, f"at most {room} tokens, as many as k holds", tokens)
        if causal and rows > (tokens or room):
            raise mismatch(self.family, "a key for each query", f"{rows} queries and {tokens or room} keys")
        if candidate.program == "rows" and rows != 1:
            raise mismatch(self.family, f"one query for {candidate.label()}", rows)
        if candidate.program == "rows":
            groups = batch * query_heads // taken_heads(self, candidate)
        else:
            groups = batch * query_heads * -(-rows // candidate.block)
        bits = struct.unpack("<i", struct.pack("<f", scale))[0]
        outputs = [Output((batch, rows, query_heads * dimension), q.dtype)]
        numbers = [bits, int(causal), query_heads, tokens, int(whole)]
        if candidate.parts > 1:
            shared = taken_heads(self, candidate)
            parts = candidate.parts if count is not None else self.parts(candidate, tokens or room)
            outputs.append(Output((groups, parts, shared, dimension + 2), mx.float32))
            numbers.append(parts)
            groups *= parts
        arrays = (
            self.arrays(candidate, inputs) if counters is None else [*inputs, counters][: 3 + (candidate.parts > 1)]
        )
        arrays += [] if count is None else [count]
        return kernel(arrays, outputs, groups=groups, numbers=numbers, poison=poison)[0]

    def launch(
        self, kernel: Kernel, candidate: AttentionTile, inputs: Sequence[mx.array], *, poison: bool = False
    ) -> list[mx.array]:
        """Run with the scale and mask of `reference` on contiguous arrays."""
        scale = 1 / math.sqrt(self.dimension)
        return [self.attend(kernel, candidate, inputs, scale=scale, causal=True, whole=True, poison=poison)]

    def reference(self, inputs: Sequence[mx.array]) -> list[mx.array]:
        """Return plain MLX's causal attention at scale 1/sqrt(D), as [B, L, H * D]."""
        q, k, v = inputs
        mask = "causal" if q.shape[2] > 1 else None
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=1 / math.sqrt(self.dimension), mask=mask)
        return [y.transpose(0, 2, 1, 3).reshape(*y.shape[::2], -1)]

    def example(self, rows: int, seed: int) -> list[mx.array]:
        """Return q, k, v ~ N(0, 1), contiguous."""
        keys = mx.random.split(mx.random.key(seed), 3)
        context = max(rows, self.tokens * 3 // 4)
        cached = self.key_value_heads, max(context, self.tokens)
        shapes = ((self.query_heads, rows), cached, cached)
        q, k, v = (
            mx.random.normal((self.batch, heads, length, self.dimension), key=key).astype(DTYPES[self.dtype])
            for (heads, length), key in zip(shapes, keys, strict=True)
        )
        mx.eval(q, k, v)
        arrays = [q, *(mx.contiguous(array[..., :context, :]) for array in (k, v))]
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
