"""The search space of a linear kernel on an NVIDIA GPU: see ``kernels/tile/cuda/matrix.h`` and ``rows.h``.

Four ways to multiply, told apart by the plan's fields. At the decode end ``rows`` reads every weight once for up to
four rows of x. ``matrix`` takes weights from where they lie (``outer_k`` 0, warps may share k), through a ring in
shared memory for a warp's products, or through a ring for a warpgroup's (``k_unroll`` 4).

Quantized weights have the same four ways. They are unpacked in registers: to be multiplied there, or on their way to
the ring, which holds values of the dtype of x, as it does of dense weights.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from metile.ops.base import DTYPES
from metile.ops.linear_tile import SCHEDULES, LinearTile
from metile.targets.base import Limits

if TYPE_CHECKING:
    from metile.ops.linear import LinearKey
    from metile.ops.weights import WeightFormat

FRAGMENT_ROWS, FRAGMENT_COLUMNS = 8, 16  # of x and of the weights in a fragment of the matrix unit
GROUP_UNROLL, GROUP_DEPTH, GROUP_COLUMNS = 4, 64, 64  # what tells a warpgroup's product, and its rows of weights
ROWS_AT_ONCE = 4  # rows of x that the decode program takes with one read of the weights
_RING_BYTES = 96 << 10  # what a ring takes if that gives it stages enough: two threadgroups then share a processor
_LEAST_STAGES, _MOST_STAGES = 4, 8
_MOST_SUMS = 128  # of a lane: half of its registers
_OTHER_REGISTERS = 72  # of a lane, beside its sums
_BUSY = 96  # threadgroups that keep a large GPU busy
_MOST_LOADED = 96  # registers of weights on their way to a lane
_CODES_AT_ONCE = 32  # of a row, that a lane takes at the matrix end
_TURN = 4 * _CODES_AT_ONCE  # of k, that a warp takes at once from where quantized weights lie
_MOST_WARPS = 16 * 132  # that keep all of a large GPU's memory requests under way


def is_grouped(tile: LinearTile) -> bool:
    """Return whether a tile is multiplied by warpgroups."""
    return tile.program == "matrix" and tile.k_unroll == GROUP_UNROLL and tile.outer_k == GROUP_DEPTH


def slice_bytes(tile: LinearTile, operands: int, size: int) -> int:
    """Return the shared memory of a slice of x and of the weights, elements of `size` bytes; 0 without slices."""
    if tile.program == "rows" or not tile.outer_k:
        return 0
    row = tile.outer_k * size
    return (tile.block_m + operands * tile.block_n) * (row + (0 if row == 128 else 16))


def stages(tile: LinearTile, operands: int, size: int) -> int:
    """Return how many slices a ring holds: of large ones so few that two threadgroups of four simdgroups fit."""
    taken = slice_bytes(tile, operands, size)
    least = _LEAST_STAGES - 1 if tile.wm * tile.wn <= 4 else _LEAST_STAGES
    return min(max(_RING_BYTES // taken, least), _MOST_STAGES) if taken else _LEAST_STAGES


def likely_depths(tile: LinearTile) -> tuple[int, ...]:
    """Return the depths of a slice that tiles of one kernel may have."""
    return (tile.outer_k,) if not tile.outer_k or is_grouped(tile) else (32, 64)


def product(key: LinearKey, limits: Limits) -> Sequence[LinearTile]:
    """Return the whole product of plan fields, valid or not."""
    del limits
    return _product(min(key.rows, ROWS_AT_ONCE))


def admitted(key: LinearKey, limits: Limits) -> list[LinearTile]:
    """Return the valid part of the product."""
    fitting = _fitting(min(key.rows, ROWS_AT_ONCE), key.operands, key.dtype, key.format, limits)
    return [tile for tile in fitting if _shape_fault(key, tile) is None]


def fault(key: LinearKey, tile: LinearTile, limits: Limits) -> str | None:
    """Return why a candidate is inadmissible for `key` on a device, or None where it may run."""
    return _tile_fault(tile, key.operands, key.dtype, key.format, limits) or _shape_fault(key, tile)


def _rows(rows_at_once: int) -> Iterator[LinearTile]:
    for each, wn, unroll in itertools.product((1, 2, 4), (4, 8, 16), (1, 2, 3, 6)):
        yield LinearTile("rows", rows_at_once, each * wn, 1, wn, unroll, 0, "linear")


def _direct() -> Iterator[LinearTile]:
    for block_m, wm, wn, each, unroll in itertools.product(
        (8, 16, 32), (1, 2, 4, 8, 16), (1, 2, 4), (1, 2), (1, 2, 3, 4)
    ):
        yield LinearTile("matrix", block_m, FRAGMENT_COLUMNS * wn * each, wm, wn, unroll, 0, "linear")


def _staged() -> Iterator[LinearTile]:
    for block_m, block_n, wm, wn, depth, schedule in itertools.product(
        (16, 32, 64, 128), (32, 64, 128), (1, 2, 4), (1, 2, 4), (32, 64), SCHEDULES
    ):
        yield LinearTile("matrix", block_m, block_n, wm, wn, 1, depth, schedule)


def _grouped() -> Iterator[LinearTile]:
    for block_m, block_n, wm, schedule in itertools.product(
        (8, 16, 32, 64, 128, 256), (64, 128, 192), (1, 2), SCHEDULES
    ):
        wn = block_n // FRAGMENT_COLUMNS
        yield LinearTile("matrix", block_m, block_n, wm, wn, GROUP_UNROLL, GROUP_DEPTH, schedule)


@functools.cache
def _product(rows_at_once: int) -> tuple[LinearTile, ...]:
    return (*_rows(rows_at_once), *_direct(), *_staged(), *_grouped())


@functools.cache
def _fitting(
    rows_at_once: int, operands: int, dtype: str, kept: WeightFormat, limits: Limits
) -> tuple[LinearTile, ...]:
    return tuple(tile for tile in _product(rows_at_once) if _tile_fault(tile, operands, dtype, kept, limits) is None)


def _piece_registers(kept: WeightFormat, codes: int) -> int:
    """Return the registers that a lane takes for a piece of a row: 16 bytes, or codes and what scales them."""
    return 4 if kept.is_dense else codes * kept.bits // 32 + 2


def _ring_registers(tile: LinearTile, operands: int, kept: WeightFormat) -> int:
    """Return the registers in which a thread brings quantized weights to the ring."""
    if kept.is_dense:
        return 0
    turns = operands * -(-tile.block_n * tile.outer_k // (_CODES_AT_ONCE * 32 * tile.wm * tile.wn))
    ahead = min(max(16 // (turns * kept.bits), 1), 3)
    return (ahead + 1) * turns * _piece_registers(kept, _CODES_AT_ONCE)


def _tile_fault(tile: LinearTile, operands: int, dtype: str, kept: WeightFormat, limits: Limits) -> str | None:
    """Return why a tile does not fit the device, whatever the shape."""
    size = DTYPES[dtype].size
    if tile.wm * tile.wn * limits.lanes > limits.threads:
        return f"more threads than the device's {limits.threads}"
    if slice_bytes(tile, operands, size) * stages(tile, operands, size) > limits.threadgroup_bytes:
        return f"more threadgroup memory than the device's {limits.threadgroup_bytes} bytes"
    if tile.program == "rows":
        return _rows_fault(tile, operands, kept, limits)
    if is_grouped(tile):
        return _grouped_fault(tile, operands, dtype, kept, limits)
    return _warps_fault(tile, operands, kept, limits)


def _is_crowded(tile: LinearTile, registers: int, kept: WeightFormat, limits: Limits) -> bool:
    """Return whether threads cannot have so many registers of quantized weights and sums, beside those to unpack."""
    taken = (registers + _OTHER_REGISTERS) * tile.wm * tile.wn * limits.lanes
    return not kept.is_dense and taken > limits.threadgroup_registers


def _rows_fault(tile: LinearTile, operands: int, kept: WeightFormat, limits: Limits) -> str | None:
    each = tile.block_n // tile.wn
    sums = operands * each * tile.block_m
    if sums > _MOST_SUMS // 4:
        return "accumulators do not fit the registers"
    loaded = _piece_registers(kept, 32 if kept.bits % 2 else 16) * operands * each * tile.k_unroll
    crowded = _is_crowded(tile, loaded + 2 * sums, kept, limits)
    return "weights do not fit the registers" if loaded > _MOST_LOADED or crowded else None


def _grouped_fault(tile: LinearTile, operands: int, dtype: str, kept: WeightFormat, limits: Limits) -> str | None:
    if not limits.warpgroups or dtype not in limits.tile_dtypes:
        return "the device does not multiply this dtype by warpgroups"
    if tile.block_m % tile.wm or tile.block_m // tile.wm < FRAGMENT_ROWS:
        return "a block is not whole fragments for each simdgroup"
    sums = operands * tile.block_m // tile.wm // 2
    taken = sums + _OTHER_REGISTERS + _ring_registers(tile, operands, kept)
    if taken * tile.wm * tile.wn * limits.lanes > limits.threadgroup_registers or sums > _MOST_SUMS:
        return "accumulators do not fit the registers"
    return None


def _warps_fault(tile: LinearTile, operands: int, kept: WeightFormat, limits: Limits) -> str | None:
    if kept.is_dense and tile.k_unroll == 3:
        return "k_unroll is for quantized weights"
    # Warps that share k: those that are too many for their rows; all that would unpack the same weights.
    sharing = max(FRAGMENT_ROWS * tile.wm // tile.block_m, 1)
    if not tile.outer_k and not kept.is_dense:
        sharing = tile.wm
    warps_m = tile.wm // sharing
    if not warps_m or tile.block_m % (FRAGMENT_ROWS * warps_m) or tile.block_n % (FRAGMENT_COLUMNS * tile.wn):
        return "a block is not whole fragments for each simdgroup"
    tall, wide = tile.block_m // warps_m // FRAGMENT_ROWS, tile.block_n // tile.wn // FRAGMENT_COLUMNS
    sums = 4 * operands * tall * wide
    if sums > _MOST_SUMS:
        return "accumulators do not fit the registers"
    if tile.outer_k:
        if sums < 16 or sharing > 1:
            return "a simdgroup has too little to do"
        crowded = _is_crowded(tile, sums + _ring_registers(tile, operands, kept), kept, limits)
        return "weights do not fit the registers" if crowded else None
    return _direct_fault(tile, operands * wide, tall, kept, limits)


def _direct_fault(tile: LinearTile, wide: int, tall: int, kept: WeightFormat, limits: Limits) -> str | None:
    sums = 4 * wide * tall
    loaded = 4 * _piece_registers(kept, _CODES_AT_ONCE) * wide * tile.k_unroll + 4 * tall
    room = _MOST_LOADED if kept.is_dense else _MOST_LOADED + 8
    crowded = _is_crowded(tile, loaded + sums, kept, limits)
    return "weights do not fit the registers" if loaded > room or sums > _MOST_SUMS // 2 or crowded else None


def _shape_fault(key: LinearKey, tile: LinearTile) -> str | None:
    """Return why a tile that fits the device does not fit a shape."""
    if tile.block_n >= key.outputs + 64:
        return "block_n is wider than the matrix"
    if tile.program == "rows":
        return "more rows than the decode program takes at once" if key.rows > ROWS_AT_ONCE else None
    if tile.block_m > max(FRAGMENT_ROWS, 1 << max(key.rows - 1, 1).bit_length()):
        return "block_m is taller than the bucket"
    if not tile.outer_k and key.rows > 64:
        return "weights that do not lie in threadgroup memory would be read too often"
    if tile.outer_k >= key.inputs:
        return "outer_k is not less than k"
    if tile.schedule != "linear" and key.rows <= tile.block_m:
        return "a single row of blocks has one order"
    return None


def distance(key: LinearKey, tile: LinearTile, limits: Limits) -> tuple[float, ...]:
    """Order candidates by how far they stand from what does well on an H200; the first is the default.

    One row takes the decode program. More go through a ring, by warpgroups where there are such; up to 16 rows read
    weights from where they lie if they are quantized, or if there are too few of them to keep all processors busy
    otherwise.
    """
    kind, wanted = _kind(tile), "grouped" if limits.warpgroups else "staged"
    few = key.outputs < _BUSY * GROUP_COLUMNS or not key.format.is_dense
    if key.rows == 1:
        wanted = "rows"
    elif key.rows <= 2 * FRAGMENT_ROWS and (wanted == "staged" or few):
        wanted = "direct"
    rank = 0 if kind == wanted else 2 if kind == "staged" else 1
    order = "grouped8" if key.rows > 2 * tile.block_m else "linear"
    shape = _shape_distance if key.format.is_dense else _packed_distance
    return (rank, shape(key, tile, kind) + (tile.schedule != order) / 4)


def _kind(tile: LinearTile) -> str:
    if tile.program == "rows":
        return "rows"
    return "direct" if not tile.outer_k else "grouped" if is_grouped(tile) else "staged"


def _apart(value: float, wanted: float) -> float:
    return abs(math.log2(value / wanted))


def _packed_distance(key: LinearKey, tile: LinearTile, kind: str) -> float:
    """Return how far a tile stands from one that has all of quantized weights on their way at once."""
    if kind in ("grouped", "staged"):
        return _shape_distance(key, tile, kind)
    products = key.outputs * key.operands
    if kind == "rows":
        each = min(max(products / _MOST_WARPS, 1), 4) / key.operands
        turns = key.inputs / (32 if key.format.bits % 2 else 16) / 32
        unroll = _apart(tile.k_unroll, min(max(turns, 1), 6))
        return _apart(tile.block_n / tile.wn, max(each, 1)) + _apart(tile.wn, 8) + unroll
    sharing = min(max(_MOST_WARPS * FRAGMENT_COLUMNS / key.outputs, 1), 16)
    unroll = _apart(tile.k_unroll, min(max(key.inputs / (_TURN * tile.wm * key.operands), 1), 3))
    height = _apart(tile.block_m, min(max(key.rows, FRAGMENT_ROWS), 32))
    shared = _apart(tile.wm, sharing) + _apart(tile.wm * tile.wn, max(sharing, 4))
    return 2 * height + _apart(tile.block_n / tile.wn, FRAGMENT_COLUMNS) + shared + unroll


def _shape_distance(key: LinearKey, tile: LinearTile, kind: str) -> float:
    many = key.outputs >= _BUSY * GROUP_COLUMNS / 2
    if kind == "rows":
        each = _apart(tile.block_n / tile.wn, 2 if many else 1)
        return each + _apart(tile.wn, 8 if many else 4) + _apart(tile.k_unroll, 2 if many else 6)
    # So tall that there are threadgroups enough.
    blocks = -(-key.outputs // GROUP_COLUMNS)
    height = min(max(key.rows * blocks / _BUSY, FRAGMENT_ROWS), max(key.rows, FRAGMENT_ROWS), 128)
    if kind == "direct":
        return _apart(tile.block_m, height) + _apart(tile.block_n, 16) + _apart(tile.wm, 4) + _apart(tile.k_unroll, 2)
    if kind == "grouped":
        large = key.operands == 1 and key.rows * blocks >= 8 * 128 * _BUSY
        wide = _apart(tile.block_n, 128 if large else 64)
        return _apart(tile.block_m, 256 if large else height) + wide + _apart(tile.wm, 1)
    square = _apart(tile.block_n, 64) + _apart(tile.wm * tile.wn, 4)
    return _apart(tile.block_m, height) + square + _apart(tile.outer_k, 64)
