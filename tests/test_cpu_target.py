"""Launches on the CPU: any layout of inputs, unwritten outputs, threads, forks."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from small_kernels import BLOCK, elementwise_source, linear, linear_source

from metile.errors import MetileError
from metile.targets.base import Kernel, Output
from metile.targets.cpu import CpuTarget

F32 = mx.float32
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def target() -> CpuTarget:
    return CpuTarget()


@pytest.fixture(scope="module")
def kernel(target: CpuTarget) -> Kernel:
    return target.compile(linear_source())


def normal(*shape: int, dtype: mx.Dtype = F32, seed: int = 0) -> mx.array:
    array = mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
    mx.eval(array)
    return array


def close(y: mx.array, expected: mx.array, tolerance: float = 1e-5) -> bool:
    bound = tolerance * max(1.0, mx.abs(expected).max().item())
    return y.shape == expected.shape and bool(mx.abs(y.astype(F32) - expected.astype(F32)).max().item() <= bound)


def runs(kernel: Kernel, groups: int, *inputs: mx.array, shape: tuple[int, ...] = ()) -> mx.array:
    return kernel(inputs, [Output(shape or (groups,), F32)], groups=groups, poison=True)[0]


# Each turns a [34, 66] array into a view; what it gives is x, and w where its last axis has the length.
VIEWS: dict[str, Callable[[mx.array], mx.array]] = {
    "plain": lambda a: a,
    "rows reversed": lambda a: a[::-1],
    "columns reversed": lambda a: a[:, ::-1],
    "every second row": lambda a: a[::2],
    "every second column": lambda a: a[:, ::2],
    "columns from an odd one": lambda a: a[:, 1:],
    "rows and columns inside": lambda a: a[3:31, 5:60],
    "transposed": lambda a: a.T,
    "one row broadcast": lambda a: mx.broadcast_to(a[:1], (37, 66)),
    "one column broadcast": lambda a: mx.broadcast_to(a[:, :1], (34, 66)),
    "one number broadcast": lambda a: mx.broadcast_to(a[:1, :1], (34, 66)),
    "one row": lambda a: a[5:6],
    "one column": lambda a: a[:, 7:8],
    "a vector": lambda a: a[9],
    "a strided vector": lambda a: a[:, 9],
    "an axis of one in front": lambda a: a[None],
    "an axis of one between": lambda a: a[:, None],
    "an axis of one behind": lambda a: a[:, :, None],
    "three axes that fold": lambda a: a.reshape(2, 17, 66),
    "three axes swapped": lambda a: a.reshape(2, 17, 66).swapaxes(0, 1),
    "three axes, the middle cut": lambda a: a.reshape(2, 17, 66)[:, :16],
    "three axes, the outer reversed": lambda a: a.reshape(2, 17, 66)[::-1],
    "unevaluated": lambda a: a + 1,
}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_linear_equals_mlx_on_any_layout_of_x(target: CpuTarget, view: str, dtype: mx.Dtype) -> None:
    x = VIEWS[view](normal(34, 66, dtype=dtype))
    w = normal(33, x.shape[-1], dtype=dtype, seed=1) * x.shape[-1] ** -0.5
    y = linear(target.compile(linear_source(dtype)), x, w, poison=True)
    assert y.dtype == dtype
    assert close(y, x.astype(F32) @ w.astype(F32).T, TOLERANCE[dtype])


@pytest.mark.parametrize("view", [name for name in VIEWS if VIEWS[name](mx.zeros((34, 66))).ndim == 2])
def test_a_linear_equals_mlx_on_any_layout_of_w(kernel: Kernel, view: str) -> None:
    w = VIEWS[view](normal(34, 66))
    x = normal(5, w.shape[-1], seed=1)
    assert close(linear(kernel, x, w, poison=True), x @ w.T)


def test_the_input_keeps_its_values_and_may_go_before_the_output(kernel: Kernel) -> None:
    x, w = normal(5, 66), normal(34, 66, seed=1)
    before, expected = np.array(x), np.array(x @ w.T)
    y = linear(kernel, x, w)
    assert np.array_equal(np.array(x), before)
    del x, w
    gc.collect()
    assert np.allclose(np.array(y), expected, atol=1e-5)


def test_outputs_are_arrays_like_others_and_are_not_overwritten(kernel: Kernel) -> None:
    w = normal(34, 66)
    inputs = [normal(3, 66, seed=seed) for seed in range(40)]
    outputs = [linear(kernel, x, w) for x in inputs]  # more than are recycled of one size
    sums = [y.sum() * 2 for y in outputs]
    del outputs[::2]
    more = [linear(kernel, x, w) for x in inputs]
    for x, y, total in zip(inputs, more, sums, strict=True):
        assert close(y, x @ w.T)
        assert abs(total.item() - 2 * (x @ w.T).sum().item()) < 1e-3
    assert all(close(y, x @ w.T) for x, y in zip(inputs[1::2], outputs, strict=True))


def test_poison_shows_where_a_kernel_does_not_write(target: CpuTarget) -> None:
    even = target.compile(elementwise_source("even", "if (i % 2 == 0) y_[i] = 1.0f;", inputs=()))
    y = np.array(runs(even, 101))
    assert np.array_equal(np.isnan(y), np.arange(101) % 2 == 1)
    assert np.all(y[::2] == 1.0)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=["f32", "bf16", "f16"])
def test_poison_is_nan_in_every_dtype(target: CpuTarget, dtype: mx.Dtype) -> None:
    nothing = target.compile(elementwise_source("nothing", "", inputs=()))
    outputs = [Output((7, 3), dtype)]
    assert mx.isnan(nothing([], outputs, groups=1, poison=True)[0]).all().item()


def test_poison_finds_blocks_that_were_not_launched(kernel: Kernel) -> None:
    x, w = normal(2 * BLOCK, 64), normal(BLOCK, 64, seed=1)
    y = kernel([x, w], [Output((2 * BLOCK, BLOCK), F32)], groups=1, numbers=[64], poison=True)[0]
    assert close(y[:BLOCK], x[:BLOCK] @ w.T)
    assert mx.isnan(y[BLOCK:]).all().item()


def test_two_kernels_of_one_name_do_what_each_says(target: CpuTarget) -> None:
    double, triple = (elementwise_source("times", f"y_[i] = {n}.0f * x_[i];") for n in (2, 3))
    assert double.identity("") != triple.identity("")
    assert double.identity("one") != double.identity("other")
    x = normal(50)
    for source, factor in ((double, 2), (triple, 3), (double, 2)):
        assert np.array_equal(np.array(runs(target.compile(source), 50, x)), factor * np.array(x))


def test_every_group_runs_once(target: CpuTarget) -> None:
    # Poison is the integer -1; each run of group i adds i + 1 to it.
    add = "__atomic_fetch_add(reinterpret_cast<int*>(y_) + i, int(i) + 1, __ATOMIC_RELAXED);"
    count = target.compile(elementwise_source("count", add, inputs=()))
    for groups in (1, 2, 3, 7, 64, 4099):
        y = np.array(runs(count, groups)).view(np.int32)
        assert np.array_equal(y, np.arange(groups))


def test_several_outputs(target: CpuTarget) -> None:
    source = replace(
        elementwise_source("two", "y_[i] = x_[i]; static_cast<float*>(z.data)[i] = -x_[i];"),
        outputs=("y", "z"),
    )
    x = normal(9)
    y, z = target.compile(source)([x], [Output((9,), F32), Output((3, 3), F32)], groups=9)
    assert np.array_equal(np.array(y), np.array(x))
    assert np.array_equal(np.array(z), -np.array(x).reshape(3, 3))


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(0, 8, 5), (0, 8, 0), (3, 8, 0)])
def test_no_rows_or_no_outputs_give_an_empty_array(kernel: Kernel, rows: int, inputs: int, outputs: int) -> None:
    y = linear(kernel, mx.zeros((rows, inputs)), mx.zeros((outputs, inputs)))
    assert y.shape == (rows, outputs)
    assert y.sum().item() == 0


def test_an_output_without_axes(target: CpuTarget) -> None:
    first = target.compile(elementwise_source("first", "y_[0] = x_[0];"))
    y = first([mx.array(3.5)], [Output((), F32)], groups=1)[0]
    assert (y.shape, y.item()) == ((), 3.5)


def test_wrong_counts_are_refused(kernel: Kernel) -> None:
    x, one = mx.zeros((2, 4)), [Output((2, 2), F32)]
    with pytest.raises(MetileError, match=r"\[test_linear_float\] expected inputs \('x', 'w'\) but got 1"):
        kernel([x], one, groups=1, numbers=[4])
    with pytest.raises(MetileError, match=r"expected numbers \('outer_k',\) but got \(\)"):
        kernel([x, x], one, groups=1)
    with pytest.raises(MetileError, match=r"expected outputs \('y',\) of at most 8 axes but got \[\]"):
        kernel([x, x], [], groups=1, numbers=[4])
    with pytest.raises(MetileError, match=r"expected outputs \('y',\) of at most 8 axes"):
        kernel([x, x], one * 2, groups=1, numbers=[4])
    with pytest.raises(MetileError, match=r"expected x of at most 8 axes but got shape \(1, 1, 1"):
        kernel([x.reshape(*[1] * 7, 2, 4), x], one, groups=1, numbers=[4])


def test_an_input_that_is_no_array_is_a_type_error(kernel: Kernel) -> None:
    with pytest.raises(TypeError):
        kernel([object(), mx.zeros((2, 4))], [Output((2, 2), F32)], groups=1, numbers=[4])  # type: ignore[list-item]


def test_inside_a_compile_trace_a_launch_fails_and_the_next_is_right(kernel: Kernel) -> None:
    x, w = normal(3, 66), normal(34, 66, seed=1)
    with pytest.raises(RuntimeError, match="eval an array during function transformations"):
        mx.compile(lambda a: linear(kernel, a, w))(x)
    assert close(linear(kernel, x, w), x @ w.T)


def test_many_launches_hold_no_memory(target: CpuTarget) -> None:
    one = target.compile(elementwise_source("one", "y_[i] = 1.0f;", inputs=()))
    outputs = [Output((1 << 18,), F32)]  # 1 MB each
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("no /proc")
    for _ in range(20):
        one([], outputs, groups=1, poison=True)
    before = int(statm.read_text().split()[1])
    for _ in range(200):
        one([], outputs, groups=1, poison=True)
    for _ in range(100_000):
        one([], [Output((1,), F32)], groups=1)
    grown = (int(statm.read_text().split()[1]) - before) * os.sysconf("SC_PAGE_SIZE")
    assert grown < 2 << 20  # 48 bytes lost by each launch would be 4.8 MB
