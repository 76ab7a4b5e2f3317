"""The search space of a linear kernel where a threadgroup is one thread and lanes are a vector register's."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from metile.ops.linear_tile import SCHEDULES, LinearTile
from metile.targets.base import Limits

if TYPE_CHECKING:
    from metile.ops.linear import LinearKey

ROWS_AT_ONCE = 8  # the decode program's limit; above it the matrix program reads weights once as well
_MOST_GROUPS = 2040  # of a row of quantized weights, whose scales the decode program keeps beside it


def product(key: LinearKey, limits: Limits) -> Sequence[LinearTile]:
    """Return the whole product of plan fields, valid or not."""
    return _product(min(key.rows, ROWS_AT_ONCE), limits.lanes, key.format.is_dense)


def admitted(key: LinearKey, limits: Limits) -> list[LinearTile]:
    """Return the valid part of the product."""
    fitting = _fitting(min(key.rows, ROWS_AT_ONCE), key.operands, key.dtype, key.format.is_dense, limits)
    return [tile for tile in fitting if _shape_fault(key, tile, limits) is None]


def fault(key: LinearKey, tile: LinearTile, limits: Limits) -> str | None:
    """Return why a candidate is inadmissible for `key` on a device, or None where it may run."""
    dense = key.format.is_dense
    return _tile_fault(tile, key.operands, key.dtype, dense, limits) or _shape_fault(key, tile, limits)


@functools.cache
def _product(rows_at_once: int, lanes: int, dense: bool) -> tuple[LinearTile, ...]:
    """Return the whole product of plan fields, valid or not; quantized weights unroll k by themselves."""
    rows = [
        LinearTile("rows", rows_at_once, block_n, 1, wn, unroll, 0, "linear")
        for block_n, wn, unroll in itertools.product((16, 32, 64), (4, 8, 16, 32, 64), (1, 2, 4) if dense else (1,))
    ]
    matrix = [
        LinearTile("matrix", block_m, block_n, wm, wn, 1, outer_k, schedule)
        for block_m, block_n, wm, wn, outer_k, schedule in itertools.product(
            (lanes, 16, 32, 48, 64, 128),
            (16, 32, 48, 64, 96, 128, 256),
            (1, 2, 4, 8),
            (1, 2, 4, 8, 16),
            (0, 512, 2048),
            SCHEDULES,
        )
    ]
    return tuple(dict.fromkeys(rows + matrix))


@functools.cache
def _fitting(rows_at_once: int, operands: int, dtype: str, dense: bool, limits: Limits) -> tuple[LinearTile, ...]:
    """Return the part of the product that the device admits for some shape."""
    product = _product(rows_at_once, limits.lanes, dense)
    return tuple(tile for tile in product if _tile_fault(tile, operands, dtype, dense, limits) is None)


def _tile_fault(tile: LinearTile, operands: int, dtype: str, dense: bool, limits: Limits) -> str | None:
    """Return why a tile does not fit the device, whatever the shape."""
    if tile.block_n % limits.lanes or tile.block_n % tile.wn:
        return "block_n is not whole fragments for each simdgroup"
    tile_m, tile_n = tile.block_m // tile.wm, tile.block_n // tile.wn
    if tile.program == "rows" and not dense:  # the weight matrices one after the other; sums, levels, a scale
        one, fits = tile_n == 1, tile_n <= 4 and tile_n * tile_m + 6 <= limits.registers
        return None if one or fits else "accumulators do not fit the registers"
    if tile.program == "rows":
        fits = operands * tile_n * tile_m + tile_m + 1 <= limits.registers
        return None if fits else "accumulators do not fit the registers"
    if tile.block_m % tile.wm or tile_m % limits.lanes:
        return "block_m is not whole fragments for each simdgroup"
    if dtype in limits.tile_dtypes:
        groups, panels = operands * tile_n // limits.tile_rows, tile_m // limits.tile_rows
        if tile_n % limits.tile_rows or panels > 2 or not 1 <= groups * panels <= 4:
            return "accumulators do not fit the tile registers"
    elif operands * tile_n * tile_m // limits.lanes + tile_m // limits.lanes + 1 > limits.registers:
        return "accumulators do not fit the registers"
    return None


def _shape_fault(key: LinearKey, tile: LinearTile, limits: Limits) -> str | None:
    """Return why a tile that fits the device does not fit a shape."""
    if tile.block_n >= key.outputs + 64:
        return "block_n is wider than the matrix"
    if tile.program == "rows":
        if key.format.group and key.inputs // key.format.group > _MOST_GROUPS:
            return "a row has more groups than the decode program keeps scales of"
        return "more rows than the decode program takes at once" if key.rows > ROWS_AT_ONCE else None
    if tile.block_m > max(limits.lanes, _whole(key.rows, limits.lanes)):
        return "block_m is taller than the bucket"
    if tile.outer_k >= key.inputs:
        return "outer_k is not less than k"
    if tile.schedule != "linear" and key.rows <= tile.block_m:
        return "a single row of blocks has one order"
    depth = _whole(tile.outer_k or key.inputs, 2 * limits.lanes)
    if 4 * (key.operands * tile.block_n * (tile.block_m + 16) + tile.block_m * depth) > limits.threadgroup_bytes:
        return "a block does not fit threadgroup memory"
    return None


def _whole(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def distance(key: LinearKey, tile: LinearTile, limits: Limits) -> tuple[float, ...]:
    """Order candidates by how far they stand from what is known to do well; the first is the untuned default.

    At the decode end that is a few weight rows a turn; at the matrix end the largest register tile that fits, a block
    of about 128 x 128, all of k at once, and blocks that share weights side by side.
    """
    few_rows = key.rows <= 4 or (key.rows <= ROWS_AT_ONCE and key.dtype not in limits.tile_dtypes)
    accumulators = tile.block_n // tile.wn * (tile.block_m // tile.wm)
    if tile.program == "rows" and not key.format.is_dense:
        accumulators = 1  # one row of weights at a time does best
    block = abs(math.log2(tile.block_n / (64 if tile.program == "rows" else 128)))
    tall = abs(math.log2(tile.block_m / min(128, _whole(key.rows, limits.lanes)))) if tile.program == "matrix" else 0
    schedule = 0 if tile.schedule in ("linear", "grouped2") else 1
    preferred = (tile.program == "rows") == few_rows
    return (
        not preferred,
        tile.outer_k != 0,
        schedule,
        tall + block - math.log2(accumulators) / 2,
        tile.outer_k,
    )
