"""What a patched decoder layer and its attention do when they are called: see `metile.decoder` for the forms.

A kernel that raises is not tried again, and only its own step is computed by plain MLX: the cache has been written by
then, so that running the whole module once more would write it twice.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from metile import decoder
from metile.instances import state_of
from metile.ops.attention import AttentionKey, token_bucket
from metile.ops.base import DTYPES
from metile.patched import Entry, MlpState, Runtime, State
from metile.sites import Site


class DecoderState(State):
    """A module called with x, a mask and a cache."""

    __slots__ = ("layout",)

    def __init__(self, site: Site, runtime: Runtime) -> None:
        super().__init__(site, runtime)
        self.layout = site.layout

    def call(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """See `State.call`."""
        if 1 <= len(arguments) <= 3 and named.keys() <= {"mask", "cache"}:
            x = arguments[0]
            mask = arguments[1] if len(arguments) > 1 else named.get("mask")
            cache = arguments[2] if len(arguments) > 2 else named.get("cache")
            entries = self.ready(module, x) if len(getattr(x, "shape", ())) == 3 else None
            if entries is not None:
                return self.decode(module, x, entries, mask, cache)
        return self.plain(module, *arguments, **named)

    def decode(self, module: Any, x: mx.array, entries: tuple[Any, ...], mask: Any, cache: Any) -> mx.array:
        """Compute the module on `x` [B, L, hidden]."""
        raise NotImplementedError


class AttentionState(DecoderState):
    """Attention: plain projections, rope and cache, which may be patched themselves, around one kernel."""

    __slots__ = ("kernels", "op")

    def __init__(self, site: Site, runtime: Runtime) -> None:
        super().__init__(site, runtime)
        self.op = self.ops[0]
        self.kernels: dict[tuple[int, int], Entry | str] = {}

    def _resolve(self, rows: int) -> tuple[Entry | str, ...] | str:
        return ()  # the kernel depends on the context too, which is known when it is reached

    def decode(self, module: Any, x: mx.array, entries: tuple[Any, ...], mask: Any, cache: Any) -> mx.array:
        """See `DecoderState.decode`."""
        return decoder.attention(module, self.layout, x, mask, cache, attend=self._attend)

    def _attend(self, q: Any, k: Any, v: Any, scale: float, mask: Any, cache: Any) -> mx.array:
        entry = self._kernel(q, k, v, mask)
        if isinstance(entry, str):
            self.runtime.passed[self.feature, entry] += 1
            return decoder.plain_attend(q, k, v, scale, mask, cache)
        mx.eval(q, k, v)  # together: one by one they would wake MLX's thread three times
        key = entry.key
        assert isinstance(key, AttentionKey)
        try:
            y = key.attend(entry.kernel, entry.candidate, (q, k, v), scale=scale, causal=mask == "causal")
        except Exception as error:
            module = self.module()
            if module is not None:
                self.fail(module, error)
            return decoder.plain_attend(q, k, v, scale, mask, cache)
        entry.engaged += 1
        return y

    def _kernel(self, q: Any, k: Any, v: Any, mask: Any) -> Entry | str:
        """Return the kernel for a call, or why plain MLX runs it."""
        op: Any = self.op
        if not (isinstance(k, mx.array) and isinstance(v, mx.array)):
            return "the cache is quantized"
        if mask is not None and not (isinstance(mask, str) and mask == "causal"):
            return "the mask is an array"
        dtype = DTYPES[op.dtype]
        if q.dtype != dtype or k.dtype != dtype or v.dtype != dtype or v.shape[-1] != op.dimension:
            return "q, k and v are of other dtypes or widths than the weights say"
        length, tokens = q.shape[2], k.shape[2]
        if length > tokens:
            return "more queries than keys"
        place = length, token_bucket(tokens)
        if place not in self.kernels:
            self.kernels[place] = self.runtime.entry(self.feature, op, length, tokens)
        return self.kernels[place]


class LayerState(DecoderState):
    """A pre-norm layer: the first sum and its norm in one kernel, the second sum in the way down's epilogue."""

    __slots__ = ()

    def decode(self, module: Any, x: mx.array, entries: tuple[Any, ...], mask: Any, cache: Any) -> mx.array:
        """See `DecoderState.decode`."""
        norm = module[self.layout.second_norm]
        add_norm, *down = entries

        def add_and_norm(x: mx.array, branch: mx.array) -> tuple[mx.array, mx.array]:
            if isinstance(add_norm, Entry) and branch.shape == x.shape and branch.dtype == x.dtype:
                try:
                    total, normed = add_norm.run_all((x, branch, norm["weight"]))
                    return total, normed
                except Exception as error:
                    self.fail(module, error)
            h = x + branch
            return h, norm(h)

        def feed(normed: mx.array, h: mx.array) -> mx.array:
            mlp = module[self.layout.mlp]
            out = self._down(module, mlp, normed, h, down[0]) if down else None
            return h + mlp(normed) if out is None else out

        return decoder.layer(module, self.layout, x, mask, cache, add_and_norm, feed)

    def _down(self, module: Any, mlp: Any, normed: mx.array, h: mx.array, entry: Entry | str) -> mx.array | None:
        """Return h + mlp(normed) by the kernels of a patched SwiGLU block, or None where they do not fit."""
        state = state_of(mlp)
        if isinstance(entry, str) or not isinstance(state, MlpState) or type(mlp) is not state.cls:
            return None
        entries = state.ready(mlp, normed)
        if entries is None or isinstance(entries[0], str):
            return None
        try:
            hidden = state.hidden(mlp, normed, entries[0])
            down = mlp[state.parts[2].name]
            return entry.run((hidden, down["weight"], h))
        except Exception as error:
            self.fail(module, error)
            return None
