"""Sorts, searches and scans in the headers of the installed MLX, unmodified, against MLX's CPU.

sort.h, searchsorted.h and scan.h. At the end: how many checks there are of kernels that nobody here wrote.
"""

from __future__ import annotations

import importlib
import inspect
import math
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest
from mlx_kernels import DTYPES, ceil_div, close, exact, ints, kernels, longs, name_of, normal, reference, run

from metile.simulator import Empty

KINDS = tuple(DTYPES)
ALL_DTYPES = {**DTYPES, "int": mx.int32, "uint8_t": mx.uint8}


@pytest.fixture(autouse=True)
def _seed() -> None:
    mx.random.seed(19)


def values(kind: str, *shape: int) -> mx.array:
    """Return numbers some of which are equal."""
    whole = mx.random.randint(0, 200, shape)
    return whole.astype(ALL_DTYPES[kind]) if kind in ("int", "uint8_t") else (whole / 8 - 12).astype(DTYPES[kind])


SORT_CASES = [(kind, arg) for kind in ("float", "half", "bfloat16_t", "int", "uint8_t") for arg in (False, True)]


def sort_name(name: str, kind: str, arg: bool) -> str:
    return f"{name}<{kind}, {'uint' if arg else kind}, {str(arg).lower()}, 64, 4>"


SORT = tuple(sort_name("block_sort", *case) for case in SORT_CASES)
SORT_STRIDED = tuple(sort_name("block_sort_nc", *case) for case in SORT_CASES)


def sort_output(kind: str, arg: bool, *shape: int) -> Empty:
    return Empty(shape, mx.uint32 if arg else ALL_DTYPES[kind])


def compare_sorted(got: mx.array, x: mx.array, arg: bool, axis: int = -1) -> None:
    """Both sorts are stable, so that the places of equal numbers are compared too."""
    if arg:
        order = mx.array(np.argsort(np.array(x.astype(mx.float32)), axis, kind="stable"))
        exact(got, order.astype(mx.uint32))
    else:
        exact(got, reference_sort(x, axis))


def reference_sort(x: mx.array, axis: int) -> mx.array:
    with mx.stream(mx.cpu):
        return mx.sort(x, axis)


def block_sort(kind: str, arg: bool, check: bool = False) -> None:
    rows, size = 3, 213
    x = values(kind, rows, size)
    name = sort_name("block_sort", kind, arg)
    file = kernels("sort.h", (name,) if check else SORT, check=check)
    buffers = {0: x, 1: sort_output(kind, arg, rows, size), 2: size, 3: 1, 4: 1, 5: size, 6: size}
    out = run(file, name, buffers, (1, rows, 1), (64, 1, 1))
    compare_sorted(out[1], x, arg)


@pytest.mark.parametrize("case", SORT_CASES, ids=name_of)
def test_block_sort(case: tuple[str, bool]) -> None:
    block_sort(*case)


@pytest.mark.parametrize("case", SORT_CASES, ids=name_of)
def test_block_sort_of_an_axis_in_the_middle(case: tuple[str, bool]) -> None:
    size = 77
    x = values(case[0], 2, size, 3)
    buffers = {0: x, 1: sort_output(*case, 2, size, 3), 2: size, 3: 3, 4: 3, 5: 2, 6: ints(2, 3)}
    buffers |= {7: longs(3 * size, 1), 8: longs(3 * size, 1)}
    out = run(kernels("sort.h", SORT_STRIDED), sort_name("block_sort_nc", *case), buffers, (1, 6, 1), (64, 1, 1))
    compare_sorted(out[1], x, case[1], 1)


PARTS = ("mb_block_sort", "mb_block_partition", "mb_block_merge")
MERGE = tuple(f"{name}<{kind}, uint, true, 64, 4>" for kind in ("float", "half", "int") for name in PARTS)


@pytest.mark.parametrize("kind", ["float", "half", "int"])
def test_merge_sort_of_blocks(kind: str) -> None:
    rows, size, block = 2, 1001, 256
    blocks = ceil_div(size, block)
    x = values(kind, rows, size)
    file = kernels("sort.h", MERGE)
    names = [f"{name}<{kind}, uint, true, 64, 4>" for name in PARTS]
    both = [Empty((rows, size), ALL_DTYPES[kind]), Empty((rows, size), mx.uint32)]
    buffers = {0: x, 1: both[0], 2: both[1], 3: size, 4: 1, 5: 1, 6: ints(rows), 7: longs(size)}
    out = run(file, names[0], buffers, (blocks, rows, 1), (64, 1, 1))
    sorted_values, places = out[1], out[2]
    tiles = 2
    while tiles // 2 < blocks:
        buffers = {0: Empty((rows, blocks + 1), mx.uint32), 1: sorted_values, 2: places, 3: size, 4: tiles, 5: blocks}
        partitions = run(file, names[1], buffers, (1, rows, 1), (blocks + 1, 1, 1))[0]
        buffers = {0: partitions, 1: sorted_values, 2: places, 3: both[0], 4: both[1], 5: size, 6: tiles, 7: blocks}
        out = run(file, names[2], buffers, (blocks, rows, 1), (64, 1, 1))
        sorted_values, places, tiles = out[3], out[4], tiles * 2
    compare_sorted(sorted_values, x, False)
    compare_sorted(places, x, True)


SEARCH = tuple(f"searchsorted<{kind}, {side}>" for kind in ("float", "half", "int") for side in ("false", "true"))


@pytest.mark.parametrize("name", SEARCH)
def test_searchsorted(name: str) -> None:
    kind, side = name.split("<")[1].split(",")[0], "right" if name.endswith("true>") else "left"
    a, v = reference_sort(values(kind, 101), -1), values(kind, 5, 7)
    grid = (7, 5, 1)
    buffers = {0: a, 1: v, 2: Empty((5, 7), mx.uint32), 3: np.uint32(101), 4: longs(1)}
    out = run(kernels("searchsorted.h", SEARCH), name, buffers, grid, (7, 5, 1), partial=grid)
    place = np.searchsorted(np.array(a.astype(mx.float32)), np.array(v.astype(mx.float32)), side)
    exact(out[2], mx.array(place.astype(np.uint32)))


SCANS = {"CumSum": mx.cumsum, "CumProd": mx.cumprod, "CumMax": mx.cummax, "CumMin": mx.cummin}
SCANS["CumLogaddexp"] = mx.logcumsumexp
# Every operation in one way each; every way (inclusive, reverse) of a sum; the other dtypes of two.
SCAN_CASES = [("float", op, index % 2 == 0, index % 3 == 0) for index, op in enumerate(SCANS)]
SCAN_CASES += [("float", "CumSum", inclusive, reverse) for inclusive, reverse in ((True, False), (False, True))]
SCAN_CASES += [("float", "CumSum", False, False), ("int", "CumSum", True, True), ("int", "CumMax", True, False)]
SCAN_CASES += [(kind, op, True, False) for kind in KINDS[1:] for op in ("CumMax", "CumLogaddexp")]


def scan_name(name: str, kind: str, op: str, inclusive: bool, reverse: bool) -> str:
    return f"{name}<{kind}, {kind}, {op}<{kind}>, 4, {str(inclusive).lower()}, {str(reverse).lower()}>"


CONTIGUOUS = tuple(scan_name("contiguous_scan", *case) for case in SCAN_CASES)
STRIDED = tuple(scan_name("strided_scan", *case) for case in SCAN_CASES)


def scanned(x: mx.array, axis: int, op: str, inclusive: bool, reverse: bool) -> mx.array:
    return reference(lambda x: SCANS[op](x, axis, reverse=reverse, inclusive=inclusive), x)


def scan_input(kind: str, op: str, *shape: int) -> mx.array:
    if kind == "int":
        return mx.random.randint(-100, 100, shape)
    return mx.random.uniform(0.9, 1.1, shape) if op == "CumProd" else normal(*shape, kind=kind)


def compare_scan(got: mx.array, want: mx.array) -> None:
    """Compare; where an exclusive scan of a maximum starts at the lowest number, MLX's CPU has the same."""
    finite = mx.abs(want) < 1e30
    assert mx.array_equal(mx.abs(got) < 1e30, finite)
    if got.dtype == mx.int32:
        exact(got, want)
    else:
        zero = mx.array(0, got.dtype)
        # Half and bfloat are summed in their own type: a rounding for every doubling of the length.
        narrow = got.dtype != mx.float32
        close(mx.where(finite, got, zero), mx.where(finite, want, 0), 2e-2 if narrow else None)


def contiguous_scan(
    kind: str, op: str, inclusive: bool, reverse: bool, rows: int = 3, size: int = 1031, check: bool = False
) -> None:
    x = scan_input(kind, op, rows, size)
    name = scan_name("contiguous_scan", kind, op, inclusive, reverse)
    buffers = {0: x, 1: Empty(x.shape, ALL_DTYPES[kind]), 2: longs(size)}
    file = kernels("scan.h", (name,) if check else CONTIGUOUS, check=check)
    out = run(file, name, buffers, (1, rows, 1), (1024 if check else 128, 1, 1))
    compare_scan(out[1], scanned(x, -1, op, inclusive, reverse))


@pytest.mark.parametrize("case", SCAN_CASES, ids=name_of)
def test_contiguous_scan(case: tuple[str, str, bool, bool]) -> None:
    contiguous_scan(*case)


def strided_scan(kind: str, op: str, inclusive: bool, reverse: bool, check: bool = False) -> None:
    size, stride = 71, 45
    x = scan_input(kind, op, 2, size, stride)
    blocks = ceil_div(stride, 32)
    buffers = {0: x, 1: Empty(x.shape, ALL_DTYPES[kind]), 2: longs(size), 3: longs(stride), 4: longs(blocks)}
    name = scan_name("strided_scan", kind, op, inclusive, reverse)
    file = kernels("scan.h", (name,) if check else STRIDED, check=check)
    out = run(file, name, buffers, (1, 2 * blocks, 1), (256, 1, 1))
    compare_scan(out[1], scanned(x, 1, op, inclusive, reverse))


@pytest.mark.parametrize("case", SCAN_CASES, ids=name_of)
def test_strided_scan(case: tuple[str, str, bool, bool]) -> None:
    strided_scan(*case)


@pytest.mark.parametrize("arg", [False, True])
def test_checked_block_sort_has_no_findings(arg: bool) -> None:
    block_sort("float", arg, check=True)


def test_checked_scan_has_no_findings() -> None:
    contiguous_scan("float", "CumSum", True, False, 1, 45, check=True)


def test_checked_strided_scan_has_no_findings() -> None:
    strided_scan("float", "CumSum", False, True, check=True)


# At least this many checks of outputs, of MLX's kernels and of mlx-lm's, each of a whole output.
FEWEST = 155
TOPICS = ("vector", "quantized", "gemm", "attention", "reduce", "sort", "lm")


def checks_of(module: ModuleType) -> int:
    """Count the cases of a module's tests, by their tables alone; none may be skipped."""
    count = 0
    for name, test in vars(module).items():
        if name.startswith("test_") and inspect.isfunction(test) and test.__module__ == module.__name__:
            marks = getattr(test, "pytestmark", [])
            assert {mark.name for mark in marks} <= {"parametrize"}, name
            count += math.prod(len(list(mark.args[1])) for mark in marks)
    return count


def test_there_are_enough_checks_and_none_is_skipped() -> None:
    modules = [importlib.import_module(f"test_simulator_mlx_{topic}") for topic in TOPICS]
    for module in modules:
        source = Path(inspect.getfile(module)).read_text()
        assert not any(f"pytest.{way}" in source for way in ("sk" + "ip", "xf" + "ail", "importor" + "skip"))
        assert not hasattr(module, "pytestmark")
    counts = {module.__name__: checks_of(module) for module in modules}
    assert sum(counts.values()) >= FEWEST, counts
    assert min(counts.values()) >= 20, counts
