"""Matrix-vector and elementwise kernels in the headers of the installed MLX, unmodified, against MLX's CPU in float32.

gemv.h, gemv_masked.h, dot.h, unary.h, binary.h, ternary.h, copy.h and arange.h. The wheel holds no header
with kernels for rope, rms_norm, layer_norm, arg_reduce or random bits: those are in .metal files only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_kernels import (
    DTYPES,
    UNUSED,
    ceil_div,
    close,
    empty,
    exact,
    ints,
    kernels,
    longs,
    name_of,
    normal,
    reference,
    run,
)

from metile.simulator import Empty

KINDS = tuple(DTYPES)
Tile = tuple[int, int, int, int, int, int]
ROWS, COLUMNS = 77, 530  # a multiple of no tile


@pytest.fixture(autouse=True)
def _seed() -> None:
    mx.random.seed(13)


def sizes_of(tile: Tile) -> str:
    return ", ".join(map(str, tile))


# Simdgroups, lanes and elements, over rows and columns each.
GEMV_TILES = ((1, 8, 1, 32, 1, 4), (1, 8, 1, 32, 4, 4), (4, 1, 1, 32, 4, 4), (8, 1, 1, 32, 4, 4), (1, 1, 8, 4, 4, 4))
GEMV_T_TILES = ((1, 2, 8, 4, 4, 1), (1, 4, 8, 4, 4, 4), (1, 16, 4, 8, 4, 4), (4, 1, 8, 4, 4, 4))
GEMV_CASES = [
    *(("gemv", kind, tile) for kind in KINDS for tile in GEMV_TILES),
    *(("gemv_t", kind, tile) for kind in KINDS for tile in GEMV_T_TILES),
]
GEMV = tuple(f"{name}<{kind}, {sizes_of(tile)}, false, false>" for name, kind, tile in GEMV_CASES)
# Where simdgroups share columns, sums meet in threadgroup memory after a barrier with mem_none, which promises nothing
# about it, and which only the first lane of a row (or the first row of lanes) reaches.
SHARED_SUMS = {("race", "tgp_memory"), ("barrier divergence", "")}


def gemv(
    name: str, kind: str, tile: Tile, size: tuple[int, int] = (ROWS, COLUMNS), check: bool = False, findings: Any = ()
) -> None:
    matrix = normal(*size, kind=kind)
    transposed = name == "gemv_t"
    outputs, inputs = size[::-1] if transposed else size
    x = normal(inputs, kind=kind)
    block = tile[1] * tile[3] * tile[5] if transposed else tile[0] * tile[2] * tile[4]
    kernel = f"{name}<{kind}, {sizes_of(tile)}, false, false>"
    file = kernels("gemv.h", (kernel,) if check else GEMV, check=check)
    buffers = {0: matrix, 1: x, 2: UNUSED, 3: empty((outputs,), kind), 4: inputs, 5: outputs, 6: size[1]}
    buffers |= {7: 1.0, 8: 0.0, 9: 1, 10: ints(1), 11: longs(0), 12: longs(0), 13: longs(0), 14: 1}
    out = run(file, kernel, buffers, (ceil_div(outputs, block), 1, 1), (32, tile[1], tile[0]), findings)
    close(out[3], reference(lambda a, x: (a.T if transposed else a) @ x, matrix, x))


@pytest.mark.parametrize("case", GEMV_CASES, ids=name_of)
def test_gemv(case: tuple[str, str, Tile]) -> None:
    gemv(*case)


BATCHED = tuple(f"{name}<{kind}, 4, 1, 8, 4, 4, 4, true, true>" for name in ("gemv", "gemv_t") for kind in KINDS)


@pytest.mark.parametrize("kernel", BATCHED)
def test_gemv_adds_another_vector_in_a_batch(kernel: str) -> None:
    name, kind = kernel.split(",")[0].split("<")
    matrix, x, bias = normal(2, 1, 77, 45, kind=kind), normal(3, 45, kind=kind), normal(77, kind=kind)
    stored = matrix if name == "gemv" else mx.contiguous(matrix.swapaxes(-1, -2))
    block = 4 * 8 * 4 if name == "gemv" else 4 * 4
    buffers = {0: stored, 1: x, 2: bias, 3: empty((2, 3, 77), kind), 4: 45, 5: 77, 6: stored.shape[-1]}
    buffers |= {7: 0.5, 8: -2.0, 9: 2, 10: ints(2, 3), 11: longs(0, 45), 12: longs(77 * 45, 0), 13: longs(0, 0), 14: 1}
    out = run(kernels("gemv.h", BATCHED), kernel, buffers, (ceil_div(77, block), 1, 6), (32, 1, 4))
    close(out[3], reference(lambda a, x, b: 0.5 * (a @ x[..., None])[..., 0] - 2.0 * b, matrix, x, bias))


GEMV_WIDE = tuple(f"gemv_wide<{kind}, 4, {lanes}>" for kind in KINDS for lanes in (8, 32))


@pytest.mark.parametrize("kernel", GEMV_WIDE)
def test_gemv_of_several_vectors(kernel: str) -> None:
    kind, lanes = kernel.split("<")[1].split(",")[0], int(kernel[:-1].split(", ")[2])
    vectors, rows, columns = 6, 21, 532
    matrix, x = normal(rows, columns, kind=kind), normal(vectors, columns, kind=kind)
    buffers = {0: matrix, 1: x, 3: empty((vectors, rows), kind), 4: columns, 5: rows, 6: vectors, 7: columns}
    buffers |= {8: columns, 11: 1, 12: ints(1), 13: longs(0), 14: longs(0)}
    file = kernels("gemv.h", GEMV_WIDE, ((0, False), (1, False)))
    out = run(file, kernel, buffers, (2, ceil_div(rows, 4), 1), (32, lanes // 8, 1))
    close(out[3], reference(lambda a, x: x @ a.T, matrix, x))


# Masks of 32 or 64 elements: the longer side of a threadgroup's tile.
MASKED_TILES = {
    ("gemv_masked", 32): (1, 1, 4, 8, 4, 4), ("gemv_masked", 64): (2, 2, 4, 8, 4, 4),
    ("gemv_t_masked", 32): (1, 1, 8, 4, 4, 4), ("gemv_t_masked", 64): (2, 2, 8, 4, 4, 4),
}  # fmt: skip
MASKED_CASES = [
    *((*shape, "float", masks) for shape in MASKED_TILES for masks in (("bool", "bool"), ("T", "T"))),
    *((*shape, kind, ("bool", "T")) for shape in list(MASKED_TILES)[::3] for kind in KINDS[1:]),
    ("gemv_masked", 32, "float", ("nomask_t", "bool")),
    ("gemv_t_masked", 32, "float", ("T", "nomask_t")),
]


def masked_name(name: str, size: int, kind: str, masks: tuple[str, str]) -> str:
    types = ", ".join(kind if mask == "T" else mask for mask in masks)
    return f"{name}<{kind}, {types}, {sizes_of(MASKED_TILES[name, size])}, false>"


MASKED = tuple(masked_name(*case) for case in MASKED_CASES)


def block_mask(rows: int, columns: int, mask: str, kind: str) -> mx.array:
    kept = mx.array(np.arange(rows * columns).reshape(rows, columns) % 3 != 1)
    return mx.where(kept, normal(rows, columns), 0).astype(DTYPES[kind]) if mask == "T" else kept


@pytest.mark.parametrize("case", MASKED_CASES, ids=name_of)
def test_gemv_masked(case: tuple[str, int, str, tuple[str, str]]) -> None:
    name, size, kind, masks = case
    rows, columns = 77, 150  # of the result, and of what is multiplied
    blocks = ceil_div(rows, size), ceil_div(columns, size)
    matrix, x = normal(rows, columns, kind=kind), normal(columns, kind=kind)
    out_mask, left = block_mask(blocks[0], 1, masks[0], kind), block_mask(*blocks, masks[1], kind)
    right = block_mask(1, blocks[1], masks[1], kind)
    transposed, tile = name == "gemv_t_masked", MASKED_TILES[name, size]
    stored = mx.contiguous(matrix.T) if transposed else matrix
    # Strides over columns and over rows, of the masks of the output, the matrix and the vector.
    strides = [] if masks[0] == "nomask_t" else [1, 1]
    if masks[1] != "nomask_t":
        strides += [blocks[1], 1, 1, 1] if transposed else [1, blocks[1], 1, 1]
    block = tile[1] * tile[3] * tile[5] if transposed else tile[0] * tile[2] * tile[4]
    buffers = {0: stored, 1: x, 3: empty((rows,), kind), 4: columns, 5: rows, 6: stored.shape[1], 9: 1, 10: ints(1)}
    buffers |= {11: longs(0), 12: longs(0), 20: out_mask, 21: left, 22: right, 23: ints(*strides), 24: longs(0, 0, 0)}
    groups = (ceil_div(rows, block), 1, 1)
    out = run(kernels("gemv_masked.h", MASKED), masked_name(*case), buffers, groups, (32, tile[1], tile[0]))

    def masked(matrix: mx.array, x: mx.array, out_mask: mx.array, left: mx.array, right: mx.array) -> mx.array:
        spread = lambda mask, *shape: mx.repeat(mx.repeat(mask, size, 0), size, 1)[: shape[0], : shape[1]]  # noqa: E731
        if masks[1] != "nomask_t":
            matrix, x = matrix * spread(left, rows, columns), x * spread(right, 1, columns)[0]
        result = matrix @ x
        return result if masks[0] == "nomask_t" else result * spread(out_mask, rows, 1)[:, 0]

    close(out[3], reference(masked, matrix, x, out_mask, left, right))


DOT = tuple(f"dot_product<{kind}, 32, 1024, 32>" for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_dot_product(kind: str) -> None:
    a, b = normal(40007, kind=kind), normal(40007, kind=kind)
    buffers = {0: a, 1: b, 2: empty((2,)), 3: 40007}
    out = run(kernels("dot.h", DOT), DOT[KINDS.index(kind)], buffers, (2, 1, 1), (1024, 1, 1))
    want = reference(lambda a, b: (a * b).sum(), a, b)
    assert abs(out[2].sum().item() - want.item()) <= 1e-5 * reference(lambda a, b: mx.abs(a * b).sum(), a, b).item()


UNARY: dict[str, Callable[[mx.array], mx.array]] = {
    "Abs": mx.abs, "ArcCos": mx.arccos, "ArcSin": mx.arcsin, "ArcSinh": mx.arcsinh, "ArcTan": mx.arctan,
    "ArcTanh": mx.arctanh, "Ceil": mx.ceil, "Cos": mx.cos, "Cosh": mx.cosh, "Erf": mx.erf, "ErfInv": mx.erfinv,
    "Exp": mx.exp, "Expm1": mx.expm1, "Floor": mx.floor, "Negative": mx.negative, "Round": mx.round,
    "Sigmoid": mx.sigmoid, "Sign": mx.sign, "Sin": mx.sin, "Sinh": mx.sinh, "Square": mx.square, "Tan": mx.tan,
    "Tanh": mx.tanh,
}  # fmt: skip
POSITIVE: dict[str, Callable[[mx.array], mx.array]] = {
    "Log": mx.log, "Log10": mx.log10, "Log1p": mx.log1p, "Log2": mx.log2, "Rsqrt": mx.rsqrt, "Sqrt": mx.sqrt
}  # fmt: skip
# Every operation in float32; half and bfloat take other functions for these.
UNARY_CASES = [("float", name) for name in (*UNARY, *POSITIVE)]
UNARY_CASES += [(kind, name) for kind in KINDS[1:] for name in ("Exp", "Log1p", "Sigmoid", "Tanh", "Rsqrt", "Round")]
UNARY_INSTANCES = tuple(f"unary_v<{kind}, {kind}, {name}>" for kind, name in UNARY_CASES)


@pytest.mark.parametrize("case", UNARY_CASES, ids=name_of)
def test_unary(case: tuple[str, str]) -> None:
    kind, name = case
    size, low = 1003, 0.05 if name in POSITIVE else -0.95
    x = mx.random.uniform(low, 0.95, (size,)).astype(DTYPES[kind])
    scale = 3 if name in ("Round", "Floor", "Ceil", "Log", "Exp") else 1  # past one where it matters
    x = (x * scale).astype(DTYPES[kind])
    buffers = {0: x, 1: empty((size,), kind), 2: np.uint32(size)}
    out = run(kernels("unary.h", UNARY_INSTANCES), f"unary_v<{kind}, {kind}, {name}>", buffers, (2, 1, 1), (256, 1, 1),
              partial=(ceil_div(size, per_thread(kind)), 1, 1))  # fmt: skip
    close(out[1], reference({**UNARY, **POSITIVE}[name], x))


def per_thread(kind: str) -> int:
    return 8 // DTYPES[kind].size


BINARY: dict[str, Callable[[mx.array, mx.array], mx.array]] = {
    "Add": mx.add, "ArcTan2": mx.arctan2, "Divide": mx.divide, "FloorDivide": mx.floor_divide,
    "LogAddExp": mx.logaddexp, "Maximum": mx.maximum, "Minimum": mx.minimum, "Multiply": mx.multiply,
    "Power": mx.power, "Remainder": mx.remainder, "Subtract": mx.subtract,
}  # fmt: skip
BINARY_CASES = [("vv", "float", name) for name in BINARY]
BINARY_CASES += [("vv", kind, name) for kind in KINDS[1:] for name in ("Add", "Divide", "LogAddExp", "Multiply")]
BINARY_CASES += [("sv", "float", "Subtract"), ("vs", "float", "Subtract"), ("vv2", "half", "Subtract")]
BINARY_INSTANCES = tuple(f"binary_{form}<{kind}, {kind}, {name}>" for form, kind, name in BINARY_CASES)


@pytest.mark.parametrize("case", BINARY_CASES, ids=name_of)
def test_binary(case: tuple[str, str, str]) -> None:
    form, kind, name = case
    size = 1003
    a, b = (mx.random.uniform(0.1, 2.9, (size,)).astype(DTYPES[kind]) for _ in range(2))
    a, b = a[: 1 if form[0] == "s" else size], b[: 1 if form[1] == "s" else size]
    buffers = {0: a, 1: b, 2: empty((size,), kind), 3: longs(size) if form == "vv2" else np.uint32(size)}
    grid = (ceil_div(size, per_thread(kind)), 1, 1)
    file = kernels("binary.h", BINARY_INSTANCES)
    out = run(file, f"binary_{form}<{kind}, {kind}, {name}>", buffers, (2, 1, 1), (256, 1, 1), partial=grid)
    close(out[2], reference(BINARY[name], a, b))


STRIDED = ("binary_g_nd2<int, bool, Less, int>", "binary_g_nd2<int, int, BitwiseXor, int>")


@pytest.mark.parametrize("kernel", STRIDED)
def test_binary_of_strided_integers(kernel: str) -> None:
    a, b = mx.random.randint(-50, 50, (9, 13)), mx.random.randint(-50, 50, (13, 9))
    less = "Less" in kernel
    buffers = {0: a, 1: b, 2: Empty((9, 13), mx.bool_ if less else mx.int32), 3: longs(13, 1), 4: longs(1, 9)}
    out = run(kernels("binary.h", STRIDED), kernel, buffers, (1, 1, 1), (13, 4, 1), partial=(13, 9, 1))
    exact(out[2], reference(lambda a, b: mx.less(a, b.T) if less else mx.bitwise_xor(a, b.T), a, b))


SELECT = tuple(f"ternary_v<{kind}, Select, false, {scalar}>" for kind in KINDS for scalar in ("false", "true"))


@pytest.mark.parametrize("kernel", SELECT)
def test_ternary(kernel: str) -> None:
    kind, scalar = kernel.split("<")[1].split(",")[0], kernel.endswith("true>")
    size = 501
    kept, a, b = (
        mx.random.uniform(shape=(size,)) > 0.5,
        normal(size, kind=kind),
        normal(1 if scalar else size, kind=kind),
    )
    buffers = {0: kept, 1: a, 2: b, 3: empty((size,), kind), 4: np.uint32(size)}
    grid = (ceil_div(size, per_thread(kind)), 1, 1)
    out = run(kernels("ternary.h", SELECT), kernel, buffers, (1, 1, 1), (64, 1, 1), partial=grid)
    exact(out[3], mx.where(kept, a, b))


COPIES = [("float", "half"), ("half", "bfloat16_t"), ("bfloat16_t", "float"), ("float", "int"), ("int", "float")]
COPY = tuple(f"copy_g_nd2<{source}, {target}, int>" for source, target in COPIES)
ALL_DTYPES = {**DTYPES, "int": mx.int32}


@pytest.mark.parametrize("case", COPIES, ids=name_of)
def test_copy_of_a_transposed_matrix_to_another_type(case: tuple[str, str]) -> None:
    source, target = (ALL_DTYPES[kind] for kind in case)
    x = (normal(9, 13) * 20).astype(source)
    buffers = {0: x, 1: Empty((13, 9), target), 3: longs(1, 13)}
    file = kernels("copy.h", COPY)
    out = run(file, COPY[COPIES.index(case)], buffers, (1, 1, 1), (9, 4, 1), partial=(9, 13, 1))
    exact(out[1], mx.contiguous(x.T).astype(target))


ARANGE = ("arange<float>", "arange<half>", "arange<int>")


@pytest.mark.parametrize("kernel", ARANGE)
def test_arange(kernel: str) -> None:
    dtype = ALL_DTYPES[kernel[7:-1]]
    step = mx.array(3, dtype) if dtype == mx.int32 else mx.array(0.25, dtype)
    buffers = {0: mx.array(-7, dtype), 1: step, 2: Empty((101,), dtype)}
    out = run(kernels("arange.h", ARANGE), kernel, buffers, (1, 1, 1), (32, 1, 1), partial=(101, 1, 1))
    exact(out[2], (mx.arange(101) * step.item() - 7).astype(dtype))


@pytest.mark.parametrize(("name", "tile", "size"), [
    ("gemv", (1, 1, 8, 4, 4, 4), (35, 37)),
    ("gemv_t", (1, 1, 8, 4, 4, 4), (35, 48)),
])  # fmt: skip
def test_checked_gemv_has_no_findings(name: str, tile: Tile, size: tuple[int, int]) -> None:
    gemv(name, "float", tile, size, check=True)


def test_checked_gemv_of_shared_columns_lacks_a_barrier_for_threadgroup_memory() -> None:
    gemv("gemv", "float", (1, 8, 1, 32, 4, 4), (9, 1030), check=True, findings=SHARED_SUMS)


def test_checked_gemv_t_of_ragged_columns_has_a_barrier_that_not_all_threads_reach() -> None:
    """It orders nothing (its flags are mem_none) and is there for the cache; threads past the edge pass it by."""
    gemv("gemv_t", "float", (1, 1, 8, 4, 4, 4), (35, 37), check=True, findings={("barrier divergence", "")})
