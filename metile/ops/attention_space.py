"""The search space of attention kernels: their plan fields, and which of them a device admits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from metile.ops.base import DTYPES
from metile.targets.base import Limits

if TYPE_CHECKING:
    from metile.ops.attention import AttentionKey

_HEAD_DIMS = (64, 80, 96, 128, 256)
_FRAGMENT = 8  # rows and columns of a fragment of a GPU's matrix unit
_MOST_FLOATS = 256  # of scores and outputs that a lane may hold
_PARTS = (1, 4, 8, 16, 32, 64)
_KEYS_EACH = 64  # of a threadgroup, where several share the keys
_USUAL_GROUPS = 64
_OTHER_REGISTERS = 64  # that a thread needs beside what it holds of queries, keys, values, scores and outputs
_MOST_MATRIX_FLOATS = 80  # the same as _MOST_FLOATS where registers are known to be few
_MOST_GROUPS = 528  # that share keys with others: four to each processor of a large GPU


@dataclass(frozen=True)
class AttentionTile:
    """A point of the search space of an attention kernel.

    Attributes:
        program: ``rows``, one query of all heads that share a key head, or ``matrix``, blocks of queries.
        block: queries a threadgroup takes.
        block_keys: keys taken between two updates of the running maximum.
        simdgroups: simdgroups of a threadgroup on a GPU; they share the queries of a block, or the keys.
        parts: threadgroups that may share the keys; fewer do where the context has fewer blocks of keys.
        heads: query heads that a threadgroup takes; 0 for all that share a key head.
    """

    program: Literal["rows", "matrix"]
    block: int
    block_keys: int
    simdgroups: int = 1
    parts: int = 1
    heads: int = 0

    def label(self) -> str:
        """Return the fields as one word."""
        ending = f"_s{self.simdgroups}" if self.simdgroups > 1 else ""
        ending += f"_p{self.parts}" if self.parts > 1 else ""
        ending += f"_h{self.heads}" if self.heads else ""
        return f"{self.program}_b{self.block}_bk{self.block_keys}{ending}"


def product(key: AttentionKey, limits: Limits) -> list[AttentionTile]:
    """Return the whole product of plan fields, valid or not; the first valid one is the untuned default."""
    if limits.is_gpu:
        keys = [(64, 8), (32, 8), (32, 4), (64, 16), (128, 16), (128, 32)]
        rows = [
            AttentionTile("rows", 1, *tile, parts, heads)
            for parts in _parts(key, limits)
            for heads in _heads(key, limits)
            for tile in keys
        ]
        blocks = [(32, 4), (16, 2), (32, 2), (64, 4), (64, 8), (8, 1)]
        matrix = [AttentionTile("matrix", block, keys, count) for block, count in blocks for keys in (32, 16, 64)]
    else:
        rows = [AttentionTile("rows", 1, block_keys) for block_keys in (128, 64, 256)]
        heights = dict.fromkeys((2 * limits.lanes, limits.lanes, 4 * limits.lanes))
        matrix = [AttentionTile("matrix", height, keys) for height in heights for keys in (64, 32, 128)]
    return rows + matrix if key.rows == 1 else matrix + rows


def _parts(key: AttentionKey, limits: Limits) -> list[int]:
    """Return numbers of threadgroups that share the keys of a head, in the order in which to try them.

    The first gives each about `_KEYS_EACH` keys, or all heads together about `_USUAL_GROUPS` threadgroups; the others
    follow by how far they are from it.
    """
    if not limits.groups_exchange or key.rows > 1:
        return [1]
    usual = min(-(-key.tokens // _KEYS_EACH), max(1, _USUAL_GROUPS // (key.key_value_heads * key.batch)))
    return sorted(_PARTS, key=lambda parts: abs(math.log2(parts / usual)))


def _heads(key: AttentionKey, limits: Limits) -> list[int]:
    """Return numbers of query heads of a threadgroup, 0 for all that share a key head.

    With fewer, keys are read more than once, from the cache; but there are more threadgroups to read them, and each has
    less to join.
    """
    shared = key.query_heads // key.key_value_heads
    if not limits.groups_exchange or key.rows > 1:
        return [0]
    return [*(shared // share for share in (2, 3) if shared % share == 0), 0]


def taken_heads(key: AttentionKey, tile: AttentionTile) -> int:
    """Return how many query heads a threadgroup of the program ``rows`` takes."""
    return tile.heads or key.query_heads // key.key_value_heads


def is_valid(key: AttentionKey, tile: AttentionTile, limits: Limits) -> str | None:
    """Return why a candidate is inadmissible for `key` on a device, or None where it may run."""
    if key.dimension not in _HEAD_DIMS or key.dimension % (_FRAGMENT if limits.is_gpu else limits.lanes):
        return f"head_dim is none of {', '.join(map(str, _HEAD_DIMS))}"
    if key.query_heads % key.key_value_heads or key.query_heads // key.key_value_heads > 16:
        return "more than 16 query heads share a key head, or an uneven number"
    if tile.program == "rows" and key.rows > 1:
        return "more than one query"
    if tile.parts > 1:
        reason = _parts_fault(key, tile, limits)
        if reason is not None:
            return reason
    return _gpu_fault(key, tile, limits) if limits.is_gpu else _cpu_fault(key, tile, limits)


def _parts_fault(key: AttentionKey, tile: AttentionTile, limits: Limits) -> str | None:
    if tile.program != "rows" or not limits.groups_exchange:
        return "threadgroups cannot share the keys"
    if tile.parts > -(-key.tokens // tile.block_keys):
        return "more threadgroups share the keys than there are blocks of them"
    if tile.parts * key.query_heads // taken_heads(key, tile) * key.batch > _MOST_GROUPS:
        return "more threadgroups than run at once"
    return None


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
        shared = taken_heads(key, tile)
        floats = shared * (tile.block_keys // tile.simdgroups + 2 * columns)
        memory = 4 * tile.simdgroups * (columns * limits.lanes + 2)
    else:
        if tile.block > max(_FRAGMENT, -(-key.rows // _FRAGMENT) * _FRAGMENT):
            return "block is taller than the bucket"
        fragments = tile.block // tile.simdgroups // _FRAGMENT
        floats = fragments * (tile.block_keys + key.dimension) // 4
        memory = tile.block * (key.dimension * DTYPES[key.dtype].size + 16)
    if floats > _MOST_FLOATS or (limits.threadgroup_registers and _spills(key, tile, limits, floats)):
        return "scores and outputs do not fit the registers"
    return "a block does not fit threadgroup memory" if memory > limits.threadgroup_bytes else None


def _spills(key: AttentionKey, tile: AttentionTile, limits: Limits, floats: int) -> bool:
    """Return whether a thread holds more than its registers, where it is known how many a threadgroup has.

    Counted as ``kernels/tile/cuda`` lays out what it holds, and held against what its compiler says.
    """
    if tile.program == "matrix":
        return floats > _MOST_MATRIX_FLOATS
    most = min(limits.registers, limits.threadgroup_registers // (tile.simdgroups * limits.lanes)) - _OTHER_REGISTERS
    shared = taken_heads(key, tile)
    # So many heads fit with no block of keys: a part of what they hold is kept in memory.
    return _row_words(key, tile, shared) > (2 * most if shared > _FRAGMENT else most)


def _row_words(key: AttentionKey, tile: AttentionTile, shared: int) -> int:
    held = 16 // DTYPES[key.dtype].size  # elements that a lane moves at once
    chunks = key.dimension // held
    team = next(lanes for lanes in (4, 8, 16, 32) if chunks <= lanes or lanes == 32)  # that hold a row
    runs = -(-chunks // team)
    keys = -(-(tile.block_keys // tile.simdgroups) // (32 // team))  # of a team
    moved = 4 * runs * (2 * keys + min(shared, 8))  # keys, values and queries
    return moved + shared * (keys + runs * held + 2)
