"""The rope kernel of a GPU turns q and k, and lays out k and v, like plain MLX, on the simulator.

The space holds 12 tiles for each head size and dtype, a second of compilation each (`make check-kernels` runs all 180
kernels). Here every head size, every dtype and every number of simdgroups is met, in five kernels.
"""

from __future__ import annotations

import mlx.core as mx
import pytest
from kernel_checks import assert_near, numpy_of, random
from metal_checks import CHECKED, FAST, WatchedTarget, check_turn
from test_rope import inputs_of, reference, table_of

from metile.errors import MetileError
from metile.ops.rope import RopeKey, RopeTile, is_valid
from metile.simulator import custom
from metile.targets.metal import limits_of

TILES = [
    (64, "bfloat16", RopeTile(4, 2), FAST),
    (80, "float16", RopeTile(1, 8), CHECKED),
    (96, "float32", RopeTile(4, 4), CHECKED),
    (128, "bfloat16", RopeTile(16, 16), FAST),
    (256, "float32", RopeTile(16, 2), CHECKED),
]
EVERY = pytest.mark.parametrize(
    ("dimension", "dtype", "tile", "target"), TILES, ids=[f"d{d}-{t}-{tile.label()}" for d, t, tile, _ in TILES]
)


@EVERY
def test_lengths_offsets_and_heads(dimension: int, dtype: str, tile: RopeTile, target: WatchedTarget) -> None:
    shapes = [(1, rows, rows % 3) for rows in range(1, 18)] + [(2, 3, 7), (1, 33, 131), (2, 1, 1001)]
    for heads in ((5, 3), (1, 1)):
        key = RopeKey(64, *heads, dimension, dtype)
        for batch, length, offset in shapes if heads == (5, 3) else shapes[-3:]:
            check_turn(key, tile, inputs_of(key, batch, length, offset + length), target, offset=offset)


def test_it_equals_plain_mlx() -> None:
    key, tile = RopeKey(64, 6, 3, 64, "bfloat16"), RopeTile(4, 2)
    for rows in (1, 5, 40):
        inputs = key.example(rows, seed=rows)
        actual = key.launch(FAST.compile(key.source(tile)), tile, inputs, poison=True)
        for ours, theirs in zip(actual, key.reference(inputs), strict=True):
            assert_near(ours, numpy_of(theirs), times=2)  # each side rounds once


def test_strides_of_inputs() -> None:
    """Inputs are read where they lie: slices of one wide projection, reversed, transposed, every second column."""
    key, tile, length = RopeKey(64, 4, 2, 64, "bfloat16"), RopeTile(4, 2), 9
    kernel, table = FAST.compile(key.source(tile)), table_of(30, 64)
    wide = random(1, (2, length, 1024), "bfloat16")
    turned = random(2, (128, length, 2), "bfloat16").transpose(2, 1, 0)
    shared = mx.broadcast_to(random(3, (1, 1, 128), "bfloat16"), (2, length, 128))
    for q, k, v in (
        (wide[..., :256], wide[..., 256:384], wide[..., 384:512]),
        (wide[:, ::-1, ::2][..., :256], wide[..., ::-1][..., :128], wide[::-1, :, 512:640]),
        (wide[..., :1024:4], turned, turned[:, ::-1]),
        (wide[..., 700:956], shared, shared),
    ):
        actual = key.turn(kernel, tile, [q, k, v, table], offset=11, poison=True)
        for ours, theirs in zip(actual, reference(key, [q, k, v, table], 11), strict=True):
            assert_near(ours, theirs)
        plain = [mx.contiguous(array) for array in (q, k, v)]
        for ours, theirs in zip(actual, key.turn(kernel, tile, [*plain, table], offset=11), strict=True):
            assert mx.array_equal(ours, theirs)
    empty = [array[:, :0] for array in (wide[..., :256], wide[..., :128], wide[..., :128])]
    assert [y.shape for y in key.turn(kernel, tile, [*empty, table], offset=0)] == [(2, 0, 256), *[(2, 2, 0, 64)] * 2]


def test_heads_of_fewer_than_eight_elements() -> None:
    # Then an input is too small to be a view: its text is another.
    key, tile = RopeKey(64, 3, 1, 2, "float32"), RopeTile(1, 2)
    for length in (1, 2, 5):
        check_turn(key, tile, inputs_of(key, 1, length, 9), CHECKED, offset=3)


def test_the_space() -> None:
    limits = limits_of(custom("c"))
    assert [tile.block for tile in RopeKey(1, 4, 2, 64, "bfloat16").space(limits)] == [1] * 4
    assert len(RopeKey(16, 4, 2, 64, "bfloat16").space(limits)) == 12
    assert is_valid(RopeKey(16, 4, 2, 63, "bfloat16"), RopeTile(4, 2), limits) == "head_dim is odd"
    small = limits_of(custom("c", pipeline_threads=256))
    assert is_valid(RopeKey(16, 4, 2, 64, "bfloat16"), RopeTile(4, 16), small) == "more threads than the device's 256"


def test_other_arrays_are_refused() -> None:
    key, tile = RopeKey(64, 4, 2, 64, "bfloat16"), RopeTile(4, 2)
    kernel, (q, k, v, table) = FAST.compile(key.source(tile)), inputs_of(key, 2, 5, 9)
    for inputs in ([k, k, v, table], [q, k, v[:, 1:], table], [q.astype(mx.float16), k, v, table]):
        with pytest.raises(MetileError, match=r"^\[rope\] expected arrays of bfloat16 and shapes"):
            key.turn(kernel, tile, inputs, offset=0)
    with pytest.raises(MetileError, match=r"^\[rope\] expected positions of a table of 9 but got 5 to 9$"):
        key.turn(kernel, tile, [q, k, v, table], offset=5)
