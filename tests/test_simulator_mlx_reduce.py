"""Reductions, softmax and their kin in the headers of the installed MLX, unmodified, against MLX's CPU in float32.

reduction/*.h, softmax.h, logsumexp.h, cross_entropy.h, hadamard.h.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_kernels import (
    DTYPES,
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
    up_to_simdgroup,
)

from metile.simulator import Empty, MetalFile

KINDS = tuple(DTYPES)
ALL_DTYPES = {**DTYPES, "int": mx.int32}
OPERATIONS = {"Sum": mx.sum, "Prod": mx.prod, "Min": mx.min, "Max": mx.max}
# Every operation in float32; sum and maximum, which differ most in how they round, in the others.
REDUCED = [("float", op) for op in OPERATIONS] + [(kind, op) for kind in KINDS[1:] for op in ("Sum", "Max")]
REDUCED += [("int", "Sum"), ("int", "Min")]


@pytest.fixture(autouse=True)
def _seed() -> None:
    mx.random.seed(17)


def values(kind: str, op: str, *shape: int) -> mx.array:
    """Return numbers of which neither a sum nor a product is lost in its rounding."""
    if kind == "int":
        return mx.random.randint(-1000, 1000, shape)
    low, high = (0.9, 1.1) if op == "Prod" else (-0.5, 1.0)
    return mx.random.uniform(low, high, shape).astype(DTYPES[kind])


def reduced(x: mx.array, op: str, axes: Any) -> mx.array:
    return reference(lambda x: OPERATIONS[op](x, axes), x)


def output_type(kind: str, op: str) -> str:
    """Return what it is reduced in: half and bfloat are summed in float32 here, as when MLX does it in two passes."""
    return "float" if op == "Sum" and kind != "int" else kind


def instance(name: str, kind: str, op: str, tail: str = "") -> str:
    result = output_type(kind, op)
    return f"{name}<{kind}, {result}, {op}<{result}>{tail}>"


def instances(name: str, tail: str = "") -> tuple[str, ...]:
    return tuple(instance(name, *case, tail) for case in REDUCED)


def compare(got: mx.array, want: mx.array) -> None:
    if got.dtype == mx.int32:
        exact(got, want)
    else:
        close(got, want)


def result_of(kind: str, op: str, *shape: int) -> Empty:
    return Empty(shape, ALL_DTYPES[output_type(kind, op)])


@pytest.mark.parametrize("case", REDUCED, ids=name_of)
def test_all_reduce_in_two_passes(case: tuple[str, str]) -> None:
    size, row = 10007, 4004
    x = values(*case, size)
    rows = ceil_div(size, row)
    file = kernels("reduction/reduce_all.h", instances("all_reduce"))
    buffers = {0: x, 1: result_of(*case, rows), 2: longs(size), 3: longs(row)}
    out = run(file, instance("all_reduce", *case), buffers, (1, rows, 1), (256, 1, 1))
    compare(out[1], mx.stack([reduced(x[start : start + row], case[1], None) for start in range(0, size, row)]))


# Rows of x[4, 5, 6, row] are what is reduced, and its axis of length 5.
ROW_AXES = {4: ints(4, 6), 7: ints(5)}


def row_buffers(kind: str, op: str, row: int) -> tuple[mx.array, dict[int, Any], mx.array]:
    x = values(kind, op, 4, 5, 6, row)
    strides = {5: longs(5 * 6 * row, row), 8: longs(6 * row)}
    buffers = {0: x, 1: result_of(kind, op, 4, 6), 2: longs(row), 3: longs(5), **ROW_AXES, **strides, 6: 2, 9: 1}
    return x, buffers, reduced(x, op, (1, 3))


@pytest.mark.parametrize("case", REDUCED, ids=name_of)
def test_row_reduce_small(case: tuple[str, str]) -> None:
    _, buffers, want = row_buffers(*case, 7)
    file = kernels("reduction/reduce_row.h", instances("row_reduce_small", ", int, 1"))
    name = instance("row_reduce_small", *case, ", int, 1")
    out = run(file, name, buffers, (1, 1, 1), (24, 1, 1))
    compare(out[1], want)


@pytest.mark.parametrize("case", REDUCED, ids=name_of)
def test_row_reduce_looped(case: tuple[str, str]) -> None:
    _, buffers, want = row_buffers(*case, 531)
    file = kernels("reduction/reduce_row.h", instances("row_reduce_looped", ", int, 1"))
    name = instance("row_reduce_looped", *case, ", int, 1")
    out = run(file, name, buffers, (1, 6, 4), (64, 1, 1))
    compare(out[1], want)


def row_reduce_simple(kind: str, op: str, check: bool = False) -> None:
    rows, row = 11, 531  # four rows a threadgroup; the last takes its own again
    x = values(kind, op, rows, row)
    name = instance("row_reduce_simple", kind, op)
    file = kernels("reduction/reduce_row.h", (name,) if check else instances("row_reduce_simple"), check=check)
    buffers = {0: x, 1: result_of(kind, op, rows), 2: longs(row), 3: longs(rows)}
    out = run(file, name, buffers, (1, ceil_div(rows, 4), 1), (64, 1, 1))
    compare(out[1], reduced(x, op, -1))


@pytest.mark.parametrize("case", REDUCED, ids=name_of)
def test_row_reduce_simple(case: tuple[str, str]) -> None:
    row_reduce_simple(*case)


# Columns of x[3, rows, columns] are what is reduced.
def column_buffers(kind: str, op: str, rows: int, columns: int) -> tuple[dict[int, Any], mx.array]:
    x = values(kind, op, 3, rows, columns)
    shape = {4: ints(3), 5: longs(rows * columns), 6: 1, 7: ints(rows), 8: longs(columns), 9: 1, 10: longs(1)}
    buffers = {0: x, 1: result_of(kind, op, 3, columns), 2: longs(rows), 3: longs(columns), **shape}
    return buffers, reduced(x, op, 1)


COLUMN_CASES = [case for case in REDUCED if case[1] in ("Sum", "Max") or case[0] == "float"]


@pytest.mark.parametrize("case", COLUMN_CASES, ids=name_of)
def test_col_reduce_small(case: tuple[str, str]) -> None:
    buffers, want = column_buffers(*case, 19, 37)
    file = kernels("reduction/reduce_col.h", instances("col_reduce_small", ", int, 1"))
    out = run(file, instance("col_reduce_small", *case, ", int, 1"), buffers, (1, 3, 1), (32, 8, 1))
    compare(out[1], want)


@pytest.mark.parametrize("case", COLUMN_CASES, ids=name_of)
def test_col_reduce_longcolumn_in_two_passes(case: tuple[str, str]) -> None:
    rows, columns, parts = 300, 5, 2
    buffers, want = column_buffers(*case, rows, columns)
    buffers |= {1: result_of(*case, parts, 3, columns), 11: longs(3 * columns)}
    file = kernels("reduction/reduce_col.h", instances("col_reduce_longcolumn", ", int, 1"))
    out = run(file, instance("col_reduce_longcolumn", *case, ", int, 1"), buffers, (3, 1, parts), (columns, 32, 1))
    compare(reference(lambda x: OPERATIONS[case[1]](x, 0), out[1]).astype(out[1].dtype), want)


COLUMN_TILES = ("8, 128", "32, 32")


@pytest.mark.parametrize("case", COLUMN_CASES, ids=name_of)
@pytest.mark.parametrize("tile", COLUMN_TILES)
def test_col_reduce_looped(case: tuple[str, str], tile: str) -> None:
    columns = 150
    buffers, want = column_buffers(*case, 45, columns)
    buffers[11] = longs(0)
    tail = f", int, 1, {tile}"
    file = kernels("reduction/reduce_col.h", instances("col_reduce_looped", tail))
    groups = (ceil_div(columns, int(tile.split(", ")[1])), 3, 1)
    out = run(file, instance("col_reduce_looped", *case, tail), buffers, groups, (256, 1, 1))
    compare(out[1], want)


@pytest.mark.parametrize("case", [("float", "Sum"), ("half", "Max")], ids=name_of)
def test_col_reduce_2pass(case: tuple[str, str]) -> None:
    rows, columns, parts = 1100, 37, 32
    buffers, want = column_buffers(*case, rows, columns)
    buffers |= {1: result_of(*case, parts, 3, columns), 11: longs(0), 12: longs(3)}
    tail = ", int, 1, 32, 32"
    names = tuple(instance("col_reduce_2pass", *one, tail) for one in (("float", "Sum"), ("half", "Max")))
    name = instance("col_reduce_2pass", *case, tail)
    file = kernels("reduction/reduce_col.h", names)
    out = run(file, name, buffers, (ceil_div(columns, 32), 3 * parts, 1), (256, 1, 1))
    compare(reference(lambda x: OPERATIONS[case[1]](x, 0), out[1]).astype(out[1].dtype), want)


INIT = ("init_reduce<float, Sum<float>>", "init_reduce<half, Max<half>>", "init_reduce<int, Prod<int>>")


@pytest.mark.parametrize(("name", "value"), [*zip(INIT, (0, -np.inf, 1), strict=True)], ids=name_of)
def test_init_reduce(name: str, value: float) -> None:
    kind = name.split("<")[1].split(",")[0]
    out = run(kernels("reduction/reduce_init.h", INIT), name, {0: Empty((37,), ALL_DTYPES[kind])}, (1, 1, 1),
              (37, 1, 1))  # fmt: skip
    exact(out[0], mx.full((37,), value, ALL_DTYPES[kind]))


PRECISE = ("{}", "{}, float")  # what it is reduced in
SOFTMAX = tuple(
    f"softmax_{name}<{form.format(kind)}>"
    for name in ("single_row", "looped")
    for kind in KINDS
    for form in PRECISE[: 1 + (kind != "float")]
)
SOFTMAX_CASES = [(name, size) for name in SOFTMAX for size in ((70, 1000) if "single" in name else (1000, 4099))]


def threads_for(name: str, size: int) -> int:
    # The looped ones read a maximum of each of 32 simdgroups.
    return 1024 if "looped" in name else up_to_simdgroup(ceil_div(size, 4))


def softmax(name: str, size: int, check: bool = False) -> None:
    kind = name.split("<")[1].split(",")[0].rstrip(">")
    x = normal(3, size, kind=kind, scale=3)
    file = kernels("softmax.h", (name,) if check else SOFTMAX, check=check)
    buffers = {0: x, 1: empty(x.shape, kind), 2: size}
    threads = threads_for(name, size)
    out = run(file, name, buffers, (3, 1, 1), (threads, 1, 1))
    # Where half and bfloat are reduced in their own type, as many roundings add up as a thread and a simdgroup have.
    narrow = kind != "float" and "float" not in name
    close(out[1], reference(lambda x: mx.softmax(x, -1), x), 2e-2 if narrow else None)


@pytest.mark.parametrize("case", SOFTMAX_CASES, ids=name_of)
def test_softmax(case: tuple[str, int]) -> None:
    softmax(*case)


LOGSUMEXP = tuple(f"logsumexp{form}<{kind}>" for form in ("", "_looped") for kind in KINDS)


@pytest.mark.parametrize("name", LOGSUMEXP)
@pytest.mark.parametrize("size", [70, 1000])
def test_logsumexp(name: str, size: int) -> None:
    kind = name.split("<")[1].rstrip(">")
    x = normal(5, size, kind=kind, scale=3)
    threads = threads_for(name, size)
    buffers = {0: x, 1: empty((5,), kind), 2: size}
    out = run(kernels("logsumexp.h", LOGSUMEXP), name, buffers, (5, 1, 1), (threads, 1, 1))
    close(out[1], reference(lambda x: mx.logsumexp(x, -1), x))


CROSS_ENTROPY = tuple(f"{name}<{kind}>" for name in ("cross_entropy", "cross_entropy_vjp") for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_cross_entropy_and_its_gradient(kind: str) -> None:
    rows, size = 4, 1003
    x, targets, cotangent = normal(rows, size, kind=kind, scale=3), mx.array([0, 1002, -5, 17]), normal(rows)
    file = kernels("cross_entropy.h", CROSS_ENTROPY)
    buffers = {0: x, 1: targets, 2: empty((rows,)), 3: size}
    loss = run(file, f"cross_entropy<{kind}>", buffers, (rows, 1, 1), (128, 1, 1))[2]

    def losses(x: mx.array) -> mx.array:
        return mx.logsumexp(x, -1) - mx.take_along_axis(x, targets[:, None] % size, -1)[:, 0]

    close(loss, reference(losses, x))
    buffers = {0: x, 1: targets, 2: loss, 3: cotangent, 4: empty(x.shape, kind), 5: size}
    out = run(file, f"cross_entropy_vjp<{kind}>", buffers, (rows, 1, 1), (128, 1, 1))
    close(out[4], reference(lambda x: mx.vjp(losses, [x], [cotangent])[1][0], x))


HADAMARD = tuple(f"hadamard_n<{kind}, 512, 16, 4>" for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_hadamard(kind: str) -> None:
    x = normal(3, 512, kind=kind)
    buffers = {0: x, 1: empty(x.shape, kind), 2: 512**-0.5}
    file = kernels("hadamard.h", HADAMARD)
    out = run(file, HADAMARD[KINDS.index(kind)], buffers, (1, 3, 1), (32, 1, 1))
    close(out[1], reference(mx.hadamard_transform, x))


def test_checked_row_reduce_has_no_findings() -> None:
    row_reduce_simple("half", "Sum", check=True)


@pytest.mark.parametrize("factor", [1, 2])
def test_checked_mode_compares_what_two_threads_write_and_no_more(factor: int) -> None:
    """As the rows above: the last of four numbers that a thread writes at once is the first of the next thread's."""
    text = """
    kernel void overlap(device int* out, constant int& factor, uint i [[thread_position_in_grid]]) {
      *(device packed_int4*)(out + 3 * i) = packed_int4(3 * i, 3 * i + 1, 3 * i + 2, (3 * i + 3) * factor);
    }
    """
    file = MetalFile(text=f"#include <metal_stdlib>\nusing namespace metal;\n{text}", check=True)
    buffers = {0: Empty((7,), mx.int32), 1: factor}
    done = file.run("overlap", buffers=buffers, grid=(2, 1, 1), threadgroup=(2, 1, 1), collect=True)
    assert [finding.kind for finding in done.launch.findings] == ["race"] * (factor - 1)
    assert [finding.kind for finding in done.launch.benign] == ["race"] * (2 - factor)


@pytest.mark.parametrize(("name", "size"), [("softmax_single_row<float>", 70), ("softmax_looped<half, float>", 1000)])
def test_checked_softmax_has_no_findings(name: str, size: int) -> None:
    softmax(name, size, check=True)
