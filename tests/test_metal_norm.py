"""Norm kernels of a GPU equal RMSNorm, alone and after a residual add, on the simulator.

The spaces hold 108 kernels, a second of compilation each (`make check-kernels` runs them all). Here each family meets
each dtype once, every time with other numbers of rows and simdgroups.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kernel_checks import assert_near, numpy_of, random
from metal_checks import CHECKED, FAST, WatchedTarget, check, reference

from metile.errors import MetileError
from metile.ops.base import ROW_BUCKETS
from metile.ops.norm import NormKey, NormTile, is_valid
from metile.simulator import custom
from metile.targets.metal import limits_of

TILES = [
    (False, "bfloat16", NormTile(2, 2), CHECKED),
    (False, "float16", NormTile(1, 1), FAST),
    (False, "float32", NormTile(4, 32), CHECKED),
    (True, "bfloat16", NormTile(2, 4), FAST),
    (True, "float16", NormTile(4, 8), CHECKED),
    (True, "float32", NormTile(1, 16), FAST),
]
EVERY = pytest.mark.parametrize(
    ("add", "dtype", "tile", "target"),
    TILES,
    ids=[f"{'add-' if add else ''}{dtype}-{tile.label()}" for add, dtype, tile, _ in TILES],
)


@EVERY
def test_rows_and_ragged_lengths(add: bool, dtype: str, tile: NormTile, target: WatchedTarget) -> None:
    width = 128 * tile.simdgroups
    shapes = [(5, hidden) for hidden in (1, 3, 7, 8, 33, width - 1, width, width + 1, 2 * width + 5)]
    shapes += [(rows, width // 2 + 3) for rows in range(1, 18)]
    for rows, hidden in shapes:
        key = NormKey(add, 64, hidden, 1e-5, dtype)
        inputs = key.example(rows, seed=rows)
        outputs = check(key, tile, inputs, target)
        if add:
            assert mx.array_equal(outputs[0], inputs[0] + inputs[1])


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.5])
@pytest.mark.parametrize("scale", [1e-3, 100.0])
def test_scales_and_eps(scale: float, eps: float) -> None:
    key = NormKey(True, 64, 577, eps, "float32")
    *arrays, weight = key.example(3, 0)
    check(key, NormTile(1, 16), [*(scale * array for array in arrays), weight], FAST)


@pytest.mark.parametrize(
    ("add", "dtype", "tile"), [(False, "float16", NormTile(1, 1)), (True, "bfloat16", NormTile(2, 4))]
)
def test_shapes_and_strides_of_inputs(add: bool, dtype: str, tile: NormTile) -> None:
    key = NormKey(add, 64, 33, 1e-5, dtype)
    kernel = FAST.compile(key.source(tile))
    base, weights = random(2, (2, 5, 99), dtype), [random(1, (66,), dtype)[::2], random(1, (33,), dtype)[::-1]]
    views = [base[..., ::3], base[:, ::-1, 7:40], base[0, :, :33], base[0, 0, 60:93], random(3, (33, 4), dtype).T]
    views += [mx.broadcast_to(base[0, 1, :33], (3, 33)), mx.broadcast_to(base[0, :, :1], (5, 33))]
    views += [base.reshape(2, 1, 5, 1, 3, 33).transpose(4, 1, 2, 3, 0, 5)]  # more axes than a kernel knows
    for x in views:
        for weight in weights:
            inputs = [x, *([mx.contiguous(x)[..., ::-1]] if add else []), weight]
            outputs = key.launch(kernel, tile, inputs, poison=True)
            plain = key.launch(kernel, tile, [mx.contiguous(array) for array in inputs], poison=True)
            for y, same, expected in zip(outputs, plain, reference(key, inputs), strict=True):
                assert_near(y, expected, times=2)
                assert mx.array_equal(y, same)
    empty = [base[:0, :, :33]] * (1 + add)
    assert [y.shape for y in key.launch(kernel, tile, [*empty, weights[0]])] == [(0, 5, 33)] * (1 + add)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(value: float) -> None:
    key, tile = NormKey(True, 64, 577, 1e-5, "bfloat16"), NormTile(2, 4)
    kernel = FAST.compile(key.source(tile))
    plain = key.example(9, 0)
    before = [numpy_of(y) for y in key.launch(kernel, tile, plain, poison=True)]
    for place in (0, 1):
        inputs = [mx.array(array) for array in plain]
        inputs[place][3, -1] = value
        others = np.arange(9) != 3
        for ours, clean, theirs in zip(
            key.launch(kernel, tile, inputs, poison=True), before, key.reference(inputs), strict=True
        ):
            assert (numpy_of(ours)[others] == clean[others]).all()
            assert (np.isnan(numpy_of(ours)[3]) == np.isnan(numpy_of(theirs)[3])).all()


def test_the_space() -> None:
    limits = limits_of(custom("c"))
    for rows in ROW_BUCKETS:
        for hidden in (64, 577, 4096, 16384):
            key = NormKey(False, rows, hidden, 1e-5, "float32")
            space = key.space(limits)
            assert len(space) + sum(key.pruned(limits).values()) == 18
            assert {tile.block for tile in space} == {block for block in (1, 2, 4) if block <= rows}
            assert space[0].block == 1
            assert space[0].simdgroups == {64: 1, 577: 4, 4096: 32, 16384: 32}[hidden]


@pytest.mark.parametrize(
    ("rows", "hidden", "tile", "reason"),
    [
        (4, 577, NormTile(4, 8), None),
        (2, 577, NormTile(4, 8), "block is taller than the bucket"),
        (4, 512, NormTile(4, 8), "more threads than elements of a row"),
        (4, 1, NormTile(4, 1), None),
    ],
)
def test_reasons(rows: int, hidden: int, tile: NormTile, reason: str | None) -> None:
    assert is_valid(NormKey(False, rows, hidden, 1e-5, "float32"), tile, limits_of(custom("c"))) == reason


def test_other_arrays_are_refused() -> None:
    key, tile = NormKey(True, 8, 70, 1e-5, "bfloat16"), NormTile(2, 4)
    kernel, good = FAST.compile(key.source(tile)), key.example(5, 0)
    for place, array in enumerate(good):
        for other in (array.astype(mx.float16), array[..., :-1]):
            inputs: list[Any] = [*good[:place], other, *good[place + 1 :]]
            with pytest.raises(MetileError, match=r"^\[norm\] expected arrays of bfloat16 and shapes \(.* but got"):
                key.launch(kernel, tile, inputs)
