"""Inputs of any strides, and grids of any size, reach every element once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_kernels import COPY, I, make, run, same

from metile.simulator import Finding

# Layouts (case 2)

BASE = mx.arange(48, dtype=mx.float32).reshape(6, 8)
LAYOUTS: dict[str, Callable[[mx.array], mx.array]] = {
    "whole": lambda x: x,
    "reversed": lambda x: x[::-1],
    "both reversed": lambda x: x[::-1, ::-1],
    "every second column": lambda x: x[:, ::2],
    "inner": lambda x: x[1:5, 2:7],
    "transposed": lambda x: x.T,
    "broadcast rows": lambda x: mx.broadcast_to(x[0], (5, 8)),
    "broadcast column": lambda x: mx.broadcast_to(x[:, 3:4], (6, 4)),
    "broadcast scalar": lambda x: mx.broadcast_to(x[2, 3], (3, 4)),
    "one row": lambda x: x[2:3],
    "one column": lambda x: x[:, 2:3],
    "more axes": lambda x: x.reshape(2, 3, 2, 4).transpose(3, 0, 2, 1)[::-2, :, None],
}
BY_STRIDES = (
    I
    + """
    long at = 0; uint rest = i;
    for (int axis = x_ndim - 1; axis >= 0; axis--) {
      at += long(rest % uint(x_shape[axis])) * x_strides[axis];
      rest /= uint(x_shape[axis]);
    }
    y[i] = x[at];"""
)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint8], ids=str)
@pytest.mark.parametrize("check", [False, True], ids=["fast", "checked"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, check: bool, dtype: mx.Dtype) -> None:
    x = LAYOUTS[layout](BASE.astype(dtype))
    assert same(run(make(COPY), x, check=check), x)
    for contiguous in (False, True):
        assert same(run(make(BY_STRIDES, ensure_row_contiguous=contiguous), x, check=check), x)


def test_strides_are_those_of_the_array_only_where_it_is_not_copied() -> None:
    source = "for (int axis = 0; axis < x_ndim; axis++) y[axis] = x_strides[axis];"
    x = BASE[::-1, ::2].T
    options: dict[str, Any] = {"like": mx.zeros(2, mx.int32), "grid": (1, 1, 1)}
    assert run(make(source, ensure_row_contiguous=False), x, **options).tolist() == [2, -8]
    assert run(make(source), x, **options).tolist() == [6, 1]


def test_memory_around_a_view_is_out_of_bounds() -> None:
    x = BASE[::-1, ::2]
    for at, fine in ((-40, True), (-41, False), (6, True), (7, False)):
        kernel = make(f"y[0] = x[{at}];", ensure_row_contiguous=False)
        found: list[Finding] = []
        run(kernel, x, like=mx.zeros(1), check=True, collect=found)
        assert [finding.kind for finding in found] == ([] if fine else ["out of bounds"])


IN_PLACE, COPIED = make(BY_STRIDES, ensure_row_contiguous=False), make(COPY)
steps = st.sampled_from([1, 2, 3, -1, -2])


@settings(max_examples=60, deadline=None)
@given(
    st.permutations([0, 1, 2]),
    st.tuples(steps, steps, steps),
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 1)),
    st.booleans(),
    st.sampled_from([mx.float32, mx.bfloat16, mx.int8]),
)
def test_any_layout(
    axes: list[int], by: tuple[int, int, int], begin: tuple[int, int, int], broadcast: bool, dtype: mx.Dtype
) -> None:
    x = mx.arange(5 * 4 * 6).reshape(5, 4, 6).astype(dtype)
    x = x[begin[0] :, begin[1] :, begin[2] :].transpose(axes)[:: by[0], :: by[1], :: by[2]]
    if broadcast:
        x = mx.broadcast_to(x[:, :1], (2, x.shape[0], 3, x.shape[2]))
    assert same(run(IN_PLACE, x), x)
    assert same(run(COPIED, x), x)


# Grids (case 3)

COVERAGE = """
    uint3 at = thread_position_in_grid, size = threads_per_grid;
    atomic_fetch_add_explicit(&y[(at.z * size.y + at.y) * size.x + at.x], 1, memory_order_relaxed);
    uint3 expected = threadgroup_position_in_grid * dispatch_threads_per_threadgroup + thread_position_in_threadgroup;
    if (any(at != expected)) atomic_fetch_add_explicit(&y[0], 1000, memory_order_relaxed);
"""


COUNTING = make(COVERAGE, "unused", atomic_outputs=True, name="coverage")


def coverage(grid: tuple[int, int, int], threadgroup: tuple[int, int, int], check: bool = False) -> mx.array:
    shape = (grid[2], grid[1], grid[0])
    return run(
        COUNTING, 0, like=mx.zeros(shape, mx.int32), grid=grid, threadgroup=threadgroup, init_value=0, check=check
    )


@pytest.mark.parametrize("check", [False, True], ids=["fast", "checked"])
@pytest.mark.parametrize(
    ("grid", "threadgroup"),
    [((257, 1, 1), (256, 1, 1)), ((24, 64, 1), (256, 1, 1)), ((1, 1, 1), (1024, 1, 1)), ((33, 7, 5), (8, 4, 3))],
)
def test_every_thread_runs_once(grid: tuple[int, int, int], threadgroup: tuple[int, int, int], check: bool) -> None:
    assert (coverage(grid, threadgroup, check) == 1).all()


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(st.integers(1, 70), st.integers(1, 9), st.integers(1, 5)),
    st.tuples(st.integers(1, 40), st.integers(1, 6), st.integers(1, 4)),
)
def test_every_thread_of_any_grid_runs_once(grid: tuple[int, int, int], threadgroup: tuple[int, int, int]) -> None:
    assert (coverage(grid, threadgroup) == 1).all()


def test_a_threadgroup_is_cut_to_the_grid_and_the_last_ones_are_partial() -> None:
    source = "y[i] = threads_per_threadgroup.x * 1000 + dispatch_threads_per_threadgroup.x;"
    got = run(make(I + source), mx.zeros(70, mx.int32))
    assert got.tolist() == [32032] * 64 + [6032] * 6
    got = run(make(I + source), mx.zeros(20, mx.int32), threadgroup=(256, 1, 1))
    assert got.tolist() == [20020] * 20


def test_a_grid_without_threads_runs_none() -> None:
    kernel = make("y[0] = 1;")
    got = run(kernel, mx.zeros(2), grid=(0, 4, 1), init_value=3)
    assert got.tolist() == [3, 3]
    assert kernel.last is not None
    assert kernel.last.counters.threads == 0
