"""The search space of linear kernels on an NVIDIA GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from test_cuda_target import HOPPER

from metile.ops import linear_cuda
from metile.ops.base import DTYPES
from metile.ops.linear import LinearKey, is_valid
from metile.ops.linear_tile import LinearTile

LIMITS = HOPPER.limits
AMPERE = dataclasses.replace(LIMITS, warpgroups=False, threadgroup_bytes=166912)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)


def key(rows: int, epilogue: Any = "swiglu", dtype: str = "bfloat16") -> LinearKey:
    return LinearKey(epilogue, rows, 8960, 1536, dtype)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("epilogue", ["store", "swiglu"])
def test_candidates_fit_the_device(rows: int, dtype: str, epilogue: str) -> None:
    subject = key(rows, epilogue, dtype)
    for limits in (LIMITS, AMPERE):
        space = subject.space(limits)
        assert len(space) == len(set(space)) > 8
        for tile in space:
            assert is_valid(subject, tile, limits) is None
            size = DTYPES[dtype].size
            ring = linear_cuda.slice_bytes(tile, subject.operands, size) * linear_cuda.stages(
                tile, subject.operands, size
            )
            assert ring <= limits.threadgroup_bytes
            assert tile.wm * tile.wn * 32 <= limits.threads
            grouped = linear_cuda.is_grouped(tile)
            assert not grouped or (limits.warpgroups and dtype != "float32" and tile.block_n == 16 * tile.wn)


@pytest.mark.parametrize("rows", ROWS)
def test_the_default_is_of_the_kind_that_did_well(rows: int) -> None:
    first = key(rows).space(LIMITS)[0]
    if rows == 1:
        assert first.program == "rows"
    else:
        assert linear_cuda.is_grouped(first)
        assert first.block_m == min(max(rows, 8), 128)
    narrow = dataclasses.replace(key(rows), epilogue="store", outputs=256).space(LIMITS)[0]
    assert -(-rows // narrow.block_m) * -(-256 // narrow.block_n) >= min(rows * 4 // 8, 32)
    older = key(rows).space(AMPERE)[0]
    assert not linear_cuda.is_grouped(older)


def test_a_ring_of_large_slices_leaves_room_for_a_second_threadgroup() -> None:
    large = LinearTile("matrix", 128, 64, 1, 4, 4, 64, "linear")
    assert linear_cuda.slice_bytes(large, 2, 2) == (128 + 2 * 64) * 128
    assert linear_cuda.stages(large, 2, 2) == 3
    assert linear_cuda.stages(dataclasses.replace(large, block_n=128, wn=8), 2, 2) == 4
    assert linear_cuda.stages(dataclasses.replace(large, block_m=8), 1, 2) == 8
    assert linear_cuda.stages(dataclasses.replace(large, outer_k=0, k_unroll=1), 2, 2) == 4


def test_reasons_name_what_does_not_fit() -> None:
    pruned = key(2048).pruned(LIMITS)
    assert sum(pruned.values()) + len(key(2048).space(LIMITS)) == len(linear_cuda.product(key(2048), LIMITS))
    assert "accumulators do not fit the registers" in pruned
    grouped = LinearTile("matrix", 128, 128, 1, 8, 4, 64, "linear")
    assert (
        is_valid(key(2048), dataclasses.replace(grouped, block_n=64, wn=4), AMPERE)
        == "the device does not multiply this dtype by warpgroups"
    )
    assert is_valid(key(2048, dtype="float32"), grouped, LIMITS) is not None
    tall = dataclasses.replace(grouped, block_m=256)
    assert is_valid(key(64), tall, LIMITS) is not None


def test_forms_that_are_compiled_beforehand_hold_every_depth() -> None:
    for tile in key(128).space(LIMITS):
        assert tile.outer_k in linear_cuda.likely_depths(tile)


def packed(rows: int, weights: str = "affine4g64", epilogue: Any = "store", **shape: Any) -> LinearKey:
    return dataclasses.replace(key(rows, epilogue), weights=weights, **shape)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("epilogue", ["store", "swiglu"])
@pytest.mark.parametrize("weights", ["affine2g32", "affine4g64", "affine5g128", "affine8g64", "mxfp8", "nvfp4"])
def test_candidates_of_quantized_weights(weights: str, epilogue: str, rows: int) -> None:
    subject = packed(rows, weights, epilogue)
    for limits in (LIMITS, AMPERE):
        space = subject.space(limits)
        assert len(space) == len(set(space)) > 8
        assert all(is_valid(subject, tile, limits) is None for tile in space)
        assert all(tile.outer_k % 32 == 0 for tile in space)  # a lane takes 32 codes
        assert len(space) + sum(subject.pruned(limits).values()) == len(linear_cuda.product(subject, limits))


@pytest.mark.parametrize(
    ("subject", "label"),
    [
        (packed(1), "rows_bm1_bn32_wm1_wn8_ku3_ok0_linear"),
        (packed(8), "matrix_bm8_bn16_wm4_wn1_ku3_ok0_linear"),
        (packed(16), "matrix_bm16_bn16_wm4_wn1_ku3_ok0_linear"),
        (packed(8, epilogue="swiglu"), "matrix_bm8_bn16_wm4_wn1_ku2_ok0_linear"),
        (packed(8, outputs=1536, inputs=8960), "matrix_bm8_bn16_wm16_wn1_ku2_ok0_linear"),
        (packed(128), "matrix_bm128_bn64_wm1_wn4_ku4_ok64_linear"),
        (packed(2048), "matrix_bm256_bn128_wm1_wn8_ku4_ok64_grouped8"),
    ],
)
def test_defaults_of_quantized_weights(subject: LinearKey, label: str) -> None:
    assert subject.space(LIMITS)[0].label() == label
    assert not linear_cuda.is_grouped(subject.space(AMPERE)[0])


def test_quantized_weights_leave_out_what_crowds_the_registers() -> None:
    wide = LinearTile("matrix", 8, 64, 4, 4, 4, 0, "linear")
    assert is_valid(packed(8), wide, LIMITS) == "weights do not fit the registers"
    assert is_valid(packed(8), dataclasses.replace(wide, wm=2), LIMITS) is None
    three = LinearTile("matrix", 8, 16, 4, 1, 3, 0, "linear")
    assert is_valid(packed(8), three, LIMITS) is None
    assert is_valid(key(8), three, LIMITS) == "k_unroll is for quantized weights"
    rows = LinearTile("rows", 1, 64, 1, 16, 6, 0, "linear")
    assert is_valid(packed(1), rows, LIMITS) == "weights do not fit the registers"
