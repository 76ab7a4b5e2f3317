"""Attention kernels of a GPU equal softmax(scale · q · kᵀ) · v, on the simulator.

The spaces hold some 1,550 kernels over head sizes, ratios of heads and dtypes, a second of compilation each (`make
check-kernels` runs them all). Here every head size, dtype and height of block is met at the matrix end, and every head
size, dtype and the ratios 1 to 16 at the decode end, in twelve kernels.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kernel_checks import assert_near, numpy_of, random
from metal_checks import CHECKED, FAST, WatchedTarget, check_attend
from test_attention import arrays, reference

from metile.errors import MetileError
from metile.ops.attention import AttentionKey
from metile.ops.attention_space import AttentionTile, is_valid, product
from metile.ops.base import ROW_BUCKETS
from metile.simulator import custom
from metile.targets.metal import limits_of

Heads = tuple[int, int]

MATRIX: list[tuple[int, str, Heads, AttentionTile, WatchedTarget]] = [
    (64, "bfloat16", (4, 2), AttentionTile("matrix", 32, 32, 4), FAST),
    (80, "float32", (3, 1), AttentionTile("matrix", 16, 16, 2), CHECKED),
    (96, "float16", (2, 2), AttentionTile("matrix", 64, 64, 8), FAST),
    (128, "bfloat16", (4, 1), AttentionTile("matrix", 32, 16, 4), CHECKED),
    (256, "float16", (2, 1), AttentionTile("matrix", 8, 32, 1), CHECKED),
]
ROWS: list[tuple[int, str, Heads, AttentionTile, WatchedTarget]] = [
    (64, "bfloat16", (4, 2), AttentionTile("rows", 1, 64, 8), FAST),
    (80, "float32", (3, 3), AttentionTile("rows", 1, 32, 4), CHECKED),
    (96, "float16", (6, 2), AttentionTile("rows", 1, 32, 8), CHECKED),
    (128, "bfloat16", (16, 2), AttentionTile("rows", 1, 128, 32), FAST),
    (64, "float32", (16, 1), AttentionTile("rows", 1, 64, 16), CHECKED),
    (256, "float16", (8, 2), AttentionTile("rows", 1, 128, 16), CHECKED),
    (64, "bfloat16", (7, 1), AttentionTile("rows", 1, 64, 16), FAST),
]
NAMES = ("dimension", "dtype", "heads", "tile", "target")


def name(case: tuple[int, str, Heads, AttentionTile, WatchedTarget]) -> str:
    dimension, dtype, heads, tile, _ = case
    return f"d{dimension}-{dtype}-{heads[0]}of{heads[1]}-{tile.label()}"


def key_of(dimension: int, dtype: str, heads: Heads, tile: AttentionTile) -> AttentionKey:
    key = AttentionKey(1 if tile.program == "rows" else 64, 256, *heads, dimension, dtype)
    assert is_valid(key, tile, FAST.limits) is None
    return key


# ---- right results ----


@pytest.mark.parametrize(NAMES, ROWS, ids=map(name, ROWS))
def test_one_query(dimension: int, dtype: str, heads: Heads, tile: AttentionTile, target: WatchedTarget) -> None:
    key, keys = key_of(dimension, dtype, heads, tile), tile.block_keys
    for tokens in (1, 2, 9, keys - 1, keys, keys + 1, 2 * keys + 5, 333):
        check_attend(key, tile, arrays(key, 1, tokens, batch=2), target, scale=dimension**-0.5)
    check_attend(key, tile, arrays(key, 1, 131), target, causal=False)


@pytest.mark.parametrize("target", [FAST, CHECKED], ids=["fast", "checked"])
def test_a_number_of_tokens_that_is_read_when_the_kernel_runs(target: WatchedTarget) -> None:
    tile = AttentionTile("rows", 1, 32, 4)
    key = key_of(64, "float16", (6, 2), tile)
    kernel = target.compile(key.source(tile, counted=True))
    for tokens in (1, 32, 70):
        q, k, v = arrays(key, 1, tokens)
        room = mx.full((1, 2, 26, 64), float("nan"), k.dtype)
        cache = [mx.concatenate([array, room], axis=2) for array in (k, v)]
        y = key.attend(kernel, tile, [q, *cache], scale=0.125, causal=False, count=mx.array([tokens], mx.int32))
        assert_near(y, reference(q, k, v, 0.125, True))


@pytest.mark.parametrize(NAMES, MATRIX, ids=map(name, MATRIX))
def test_blocks_of_queries(
    dimension: int, dtype: str, heads: Heads, tile: AttentionTile, target: WatchedTarget
) -> None:
    # The mask is aligned at the bottom right: the last query sees all keys.
    key, block, keys = key_of(dimension, dtype, heads, tile), tile.block, tile.block_keys
    shapes = [(rows, past) for rows in (1, block - 1, block, block + 1) for past in (0, 1, keys)]
    shapes += [(rows, keys + 1) for rows in range(1, 18)] + [(2 * block + 3, 2 * keys - 1)]
    for length, past in dict.fromkeys(shapes):
        inputs = arrays(key, length, length + past, batch=1 + length % 2)
        for causal in (True, False) if past else (True,):
            check_attend(key, tile, inputs, target, causal=causal, scale=dimension**-0.5)
    check_attend(key, tile, arrays(key, 33, 17), target, causal=False)  # fewer keys than queries


USUAL = [ROWS[0][:4], MATRIX[0][:4]]
PROGRAMS = pytest.mark.parametrize(("dimension", "dtype", "heads", "tile"), USUAL, ids=["rows", "matrix"])


@PROGRAMS
def test_strides_of_inputs(dimension: int, dtype: str, heads: Heads, tile: AttentionTile) -> None:
    """q, k and v in any strides, the last one included, are read where they lie."""
    key, length = key_of(dimension, dtype, heads, tile), 1 if tile.program == "rows" else 19
    base = random(1, (2, length, 4, 64), dtype)
    q = base.transpose(0, 2, 1, 3)
    cache = [random(n, (2, 2, 256, 64), dtype) for n in (2, 3)]
    held = [array[..., :100, :] for array in cache]
    wide = random(4, (2, 2, 100, 128), dtype)
    turned = random(5, (64, 100, 2, 2), dtype)
    shared = mx.broadcast_to(cache[0][:, :1, :100], (2, 2, 100, 64))
    same = mx.broadcast_to(cache[0][:1, :1, :1], (2, 2, 100, 64))
    for inputs in (
        [q, *held],
        [q, wide[..., 64:], wide[..., :64]],
        [q[:, ::-1], wide[:, ::-1, ::-1, 64:], wide[..., ::2]],
        [q[..., ::-1], turned.T, turned.transpose(3, 2, 1, 0)[..., ::-1]],
        [random(6, (64, length, 4, 2), dtype).T, wide[..., ::2], wide[..., 1::2]],
        [q, shared, shared],
        [mx.broadcast_to(q[:, :1], q.shape), held[0], same],
        [q[:1], held[0][1:], held[1][:1]],
    ):
        y = check_attend(key, tile, inputs, FAST)
        assert mx.array_equal(y, check_attend(key, tile, [mx.contiguous(array) for array in inputs], FAST))
    inside = base.reshape(2, length, 256)  # heads side by side, as projections give them
    kernel = FAST.compile(key.source(tile))
    y = key.attend(kernel, tile, [inside, *held], scale=0.125, causal=True, poison=True)
    assert mx.array_equal(y, check_attend(key, tile, [q, *held], FAST))
    empty = [q[:0], *(array[:0] for array in held)]
    assert key.attend(kernel, tile, empty, scale=1.0, causal=True).shape == (0, length, 256)


@PROGRAMS
def test_each_row_of_a_batch_equals_its_own_run(dimension: int, dtype: str, heads: Heads, tile: AttentionTile) -> None:
    key, length = key_of(dimension, dtype, heads, tile), 1 if tile.program == "rows" else 19
    inputs = arrays(key, length, 140, batch=3)
    both = check_attend(key, tile, inputs, FAST)
    for row in range(3):
        assert mx.array_equal(both[row : row + 1], check_attend(key, tile, [a[row : row + 1] for a in inputs], FAST))


@PROGRAMS
def test_scores_that_would_overflow(dimension: int, dtype: str, heads: Heads, tile: AttentionTile) -> None:
    key = key_of(dimension, dtype, heads, tile)
    q, k, v = arrays(key, 1, 300)
    q, k = 100 * q, 100 * k  # scores of some 10^5: one weight is 1
    k[:, :, 250] = 0
    check_attend(key, tile, [q, k, v], FAST, scale=1.0)


@PROGRAMS
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_lies_past_the_context_is_not_read(
    dimension: int, dtype: str, heads: Heads, tile: AttentionTile, value: float
) -> None:
    key = key_of(dimension, dtype, heads, tile)
    for tokens in (1, 33, 64, 100):
        length = 1 if tile.program == "rows" else min(tokens, 19)
        q, k, v = arrays(key, length, tokens)
        unused = mx.full((1, heads[1], 60, dimension), value, k.dtype)
        cached = [mx.concatenate([array, unused], axis=2)[..., :tokens, :] for array in (k, v)]
        plain = check_attend(key, tile, [q, k, v], FAST)
        assert mx.array_equal(check_attend(key, tile, [q, *cached], FAST), plain)


@PROGRAMS
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_reaches_nobody_else(
    dimension: int, dtype: str, heads: Heads, tile: AttentionTile, value: float
) -> None:
    key = key_of(dimension, dtype, heads, tile)
    kernel, length = FAST.compile(key.source(tile)), 1 if tile.program == "rows" else 37

    def launch(inputs: list[mx.array]) -> np.ndarray[Any, Any]:
        return numpy_of(key.launch(kernel, tile, inputs, poison=True)[0])

    plain = arrays(key, length, length + 40)
    before = launch(plain)
    for place, token in ((0, 0), (0, -1), (1, 0), (2, 3), (2, -1)):
        inputs = [mx.array(array) for array in plain]
        inputs[place][0, 1, token, 5] = value
        ours, theirs = launch(inputs), np.isfinite(numpy_of(key.reference(inputs)[0]))
        assert np.isfinite(ours[theirs]).all(), (place, token)
        assert place == 1 or (before == ours)[theirs].all(), (place, token)  # a key of -Inf changes the others' weights


def test_it_equals_plain_mlx() -> None:
    for dimension, dtype, heads, tile in USUAL:
        key = key_of(dimension, dtype, heads, tile)
        inputs = key.example(1 if tile.program == "rows" else 33, seed=3)
        (y,) = key.launch(FAST.compile(key.source(tile)), tile, inputs, poison=True)
        assert_near(y, numpy_of(key.reference(inputs)[0]), times=6)  # plain MLX rounds between the steps
        assert_near(y, reference(*inputs, 1 / math.sqrt(dimension), True))


# ---- the space ----


@pytest.mark.parametrize("rows", ROW_BUCKETS)
def test_the_space(rows: int) -> None:
    limits = limits_of(custom("c"))
    for dimension in (64, 80, 96, 128, 256, 72):
        for heads in ((4, 2), (16, 1)):
            key = AttentionKey(rows, 1024, *heads, dimension, "bfloat16")
            space, whole = key.space(limits), product(key, limits)
            assert len(space) + sum(key.pruned(limits).values()) == len(whole) == len(set(whole))
            assert dimension == 72 or space
            assert {tile.program for tile in space} <= ({"rows", "matrix"} if rows == 1 else {"matrix"})
            assert heads == (16, 1) or not space or space[0].program == ("rows" if rows == 1 else "matrix")


UNEVEN = "more than 16 query heads share a key head, or an uneven number"


@pytest.mark.parametrize(
    ("rows", "heads", "dimension", "tile", "reason"),
    [
        (1, (4, 2), 64, AttentionTile("rows", 1, 64, 8), None),
        (1, (4, 2), 72, AttentionTile("rows", 1, 64, 8), "head_dim is none of 64, 80, 96, 128, 256"),
        (2, (4, 2), 64, AttentionTile("rows", 1, 64, 8), "more than one query"),
        (1, (4, 3), 64, AttentionTile("rows", 1, 64, 8), UNEVEN),
        (1, (16, 1), 256, AttentionTile("rows", 1, 64, 8), "scores and outputs do not fit the registers"),
        (16, (4, 2), 64, AttentionTile("matrix", 32, 32, 4), "block is taller than the bucket"),
        (64, (4, 2), 256, AttentionTile("matrix", 64, 32, 8), "a block does not fit threadgroup memory"),
        (64, (4, 2), 256, AttentionTile("matrix", 32, 32, 2), None),
    ],
)
def test_reasons(rows: int, heads: Heads, dimension: int, tile: AttentionTile, reason: str | None) -> None:
    key = AttentionKey(rows, 256, *heads, dimension, "bfloat16")
    assert is_valid(key, tile, limits_of(custom("c"))) == reason


# ---- errors ----


@PROGRAMS
def test_other_arrays_are_refused(dimension: int, dtype: str, heads: Heads, tile: AttentionTile) -> None:
    key = key_of(dimension, dtype, heads, tile)
    kernel, good = FAST.compile(key.source(tile)), arrays(key, 1, 33, batch=2)
    bad = [good[:-1], [*good, good[0]], good[::-1]]
    for place, array in enumerate(good):
        for other in (array.astype(mx.float32), array[..., :-1], array[:, :1], array[:1], array[0]):
            bad.append([*good[:place], other, *good[place + 1 :]])
    for inputs in bad:
        with pytest.raises(MetileError, match=r"^\[attention\] expected .* but got .*\("):
            key.attend(kernel, tile, inputs, scale=1.0, causal=False)
