"""Linear kernels on quantized weights equal x · Wᵀ of the dequantized ones, on every instruction set of this machine.

A weight is its code's level, scaled, exactly; x loses less than its own dtype's rounding. So the reference is float64
arithmetic on the values that MLX gives for the codes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import BEST, NAMES, TARGETS, assert_near, numpy_of

from metile.errors import MetileError
from metile.ops.linear import LinearKey, is_valid
from metile.ops.linear_tile import LinearTile
from metile.ops.projections import ProjectionsKey
from metile.ops.weights import AFFINE_BITS, AFFINE_GROUPS, weight_format
from metile.report_dispatches import SelectedDispatches
from metile.targets.base import Limits
from metile.targets.cpu import CpuTarget

Array = np.ndarray[Any, Any]
AFFINE = [f"affine{bits}g{group}" for bits in AFFINE_BITS for group in AFFINE_GROUPS]
FORMATS = [*AFFINE, "mxfp4", "mxfp8", "nvfp4"]
EVERY = pytest.mark.parametrize("target", TARGETS, ids=NAMES)
DTYPES = ("bfloat16", "float16", "float32")

# Every format with one dtype and epilogue in turn: all three dtypes of each would take three times as long to compile.
CASES = [
    pytest.param(name, DTYPES[place % 3], ("store", "bias", "residual", "swiglu")[place % 4], id=name)
    for place, name in enumerate(FORMATS)
]


def reference(key: LinearKey, inputs: list[mx.array]) -> Array:
    """Return epilogue(x · Wᵀ) in float64, W being the values of the codes."""
    x = numpy_of(inputs[0])
    products = [x @ numpy_of(key.format.values(matrix, mx.float32)).T for matrix in key.matrices(inputs)]
    if key.epilogue == "swiglu":
        return np.asarray(products[0] / (1 + np.exp(-products[0])) * products[1])
    return products[0] if key.epilogue == "store" else products[0] + numpy_of(inputs[-1])


@functools.cache
def tile(program: str, epilogue: Any, dtype: str, weights: str, target: CpuTarget) -> LinearTile:
    """Return the first candidate of a program at a middling shape."""
    key = LinearKey(epilogue, 3 if program == "rows" else 64, 577, 640, dtype, weights)
    return next(tile for tile in key.space(target.limits) if tile.program == program)


def check(key: LinearKey, candidate: LinearTile, rows: int, target: CpuTarget, seed: int = 0) -> None:
    inputs = key.example(rows, seed)
    (y,) = key.launch(target.compile(key.source(candidate)), candidate, inputs, poison=True)
    assert_near(y, reference(key, inputs))


@EVERY
@pytest.mark.parametrize(("weights", "dtype", "epilogue"), CASES)
def test_every_format(target: CpuTarget, weights: str, dtype: str, epilogue: Any) -> None:
    group = weight_format(weights).group
    # Odd numbers of groups: no register holds whole ones, nor a slice of k; and rows that end within a tile.
    columns = (5 * group, 2 * group) if group < 128 else (3 * group,)
    for program, rows in (("rows", (1, 3)), ("matrix", (17, 70))):
        candidate = tile(program, epilogue, dtype, weights, target)
        for inputs in columns:
            for count in rows:
                key = LinearKey(epilogue, 64, 70, inputs + inputs % 32, dtype, weights)
                check(key, candidate, count, target)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 150),
    groups=st.integers(1, 9),
    case=st.sampled_from([("affine4g32", "float16"), ("affine4g64", "bfloat16"), ("mxfp4", "bfloat16")]),
    program=st.sampled_from(("rows", "matrix")),
    seed=st.integers(0, 9),
)
def test_any_shape(rows: int, outputs: int, groups: int, case: tuple[str, str], program: str, seed: int) -> None:
    weights, dtype = case
    key = LinearKey("store", 64, outputs, groups * weight_format(weights).group, dtype, weights)
    check(key, tile(program, "store", dtype, weights, BEST), rows, BEST, seed)


@pytest.mark.parametrize("weights", ["affine4g64", "affine4g32", "affine8g64", "mxfp4"])
def test_tiles_of_the_decode_program(weights: str) -> None:
    key = LinearKey("swiglu", 4, 131, 384, "bfloat16", weights)
    candidates = {key.source(candidate).name: candidate for candidate in key.space(BEST.limits)}
    rows = [candidate for candidate in candidates.values() if candidate.program == "rows"]
    assert len(rows) > 3
    for candidate in rows[:: max(1, len(rows) // 5)]:
        assert is_valid(key, candidate, BEST.limits) is None
        check(key, candidate, 4, BEST)


@EVERY
def test_a_large_value_in_a_group_costs_the_others_nothing(target: CpuTarget) -> None:
    """Groups of x have scales of their own: an outlier of 4000 leaves the rest as exact as it was."""
    key = LinearKey("store", 1, 64, 1024, "bfloat16", "affine4g64")
    inputs = key.example(1, 1)
    inputs[0][0, 100] = 4000.0
    codes, scales, biases = inputs[1:4]
    scales[:, 1] = 0.0  # and the outlier's own group says nothing
    biases[:, 1] = 0.0
    candidate, arrays = tile("rows", "store", "bfloat16", "affine4g64", target), [inputs[0], codes, scales, biases]
    (y,) = key.launch(target.compile(key.source(candidate)), candidate, arrays)
    assert_near(y, reference(key, arrays))


@EVERY
@pytest.mark.parametrize("program", ["rows", "matrix"])
def test_projections(target: CpuTarget, program: str) -> None:
    key = ProjectionsKey(64, (70, 33, 17), 192, True, "float16", "affine4g32")
    candidate = tile(program, "store", "float16", "affine4g32", target)
    for rows in (1, 3, 20):
        arrays = key.example(rows, seed=rows)
        outputs = key.launch(target.compile(key.source(candidate)), candidate, arrays, poison=True)
        for place, y in enumerate(outputs):
            one = LinearKey("bias", 64, key.outputs[place], 192, "float16", "affine4g32")
            own = [arrays[0], *arrays[1 + 3 * place : 4 + 3 * place], arrays[10 + place]]
            assert_near(y, reference(one, own))


def test_infinity_and_nan_reach_the_output() -> None:
    key = LinearKey("store", 1, 16, 128, "bfloat16", "affine4g64")
    inputs = key.example(1, 0)
    for value in (float("nan"), float("inf")):
        inputs[0][0, 7] = value
        candidate = tile("rows", "store", "bfloat16", "affine4g64", BEST)
        (y,) = key.launch(BEST.compile(key.source(candidate)), candidate, inputs)
        assert not mx.isfinite(y.astype(mx.float32)).any().item()


def test_families_names_and_dispatches() -> None:
    families = {
        ("store", 1, "affine4g64"): "affine_matmul",
        ("swiglu", 1, "affine4g64"): "affine_swiglu",
        ("residual", 16, "affine4g64"): "affine_residual_qmv",
        ("residual", 32, "affine4g64"): "affine_matmul",
        ("swiglu", 64, "mxfp4"): "block_scaled",
        ("residual", 1, "nvfp4"): "block_scaled",
    }
    for (epilogue, rows, weights), family in families.items():
        key = LinearKey(epilogue, rows, 64, 128, "bfloat16", weights)  # type: ignore[arg-type]
        assert key.family == family
        for candidate in (None, key.space(BEST.limits)[0]):
            SelectedDispatches.of({family: [key.dispatch(candidate)]})  # type: ignore[list-item]
        assert weights in key.subject()
        assert weights in key.source(key.space(BEST.limits)[0]).name


def test_devices_without_such_kernels_say_so() -> None:
    key = LinearKey("store", 1, 64, 128, "bfloat16", "affine4g64")
    apple = Limits(lanes=32, registers=128, threadgroup_bytes=32768, tile_dtypes=DTYPES, tile_rows=8, threads=1024)
    assert key.space(apple) == []
    assert "quantized weights have no kernel for this device yet" in key.pruned(apple)
    assert dataclasses.replace(key, weights="dense").space(apple)


def test_a_format_that_does_not_exist_is_refused() -> None:
    for name in ("affine1g64", "affine4g16", "mxfp6", ""):
        with pytest.raises(MetileError, match=r"\[weights\] expected dense, mxfp4"):
            weight_format(name)


def test_arrays_of_another_dtype_are_refused() -> None:
    key = LinearKey("store", 1, 16, 128, "bfloat16", "affine4g64")
    candidate = tile("rows", "store", "bfloat16", "affine4g64", BEST)
    inputs = key.example(1, 0)
    inputs[2] = inputs[2].astype(mx.float16)
    with pytest.raises(MetileError, match=r"\[linear\] expected arrays of bfloat16, uint32, bfloat16, bfloat16"):
        key.launch(BEST.compile(key.source(candidate)), candidate, inputs)
