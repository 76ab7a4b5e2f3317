"""The search space of a linear kernel on a GPU: threadgroups of simdgroups, matrices of 8 x 8 fragments."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from metile.ops.base import DTYPES
from metile.ops.linear_tile import SCHEDULES, LinearTile
from metile.targets.base import Limits

if TYPE_CHECKING:
    from metile.ops.linear import LinearKey

ROWS_AT_ONCE = 16  # rows of x that the decode program takes with one read of the weights
FRAGMENT = 8  # rows and columns of a fragment of the matrix unit
PADDING_BYTES = 16  # between rows in threadgroup memory, against bank conflicts
_MOST_FRAGMENTS = 32  # accumulators of a simdgroup: 64 floats a lane
_MOST_SUMS = 64  # of a lane at the decode end


def product(key: LinearKey, limits: Limits) -> Sequence[LinearTile]:
    """Return the whole product of plan fields, valid or not."""
    del limits
    return _product(min(key.rows, ROWS_AT_ONCE))


def admitted(key: LinearKey, limits: Limits) -> list[LinearTile]:
    """Return the valid part of the product."""
    fitting = _fitting(min(key.rows, ROWS_AT_ONCE), key.operands, key.dtype, limits)
    return [tile for tile in fitting if _shape_fault(key, tile) is None]


def fault(key: LinearKey, tile: LinearTile, limits: Limits) -> str | None:
    """Return why a candidate is inadmissible for `key` on a device, or None where it may run."""
    return _tile_fault(tile, key.operands, key.dtype, limits) or _shape_fault(key, tile)


def threadgroup_bytes(tile: LinearTile, operands: int, dtype: str) -> int:
    """Return the threadgroup memory that a candidate takes: slices of x and of the weights."""
    size = DTYPES[dtype].size
    rows = tile.block_m + operands * tile.block_n
    return rows * (tile.outer_k * size + PADDING_BYTES) if tile.program == "matrix" and tile.outer_k else 0


@functools.cache
def _product(rows_at_once: int) -> tuple[LinearTile, ...]:
    rows = [
        LinearTile("rows", rows_at_once, each * wn, 1, wn, unroll, 0, "linear")
        for each, wn, unroll in itertools.product((2, 4, 8), (2, 4, 8, 16), (1, 2, 4))
    ]
    # Staged, a slice is unrolled by the compiler; where fragments come from device memory it is a choice.
    slices = ((1, 16), (1, 32), (1, 64), (1, 0), (2, 0))
    matrix = [
        LinearTile("matrix", block_m, block_n, wm, wn, unroll, outer_k, schedule)
        for block_m, block_n, wm, wn, (unroll, outer_k), schedule in itertools.product(
            (8, 16, 32, 64, 128), (32, 64, 128), (1, 2, 4), (1, 2, 4), slices, SCHEDULES
        )
    ]
    return tuple(rows + matrix)


@functools.cache
def _fitting(rows_at_once: int, operands: int, dtype: str, limits: Limits) -> tuple[LinearTile, ...]:
    return tuple(tile for tile in _product(rows_at_once) if _tile_fault(tile, operands, dtype, limits) is None)


def _tile_fault(tile: LinearTile, operands: int, dtype: str, limits: Limits) -> str | None:
    """Return why a tile does not fit the device, whatever the shape."""
    if tile.wm * tile.wn * limits.lanes > limits.threads:
        return f"more threads than the device's {limits.threads}"
    if threadgroup_bytes(tile, operands, dtype) > limits.threadgroup_bytes:
        return f"more threadgroup memory than the device's {limits.threadgroup_bytes} bytes"
    if tile.program == "rows":
        return _rows_fault(tile, operands)
    if tile.block_m % (FRAGMENT * tile.wm) or tile.block_n % (FRAGMENT * tile.wn):
        return "a block is not whole fragments for each simdgroup"
    fragments = operands * (tile.block_m // tile.wm // FRAGMENT) * (tile.block_n // tile.wn // FRAGMENT)
    if fragments > _MOST_FRAGMENTS:
        return "accumulators do not fit the registers"
    if fragments < operands * min(4, tile.block_m // FRAGMENT * 2):
        return "a simdgroup has too little to do"
    return None


def _rows_fault(tile: LinearTile, operands: int) -> str | None:
    if tile.block_n % tile.wn or tile.block_n // tile.wn > FRAGMENT:
        return "block_n is not a few rows for each simdgroup"
    sums = operands * (tile.block_n // tile.wn) * tile.block_m
    return "accumulators do not fit the registers" if sums > _MOST_SUMS else None


def _shape_fault(key: LinearKey, tile: LinearTile) -> str | None:
    """Return why a tile that fits the device does not fit a shape."""
    if not key.format.is_dense:
        return "quantized weights have no kernel for this device yet"
    if tile.block_n >= key.outputs + 64:
        return "block_n is wider than the matrix"
    if tile.program == "rows":
        return "more rows than the decode program takes at once" if key.rows > ROWS_AT_ONCE else None
    if tile.block_m > max(FRAGMENT, -(-key.rows // FRAGMENT) * FRAGMENT):
        return "block_m is taller than the bucket"
    if tile.outer_k >= key.inputs:
        return "outer_k is not less than k"
    if tile.schedule != "linear" and key.rows <= tile.block_m:
        return "a single row of blocks has one order"
    return None


def distance(key: LinearKey, tile: LinearTile, limits: Limits) -> tuple[float, ...]:
    """Order candidates by how far they stand from what is known to do well on GPUs; the first is the default.

    At the decode end that is a few rows of weights a simdgroup and eight simdgroups; at the matrix end a block of
    64 x 64 for four simdgroups, staged 32 deep, as MLX's own matrix kernels take it.
    """
    del limits
    preferred = (tile.program == "rows") == (key.rows <= FRAGMENT)
    if tile.program == "rows":
        rows_each = tile.block_n // tile.wn
        shape = abs(math.log2(rows_each / 4)) + abs(math.log2(tile.wn / 8)) + abs(math.log2(tile.k_unroll / 2))
        return (not preferred, shape, 0)
    tall = abs(math.log2(tile.block_m / min(64, max(FRAGMENT, key.rows))))
    shape = tall + abs(math.log2(tile.block_n / 64)) + abs(math.log2(tile.wm * tile.wn / 4))
    depth = abs(math.log2(tile.outer_k / 32)) if tile.outer_k else 1.5
    return (not preferred, SCHEDULES.index(tile.schedule) > 1, shape + depth + tile.k_unroll / 8)
