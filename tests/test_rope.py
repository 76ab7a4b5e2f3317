"""The rope kernel turns q and k, and lays out k and v, like plain MLX on every instruction set of this machine."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kernel_checks import BEST, TARGETS, assert_near, check_identities, numpy_of, random

from metile.errors import MetileError
from metile.ops.base import DTYPES, ROW_BUCKETS
from metile.ops.rope import RopeKey, RopeTile, is_valid
from metile.targets.cpu import CpuTarget

Array = np.ndarray[Any, Any]

# Every dtype at every head size on the best instruction set; the others meet each dtype and a head size of each kind:
# whole vectors, a ragged half, and the largest.
CASES = [
    pytest.param(target, dimension, dtype, id=f"{target.isa.name}-{dimension}-{dtype}")
    for target in TARGETS
    for dimension, dtype in (
        [(dimension, dtype) for dimension in (64, 80, 96, 128, 256) for dtype in DTYPES]
        if target is BEST
        else [(64, "bfloat16"), (80, "float16"), (256, "float32")]
    )
]


def table_of(positions: int, dimension: int) -> mx.array:
    """Return cosines, then sines, of base 10000."""
    angles = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(0, dimension, 2) / dimension)
    table = mx.array(np.concatenate([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32))
    mx.eval(table)
    return table


def inputs_of(key: RopeKey, batch: int, length: int, positions: int, seed: int = 0) -> list[mx.array]:
    widths = [heads * key.dimension for heads in (key.query_heads, key.key_value_heads, key.key_value_heads)]
    arrays = [random(seed + i, (batch, length, width), key.dtype) for i, width in enumerate(widths)]
    return [*arrays, table_of(positions, key.dimension)]


def reference(key: RopeKey, inputs: list[mx.array], offset: int) -> list[Array]:
    """Return q [B, L, H * D], k and v [B, H_kv, L, D] in float64: a pair (a, b) becomes (ac - bs, as + bc)."""
    q, k, v, table = (numpy_of(array) for array in inputs)
    batch, length, half = q.shape[0], q.shape[1], key.dimension // 2
    rows = table[offset : offset + length, None]
    c, s = rows[..., :half], rows[..., half:]

    def turned(x: Array) -> Array:
        x = x.reshape(batch, length, -1, key.dimension)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * c - b * s, a * s + b * c], axis=-1)

    values = v.reshape(batch, length, -1, key.dimension)
    return [turned(q).reshape(q.shape), turned(k).transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)]


def run(key: RopeKey, block: int, inputs: list[mx.array], offset: int, target: CpuTarget = BEST) -> list[mx.array]:
    candidate = RopeTile(block)
    kernel = target.compile(key.source(candidate))
    return key.turn(kernel, candidate, inputs, offset=offset, poison=True)


def check(key: RopeKey, block: int, inputs: list[mx.array], offset: int, target: CpuTarget = BEST) -> None:
    actual = run(key, block, inputs, offset, target)
    for ours, theirs in zip(actual, reference(key, inputs, offset), strict=True):
        assert ours.dtype == DTYPES[key.dtype]
        assert_near(ours, theirs)
    shape = (*inputs[2].shape[:2], key.key_value_heads, key.dimension)
    assert mx.array_equal(actual[2], inputs[2].reshape(shape).transpose(0, 2, 1, 3))


# ---- right results ----


@pytest.mark.parametrize(("target", "dimension", "dtype"), CASES)
def test_lengths_offsets_and_batches(target: CpuTarget, dimension: int, dtype: str) -> None:
    key = RopeKey(64, 5, 2, dimension, dtype)
    for batch, length, offset in ((1, 1, 0), (1, 1, 130), (2, 3, 7), (1, 31, 0), (2, 33, 100), (1, 127, 1)):
        check(key, 4, inputs_of(key, batch, length, offset + length), offset, target)


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (3, 3), (9, 3)])
def test_blocks_and_heads(block: int, heads: tuple[int, int]) -> None:
    key = RopeKey(64, *heads, 64, "bfloat16")
    for length in (*range(1, 19), 37):
        check(key, block, inputs_of(key, 2, length, 60), 5)


@pytest.mark.parametrize("dimension", [2, 6, 34])
def test_heads_narrower_than_a_vector(dimension: int) -> None:
    for dtype in ("float32", "bfloat16"):
        key = RopeKey(64, 3, 1, dimension, dtype)
        for target in (BEST, TARGETS[-1]):
            check(key, 4, inputs_of(key, 2, 5, 9), 4, target)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_equals_plain_mlx(dtype: str) -> None:
    key = RopeKey(64, 6, 3, 64, dtype)
    for rows in (1, 5, 40):
        inputs = key.example(rows, seed=rows)
        for candidate in (RopeTile(1), RopeTile(16)):
            kernel = BEST.compile(key.source(candidate))
            actual = key.launch(kernel, candidate, inputs, poison=True)
            for ours, theirs in zip(actual, key.reference(inputs), strict=True):
                assert_near(ours, numpy_of(theirs), times=2)  # each side rounds once


def test_rows_of_a_batch_are_those_of_their_own_run() -> None:
    key = RopeKey(64, 4, 2, 80, "float16")
    *arrays, table = inputs_of(key, 2, 7, 20)
    both = run(key, 4, [*arrays, table], 11)
    for row in range(2):
        alone = run(key, 4, [*(array[row : row + 1] for array in arrays), table], 11)
        for ours, theirs in zip(both, alone, strict=True):
            assert mx.array_equal(ours[row : row + 1], theirs)


def test_layouts() -> None:
    key = RopeKey(64, 4, 2, 64, "bfloat16")
    table = table_of(40, 64)
    joint = random(0, (2, 9, 8 * 64), "bfloat16")  # one projection of all three
    check(key, 4, [joint[..., :256], joint[..., 256:384], joint[..., 384:], table], 3)
    q, k, v, _ = inputs_of(key, 2, 18, 40)
    check(key, 4, [x[:, ::2] for x in (q, k, v)] + [table], 3)
    check(key, 4, [x[::-1, ::-1] for x in (q, k, v)] + [table], 3)
    check(key, 4, [mx.broadcast_to(x[:1, :1], (2, 5, x.shape[2])) for x in (q, k, v)] + [table], 3)
    check(key, 4, [mx.contiguous(x.transpose(2, 0, 1)).transpose(1, 2, 0) for x in (q, k, v)] + [table], 3)


def test_nothing_to_turn() -> None:
    key = RopeKey(64, 4, 2, 64, "float32")
    q, k, v = run(key, 4, [x[:, :0] for x in inputs_of(key, 2, 3, 9)[:3]] + [table_of(9, 64)], 9)
    assert (q.shape, k.shape, v.shape) == ((2, 0, 256), (2, 2, 0, 64), (2, 2, 0, 64))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_pair(value: float) -> None:
    key = RopeKey(64, 4, 2, 80, "bfloat16")
    *arrays, table = inputs_of(key, 1, 5, 9)
    clean = [numpy_of(y) for y in run(key, 4, [*arrays, table], 2)]
    arrays[0][0, 3, 80 + 7] = value  # head 1, pair (7, 47)
    dirty = [numpy_of(y) for y in run(key, 4, [*arrays, table], 2)]
    assert [tuple(place) for place in np.argwhere(~np.isfinite(dirty[0]))] == [(0, 3, 87), (0, 3, 127)]
    same = np.isfinite(dirty[0])
    assert (dirty[0][same] == clean[0][same]).all()
    assert all((ours == theirs).all() for ours, theirs in zip(dirty[1:], clean[1:], strict=True))


# ---- the space, and what is refused ----


def test_the_space() -> None:
    for rows in ROW_BUCKETS:
        key = RopeKey(rows, 4, 2, 64, "float32")
        space = key.space(BEST.limits)
        assert [tile.block for tile in space] == [block for block in (1, 4, 16) if block <= rows]
        assert sum(key.pruned(BEST.limits).values()) == 3 - len(space)
    assert is_valid(RopeKey(4, 4, 2, 64, "float32"), RopeTile(16), BEST.limits) == "block is taller than the bucket"
    odd = RopeKey(4, 4, 2, 65, "float32")
    assert is_valid(odd, RopeTile(1), BEST.limits) == "head_dim is odd"
    assert odd.space(BEST.limits) == []
    assert odd.pruned(BEST.limits) == {"head_dim is odd": 3}


def test_labels_and_names() -> None:
    check_identities([RopeKey(512, 4, 2, d, dtype) for d in (64, 80) for dtype in DTYPES], BEST)
    key = RopeKey(16, 9, 3, 64, "bfloat16")
    assert key.subject() == "rope rows=16 heads=9/3 dim=64 bfloat16"
    assert key.dispatch(None) == {"algorithm": "mlx", "block": 0, "rows": 16}
    assert key.dispatch(RopeTile(4)) == {"algorithm": "metile", "block": 4, "rows": 16}
    assert key.weight_inputs() == ()


def test_other_arrays_are_refused() -> None:
    key = RopeKey(8, 4, 2, 64, "bfloat16")
    good = inputs_of(key, 2, 5, 9)
    for place in range(3):
        x = good[place]
        for other in (x.astype(mx.float16), x[..., :-1], x[0], x[None], x[:, :4] if place else x[:, :, :64]):
            with pytest.raises(MetileError, match=r"^\[rope\] expected arrays of bfloat16 and shapes \(.* but got"):
                run(key, 4, [*good[:place], other, *good[place + 1 :]], 0)
    table = good[3]
    for wrong in (table.astype(mx.float16), table[:, :32], table[None], table[0]):
        with pytest.raises(MetileError, match=r"^\[rope\] expected .* table of float32 and 64 columns but got one of"):
            run(key, 4, [*good[:3], wrong], 0)
    with pytest.raises(MetileError, match=r"a table of float32 and 64 columns but got 3 arrays$"):
        run(key, 4, good[:3], 0)
    for offset, got in ((5, "5 to 9"), (-1, "-1 to 3")):
        with pytest.raises(MetileError, match=rf"^\[rope\] expected positions of a table of 9 but got {got}$"):
            run(key, 4, good, offset)
