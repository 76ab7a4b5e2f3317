"""Rope as a table: the cosine and sine of each position, read off the module itself.

Turning (1, 0) by a position's angle gives its cosine and sine, whatever formula a rope module has for the angles. Only
that the module turns pairs (i, i + D/2), each by an angle of the position alone, has to be known, and is tried.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

_CHUNK = 1024  # positions a table grows by
_TOLERANCE = 1e-4
_FAR = 1 << 20  # a position beyond what models were trained for


def rope_table(rope: Any, positions: int, dimension: int) -> mx.array:
    """Return cosines and sines of the first `positions` or more: shape [positions, dimension], float32."""
    rows = -(-positions // _CHUNK) * _CHUNK
    ones = mx.ones((1, 1, rows, dimension // 2), mx.float32)
    unit = mx.concatenate([ones, mx.zeros_like(ones)], axis=-1)
    table = mx.contiguous(rope(unit, offset=0)[0, 0])
    mx.eval(table)
    return table


def turns_halves(rope: Any, dimension: int) -> bool:
    """Return whether a module turns the pairs (i, i + D/2) of a head by angles that depend on the position alone."""
    half, offset, rows = dimension // 2, 37, 5
    x = mx.random.normal((2, 3, rows, dimension), key=mx.random.key(11))
    try:
        got = rope(x, offset=offset)
        table = rope_table(rope, offset + rows, dimension)[offset : offset + rows]
        far = [rope(mx.broadcast_to(x[:1, :1, :1], (1, 1, n, dimension)), offset=_FAR)[0, 0, 0] for n in (1, 512)]
    except Exception:  # whatever a foreign module raises, it is not of the form
        return False
    if got.shape != x.shape or table.shape != (rows, dimension):
        return False
    if not mx.array_equal(far[0], far[1]).item():
        return False  # the angles change with the length of the context
    c, s = table[:, :half], table[:, half:]
    first, second = x[..., :half], x[..., half:]
    expected = mx.concatenate([first * c - second * s, first * s + second * c], axis=-1)
    return bool((mx.abs(got - expected).max() <= _TOLERANCE).item())


def rope_kind(rope: nn.Module) -> tuple[Any, ...]:
    """Return what rope modules have in common that turn by the same angles: their class and everything they hold."""
    held = {**vars(rope), **rope}
    known = ((name, value.tolist() if isinstance(value, mx.array) else value) for name, value in held.items())
    return (type(rope), *sorted((name, repr(value)) for name, value in known))
