"""Attention kernels in the headers of the installed MLX, unmodified, against MLX's CPU in float32.

sdpa_vector.h, sdpa_blocked.h and steel/attn/kernels/steel_attention.h. Of the blocked form the wheel holds what
surrounds its matrix multiplications: scaling a block of queries, and the causal mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_kernels import (
    DTYPES,
    ceil_div,
    close,
    empty,
    exact,
    kernels,
    longs,
    name_of,
    normal,
    packed,
    reference,
    run,
)

from metile.simulator import SimulatorFault

KINDS = tuple(DTYPES)
MASKS = ("none", "causal", "bool", "float")
HEADS, GROUP = 2, 2  # key heads, and query heads that share one
VECTOR_TYPES = tuple(f"{kind}, {width}" for kind in KINDS for width in (64, 128))
# A program each, so that function constants, which make a program anew, are met by what they matter to alone.
VECTOR, FIRST_PASS, SECOND_PASS = (
    tuple(f"{kernel}<{arguments}>" for arguments in VECTOR_TYPES)
    for kernel in ("sdpa_vector", "sdpa_vector_2pass_1", "sdpa_vector_2pass_2")
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    mx.random.seed(7)


def inputs(kind: str, queries: int, keys: int, width: int, group: int = GROUP) -> list[mx.array]:
    return [
        normal(1, heads, length, width, kind=kind)
        for heads, length in ((HEADS * group, queries), (HEADS, keys), (HEADS, keys))
    ]


def mask_of(mask: str, kind: str, heads: int, queries: int, keys: int) -> Any:
    """Return what MLX takes as a mask; some keys of a float mask are out altogether."""
    if mask in ("none", "causal"):
        return None if mask == "none" else mask
    kept = mx.random.uniform(shape=(1, heads, queries, keys)) > 0.3
    if mask == "bool":
        return kept
    return mx.where(kept, normal(1, heads, queries, keys), -np.inf).astype(DTYPES[kind])


def attention(q: mx.array, k: mx.array, v: mx.array, mask: Any = None, sinks: mx.array | None = None) -> mx.array:
    scale = q.shape[-1] ** -0.5
    return reference(
        lambda q, k, v, mask, sinks: mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks),
        q, k, v, mask, sinks,
    )  # fmt: skip


def vector_constants(mask: str, sinks: bool = False, blocks: int = 1) -> tuple[tuple[int, bool | int], ...]:
    masked = mask in ("bool", "float")
    values = (masked, False, mask == "causal", mask == "bool", mask == "float", sinks)
    return (*enumerate(values, 20), (26, blocks))


def masked_buffers(mask: str, array: Any, first: int) -> dict[int, Any]:
    """Return the mask, and its strides over keys, queries and heads; buffers that a constant turns off are left out."""
    if mask not in ("bool", "float"):
        return {}
    _, _, queries, keys = array.shape
    place = first if mask == "bool" else first + 1
    return {place: array, first + 2: 1, first + 3: keys, first + 4: queries * keys}


def sdpa_vector(
    kind: str, width: int, mask: str, queries: int, keys: int, sinks: bool = False, check: bool = False
) -> None:
    q, k, v = inputs(kind, queries, keys, width)
    heads = HEADS * GROUP
    array = mask_of(mask, kind, heads, queries, keys)
    sink = normal(heads, kind=kind) if sinks else None
    kernel = f"sdpa_vector<{kind}, {width}>"
    file = kernels("sdpa_vector.h", (kernel,) if check else VECTOR, vector_constants(mask, sinks), check)
    strides = {6: longs(keys * width), 7: longs(width), 8: longs(keys * width), 9: longs(width)}
    buffers = {0: q, 1: k, 2: v, 3: empty(q.shape, kind), 4: GROUP, 5: keys, **strides, 10: width**-0.5}
    buffers |= masked_buffers(mask, array, 11) | ({16: sink, 17: heads} if sinks else {})
    out = run(file, kernel, buffers, (heads, queries, 1), (1024, 1, 1))
    close(out[3], attention(q, k, v, array, sink))


VECTOR_CASES = [
    *((kind, 64, mask, 3, 77, False) for kind in KINDS for mask in MASKS),
    *((kind, 128, "causal", 2, 45, False) for kind in KINDS),
    *((kind, 64, "none", 1, 33, True) for kind in KINDS),
]


@pytest.mark.parametrize("case", VECTOR_CASES, ids=name_of)
def test_sdpa_vector(case: tuple[str, int, str, int, int, bool]) -> None:
    sdpa_vector(*case)


def second_pass(kind: str, width: int, rows: int, queries: int, blocks: int, partial: Sequence[Any]) -> mx.array:
    buffers = {**dict(enumerate(partial)), 3: empty((1, rows, queries, width), kind), 4: blocks}
    file = kernels("sdpa_vector.h", SECOND_PASS, vector_constants("none", blocks=blocks))
    return run(file, f"sdpa_vector_2pass_2<{kind}, {width}>", buffers, (rows, queries, 1), (1024, 1, 1))[3]


TWO_PASS_CASES = [
    *((kind, 64, mask, 2, 293, 4) for kind in KINDS for mask in ("none", "causal", "bool")),
    *((kind, 128, "float", 1, 150, 2) for kind in KINDS),
]


@pytest.mark.parametrize("case", TWO_PASS_CASES, ids=name_of)
def test_sdpa_vector_in_two_passes(case: tuple[str, int, str, int, int, int]) -> None:
    kind, width, mask, queries, keys, group = case
    blocks, heads = 32, HEADS * group
    q, k, v = inputs(kind, queries, keys, width, group)
    array = mask_of(mask, kind, heads, queries, keys)
    strides = {8: longs(keys * width), 9: longs(width), 10: longs(keys * width), 11: longs(width)}
    outputs = {
        3: empty((heads, queries, blocks, width), kind),
        4: empty((heads, queries, blocks)),
        5: empty((heads, queries, blocks)),
    }
    buffers = {0: q, 1: k, 2: v, **outputs, 7: keys, **strides, 12: width**-0.5} | masked_buffers(mask, array, 13)
    file = kernels("sdpa_vector.h", FIRST_PASS, vector_constants(mask, blocks=blocks))
    first = f"sdpa_vector_2pass_1<{kind}, {width}>"
    partial = run(file, first, buffers, (HEADS, 1, blocks), (32, group, queries))
    out = second_pass(kind, width, heads, queries, blocks, [partial[index] for index in (3, 4, 5)])
    close(out, attention(q, k, v, array))


GROUPED = tuple(f"sdpa_vector_2pass_1_gqa<{kind}, 64, 64, 4, 2>" for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_sdpa_vector_in_two_passes_of_a_large_group(kind: str) -> None:
    width, keys, group, blocks = 64, 301, 4, 32
    heads = HEADS * group
    q, k, v = inputs(kind, 1, keys, width, group)
    strides = {8: longs(keys * width), 9: longs(width), 10: longs(keys * width), 11: longs(width)}
    outputs = {3: empty((heads, 1, blocks, width), kind), 4: empty((heads, 1, blocks)), 5: empty((heads, 1, blocks))}
    buffers = {0: q, 1: k, 2: v, **outputs, 7: keys, **strides, 12: width**-0.5}
    file = kernels("sdpa_vector.h", GROUPED, vector_constants("none", blocks=blocks))
    name = f"sdpa_vector_2pass_1_gqa<{kind}, 64, 64, 4, 2>"
    partial = run(file, name, buffers, (HEADS, 1, blocks), (32, group, 1))
    close(second_pass(kind, width, heads, 1, blocks, [partial[index] for index in (3, 4, 5)]), attention(q, k, v))


BLOCKED = tuple(f"sdpa_blocked_{name}<{kind}>" for name in ("scale_copy", "causal_mask") for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_sdpa_blocked_scales_a_block_of_queries(kind: str) -> None:
    heads, width, rows, offset = 3, 20, 5, 2
    q = normal(2, 9, heads, width, kind=kind)  # heads and positions are swapped, as they are in a model
    strides = longs(9 * heads * width, width, heads * width)
    buffers = {0: q, 1: empty((2, heads, rows, width), kind), 2: 0.3, 3: strides}
    buffers |= {4: heads, 5: rows, 6: width, 7: offset}
    grid = (width, rows, 2 * heads)
    out = run(kernels("sdpa_blocked.h", BLOCKED), BLOCKED[KINDS.index(kind)], buffers, grid, (4, 5, 3), partial=grid)
    close(out[1], reference(lambda q: q.swapaxes(1, 2)[:, :, offset : offset + rows] * 0.3, q))


@pytest.mark.parametrize("kind", KINDS)
def test_sdpa_blocked_masks_the_future(kind: str) -> None:
    rows, columns = 7, 18
    scores = normal(2 * rows, columns, kind=kind)
    grid = (rows, 2 * rows, 1)
    file = kernels("sdpa_blocked.h", BLOCKED)
    buffers = {0: scores, 1: rows, 2: columns}
    got = run(file, f"sdpa_blocked_causal_mask<{kind}>", buffers, grid, (7, 2, 1), partial=grid)[0]
    row, column = np.arange(2 * rows)[:, None] % rows, np.arange(columns)[None] - (columns - rows)
    exact(got, mx.where(mx.array(column > row), mx.finfo(DTYPES[kind]).min, scores).astype(DTYPES[kind]))


# Tiles of queries, keys and simdgroups, as MLX picks them by the width of a head.
TILES = {64: "32, 32, 64, 64, 4, 1", 80: "32, 32, 80, 80, 4, 1", 128: "32, 16, 128, 128, 4, 1"}
STEEL = tuple(f"attention<{kind}, {tile}>" for kind in KINDS for tile in TILES.values())
STEEL_MASKED = tuple(f"attention<{kind}, {TILES[64]}, {mask}>" for kind in ("float", "half") for mask in (kind, "bool"))


def steel_params(q: mx.array, k: mx.array, block: tuple[int, int]) -> np.ndarray:
    batch, heads, queries, width = q.shape
    keys = k.shape[2]
    q_tile, k_tile = block
    strides = [
        ("q", (array.shape[1] * array.shape[2] * width, array.shape[2] * width, width)) for array in (q, k, k, q)
    ]
    sizes = (batch, heads, width, queries, keys, heads // k.shape[1])
    counts = (ceil_div(queries, q_tile), ceil_div(keys, k_tile), queries // q_tile, keys // k_tile)
    rest = (queries % q_tile, keys % k_tile, keys - queries)
    return packed([("i", sizes), ("f", width**-0.5), ("i", counts), ("i", rest), *strides])


def steel_attention(kind: str, width: int, mask: str, queries: int, keys: int, check: bool = False) -> None:
    q, k, v = inputs(kind, queries, keys, width)
    heads = HEADS * GROUP
    array = mask_of(mask, kind, heads, queries, keys)
    masked = mask in ("bool", "float")
    kernel = f"attention<{kind}, {TILES[width]}{', ' + (kind if mask == 'float' else mask) if masked else ''}>"
    block = (32, 16 if width == 128 else 32)
    flags = (queries % block[0] == 0, keys % block[1] == 0)
    constants = ((200, flags[0]), (201, flags[1]), (300, masked), (301, mask == "causal"), (302, False), (303, False))
    instances = (kernel,) if check else STEEL_MASKED if masked else STEEL
    buffers = {0: q, 1: k, 2: v, 3: empty(q.shape, kind), 4: steel_params(q, k, block)}
    if masked:
        buffers |= {5: longs(heads * queries * keys, queries * keys, keys), 6: array}
    file = kernels("steel/attn/kernels/steel_attention.h", instances, constants, check)
    out = run(file, kernel, buffers, (ceil_div(queries, block[0]), heads, 1), (32, 4, 1))
    close(out[3], attention(q, k, v, array))


# Every width with every dtype, without a mask in whole tiles and causal in ragged ones; other masks at one width.
STEEL_CASES = [
    *((kind, width, "none", 64, 96) for kind in KINDS for width in TILES),
    *((kind, width, "causal", 37, 75) for kind in KINDS for width in TILES),
    *((kind, 64, mask, 37, 75) for kind in ("float", "half") for mask in ("bool", "float")),
]


@pytest.mark.parametrize("case", STEEL_CASES, ids=name_of)
def test_steel_attention(case: tuple[str, int, str, int, int]) -> None:
    steel_attention(*case)


def test_a_buffer_that_a_function_constant_turns_off_need_not_be_there_and_one_turned_on_must() -> None:
    q = normal(1, 1, 1, 64)
    buffers = {0: q, 1: q, 2: q, 3: empty(q.shape), 4: 1, 5: 1, **{index: longs(64) for index in range(6, 10)}, 10: 1.0}
    sizes = ((1, 1, 1), (1024, 1, 1))
    out = run(kernels("sdpa_vector.h", VECTOR, vector_constants("none")), VECTOR[0], buffers, *sizes)
    close(out[3], q)
    with pytest.raises(SimulatorFault):
        run(kernels("sdpa_vector.h", VECTOR, vector_constants("bool")), VECTOR[0], buffers, *sizes)


def test_checked_sdpa_vector_has_no_findings() -> None:
    sdpa_vector("float", 64, "bool", 1, 35, check=True)


def test_checked_steel_attention_has_no_findings() -> None:
    steel_attention("half", 64, "causal", 33, 34, check=True)
