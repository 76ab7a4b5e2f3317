"""Steel's matrix multiplications in the headers of the installed MLX, unmodified, against MLX's CPU in float32.

The fused, split-K, masked, gather, segmented and convolution kernels of the wheel (those for Metal 4's tensors aside).
"""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest
from mlx_kernels import (
    DTYPES,
    Constants,
    ceil_div,
    close,
    empty,
    ints,
    kernels,
    longs,
    name_of,
    normal,
    packed,
    reference,
    run,
)

from metile.simulator import SimulatorFault

KINDS = tuple(DTYPES)
LAYOUTS = ("nn", "nt", "tn", "tt")
BIG, WIDE, SMALL = (64, 64, 16), (64, 32, 32), (32, 32, 16)  # tiles of M, N and K, over 2 x 2 simdgroups
THREADS = (32, 2, 2)
WHOLE, RAGGED = (128, 64, 64), (70, 50, 45)  # M, N and K


@pytest.fixture(autouse=True)
def _seed() -> None:
    mx.random.seed(11)


def flag(value: bool) -> str:
    return str(value).lower()


def tile_of(tile: tuple[int, int, int], layout: str) -> str:
    sizes = ", ".join(map(str, tile))
    return f"{sizes}, 2, 2, {flag(layout[0] == 't')}, {flag(layout[1] == 't')}"


def laid_out(a: mx.array, b: mx.array, layout: str) -> tuple[mx.array, mx.array]:
    """Return two matrices as they are in memory."""
    return (
        mx.contiguous(a.swapaxes(-1, -2)) if layout[0] == "t" else a,
        mx.contiguous(b.swapaxes(-1, -2)) if layout[1] == "t" else b,
    )


def gemm_params(
    sizes: tuple[int, int, int],
    tile: tuple[int, int, int],
    a: mx.array,
    b: mx.array,
    strides: tuple[int, int, int] = (0, 0, 0),
    batch_axes: int = 1,
) -> np.ndarray:
    """Return GEMMParams; strides are from one matrix of a batch to the next, of A, B and D."""
    m, n, k = sizes
    counts = (ceil_div(n, tile[1]), ceil_div(m, tile[0]))
    return packed(
        [("i", (*sizes, a.shape[-1], b.shape[-1], n, *counts)), ("q", strides), ("i", (0, k // tile[2], batch_axes))]
    )


def groups_of(sizes: tuple[int, int, int], tile: tuple[int, int, int], batch: int = 1) -> tuple[int, int, int]:
    return ceil_div(sizes[1], tile[1]), ceil_div(sizes[0], tile[0]), batch


def alignment(sizes: tuple[int, int, int], tile: tuple[int, int, int]) -> Constants:
    return tuple((index, size % part == 0) for index, size, part in zip((200, 201, 202), sizes, tile, strict=True))


# Every dtype with every layout. The largest tile, the slowest to compile, is for float32 and one of bfloat16.
FUSED_TILES = [(kind, layout, BIG if kind == "float" else SMALL) for kind in KINDS for layout in LAYOUTS]
FUSED_TILES += [("float", "nt", WIDE), ("bfloat16_t", "nt", BIG)]
FUSED = tuple(f"gemm<{kind}, {tile_of(tile, layout)}>" for kind, layout, tile in FUSED_TILES)
FUSED_CASES = [(*case, sizes) for case in FUSED_TILES for sizes in (WHOLE, RAGGED)]


def fused(kind: str, layout: str, tile: tuple[int, int, int], sizes: tuple[int, int, int], check: bool = False) -> None:
    m, n, k = sizes
    a, b = normal(m, k, kind=kind), normal(k, n, kind=kind)
    in_memory = laid_out(a, b, layout)
    kernel = f"gemm<{kind}, {tile_of(tile, layout)}>"
    constants = ((10, False), (100, False), (110, False), *alignment(sizes, tile))
    file = kernels("steel/gemm/kernels/steel_gemm_fused.h", (kernel,) if check else FUSED, constants, check)
    buffers = {0: in_memory[0], 1: in_memory[1], 3: empty((m, n), kind), 4: gemm_params(sizes, tile, *in_memory)}
    out = run(file, kernel, buffers, groups_of(sizes, tile), THREADS)
    close(out[3], reference(mx.matmul, a, b))


@pytest.mark.parametrize("case", FUSED_CASES, ids=name_of)
def test_fused(case: tuple[str, str, tuple[int, int, int], tuple[int, int, int]]) -> None:
    fused(*case)


EPILOGUES = tuple(f"gemm<{kind}, {tile_of(SMALL, 'nt')}>" for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scaled", [False, True], ids=["add", "axpby"])
def test_fused_adds_another_matrix_in_a_batch(kind: str, scaled: bool) -> None:
    m, n, k = sizes = (35, 42, 23)
    a, b, c = normal(2, m, k, kind=kind), normal(3, 1, k, n, kind=kind), normal(n, kind=kind)
    alpha, beta = (0.5, -2.0) if scaled else (1.0, 1.0)
    in_memory = laid_out(a, b, "nt")
    constants = ((10, True), (100, True), (110, scaled), *alignment(sizes, SMALL))
    file = kernels("steel/gemm/kernels/steel_gemm_fused.h", EPILOGUES, constants)
    buffers = {0: in_memory[0], 1: in_memory[1], 2: c, 3: empty((3, 2, m, n), kind)}
    buffers[4] = gemm_params(sizes, SMALL, *in_memory, (0, 0, m * n), batch_axes=2)
    buffers[5] = packed([("i", (0, 1)), ("q", 0), ("f", (alpha, beta))])
    buffers |= {6: ints(3, 2), 7: longs(0, m * k, k * n, 0, 0, 0)}
    out = run(file, EPILOGUES[KINDS.index(kind)], buffers, groups_of(sizes, SMALL, 6), THREADS)
    close(out[3], reference(lambda a, b, c: alpha * (a @ b) + beta * c, a, b, c))


SPLIT_TILE = (32, 32, 16)
SPLIT_CASES = [
    *((kind, "nt", sizes) for kind in KINDS for sizes in ((64, 32, 160), (37, 50, 139))),
    *(("float", layout, (37, 50, 139)) for layout in LAYOUTS if layout != "nt"),
]


def split_name(kind: str, layout: str, aligned: bool) -> str:
    return f"gemm_splitk<{kind}, float, {tile_of(SPLIT_TILE, layout)}, {flag(aligned)}, {flag(aligned)}>"


SPLIT = (
    *dict.fromkeys(split_name(kind, layout, sizes[0] == 64) for kind, layout, sizes in SPLIT_CASES),
    *(f"{name}<float, {kind}>" for name in ("gemm_splitk_accum", "gemm_splitk_accum_axpby") for kind in KINDS),
)


@pytest.mark.parametrize("case", SPLIT_CASES, ids=name_of)
def test_split_k_and_its_accumulation(case: tuple[str, str, tuple[int, int, int]]) -> None:
    kind, layout, sizes = case
    m, n, k = sizes
    parts, steps = 3, k // SPLIT_TILE[2] // 3
    a, b = normal(m, k, kind=kind), normal(k, n, kind=kind)
    in_memory = laid_out(a, b, layout)
    counts = (ceil_div(n, 32), ceil_div(m, 32))
    split = (parts, m * n, steps * SPLIT_TILE[2], 0, steps)
    params = packed([("i", (*sizes, in_memory[0].shape[-1], in_memory[1].shape[-1], n, *counts, *split))])
    file = kernels("steel/gemm/kernels/steel_gemm_splitk.h", SPLIT)
    buffers = {0: in_memory[0], 1: in_memory[1], 2: empty((parts, m, n)), 3: params}
    partial = run(file, split_name(kind, layout, m == 64), buffers, (*counts, parts), THREADS)[2]
    summed = {0: partial, 1: empty((m, n), kind), 2: parts, 3: m * n, 4: n}
    out = run(file, f"gemm_splitk_accum<float, {kind}>", summed, (1, 1, 1), (32, 8, 1), partial=(n, m, 1))
    want = reference(mx.matmul, a, b)
    close(out[1], want)
    c = normal(n, kind=kind)
    summed |= {1: empty((m, n), kind), 5: c, 6: 0, 7: 1, 8: 0.5, 9: -1.5}
    out = run(file, f"gemm_splitk_accum_axpby<float, {kind}>", summed, (1, 1, 1), (32, 8, 1), partial=(n, m, 1))
    close(out[1], reference(lambda product, c: 0.5 * product - 1.5 * c, want, c))


MASKED_TILE = (32, 32, 16)
# What masks the output and the operands: nothing, whole blocks, or a factor for each block.
MASKED_CASES = [
    *(("float", "nt", masks, sizes) for masks in (("bool", "bool"), ("T", "T")) for sizes in ((64, 96, 64), RAGGED)),
    *((kind, "nn", ("bool", "T"), RAGGED) for kind in KINDS[1:]),
    ("float", "tn", ("nomask_t", "bool"), RAGGED),
    ("float", "tt", ("T", "nomask_t"), RAGGED),
]


def masked_name(kind: str, layout: str, masks: tuple[str, str], sizes: tuple[int, int, int]) -> str:
    types = ", ".join(kind if mask == "T" else mask for mask in masks)
    aligned = ", ".join(flag(sizes[index] % 32 == 0) for index in (0, 2))
    return f"block_masked_gemm<{kind}, {types}, {tile_of(MASKED_TILE, layout)}, {aligned}>"


MASKED = tuple(dict.fromkeys(masked_name(*case) for case in MASKED_CASES))


def block_mask(rows: int, columns: int, mask: str, kind: str) -> mx.array:
    """Return a mask of 32 x 32 blocks, some of them off."""
    kept = mx.array(np.arange(rows * columns).reshape(rows, columns) % 4 != 1)
    if mask == "T":
        return mx.where(kept, normal(rows, columns), 0).astype(DTYPES[kind])
    return kept


def spread(mask: mx.array, rows: int, columns: int) -> mx.array:
    return mx.repeat(mx.repeat(mask, 32, 0), 32, 1)[:rows, :columns].astype(mx.float32)


@pytest.mark.parametrize("case", MASKED_CASES, ids=name_of)
def test_masked(case: tuple[str, str, tuple[str, str], tuple[int, int, int]]) -> None:
    kind, layout, masks, sizes = case
    m, n, k = sizes
    a, b = normal(m, k, kind=kind), normal(k, n, kind=kind)
    in_memory = laid_out(a, b, layout)
    rows, columns, depth = (ceil_div(size, 32) for size in sizes)
    out_mask = block_mask(rows, columns, masks[0], kind)
    left, right = block_mask(rows, depth, masks[1], kind), block_mask(depth, columns, masks[1], kind)
    strides = [] if masks[0] == "nomask_t" else [1, columns]
    strides += [] if masks[1] == "nomask_t" else [1, depth, 1, columns]
    buffers = {0: in_memory[0], 1: in_memory[1], 3: empty((m, n), kind)}
    buffers |= {4: gemm_params(sizes, MASKED_TILE, *in_memory), 6: ints(1), 7: longs(0, 0, 0, 0, 0)}
    buffers |= {10: out_mask, 11: left, 12: right, 13: ints(*strides)}
    file = kernels("steel/gemm/kernels/steel_gemm_masked.h", MASKED)
    out = run(file, masked_name(*case), buffers, groups_of(sizes, MASKED_TILE), THREADS)

    def masked(a: mx.array, b: mx.array, out_mask: mx.array, left: mx.array, right: mx.array) -> mx.array:
        if masks[1] != "nomask_t":
            a, b = a * spread(left, m, k), b * spread(right, k, n)
        return a @ b if masks[0] == "nomask_t" else a @ b * spread(out_mask, m, n)

    close(out[3], reference(masked, a, b, out_mask, left, right))


GATHER_CASES = [*((kind, "nt", RAGGED) for kind in KINDS), ("float", "nn", (64, 64, 32)), ("float", "tn", RAGGED)]
GATHER = tuple(f"gather_mm<{kind}, {tile_of(SMALL, layout)}>" for kind, layout, _ in GATHER_CASES)


@pytest.mark.parametrize("case", GATHER_CASES, ids=name_of)
def test_gather(case: tuple[str, str, tuple[int, int, int]]) -> None:
    kind, layout, sizes = case
    m, n, k = sizes
    a, b = normal(3, m, k, kind=kind), normal(4, k, n, kind=kind)
    in_memory = laid_out(a, b, layout)
    left, right = np.array([2, 0, 1, 2, 0], np.uint32), np.array([3, 3, 0, 2, 1], np.uint32)
    buffers = {0: in_memory[0], 1: in_memory[1], 2: left, 3: right, 4: empty((5, m, n), kind)}
    buffers |= {5: gemm_params(sizes, SMALL, *in_memory, (1, 1, m * n)), 6: ints(5), 7: longs(1), 8: longs(1)}
    buffers |= {9: 1, 10: ints(3), 11: longs(m * k), 12: 1, 13: ints(4), 14: longs(k * n)}
    constants = ((10, False), *alignment(sizes, SMALL))
    file = kernels("steel/gemm/kernels/steel_gemm_gather.h", GATHER, constants)
    out = run(file, f"gather_mm<{kind}, {tile_of(SMALL, layout)}>", buffers, groups_of(sizes, SMALL, 5), THREADS)
    close(out[4], reference(lambda a, b: a[mx.array(left)] @ b[mx.array(right)], a, b))


ROWS_TILE = (16, 32, 16)
GATHER_ROWS = tuple(
    f"gather_mm_rhs<{kind}, 16, 32, 16, 1, 2, false, {way}>" for kind in KINDS for way in ("false", "true")
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_gather_by_rows_in_groups(kind: str, layout: str) -> None:
    counts = (5, 0, 33, 1)  # rows of each group
    m, n, k = sizes = (sum(counts), 45, 27)
    a, b = normal(m, k, kind=kind), normal(len(counts), k, n, kind=kind)
    in_memory = laid_out(a, b, layout)
    offsets = np.cumsum([0, *counts]).astype(np.int32)
    buffers = {0: a, 1: in_memory[1], 2: offsets, 3: empty((m, n), kind), 5: len(counts)}
    buffers[4] = gemm_params(sizes, ROWS_TILE, *in_memory, (0, k * n, 0))
    constants = ((10, False), *alignment(sizes, ROWS_TILE))
    file = kernels("steel/gemm/kernels/steel_gemm_gather.h", GATHER_ROWS, constants)
    name = f"gather_mm_rhs<{kind}, 16, 32, 16, 1, 2, false, {flag(layout == 'nt')}>"
    groups = (ceil_div(n, 32), ceil_div(m, 16) + len(counts), 1)
    out = run(file, name, buffers, groups, (32, 2, 1))
    group = mx.array(np.repeat(np.arange(len(counts)), counts))
    close(out[3], reference(lambda a, b: (a[:, None] @ b[group])[:, 0], a, b))


SEGMENTED = tuple(f"segmented_mm<{kind}, {tile_of(SMALL, 'nt')}>" for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(64, 32, 80), (37, 50, 75)], ids=["whole", "ragged"])
def test_segmented(kind: str, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    a, b = normal(m, k, kind=kind), normal(k, n, kind=kind)
    in_memory = laid_out(a, b, "nt")
    ends = [0, 16, 19, k]
    buffers = {0: in_memory[0], 1: in_memory[1], 2: np.array(ends, np.uint32), 3: empty((3, m, n), kind)}
    buffers[4] = gemm_params(sizes, SMALL, *in_memory, (0, 0, m * n))
    constants = ((199, False), *alignment(sizes, SMALL)[:2])
    file = kernels("steel/gemm/kernels/steel_gemm_segmented.h", SEGMENTED, constants)
    out = run(file, SEGMENTED[KINDS.index(kind)], buffers, groups_of(sizes, SMALL, 3), THREADS)
    parts = list(itertools.pairwise(ends))
    close(out[3], reference(lambda a, b: mx.stack([a[:, p:q] @ b[p:q] for p, q in parts]), a, b))


# As MLX picks them: the narrow tile is for few outputs, and the only one that minds how many there are.
CONV_TILES = {64: "64, 32, 16, 2, 2, 0, false", 32: "64, 32, 16, 2, 2, 0, true", 13: "64, 8, 16, 4, 1, 0, false"}
CONV = tuple(f"implicit_gemm_conv_2d<{kind}, {tile}>" for kind in KINDS for tile in CONV_TILES.values())


def convolution(kind: str, outputs: int, tile: str) -> None:
    batch, height, width, channels, stride, pad = 2, 9, 7, 32, 2, 1
    x, w = normal(batch, height, width, channels, kind=kind), normal(outputs, 3, 3, channels, kind=kind)
    rows, columns = (height + 2 * pad - 3) // stride + 1, (width + 2 * pad - 3) // stride + 1
    shape = (batch, rows, columns, outputs)
    strides = [tuple(int(np.prod(dims[axis + 1 :])) for axis in range(4)) for dims in (x.shape, w.shape, shape)]
    spatial = (height, width, 3, 3, rows, columns, stride, stride, pad, pad, 1, 1, 1, 1)
    params = packed(
        [("i", (batch, channels, outputs, *spatial)), *(("q", one) for one in strides), ("i", 1), ("?", False)]
    )
    block_n, block_k, simdgroups = int(tile.split(", ")[1]), 16, tuple(map(int, tile.split(", ")[3:5]))
    sizes = (batch * rows * columns, outputs, 9 * channels)
    # To the next element of the filter, to its next row, and to the next channels at its start.
    jumps = (channels, (width - 2) * channels, block_k - 2 * width * channels - 2 * channels)
    counts = (ceil_div(sizes[1], block_n), ceil_div(sizes[0], 64))
    gemm = packed([("i", (*sizes, sizes[2] // block_k, *jumps, *counts, 0))])
    buffers = {0: x, 1: w, 2: empty(shape, kind), 3: params, 4: gemm}
    file = kernels("steel/conv/kernels/steel_conv.h", CONV)
    threads = (32, simdgroups[1], simdgroups[0])
    out = run(file, f"implicit_gemm_conv_2d<{kind}, {tile}>", buffers, (*counts, 1), threads)
    close(out[2], reference(lambda x, w: mx.conv2d(x, w, stride, pad), x, w))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outputs", CONV_TILES)
def test_convolution(kind: str, outputs: int) -> None:
    convolution(kind, outputs, CONV_TILES[outputs])


def test_convolution_reads_past_its_weights() -> None:
    """The wide tile reads whole blocks of weights without a look at how many there are."""
    with pytest.raises(SimulatorFault, match=r"got one at byte 55296 of B \(55296 bytes\)"):
        convolution("float", 48, CONV_TILES[64])


@pytest.mark.parametrize("sizes", [(64, 64, 32), (33, 35, 17)], ids=["whole", "ragged"])
def test_checked_fused_has_no_findings(sizes: tuple[int, int, int]) -> None:
    fused("float", "nt", SMALL, sizes, check=True)
