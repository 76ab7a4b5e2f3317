"""What a decoder layer computes, told by numbers: attention over four linears, and the pre-norm layer around it.

Both are written out here in plain MLX, with holes: where attention projects, turns and attends, and where a layer adds
its residual.
A module is taken for one of them only if it gives the same numbers, without a cache, with one, and at positions that
lie far back in a context; the patched module then runs the form written here with kernels in the holes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache

from metile.instances import plain_class
from metile.linears import dtype_of, shape_of

# q [B, H, L, D], k and v [B, H_kv, S, D], scale, mask, cache -> [B, L, H * D]
Attend = Callable[[mx.array, mx.array, mx.array, float, Any, Any], mx.array]
# q [B, L, H * D], k and v [B, L, H_kv * D]
Projected = tuple[mx.array, mx.array, mx.array]
# an attention module, its layout, x [B, L, hidden] -> its projections
Project = Callable[[Any, "AttentionLayout", mx.array], Projected]
# an attention module, its layout, its projections, its cache -> q, k and v turned, k and v [B, H_kv, L, D]
Turn = Callable[[Any, "AttentionLayout", Projected, Any], Projected]
# x, its residual branch -> their sum, and the norm of the sum
AddNorm = Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]
# the norm of the sum, the sum -> the layer's output
Feed = Callable[[mx.array, mx.array], mx.array]

_TOLERANCE = 1e-4  # of a row's norm: the same operations in the same order differ by nothing at all
_PREFIX, _MORE = 3, 2  # positions of the check: a prefix, and more over its cache
_FAR = 1 << 20  # some models scale queries by their position, but only past the context they were trained on


class _FarCache(KVCache):  # type: ignore[misc]
    """An empty cache that counts its positions from `_FAR`."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = _FAR

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.offset += keys.shape[2]
        return keys, values


@dataclass(frozen=True)
class AttentionLayout:
    """Names and numbers of an attention module: its children by what they are, its heads and its scale."""

    q: str
    k: str
    v: str
    o: str
    rope: str | None
    q_norm: str | None
    k_norm: str | None
    heads: int
    key_value_heads: int
    dimension: int
    scale: float


@dataclass(frozen=True)
class LayerLayout:
    """Names of a pre-norm layer's children by what they are."""

    first_norm: str
    attention: str
    second_norm: str
    mlp: str


def plain_project(module: Any, layout: AttentionLayout, x: mx.array) -> Projected:
    """Return q, k and v of `x`, each by its own linear."""
    return module[layout.q](x), module[layout.k](x), module[layout.v](x)


def plain_attend(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any, cache: Any) -> mx.array:
    """Attend as mlx-lm does."""
    y = scaled_dot_product_attention(q, k, v, cache=cache, scale=scale, mask=mask)
    return y.transpose(0, 2, 1, 3).reshape(q.shape[0], q.shape[2], -1)  # type: ignore[no-any-return]


def plain_turn(module: Any, layout: AttentionLayout, projected: Projected, cache: Any) -> Projected:
    """Return normed and turned q and k, and v, as [B, heads, L, D], from rows as the projections give them."""
    batch, length, _ = projected[0].shape
    heads = (layout.heads, layout.key_value_heads, layout.key_value_heads)
    norms = (layout.q_norm, layout.k_norm, None)

    def split(y: mx.array, count: int, norm: str | None) -> mx.array:
        y = y.reshape(batch, length, count, layout.dimension)
        return (module[norm](y) if norm else y).transpose(0, 2, 1, 3)

    q, k, v = (split(*parts) for parts in zip(projected, heads, norms, strict=True))
    if layout.rope is not None:
        rope, offset = module[layout.rope], 0 if cache is None else cache.offset
        q, k = rope(q, offset=offset), rope(k, offset=offset)
    return q, k, v


def attention(
    module: Any,
    layout: AttentionLayout,
    x: mx.array,
    mask: Any,
    cache: Any,
    *,
    attend: Attend,
    turn: Turn = plain_turn,
    project: Project = plain_project,
) -> mx.array:
    """Return o(attend(turn(project(x)), ...)), x and the result [B, L, hidden]."""
    q, k, v = turn(module, layout, project(module, layout, x), cache)
    if cache is not None:
        k, v = cache.update_and_fetch(k, v)
    return module[layout.o](attend(q, k, v, layout.scale, mask, cache))  # type: ignore[no-any-return]


def layer(
    module: Any, layout: LayerLayout, x: mx.array, mask: Any, cache: Any, add_norm: AddNorm, feed: Feed
) -> mx.array:
    """Return h + mlp(norm(h)) with h = x + attention(norm(x)), x and the result [B, L, hidden]."""
    branch = module[layout.attention](module[layout.first_norm](x), mask, cache)
    return feed(*reversed(add_norm(x, branch)))


def plain_layer(module: Any, layout: LayerLayout, x: mx.array, mask: Any, cache: Any) -> mx.array:
    """Run `layer` on plain MLX."""

    def add_norm(x: mx.array, branch: mx.array) -> tuple[mx.array, mx.array]:
        h = x + branch
        return h, module[layout.second_norm](h)

    return layer(module, layout, x, mask, cache, add_norm, lambda n, h: h + module[layout.mlp](n))


def arrange_attention(
    module: nn.Module, linears: Sequence[tuple[str, nn.Module]], others: Sequence[tuple[str, nn.Module]]
) -> AttentionLayout | None:
    """Tell the parts of an attention module from each other, or return None where it is something else.

    Args:
        module: holds `linears` and `others` and no parameters of its own.
        linears: four plain linears, in the order of their definition.
        others: the remaining children.
    """
    shapes = [shape_of(child) for _, child in linears]
    if len(linears) != 4 or shapes[1] != shapes[2] or shapes[0] != shapes[3][::-1] or shapes[0][1] != shapes[1][1]:
        return None
    norms = [name for name, child in others if plain_class(child) is nn.RMSNorm]
    ropes = [name for name, child in others if not child.parameters()]
    if len(norms) not in (0, 2) or len(ropes) > 1 or len(norms) + len(ropes) != len(others):
        return None
    q, k, v, o = (name for name, _ in linears)
    q_norm, k_norm = norms or (None, None)
    width, dtype = shapes[0][1], dtype_of(linears[0][1])

    def fits(layout: AttentionLayout) -> bool:
        form = functools.partial(attention, module, layout, attend=plain_attend)
        return _same(module, form, width, dtype)

    for heads, shared, dimension, scale in _numbers(module, shapes[0][0], shapes[1][0]):
        layout = AttentionLayout(
            q, k, v, o, ropes[0] if ropes else None, q_norm, k_norm, heads, shared, dimension, scale
        )
        if fits(layout):  # weights of zeros fit any numbers, and so tell nothing
            return None if fits(dataclasses.replace(layout, scale=2 * scale)) else layout
    return None


def arrange_layer(
    module: nn.Module, norms: Sequence[str], blocks: Sequence[str], width: int, dtype: mx.Dtype
) -> LayerLayout | None:
    """Tell the parts of a pre-norm layer from each other, or return None where it is something else.

    Args:
        module: holds two norms and two other modules.
        norms: their names, in the order of their definition.
        blocks: names of the other two.
        width: of the hidden state.
        dtype: of the hidden state.
    """
    for (first, second), (attend, mlp) in itertools.product(
        itertools.permutations(norms), itertools.permutations(blocks)
    ):
        layout = LayerLayout(first, attend, second, mlp)
        if _same(module, functools.partial(plain_layer, module, layout), width, dtype):
            return layout
    return None


def _numbers(module: nn.Module, q_rows: int, k_rows: int) -> Iterator[tuple[int, int, int, float]]:
    """Yield heads, key heads, head dimension and scale that an attention module's attributes allow."""
    values = list(vars(module).values())
    integers = {value for value in values if type(value) is int and value > 0}
    scales = {value for value in values if type(value) is float and value > 0}
    for heads, shared in sorted(itertools.product(integers, repeat=2), reverse=True):
        fits = q_rows % heads == 0 and k_rows % shared == 0 and heads % shared == 0
        if fits and q_rows // heads == k_rows // shared and q_rows // heads >= 8:
            dimension = q_rows // heads
            for scale in sorted(scales | {dimension**-0.5}):
                yield heads, shared, dimension, scale


def _same(module: nn.Module, form: Callable[[mx.array, Any, Any], mx.array], width: int, dtype: mx.Dtype) -> bool:
    """Return whether a module gives what `form` gives on random rows, without a cache and over each of two."""
    plain = plain_class(module).__call__
    x = (4 * mx.random.normal((1, _PREFIX + _MORE, width), key=mx.random.key(7))).astype(dtype)
    near, far = (KVCache(), KVCache()), (_FarCache(), _FarCache())
    try:
        for rows, caches in ((x, (None, None)), (x[:, :_PREFIX], near), (x[:, _PREFIX:], near), (x, far)):
            mine, theirs = caches
            if not _close(plain(module, rows, "causal", theirs), form(rows, "causal", mine)):
                return False
    except Exception:  # whatever a foreign module raises on this input, it is not of the form
        return False
    return True


def _close(expected: Any, got: mx.array) -> bool:
    if not isinstance(expected, mx.array) or expected.shape != got.shape:
        return False
    a, b = expected.astype(mx.float32), got.astype(mx.float32)
    error = mx.linalg.norm(a - b, axis=-1) - _TOLERANCE * mx.linalg.norm(a, axis=-1)
    return bool((error <= 1e-12).all().item())
