"""Linear kernels of a GPU equal x · Wᵀ and its epilogues, on the simulator.

A kernel costs about a second of compilation. The spaces hold 12,249 of them (`make check-kernels` runs them all, each
in both modes); here every epilogue meets every dtype in both programs once, each time in another tile, so that tiles,
epilogues and dtypes are all met in 24 kernels and no pair of them twice.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import mlx.core as mx
import pytest
from kernel_checks import assert_near, numpy_of, random
from metal_checks import CHECKED, FAST, WatchedTarget, check, reference

from metile.errors import MetileError
from metile.ops.base import DTYPES, ROW_BUCKETS
from metile.ops.linear import LinearKey, is_valid
from metile.ops.linear_metal import ROWS_AT_ONCE, threadgroup_bytes
from metile.ops.linear_space import space_for
from metile.ops.linear_tile import SCHEDULES, LinearTile
from metile.simulator import custom
from metile.targets.base import Limits
from metile.targets.metal import limits_of

EPILOGUES = ("store", "bias", "residual", "swiglu")
COMBINATIONS = [(epilogue, dtype) for epilogue in EPILOGUES for dtype in DTYPES]

# Small and large blocks, one simdgroup to sixteen, both unrollings, every depth of a slice.
MATRIX = [
    (8, 16, 1, 1, 1, 0), (8, 32, 1, 2, 2, 16), (16, 16, 1, 1, 2, 32), (16, 64, 2, 2, 1, 16), (32, 32, 2, 2, 2, 0),
    (32, 64, 1, 4, 1, 32), (64, 32, 4, 1, 2, 16), (64, 64, 2, 2, 1, 0), (64, 64, 2, 2, 2, 32), (32, 32, 1, 2, 1, 64),
    (16, 32, 1, 2, 2, 64), (64, 64, 4, 2, 1, 16),
]  # fmt: skip
ROWS = [
    (1, 4, 1, 4), (1, 32, 8, 2), (2, 8, 8, 1), (2, 64, 16, 2), (4, 16, 4, 1), (4, 8, 1, 2),
    (8, 32, 8, 4), (8, 16, 4, 2), (16, 8, 4, 1), (4, 32, 8, 4), (16, 32, 16, 2), (2, 4, 2, 4),
]  # fmt: skip


def matrix(block_m: int, block_n: int, wm: int, wn: int, unroll: int, depth: int) -> LinearTile:
    return LinearTile("matrix", block_m, block_n, wm, wn, unroll, depth, "linear")


def rows_tile(rows: int, block_n: int, wn: int, unroll: int) -> LinearTile:
    return LinearTile("rows", rows, block_n, 1, wn, unroll, 0, "linear")


TILES = [(matrix(*fields), *case) for fields, case in zip(MATRIX, COMBINATIONS, strict=True)]
TILES += [(rows_tile(*fields), *case) for fields, case in zip(ROWS, COMBINATIONS, strict=True)]
EVERY = pytest.mark.parametrize(
    ("tile", "epilogue", "dtype"), TILES, ids=[f"{epilogue}-{dtype}-{tile.label()}" for tile, epilogue, dtype in TILES]
)


def key_of(epilogue: Any, dtype: str, outputs: int, inputs: int, rows: int = 64) -> LinearKey:
    return LinearKey(epilogue, rows, outputs, inputs, dtype)


# ---- right results ----


@EVERY
def test_ragged_shapes_in_checked_or_fast_mode(tile: LinearTile, epilogue: str, dtype: str) -> None:
    # Modes take turns: a text compiles once. Aligned, and off by one in each dimension; less than a slice of k, and
    # several; 1 to 17 rows.
    target = CHECKED if (MATRIX + ROWS).index(_fields(tile)) % 3 == 0 else FAST
    assert is_valid(key_of(epilogue, dtype, 512, 512, 16 if tile.program == "rows" else 512), tile, FAST.limits) is None
    m, n, k = tile.block_m, tile.block_n, tile.outer_k or 16
    shapes = [(m, n, k), (2 * m, 2 * n, 2 * k), (m + 1, n, k), (m, n + 1, k), (m, n, k + 1), (m, n, k - 1)]
    shapes += [(m + 1, n - 1, 2 * k + 3), (1, 1, 1), (3, 2, 5), (2, n + 3, 131)]
    shapes += [(rows, n + 1, k + 3) for rows in range(1, 18)]
    for rows, outputs, inputs in shapes:
        key = key_of(epilogue, dtype, outputs, inputs)
        check(key, tile, key.example(rows, seed=rows), target)


def _fields(tile: LinearTile) -> tuple[int, ...]:
    if tile.program == "rows":
        return tile.block_m, tile.block_n, tile.wn, tile.k_unroll
    return tile.block_m, tile.block_n, tile.wm, tile.wn, tile.k_unroll, tile.outer_k


@pytest.mark.parametrize("target", [FAST, CHECKED], ids=["fast", "checked"])
@pytest.mark.parametrize("tile", [matrix(8, 16, 1, 1, 1, 0), matrix(8, 32, 1, 2, 2, 16)], ids=["direct", "staged"])
def test_orders_of_blocks_cover_every_block_once(tile: LinearTile, target: WatchedTarget) -> None:
    # Checked launches also count the bytes written: a block that two threadgroups take would be written twice. The
    # order is a number of the launch, so all orders share a kernel.
    epilogue, dtype = next(case for other, *case in TILES if other == tile)
    for rows, outputs in ((8, 33), (9, 129), (41, 97), (64, 128)):
        key = key_of(epilogue, dtype, outputs, 37)
        inputs = key.example(rows, 0)
        expected, first = reference(key, inputs), None
        for schedule in SCHEDULES:
            (y,) = check(key, dataclasses.replace(tile, schedule=schedule), inputs, target, expected)
            first = y if first is None else first
            assert mx.array_equal(y, first), schedule
    names = {key.source(dataclasses.replace(tile, schedule=schedule)) for schedule in SCHEDULES}
    assert len(names) == 1


LAYOUT_TILES = [TILES[COMBINATIONS.index(("residual", "bfloat16"))][0]]
LAYOUT_TILES += [TILES[len(MATRIX) + COMBINATIONS.index(("residual", "bfloat16"))][0]]


@pytest.mark.parametrize("tile", LAYOUT_TILES, ids=["matrix", "rows"])
def test_shapes_and_strides_of_inputs(tile: LinearTile) -> None:
    key = key_of("residual", "bfloat16", 33, 70)
    wide, tall = random(1, (6, 140), "bfloat16"), random(2, (66, 90), "bfloat16", 0.1)
    extra = random(3, (33, 6), "bfloat16")
    weights = [tall[::2, 7:77], random(4, (70, 33), "bfloat16").T, mx.broadcast_to(tall[0, :70], (33, 70))]
    for x, r in (
        (wide[:, ::2], extra.T),
        (wide[::-1, 70:], extra.T),
        (mx.broadcast_to(wide[2, :70], (6, 70)), extra.T),
        (wide[None, :, :70], extra.T[None]),
    ):
        for w in weights:
            run_layout(key, tile, [x, w, r])
    # More axes than a kernel knows: the first ones are folded.
    many = [random(5, (2, 1, 3, 1, 2, 70), "bfloat16"), weights[0], random(6, (2, 1, 3, 1, 2, 33), "bfloat16")]
    run_layout(key, tile, many)
    run_layout(key, tile, [many[0].transpose(4, 1, 2, 3, 0, 5), weights[1], many[2].transpose(4, 1, 2, 3, 0, 5)])
    one = [wide[2, :70], weights[0], extra[:, 1]]
    assert_near(launch(key, tile, one), reference(key, [wide[2:3, :70], weights[0], extra.T[1:2]])[0][0])
    empty = [wide[:0, :70], weights[0], extra.T[:0]]
    assert launch(key, tile, empty).shape == (0, 33)


def run_layout(key: LinearKey, tile: LinearTile, inputs: list[mx.array]) -> None:
    assert_near(launch(key, tile, inputs), reference(key, inputs)[0])
    assert mx.array_equal(launch(key, tile, inputs), launch(key, tile, [mx.contiguous(array) for array in inputs]))


def launch(key: LinearKey, tile: LinearTile, inputs: list[mx.array], target: WatchedTarget = FAST) -> mx.array:
    return key.launch(target.compile(key.source(tile)), tile, inputs, poison=True)[0]


@pytest.mark.parametrize("tile", LAYOUT_TILES, ids=["matrix", "rows"])
def test_arrays_of_fewer_than_eight_elements(tile: LinearTile) -> None:
    # MLX would pass these in the constant address space, which programs do not take.
    for rows, outputs, inputs in ((1, 1, 1), (7, 1, 1), (1, 7, 1), (1, 1, 7), (2, 3, 2), (8, 1, 1)):
        key = key_of("residual", "bfloat16", outputs, inputs)
        check(key, tile, key.example(rows, 1), FAST)


@pytest.mark.parametrize("tile", LAYOUT_TILES, ids=["matrix", "rows"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row_and_column(tile: LinearTile, value: float) -> None:
    key = key_of("residual", "bfloat16", 33, 70)
    plain = key.example(9, 0)
    before = numpy_of(launch(key, tile, plain))
    for place, index in ((0, (3, -1)), (1, (5, -1)), (2, (3, 5))):
        inputs = [mx.array(array) for array in plain]
        inputs[place][index] = value
        after = numpy_of(launch(key, tile, inputs))
        hit = numpy_of(inputs[0][:, :1] * 0) != 0  # all False, of one column
        hit = hit.repeat(33, axis=1)
        if place == 0:
            hit[3] = True
        elif place == 1:
            hit[:, 5] = True
        else:
            hit[3, 5] = True
        assert (after[~hit] == before[~hit]).all()
        assert not (after[hit] == before[hit]).any()


# ---- the space ----


@functools.cache
def limits() -> Limits:
    return limits_of(custom("c"))


@pytest.mark.parametrize("epilogue", ["store", "swiglu"])
def test_the_space(epilogue: str) -> None:
    for rows in ROW_BUCKETS:
        key = key_of(epilogue, "bfloat16", 577, 1100, rows)
        space, product = key.space(limits()), space_for(limits()).product(key, limits())
        assert len(space) + sum(key.pruned(limits()).values()) == len(product) == len(set(product))
        assert set(space) == {tile for tile in product if is_valid(key, tile, limits()) is None}
        assert space[0].program == ("rows" if rows <= 8 else "matrix")
        assert rows <= ROWS_AT_ONCE or all(tile.program == "matrix" for tile in space)
        for tile in space:
            assert tile.wm * tile.wn * 32 <= 1024
            assert threadgroup_bytes(tile, key.operands, key.dtype) <= 32 << 10


TILE = matrix(64, 64, 2, 2, 1, 32)


@pytest.mark.parametrize(
    ("rows", "tile", "reason"),
    [
        (64, TILE, None),
        (64, dataclasses.replace(TILE, block_m=8), "a block is not whole fragments for each simdgroup"),
        (64, matrix(8, 16, 1, 2, 1, 0), "a simdgroup has too little to do"),
        (128, matrix(128, 128, 2, 2, 1, 0), "accumulators do not fit the registers"),
        (32, TILE, "block_m is taller than the bucket"),
        (64, matrix(64, 128, 2, 4, 1, 0), None),
        (64, dataclasses.replace(TILE, schedule="hilbert"), "a single row of blocks has one order"),
        (128, dataclasses.replace(TILE, schedule="hilbert"), None),
        (128, matrix(128, 128, 4, 4, 1, 64), "more threadgroup memory than the device's 32768 bytes"),
        (8, rows_tile(8, 64, 16, 1), None),
        (32, rows_tile(16, 64, 16, 1), "more rows than the decode program takes at once"),
        (8, rows_tile(8, 64, 4, 1), "block_n is not a few rows for each simdgroup"),
        (8, rows_tile(8, 4, 8, 1), "block_n is not a few rows for each simdgroup"),
        (16, rows_tile(16, 64, 8, 1), "accumulators do not fit the registers"),
    ],
)
def test_reasons(rows: int, tile: LinearTile, reason: str | None) -> None:
    assert is_valid(key_of("store", "bfloat16", 127, 300, rows), tile, limits()) == reason


def test_reasons_of_narrow_matrices() -> None:
    wide = matrix(64, 128, 2, 4, 1, 0)
    assert is_valid(key_of("store", "bfloat16", 64, 300), wide, limits()) == "block_n is wider than the matrix"
    assert is_valid(key_of("store", "bfloat16", 127, 32), TILE, limits()) == "outer_k is not less than k"


# ---- errors ----


@pytest.mark.parametrize("tile", LAYOUT_TILES, ids=["matrix", "rows"])
def test_other_arrays_are_refused(tile: LinearTile) -> None:
    key = key_of("residual", "bfloat16", 33, 70)
    good = key.example(5, 0)
    for place, array in enumerate(good):
        for other in (array.astype(mx.float32), array[..., :-1], mx.concatenate([array, array], axis=-1)):
            inputs = [*good[:place], other, *good[place + 1 :]]
            with pytest.raises(MetileError, match=r"^\[linear\] expected arrays of bfloat16 and shapes .* but got \("):
                launch(key, tile, inputs)
