"""Quantized weights in the CUDA vocabulary: run on the emulation of ``cuda_emulation.h``, and compiled by NVRTC.

The reference takes the weights as MLX dequantizes them, and multiplies in float32.
"""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cuda_vocabulary import TOLERANCE, Emulated, compiled, kernel_text, nvrtc, nvrtc_text, tile

from metile.ops.base import DTYPES
from metile.ops.linear import LinearKey
from metile.ops.linear_tile import LinearTile
from metile.ops.projections import ProjectionsKey
from metile.ops.weights import AFFINE_BITS, AFFINE_GROUPS
from metile.targets.base import KERNEL_TYPES

BLOCKS = ("mxfp4", "mxfp8", "nvfp4")
FORMATS = (*(f"affine{bits}g{group}" for bits in AFFINE_BITS for group in AFFINE_GROUPS), *BLOCKS)
EPILOGUES = ("store", "bias", "residual", "swiglu")

ROWS = tile("rows", 2, 8, 1, 4, 2, 0)
DIRECT = tile("matrix", 8, 16, 2, 1, 1, 0)  # two warps share k
STAGED = tile("matrix", 16, 32, 1, 2, 1, 32)
DEEP = tile("matrix", 16, 32, 1, 2, 1, 64)
GROUPS = tile("matrix", 16, 64, 1, 4, 4, 64)
TILES = (ROWS, DIRECT, STAGED, DEEP, GROUPS)


def reference(key: Any, inputs: list[mx.array]) -> list[mx.array]:
    """Return y in float32, of weights as MLX dequantizes them."""
    x, count = inputs[0].astype(mx.float32), len(key.format.parts)
    matrices = 3 if isinstance(key, ProjectionsKey) else key.operands
    arrays = [inputs[1 + place * count :][:count] for place in range(matrices)]
    products = [x @ key.format.values(matrix, mx.float32).T for matrix in arrays]
    extra = [array.astype(mx.float32) for array in inputs[1 + matrices * count :]]
    if isinstance(key, ProjectionsKey):
        return [y + bias for y, bias in zip(products, extra, strict=True)] if extra else products
    if key.epilogue == "swiglu":
        return [products[0] * mx.sigmoid(products[0]) * products[1]]
    return [products[0] + extra[0] if extra else products[0]]


def check(key: Any, candidate: LinearTile, rows: int, *, order: int = 0) -> None:
    """Compare a launch on the emulation with the reference; what is not written is NaN, and fails."""
    inputs = key.example(rows, seed=rows)
    kernel = Emulated(key.source(candidate), key.dtype, order=order)
    results = key.launch(kernel, candidate, inputs)
    for y, wanted in zip(results, reference(key, inputs), strict=True):
        error = mx.abs(y.astype(mx.float32) - wanted).max().item()
        assert error <= TOLERANCE[key.dtype] * mx.abs(wanted).max().item(), error


def columns(weights: str, odd: int) -> int:
    """Return an odd number of groups, of at most 128 codes each."""
    if weights == "nvfp4":
        return 16 * odd
    return 32 * odd if weights in BLOCKS or weights.endswith("g32") else int(weights.partition("g")[2]) * (odd // 3)


@pytest.mark.parametrize("candidate", TILES, ids=LinearTile.label)
@pytest.mark.parametrize("weights", FORMATS)
def test_formats(weights: str, candidate: LinearTile) -> None:
    place = FORMATS.index(weights) + TILES.index(candidate)
    dtype = ("bfloat16", "float16")[place % 2] if candidate is GROUPS else list(DTYPES)[place % 3]
    outputs = 34 if weights == "nvfp4" else 33  # MLX quantizes by 32 elements
    key = LinearKey(EPILOGUES[place % 4], 8, outputs, columns(weights, 13), dtype, weights)  # type: ignore[arg-type]
    check(key, candidate, (3, 19, 8)[place % 3], order=place % 4)


@pytest.mark.parametrize("candidate", TILES, ids=LinearTile.label)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("weights", ["affine4g64", "affine8g32", *BLOCKS])
def test_dtypes(weights: str, dtype: str, candidate: LinearTile) -> None:
    place = TILES.index(candidate)
    key = LinearKey(EPILOGUES[place % 4], 8, 41, 192, dtype, weights)  # type: ignore[arg-type]
    check(key, candidate, 9, order=place % 4)


@pytest.mark.parametrize("candidate", [ROWS, DIRECT, GROUPS], ids=LinearTile.label)
@pytest.mark.parametrize("weights", ["affine4g64", "nvfp4"])
@pytest.mark.parametrize("bias", [False, True])
def test_projections(bias: bool, weights: str, candidate: LinearTile) -> None:
    key = ProjectionsKey(8, (72, 24, 17), 128, bias, "bfloat16", weights)
    check(key, candidate, 5, order=1)


LARGER = [  # of each way to multiply, with more fragments, turns and warps
    tile("rows", 4, 16, 1, 4, 1, 0),
    tile("matrix", 16, 32, 4, 1, 2, 0),
    tile("matrix", 32, 64, 2, 2, 1, 64),
    tile("matrix", 32, 128, 2, 8, 4, 64),
    tile("matrix", 256, 128, 2, 8, 4, 64),  # products of a slice go on while the next begins
]


@pytest.mark.parametrize("order", range(4))
@pytest.mark.parametrize("candidate", LARGER, ids=LinearTile.label)
def test_larger_tiles_in_any_order_of_threads(candidate: LinearTile, order: int) -> None:
    key = LinearKey("store" if order % 2 else "swiglu", 64, 150, 448, "bfloat16", "affine4g64")
    check(key, candidate, 37, order=order)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows=st.integers(1, 20), outputs=st.integers(1, 50), groups=st.integers(1, 21), place=st.integers(0, 4))
@pytest.mark.parametrize("weights", ["affine4g32", "nvfp4"])
def test_any_shape(weights: str, rows: int, outputs: int, groups: int, place: int) -> None:
    inputs, outputs = (groups * 16, outputs * 2) if weights == "nvfp4" else (groups * 32, outputs)
    check(LinearKey("store", 8, outputs, inputs, "bfloat16", weights), TILES[place], rows, order=rows % 4)


@pytest.mark.parametrize("candidate", TILES, ids=LinearTile.label)
def test_x_that_does_not_begin_at_16_bytes(candidate: LinearTile) -> None:
    key = LinearKey("store", 8, 33, 192, "bfloat16", "affine4g64")
    source = key.source(candidate)
    body = source.body.replace("matrix_of<const device bfloat>(x)", "narrow(matrix_of<const device bfloat>(x))")
    assert body != source.body
    narrow = "const auto narrow = [](auto all) { all.data += 1, all.columns -= 8; return all; };"
    changed = type(source)(**{**vars(source), "body": f"{narrow} {body}"})
    x, *rest = key.example(7, seed=3)
    wide = mx.concatenate([mx.zeros((7, 1), x.dtype), x, mx.zeros((7, 7), x.dtype)], axis=-1)
    kernel = Emulated(changed, "bfloat16", order=2)

    class Launch:
        """Gives the kernel the wide x."""

        source = changed

        def __call__(self, inputs: Any, outputs: Any, **launch: Any) -> list[mx.array]:
            return kernel([wide, *inputs[1:]], outputs, **launch)

    (y,) = key.launch(Launch(), candidate, [x, *rest])  # type: ignore[arg-type]
    (wanted,) = reference(key, [x, *rest])
    assert mx.abs(y.astype(mx.float32) - wanted).max() <= TOLERANCE["bfloat16"] * mx.abs(wanted).max()


@pytest.mark.parametrize("candidate", TILES, ids=LinearTile.label)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row_and_column(value: float, candidate: LinearTile) -> None:
    key = LinearKey("store", 8, 35, 96, "bfloat16", "affine4g32")
    kernel = Emulated(key.source(candidate), "bfloat16")
    before = key.example(9, seed=1)
    (plain,) = key.launch(kernel, candidate, before)
    for place in (0, 2, 3):  # x, scales, biases
        inputs = [mx.array(array) for array in before]
        inputs[place][5, -1] = value
        (y,) = key.launch(kernel, candidate, inputs)
        touched = mx.zeros(y.shape, mx.bool_)
        if place:
            touched[:, 5] = True
        else:
            touched[5] = True
        assert not mx.isfinite(mx.where(touched, y, mx.inf)).any()
        assert mx.where(touched, True, y == plain).all()


def test_every_code_is_its_level() -> None:
    """Scales are one and x picks a column: y is what MLX says the code is."""
    for weights in ("affine8g32", "affine4g32", *BLOCKS):
        for dtype in DTYPES:
            key = LinearKey("store", 32, 64, 32, dtype, weights)
            codes = mx.arange(64 * key.format.bits, dtype=mx.uint32).reshape(64, key.format.bits)
            codes = codes * 0x04030201 + (codes << 16) * 7
            if weights == "mxfp8":  # without what is not a number
                each = codes.view(mx.uint8)
                codes = mx.where(each % 128 == 127, each - 1, each).view(mx.uint32)
            scales = mx.full((64, 32 // key.format.group), 1.0 if "affine" in weights else 0x38, mx.float32)
            if "affine" in weights:
                arrays = [codes, scales.astype(DTYPES[dtype]), mx.zeros(scales.shape, DTYPES[dtype])]
            else:  # 1 in e4m3, and in e8m0
                arrays = [codes, (scales if weights == "nvfp4" else mx.full(scales.shape, 127)).astype(mx.uint8)]
            inputs = [mx.eye(32).astype(DTYPES[dtype]), *arrays]
            (wanted,) = reference(key, inputs)
            for candidate in (ROWS, DIRECT, DEEP):
                (y,) = key.launch(Emulated(key.source(candidate), dtype), candidate, inputs)
                near = 1e-6 * mx.abs(wanted).max() if candidate is ROWS else 0  # levels are subtracted at the end
                assert (mx.abs(y.astype(mx.float32) - wanted) <= near).all(), (weights, dtype, candidate.label())


COMPILED = [
    (LinearKey("swiglu", 1, 8960, 1536, "bfloat16", "affine4g64"), tile("rows", 1, 16, 1, 8, 2, 0)),
    (LinearKey("store", 4, 8960, 1536, "float16", "affine4g64"), tile("rows", 4, 16, 1, 8, 1, 0)),
    (LinearKey("store", 1, 8960, 1536, "bfloat16", "affine3g64"), tile("rows", 1, 16, 1, 8, 1, 0)),
    (LinearKey("store", 8, 8960, 1536, "bfloat16", "affine4g64"), tile("matrix", 8, 32, 4, 1, 1, 0)),
    (LinearKey("swiglu", 8, 8960, 1536, "bfloat16", "affine4g64"), tile("matrix", 8, 16, 4, 1, 2, 0)),
    (LinearKey("residual", 16, 1536, 8960, "float16", "affine4g64"), tile("matrix", 16, 16, 8, 1, 2, 0)),
    (LinearKey("swiglu", 16, 8960, 1536, "bfloat16", "affine4g64"), tile("matrix", 16, 32, 1, 2, 1, 64)),
    (LinearKey("swiglu", 512, 8960, 1536, "bfloat16", "affine4g64"), tile("matrix", 32, 64, 2, 2, 1, 64)),
    (LinearKey("store", 512, 8960, 1536, "bfloat16", "affine6g64"), tile("matrix", 128, 64, 2, 2, 1, 64)),
    (LinearKey("store", 512, 8960, 1536, "float16", "affine8g64"), tile("matrix", 128, 64, 2, 2, 1, 64)),
    (LinearKey("store", 64, 1536, 8960, "float32", "affine4g64"), tile("matrix", 32, 64, 2, 2, 1, 32)),
    (LinearKey("store", 8, 8960, 1536, "bfloat16", "mxfp4"), tile("matrix", 8, 16, 4, 1, 2, 0)),
    (LinearKey("store", 8, 8960, 1536, "bfloat16", "nvfp4"), tile("matrix", 8, 16, 4, 1, 1, 0)),
    (LinearKey("store", 64, 8960, 1536, "bfloat16", "mxfp8"), tile("matrix", 64, 64, 2, 2, 1, 64)),
    (ProjectionsKey(1, (1536, 256, 256), 1536, True, "bfloat16", "affine4g64"), tile("rows", 1, 16, 1, 8, 2, 0)),
    (ProjectionsKey(8, (1536, 256, 256), 1536, True, "bfloat16", "affine4g64"), tile("matrix", 8, 16, 8, 1, 1, 0)),
]
GROUPED = [  # what only compute capability 9.0 has
    (LinearKey("store", 16, 8960, 1536, "bfloat16", "affine4g64"), tile("matrix", 16, 64, 1, 4, 4, 64)),
    (LinearKey("swiglu", 2048, 8960, 1536, "bfloat16", "affine4g64"), tile("matrix", 128, 128, 1, 8, 4, 64)),
    (LinearKey("store", 2048, 8960, 1536, "bfloat16", "affine4g64"), tile("matrix", 256, 128, 2, 8, 4, 64)),
    (LinearKey("store", 2048, 8960, 1536, "float16", "affine4g64"), tile("matrix", 256, 128, 1, 8, 4, 64)),
    (LinearKey("store", 2048, 8960, 1536, "bfloat16", "nvfp4"), tile("matrix", 128, 128, 1, 8, 4, 64)),
    (LinearKey("store", 2048, 8960, 1536, "bfloat16", "affine5g64"), tile("matrix", 128, 128, 1, 8, 4, 64)),
    (ProjectionsKey(512, (1536, 256, 256), 1536, True, "bfloat16", "affine4g64"), tile("matrix", 128, 64, 1, 4, 4, 64)),
]


def named(item: Any) -> str:
    """Return a parameter's name."""
    return item if isinstance(item, str) else item.label() if isinstance(item, LinearTile) else item.subject()


@pytest.mark.skipif(nvrtc() is None, reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
@pytest.mark.parametrize(
    ("key", "candidate", "architecture"),
    [(*pair, architecture) for pair in COMPILED for architecture in ("sm_80", "sm_90a")]
    + [(*pair, "sm_90a") for pair in GROUPED],
    ids=named,
)
def test_nvrtc_compiles_without_spills(key: Any, candidate: LinearTile, architecture: str) -> None:
    source = key.source(candidate)
    numbers = [candidate.outer_k if name == "outer_k" else 0 for name in source.numbers]
    text = kernel_text(source, KERNEL_TYPES[DTYPES[key.dtype]], numbers)
    log = compiled(
        nvrtc_text(text, source.simdgroups), f"--gpu-architecture={architecture}", "--device-as-default-execution-space"
    )
    assert set(re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)) == {"0"}, log
    assert "serialized" not in log  # products of warpgroups that wait for one another
