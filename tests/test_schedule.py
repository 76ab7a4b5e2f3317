"""Block orders: each a permutation of any grid, each with the locality that its name promises."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metile.targets.compiler import compile_library

SCHEDULES = ("linear", "grouped2", "grouped4", "grouped8", "diagonal", "morton", "hilbert")
BANDS = {"grouped2": 2, "grouped4": 4, "grouped8": 8}

TEXT = """#define constant const
typedef unsigned int uint;
#include "tile/schedule.h"
extern "C" void order(uint schedule, uint tiles_m, uint tiles_n, uint* blocks) {
  for (uint i = 0; i < tiles_m * tiles_n; ++i) {
    const Block block = schedule_block(Schedule(schedule), i, tiles_m, tiles_n);
    blocks[2 * i] = block.m;
    blocks[2 * i + 1] = block.n;
  }
}
"""

extents = st.integers(1, 40)
schedules = st.sampled_from(SCHEDULES)
powers = st.sampled_from([1, 2, 4, 8, 16, 32])


@functools.cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(compile_library(TEXT, (), "test-schedule")))


def order(schedule: str, tiles_m: int, tiles_n: int) -> np.ndarray:
    """Return the blocks of a grid in their order, [tiles_m * tiles_n, 2]."""
    blocks = np.full((tiles_m * tiles_n, 2), -1, dtype=np.int32)
    library().order(SCHEDULES.index(schedule), tiles_m, tiles_n, blocks.ctypes.data_as(ctypes.c_void_p))
    return blocks


@given(schedules, extents, extents)
def test_every_schedule_is_a_permutation_of_any_grid(schedule: str, tiles_m: int, tiles_n: int) -> None:
    m, n = order(schedule, tiles_m, tiles_n).T
    assert sorted(m * tiles_n + n) == list(range(tiles_m * tiles_n))
    assert n.min() >= 0
    assert n.max() < tiles_n


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_large_ragged_grid(schedule: str) -> None:
    m, n = order(schedule, 129, 1187).T  # 4099 rows by a vocabulary of 151936 in blocks of 32 x 128
    assert np.array_equal(np.sort(m * 1187 + n), np.arange(129 * 1187))


@given(extents, extents)
def test_linear_walks_row_by_row(tiles_m: int, tiles_n: int) -> None:
    m, n = order("linear", tiles_m, tiles_n).T
    assert np.array_equal(m * tiles_n + n, np.arange(tiles_m * tiles_n))


@given(st.sampled_from(sorted(BANDS)), extents, extents)
def test_grouped_finishes_a_band_column_by_column(schedule: str, tiles_m: int, tiles_n: int) -> None:
    m, n = order(schedule, tiles_m, tiles_n).T
    bands = m // BANDS[schedule]
    assert np.all(np.diff(bands) >= 0)
    for band in np.unique(bands):
        inside = bands == band
        assert np.all(np.diff(n[inside]) >= 0)
        height = min(BANDS[schedule], tiles_m - band * BANDS[schedule])
        assert np.array_equal(m[inside], np.tile(np.arange(height) + band * BANDS[schedule], tiles_n))


@given(extents, extents)
def test_diagonal_steps_down_with_each_column(tiles_m: int, tiles_n: int) -> None:
    m, n = order("diagonal", tiles_m, tiles_n).T
    assert np.array_equal(n, np.tile(np.arange(tiles_n), tiles_m))
    same_sweep = n[1:] != 0
    assert np.all((np.diff(m) % tiles_m)[same_sweep] == 1 % tiles_m)


@given(powers)
def test_morton_interleaves_bits_on_a_power_of_two_square(size: int) -> None:
    m, n = order("morton", size, size).T
    interleaved = sum(((m >> bit & 1) << 2 * bit + 1) | ((n >> bit & 1) << 2 * bit) for bit in range(5))
    assert np.array_equal(interleaved, np.arange(size * size))


@given(powers)
def test_hilbert_moves_to_a_neighbour_on_a_power_of_two_square(size: int) -> None:
    steps = np.abs(np.diff(order("hilbert", size, size), axis=0)).sum(axis=1)
    assert np.all(steps == 1)


@given(st.sampled_from(["morton", "hilbert"]), extents, extents)
def test_a_ragged_grid_follows_the_curve_of_its_square(schedule: str, tiles_m: int, tiles_n: int) -> None:
    size = 1 << (max(tiles_m, tiles_n) - 1).bit_length()
    square = order(schedule, size, size)
    kept = square[(square[:, 0] < tiles_m) & (square[:, 1] < tiles_n)]
    assert np.array_equal(order(schedule, tiles_m, tiles_n), kept)
