"""What a patched decoder layer and its attention do when they are called: see `metile.decoder` for the forms.

A kernel that raises is not tried again, and only its own step is computed by plain MLX: the cache has been written by
then, so that running the whole module once more would write it twice.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from metile import decoder
from metile.instances import state_of
from metile.ops.attention import AttentionKey, token_bucket
from metile.ops.base import DTYPES
from metile.patched import TRACED, Entry, MlpState, Runtime, State
from metile.patched_projections import Projections
from metile.rotary import rope_kind
from metile.sites import Site
from metile.step_cache import RecordedCache, StepCache, UntraceableError
from metile.targets.base import EAGER_TARGETS, Kernel
from metile.tracing import is_traced

# By the number of positional arguments, which of x, mask and cache may come by name.
_NAMED = (frozenset[str](), frozenset(("mask", "cache")), frozenset(("cache",)), frozenset[str]())


# Caches whose offset is one number for all sequences, and which keep k and v as they are given.
_CACHES = (type(None), KVCache, RotatingKVCache, RecordedCache)


def _holds(cache: Any, shape: tuple[int, ...]) -> bool:
    """Return whether keys of a shape are the first ones of a cache's own array, which is contiguous."""
    if type(cache) is not KVCache or cache.keys is None:
        return False
    batch, heads, tokens, dimension = shape
    held = cache.keys.shape
    return bool(held[:2] == (batch, heads) and held[3] == dimension and tokens == cache.offset <= held[2])


class DecoderState(State):
    """A module called with x, a mask and a cache."""

    __slots__ = ("layout",)
    reads_input = False

    def __init__(self, site: Site, runtime: Runtime) -> None:
        super().__init__(site, runtime)
        self.layout = site.layout

    def call(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """See `State.call`."""
        if 1 <= len(arguments) <= 3 and named.keys() <= _NAMED[len(arguments)]:
            x, entries = arguments[0], None
            mask = arguments[1] if len(arguments) > 1 else named.get("mask")
            cache = arguments[2] if len(arguments) > 2 else named.get("cache")
            try:
                entries = self.ready(module, x) if len(getattr(x, "shape", ())) == 3 else None
            except Exception as error:
                self.fail(module, error)
            if entries is not None:
                return self.decode(module, x, entries, mask, cache)
        return self.plain(module, *arguments, **named)

    def decode(self, module: Any, x: mx.array, entries: tuple[Any, ...], mask: Any, cache: Any) -> mx.array:
        """Compute the module on `x` [B, L, hidden]."""
        raise NotImplementedError


class AttentionState(DecoderState):
    """Attention: projections, rope and attention by a kernel each, around a plain cache and output projection.

    What the plan leaves out is plain MLX, or what the module's children are patched with themselves.
    """

    __slots__ = ("kernels", "op", "projections", "rope", "rope_kind", "turner")

    def __init__(self, site: Site, runtime: Runtime) -> None:
        super().__init__(site, runtime)
        self.op: Any = site.ops.get("attention")
        self.rope = site.ops.get("rope")
        self.projections = Projections(site, runtime) if "projections" in site.ops else None
        if self.projections is not None:
            self.read = self.projections.parts
        turner = site.module[self.layout.rope] if self.rope else None
        self.rope_kind = () if turner is None else rope_kind(turner)
        self.turner: tuple[Any, ...] = () if turner is None else (turner, dict(vars(turner)), dict(turner))
        self.kernels: dict[tuple[int, int], Entry | str] = {}

    def _resolve(self, rows: int) -> tuple[Entry | str, ...] | str:
        return ()  # the kernel depends on the context too, which is known when it is reached

    def decode(self, module: Any, x: mx.array, entries: tuple[Any, ...], mask: Any, cache: Any) -> mx.array:
        """See `DecoderState.decode`."""
        attend = decoder.plain_attend if self.op is None else self._attend
        return decoder.attention(
            module, self.layout, x, mask, cache, attend=attend, turn=self._turn, project=self._project
        )

    def outdated(self, module: Any) -> bool:
        """See `State.outdated`."""
        return super().outdated(module) or (self.projections is not None and not self.projections.unchanged(module))

    def _project(self, module: Any, layout: Any, x: mx.array) -> decoder.Projected:
        projected = None
        if self.projections is not None:
            try:
                projected = self.projections.run(module, x)
            except Exception as error:
                self.fail(module, error)
        return decoder.plain_project(module, layout, x) if projected is None else projected

    def _turn(self, module: Any, layout: Any, projected: decoder.Projected, cache: Any) -> decoder.Projected:
        try:
            turned = self._turned(module, projected, cache)
        except Exception as error:
            turned = None
            self.fail(module, error)
        return decoder.plain_turn(module, layout, projected, cache) if turned is None else turned

    def _turned(self, module: Any, projected: decoder.Projected, cache: Any) -> decoder.Projected | None:
        """Return q [B, L, H * D], k and v [B, H_kv, L, D] by the kernel, or None where it does not fit."""
        if self.rope is None or type(cache) not in _CACHES:
            return None
        rope, numbers, arrays = self.turner
        if module.get(self.layout.rope) is not rope or vars(rope) != numbers:
            return None  # it turns by other angles than when its table was made
        if arrays and any(rope.get(name) is not array for name, array in arrays.items()):
            return None
        length = projected[0].shape[1]
        entry = self.runtime.entry(self.feature, self.rope, length)
        dtype = DTYPES[self.op.dtype]
        if isinstance(entry, str) or any(y.dtype != dtype for y in projected) or is_traced(*projected):
            return None
        offset = 0 if cache is None else cache.offset
        table = self.runtime.table(self.rope_kind, rope, offset + length, self.op.dimension)
        key: Any = entry.key
        q, k, v = key.turn(entry.kernel, entry.candidate, (*projected, table), offset=offset)
        entry.engaged += 1
        return q, k, v

    def _attend(self, q: Any, k: Any, v: Any, scale: float, mask: Any, cache: Any) -> mx.array:
        if isinstance(cache, StepCache):
            return self._attend_counted((q, k, v), scale, cache)
        try:
            entry = self._kernel(q, k, v, mask)
            if isinstance(entry, Entry):
                return self._launch(entry, (q, k, v), scale, mask == "causal", cache)
            self.runtime.passed[self.feature, entry] += 1
        except Exception as error:
            module = self.module()
            if module is not None:
                self.fail(module, error)
        if q.ndim == 3:
            q = q.reshape(*q.shape[:2], self.op.query_heads, -1).transpose(0, 2, 1, 3)
        return decoder.plain_attend(q, k, v, scale, mask, cache)

    def _launch(self, entry: Entry, inputs: tuple[mx.array, ...], scale: float, causal: bool, cache: Any) -> mx.array:
        key, tokens = entry.key, 0
        assert isinstance(key, AttentionKey)
        candidate: Any = entry.candidate
        parts = key.parts(candidate, inputs[1].shape[2])
        if self.runtime.target.name in EAGER_TARGETS:
            mx.eval(inputs)  # together: one by one they would wake MLX's thread three times
        elif _holds(cache, inputs[1].shape):
            tokens = inputs[1].shape[2]
            inputs = (inputs[0], cache.keys, cache.values)

        def launch(kernel: Kernel) -> list[mx.array]:
            whole = tokens > 0
            return [key.attend(kernel, candidate, inputs, scale=scale, causal=causal, tokens=tokens, whole=whole)]

        place = inputs[0].shape, causal, parts, tokens, inputs[1].shape[2] if tokens else 0
        return entry.run_bound(place, launch, key.arrays(candidate, inputs))[0]

    def _attend_counted(self, inputs: tuple[mx.array, ...], scale: float, cache: StepCache) -> mx.array:
        """Attend over as many tokens as the cache says when the step runs.

        Raises:
            UntraceableError: no kernel of one query was decided.
        """
        entry = self.runtime.counted(self.feature, self.op, cache.tokens)
        if isinstance(entry, str):
            raise UntraceableError(entry)
        key: Any = entry.key
        cache.attended = True
        entry.engaged += 1
        return key.attend(  # type: ignore[no-any-return]
            entry.kernel,
            entry.candidate,
            inputs,
            scale=scale,
            causal=False,
            whole=True,
            count=cache.count,
            counters=cache.counters,
        )

    def _kernel(self, q: Any, k: Any, v: Any, mask: Any) -> Entry | str:
        """Return the kernel for a call, or why plain MLX runs it."""
        op = self.op
        if not (isinstance(k, mx.array) and isinstance(v, mx.array)):
            return "the cache is quantized"
        if mask is not None and not (isinstance(mask, str) and mask == "causal"):
            return "the mask is an array"
        dtype = DTYPES[op.dtype]
        if (
            q.dtype != dtype
            or k.dtype != dtype
            or v.dtype != dtype
            or v.shape[-1] != op.dimension
            or k.shape != v.shape
        ):
            return "q, k and v are of other dtypes or widths than the weights say"
        length, tokens = q.shape[1 if q.ndim == 3 else 2], k.shape[2]
        if length > tokens:
            return "more queries than keys"
        place = length, token_bucket(tokens)
        if place not in self.kernels:
            self.kernels[place] = self.runtime.entry(self.feature, op, length, tokens)
        # One may be traced without the others: a cache, or the weights of one.
        return TRACED if is_traced(q, k, v) else self.kernels[place]


class LayerState(DecoderState):
    """A pre-norm layer: the first sum and its norm in one kernel, the second sum in the way down's epilogue."""

    __slots__ = ("eps",)

    def __init__(self, site: Site, runtime: Runtime) -> None:
        super().__init__(site, runtime)
        self.eps = site.module[self.layout.second_norm].eps

    def changed(self, module: Any) -> str | None:
        """See `State.changed`."""
        reason = super().changed(module)
        eps = module[self.layout.second_norm].eps if reason is None else self.eps
        return reason if eps == self.eps else "its eps was changed"

    def decode(self, module: Any, x: mx.array, entries: tuple[Any, ...], mask: Any, cache: Any) -> mx.array:
        """See `DecoderState.decode`."""
        add_norm, *down = entries
        return decoder.layer(
            module,
            self.layout,
            x,
            mask,
            cache,
            lambda x, branch: self._add_norm(module, x, branch, add_norm),
            lambda normed, h: self._feed(module, normed, h, down[0] if down else None),
        )

    def _add_norm(self, module: Any, x: mx.array, branch: mx.array, entry: Entry | str) -> tuple[mx.array, mx.array]:
        """Return the sum of `x` and `branch`, and its norm."""
        norm = module[self.layout.second_norm]
        if isinstance(entry, Entry) and branch.shape == x.shape and branch.dtype == x.dtype:
            if is_traced(branch):  # and so it is if x is
                self.runtime.passed[self.feature, TRACED] += 1
            else:
                try:
                    total, normed = entry.run_all((x, branch, norm["weight"]))
                    return total, normed
                except Exception as error:
                    self.fail(module, error)
        h = x + branch
        return h, norm(h)

    def _feed(self, module: Any, normed: mx.array, h: mx.array, entry: Entry | str | None) -> mx.array:
        """Return h + mlp(normed): by the kernels of a patched SwiGLU block, where they fit."""
        mlp = module[self.layout.mlp]
        state = state_of(mlp)
        if not isinstance(entry, Entry) or not isinstance(state, MlpState) or not state.runs(mlp):
            return h + mlp(normed)  # type: ignore[no-any-return]
        try:
            entries = state.ready(mlp, normed)
            hidden = None if entries is None else state.hidden(mlp, normed, entries[0])
        except Exception as error:
            state.fail(mlp, error)
            hidden = None
        if hidden is None:
            return h + state.plain(mlp, normed)  # type: ignore[no-any-return]
        down = mlp[state.parts[2].name]
        try:
            return entry.run((hidden, *state.parts[2].matrix(down), h))
        except Exception as error:
            self.fail(module, error)
        return h + down(hidden)  # type: ignore[no-any-return]
