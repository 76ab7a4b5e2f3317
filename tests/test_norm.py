"""Norm kernels equal RMSNorm, alone and after a residual add, on every instruction set of this machine."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import BEST, TARGETS, assert_near, check_identities, numpy_of, random

from metile.errors import MetileError
from metile.ops.base import DTYPES, ROW_BUCKETS
from metile.ops.norm import NormKey, NormTile, is_valid
from metile.report_dispatches import SelectedDispatches
from metile.targets.cpu import CpuTarget

Array = np.ndarray[Any, Any]
FAMILIES = ("rms_norm", "add_rms_norm")

# Both families in every dtype on the best instruction set; the others meet each of both.
CASES = [
    pytest.param(target, add, dtype, id=f"{target.isa.name}-{FAMILIES[add]}-{dtype}")
    for target in TARGETS
    for add, dtype in (
        itertools.product((False, True), DTYPES)
        if target is BEST
        else [(True, "bfloat16"), (False, "float16"), (True, "float32")]
    )
]


def rounded(values: Array, like: mx.array) -> Array:
    return numpy_of(mx.array(values.astype(np.float32)).astype(like.dtype))


def reference(key: NormKey, inputs: list[mx.array]) -> list[Array]:
    """Return x / rms(x) * weight in float64, with the sum before it, rounded where MLX rounds it."""
    x, *residual, weight = (numpy_of(array) for array in inputs)
    total = rounded(x + residual[0], inputs[0]) if residual else x
    with np.errstate(all="ignore"):  # some tests put in Inf and NaN
        normed = total / np.sqrt(np.square(total).mean(axis=-1, keepdims=True) + key.eps)
        y = rounded(normed, inputs[0]) * weight
    return [total, y] if residual else [y]


def run(key: NormKey, block: int, inputs: list[mx.array], target: CpuTarget) -> list[mx.array]:
    candidate = NormTile(block)
    return key.launch(target.compile(key.source(candidate)), candidate, inputs, poison=True)


def check(key: NormKey, block: int, inputs: list[mx.array], target: CpuTarget) -> None:
    expected = reference(key, inputs)
    actual = run(key, block, inputs, target)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_near(ours, theirs, times=2)  # rounded before the weight, and after
    if key.add:
        assert mx.array_equal(actual[0], inputs[0] + inputs[1])


# ---- right results ----


@pytest.mark.parametrize(("target", "add", "dtype"), CASES)
def test_rows_and_ragged_lengths(target: CpuTarget, add: bool, dtype: str) -> None:
    for hidden in (1, 3, 16, 31, 33, 64, 127, 577, 4099):
        for rows in (1, 2, 5, 17, 33):
            key = NormKey(add, 64, hidden, 1e-5, dtype)
            check(key, 4, key.example(rows, seed=rows), target)


@pytest.mark.parametrize("block", [1, 2, 8, 16, 32])
def test_blocks(block: int) -> None:
    # Rows of a block follow one another in a loop: the instruction set and the dtype make no difference to it.
    for rows in (*range(1, 18), 31, 33, 127):
        key = NormKey(True, 128, 33, 1e-5, "bfloat16")
        check(key, block, key.example(rows, seed=rows), BEST)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40),
    hidden=st.integers(1, 300),
    add=st.booleans(),
    eps=st.sampled_from([1e-12, 1e-6, 1e-5, 0.5]),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
)
def test_any_shape_scale_and_eps(rows: int, hidden: int, add: bool, eps: float, scale: float) -> None:
    key = NormKey(add, 64, hidden, eps, "float32")
    *arrays, weight = key.example(rows, 0)
    for target in (BEST, TARGETS[-1]):
        check(key, 4, [*(scale * array for array in arrays), weight], target)


@pytest.mark.parametrize("add", [False, True])
def test_shapes_and_strides_of_inputs(add: bool) -> None:
    key = NormKey(add, 64, 33, 1e-5, "bfloat16")
    weight, base = random(1, (66,), "bfloat16")[::2], random(2, (2, 5, 99), "bfloat16")
    views = [base[..., ::3], base[:, ::-1, 7:40], base[0, :, :33], base[0, 0, 60:93], random(3, (33, 4), "bfloat16").T]
    for x in views:
        others = [mx.contiguous(x)[..., ::-1]] if add else []
        check(key, 4, [x, *others, weight], BEST)
    empty = [base[:0, :, :33]] * (1 + add)
    assert [y.shape for y in run(key, 4, [*empty, weight], BEST)] == [(0, 5, 33)] * (1 + add)


# ---- values that are not finite ----


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("target", "add", "dtype"), CASES)
def test_what_is_not_finite_stays_in_its_row(target: CpuTarget, add: bool, dtype: str, value: float) -> None:
    for hidden in (33, 64):
        key = NormKey(add, 64, hidden, 1e-5, dtype)
        plain = key.example(9, 0)
        before = [numpy_of(y) for y in run(key, 4, plain, target)]
        for place in range(1 + add):
            for column in (0, -1):
                inputs = [mx.array(array) for array in plain]
                inputs[place][3, column] = value
                after = [numpy_of(y) for y in run(key, 4, inputs, target)]
                expected = [numpy_of(y) for y in key.reference(inputs)]
                for ours, clean, theirs in zip(after, before, expected, strict=True):
                    others = np.arange(9) != 3
                    assert (ours[others] == clean[others]).all()
                    assert (np.isnan(ours[3]) == np.isnan(theirs[3])).all()
                    assert (np.isfinite(ours[3]) == np.isfinite(theirs[3])).all()
        inputs = [*plain[:-1], mx.array(plain[-1])]
        inputs[-1][-1] = value  # the weight's edge
        y = numpy_of(run(key, 4, inputs, target)[-1])
        assert (y[:, :-1] == before[-1][:, :-1]).all()
        assert not np.isfinite(y[:, -1]).any()


def test_rows_of_zeros() -> None:
    key = NormKey(False, 4, 33, 1e-5, "float32")
    x, weight = key.example(3, 0)
    x[1] = 0
    y = run(key, 1, [x, weight], BEST)[0]
    assert not y[1].any()
    check(key, 1, [x, weight], BEST)


# ---- the space, the search and the report ----


def test_the_space() -> None:
    for rows in ROW_BUCKETS:
        key = NormKey(False, rows, 64, 1e-5, "float32")
        space = key.space(BEST.limits)
        assert [tile.block for tile in space] == [block for block in (1, 2, 4, 8, 16, 32) if block <= rows]
        assert sum(key.pruned(BEST.limits).values()) == 6 - len(space)
    key = NormKey(False, 4, 64, 1e-5, "float32")
    assert is_valid(key, NormTile(8), BEST.limits) == "block is taller than the bucket"
    assert is_valid(key, NormTile(4), BEST.limits) is None
    assert list(key.pruned(BEST.limits)) == ["block is taller than the bucket"]


def test_labels_and_names() -> None:
    check_identities([NormKey(add, 512, 64, 1e-5, dtype) for add in (False, True) for dtype in DTYPES], BEST)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("add", [False, True])
def test_examples_and_plain_mlx(add: bool, dtype: str) -> None:
    key = NormKey(add, 8, 70, 1e-5, dtype)
    inputs = key.example(5, seed=3)
    assert [array.shape for array in inputs] == [(5, 70)] * (1 + add) + [(70,)]
    assert {array.dtype for array in inputs} == {DTYPES[dtype]}
    assert all(mx.array_equal(a, b) for a, b in zip(inputs, key.example(5, seed=3), strict=True))
    for ours, theirs in zip(key.reference(inputs), reference(key, inputs), strict=True):
        assert ours.dtype == DTYPES[dtype]
        assert_near(ours, theirs, times=2)
    assert key.weight_inputs() == ()


@pytest.mark.parametrize("add", [False, True])
def test_dispatches_are_those_of_the_schema(add: bool) -> None:
    key = NormKey(add, 64, 577, 1e-6, "float16")
    assert key.family == FAMILIES[add]
    empty: dict[str, list[Any]] = {name: [] for name in SelectedDispatches.model_fields}
    for candidate in (None, *key.space(BEST.limits)):
        record = SelectedDispatches.model_validate(empty | {key.family: [key.dispatch(candidate)]})
        entry = getattr(record, key.family)[0]
        assert entry.algorithm == ("mlx" if candidate is None else "metile")
        assert entry.block == (0 if candidate is None else candidate.block)
        assert (entry.hidden, entry.eps, entry.row_bucket, entry.dtype) == (577, 1e-6, 64, "mlx.core.float16")


@pytest.mark.parametrize("add", [False, True])
def test_other_arrays_are_refused(add: bool) -> None:
    key = NormKey(add, 8, 70, 1e-5, "bfloat16")
    good = key.example(5, 0)
    message = r"^\[norm\] expected arrays of bfloat16 and shapes \(.* but got"
    for place, array in enumerate(good):
        others = [array.astype(mx.float16), array[..., :-1], mx.concatenate([array, array], axis=-1)]
        others += [] if place == 0 else [array[None]]  # x may have any leading axes
        for other in others:
            with pytest.raises(MetileError, match=message):
                run(key, 4, [*good[:place], other, *good[place + 1 :]], BEST)
    for inputs in (good[:-1], [*good, good[0]], [mx.array(1.0, mx.bfloat16), *good[1:]]):
        with pytest.raises(MetileError, match=message):
            run(key, 4, inputs, BEST)
