"""Quantized matrix multiplications in the headers of the installed MLX, unmodified, against MLX's CPU in float32.

quantized.h (affine) and fp_quantized.h (mxfp4, mxfp8 and nvfp4).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_kernels import (
    DTYPES,
    UNUSED,
    ceil_div,
    close,
    empty,
    exact,
    kernels,
    name_of,
    normal,
    reference,
    run,
)

from metile.simulator import Empty

KINDS = tuple(DTYPES)
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = dict(zip(BITS, (32, 64, 128, 64, 32, 128), strict=True))
# Every width with every dtype for the two that a decoder runs most; the others take the dtypes in turn.
THINNED = [(KINDS[index % 3], bits) for index, bits in enumerate(BITS)]
BATCH_AXES = {7: 0, 8: UNUSED, 9: UNUSED, 10: 0, 11: UNUSED, 12: UNUSED, 13: UNUSED, 14: UNUSED}


@pytest.fixture(autouse=True)
def _seed() -> None:
    mx.random.seed(5)


def quantized(rows: int, columns: int, kind: str, bits: int, group: int) -> tuple[mx.array, mx.array, mx.array]:
    with mx.stream(mx.cpu):
        result = mx.quantize(normal(rows, columns), group, bits)
        packed, scales, biases = result[0], result[1].astype(DTYPES[kind]), result[2].astype(DTYPES[kind])
        mx.eval(packed, scales, biases)
    return packed, scales, biases


def product(x: mx.array, weights: tuple[mx.array, ...], bits: int, group: int, transpose: bool) -> mx.array:
    def multiply(x: mx.array, packed: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
        w = mx.dequantize(packed, scales, biases, group, bits)
        return x @ (w.T if transpose else w)

    return reference(multiply, x, *weights)


def multiply(
    kernel: str,
    kind: str,
    bits: int,
    sizes: tuple[int, int, int],
    grid: tuple[tuple[int, int, int], tuple[int, int, int]],
    instances: tuple[str, ...],
    transpose: bool,
    check: bool = False,
) -> None:
    """Run one of the affine kernels, of the name without its prefix, on M x K by K x N."""
    m, n, k = sizes
    group = GROUPS[bits]
    x = normal(m, k, kind=kind)
    weights = quantized(*((n, k) if transpose else (k, n)), kind, bits, group)
    name = f"affine_{kernel}"
    buffers: dict[int, Any] = {**dict(enumerate(weights)), 3: x, 4: empty((m, n), kind), 5: k, 6: n}
    if "qmm" in kernel or "wide" in kernel:
        buffers |= {7: m, **{index + 1: value for index, value in BATCH_AXES.items()}}
    else:
        buffers |= BATCH_AXES
    out = run(kernels("quantized.h", (name,) if check else instances, check=check), name, buffers, *grid)
    close(out[4], product(x, weights, bits, group, transpose))


def arguments(kind: str, bits: int, tail: str) -> str:
    return f"<{kind}, {GROUPS[bits]}, {bits}, {tail}>"


QMV_CASES = [(name, kind, bits) for name in ("qmv_fast", "qmv") for kind in KINDS for bits in BITS]
QMV = tuple(f"affine_{name}{arguments(kind, bits, 'false')}" for name, kind, bits in QMV_CASES)


def qmv(name: str, kind: str, bits: int, check: bool = False) -> None:
    # The fast one wants a multiple of 512 in K and of 8 in N; the other takes any N, and K in groups.
    m, n, k = (2, 24, 512) if name == "qmv_fast" else (3, 21, 384)
    grid = (m, ceil_div(n, 8), 1), (32, 2, 1)
    kernel = f"{name}{arguments(kind, bits, 'false')}"
    multiply(kernel, kind, bits, (m, n, k), grid, QMV, True, check)


@pytest.mark.parametrize("case", QMV_CASES, ids=name_of)
def test_qmv(case: tuple[str, str, int]) -> None:
    qmv(*case)


QUAD_CASES = [(kind, bits) for kind, bits in zip(KINDS, (2, 4, 8), strict=True)]
QUAD = tuple(f"affine_qmv_quad{arguments(*case, '128, false')}" for case in QUAD_CASES)


@pytest.mark.parametrize("case", QUAD_CASES, ids=name_of)
def test_qmv_by_quadgroups(case: tuple[str, int]) -> None:
    m, n, k = 3, 70, 128
    grid = (m, ceil_div(n, 64), 1), (32, 1, 1)
    multiply(f"qmv_quad{arguments(*case, '128, false')}", *case, (m, n, k), grid, QUAD, True)


WIDE = tuple(f"affine_qmv_wide{arguments(*case, '4, 8, false')}" for case in THINNED)


@pytest.mark.parametrize("case", THINNED, ids=name_of)
def test_qmv_of_several_vectors(case: tuple[str, int]) -> None:
    m, n, k = 6, 21, 384
    grid = (ceil_div(m, 4), ceil_div(n, 8), 1), (32, 2, 1)
    multiply(f"qmv_wide{arguments(*case, '4, 8, false')}", *case, (m, n, k), grid, WIDE, True)


QVM = tuple(f"affine_qvm{arguments(*case, 'false')}" for case in THINNED)


@pytest.mark.parametrize("case", THINNED, ids=name_of)
def test_qvm(case: tuple[str, int]) -> None:
    kind, bits = case
    m, n, k = 3, 128, 70
    grid = (m, ceil_div(n, 64), 1), (32, 2, 1)
    multiply(f"qvm{arguments(kind, bits, 'false')}", kind, bits, (m, n, k), grid, QVM, False)


QMM_T_CASES = [(kind, bits, n) for (kind, bits), n in zip(THINNED, (64, 41, 64, 41, 41, 41), strict=True)]
QMM_T_CASES += [(KINDS[(index + 1) % 3], bits, 41) for index, bits in enumerate(BITS)]


def aligned(n: int) -> str:
    return f"{str(n % 32 == 0).lower()}, false"


QMM_T = tuple(f"affine_qmm_t{arguments(kind, bits, aligned(n))}" for kind, bits, n in QMM_T_CASES)


def qmm_t(kind: str, bits: int, n: int, check: bool = False) -> None:
    m, k = 37, 128
    grid = (ceil_div(n, 32), ceil_div(m, 32), 1), (32, 2, 2)
    multiply(f"qmm_t{arguments(kind, bits, aligned(n))}", kind, bits, (m, n, k), grid, QMM_T, True, check)


@pytest.mark.parametrize("case", QMM_T_CASES, ids=name_of)
def test_qmm_t(case: tuple[str, int, int]) -> None:
    qmm_t(*case)


QMM_N = tuple(f"affine_qmm_n{arguments(*case, 'false')}" for case in THINNED)


@pytest.mark.parametrize("case", THINNED, ids=name_of)
def test_qmm_n(case: tuple[str, int]) -> None:
    kind, bits = case
    m, n, k = 35, 128, 77
    grid = (ceil_div(n, 32), ceil_div(m, 32), 1), (32, 2, 2)
    multiply(f"qmm_n{arguments(kind, bits, 'false')}", kind, bits, (m, n, k), grid, QMM_N, False)


DEQUANTIZE = tuple(f"affine_dequantize<{kind}, {GROUPS[bits]}, {bits}>" for kind, bits in THINNED)
QUANTIZE = tuple(f"affine_quantize<float, {GROUPS[bits]}, {bits}>" for bits in BITS)
PACKED = {2: 4, 3: 8, 4: 2, 5: 8, 6: 4, 8: 1}  # values that a thread unpacks


@pytest.mark.parametrize("case", THINNED, ids=name_of)
def test_dequantize(case: tuple[str, int]) -> None:
    kind, bits = case
    rows, columns, group = 5, 384, GROUPS[bits]
    weights = quantized(rows, columns, kind, bits, group)
    grid = (columns // PACKED[bits], rows, 1)
    buffers = {**dict(enumerate(weights)), 3: empty((rows, columns), kind)}
    file = kernels("quantized.h", DEQUANTIZE)
    out = run(file, f"affine_dequantize<{kind}, {group}, {bits}>", buffers, grid, (48, 5, 1), partial=grid)
    close(out[3], reference(lambda *w: mx.dequantize(*w, group, bits), *weights))


@pytest.mark.parametrize("bits", BITS)
def test_quantize(bits: int) -> None:
    rows, columns, group = 3, 384, GROUPS[bits]
    w = normal(rows, columns)
    with mx.stream(mx.cpu):
        packed, scales, biases = mx.quantize(w, group, bits)
        mx.eval(packed, scales, biases)
    grid = (columns // (group // 32), rows, 1)
    buffers = {0: w, 1: Empty(packed.shape, mx.uint32), 2: empty(scales.shape), 3: empty(biases.shape)}
    out = run(kernels("quantized.h", QUANTIZE), QUANTIZE[BITS.index(bits)], buffers, grid, (96, 1, 1), partial=grid)
    exact(out[1], packed)
    close(out[2], scales)
    close(out[3], biases)


MODES = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
FP_CASES = [
    *(("qmv_fast", kind, mode) for kind in KINDS for mode in MODES),
    *((name, KINDS[index], mode) for name in ("qmv", "qvm", "qmm_t", "qmm_n") for index, mode in enumerate(MODES)),
]
FP_TAILS = {"qmm_t": "false, false"}
FP = tuple(
    f"fp_{name}<{kind}, {MODES[mode][0]}, {MODES[mode][1]}, {FP_TAILS.get(name, 'false')}>"
    for name, kind, mode in FP_CASES
)


def fp_grid(name: str, m: int, n: int, group: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    if name.startswith("qmm"):
        return (ceil_div(n, 32), ceil_div(m, 32), 1), (32, 2, 2)
    return (m, ceil_div(n, 2 * group if name == "qvm" else 8), 1), (32, 2, 1)


FP_SIZES = {"qmv_fast": (2, 24, 512), "qmv": (3, 21, 352), "qvm": (3, 128, 70), "qmm_t": (37, 41, 96)}


@pytest.mark.parametrize("case", FP_CASES, ids=name_of)
def test_fp_quantized(case: tuple[str, str, str]) -> None:
    name, kind, mode = case
    m, n, k = FP_SIZES.get(name, (35, 64, 77))
    group, bits = MODES[mode]
    transpose = name not in ("qvm", "qmm_n")
    x = normal(m, k, kind=kind)
    with mx.stream(mx.cpu):
        packed, scales = mx.quantize(normal(*((n, k) if transpose else (k, n))), group, bits, mode)
        w = mx.dequantize(packed, scales, None, group, bits, mode, dtype=mx.float32)
        mx.eval(packed, scales, w)
    values: list[Any] = [packed, scales, *([] if name == "qmm_n" else [UNUSED]), x, empty((m, n), kind), k, n]
    values += [*([m] if name.startswith("qmm") else []), 0, UNUSED, UNUSED, 0, UNUSED, UNUSED, UNUSED]
    kernel = f"fp_{name}<{kind}, {group}, {bits}, {FP_TAILS.get(name, 'false')}>"
    out = run(kernels("fp_quantized.h", FP), kernel, dict(enumerate(values)), *fp_grid(name, m, n, group))
    place = next(place for place, value in enumerate(values) if isinstance(value, Empty))
    close(out[place], reference(lambda x, w: x @ (w.T if transpose else w), x, w))


def test_checked_qmv_has_no_findings() -> None:
    qmv("qmv", "float", 4, check=True)


def test_checked_qmm_has_no_findings() -> None:
    qmm_t("half", 3, 41, check=True)
