"""Launches as a model makes them: bound once, on weights that workers look ahead to, groups taken from both ends."""

from __future__ import annotations

import mlx.core as mx
import pytest
from small_kernels import linear, linear_source

from metile.targets.base import Kernel, KernelSource, Output
from metile.targets.cpu import CpuTarget

ROWS, DEPTH = 3, 256


@pytest.fixture(scope="module")
def target() -> CpuTarget:
    return CpuTarget()


@pytest.fixture(scope="module")
def kernel(target: CpuTarget) -> Kernel:
    return target.compile(linear_source())


def normal(*shape: int, seed: int) -> mx.array:
    array = mx.random.normal(shape, key=mx.random.key(seed))
    mx.eval(array)
    return array


def test_a_bound_launch_is_the_launch(kernel: Kernel) -> None:
    w = normal(96, DEPTH, seed=1)
    call = kernel.bind([Output((ROWS, 96), mx.float32)], groups=3, numbers=[DEPTH])
    for seed in (2, 3):
        x = normal(ROWS, DEPTH, seed=seed)
        assert mx.array_equal(call([x, w])[0], linear(kernel, x, w))


def test_a_bound_launch_copies_what_does_not_fold(kernel: Kernel) -> None:
    x, w = normal(DEPTH, ROWS, seed=2).T, normal(96, DEPTH, seed=1)
    call = kernel.bind([Output((ROWS, 96), mx.float32)], groups=3, numbers=[DEPTH])
    assert mx.allclose(call([x, w])[0], x @ w.T, atol=1e-3)


def test_expected_weights_change_no_result(target: CpuTarget, kernel: Kernel) -> None:
    layers = [normal(32 * n, DEPTH, seed=n) for n in (1, 2, 33, 70)]
    x = normal(ROWS, DEPTH, seed=9)
    plain = [linear(kernel, x, w) for w in layers]
    target.expect(layers)
    target.expect(layers)  # once more is the same
    for order in ((0, 1, 2, 3), (0, 1, 2, 3), (3, 1, 0, 2), (2, 2, 2, 0)):
        for i in order:
            assert mx.array_equal(linear(kernel, x, layers[i]), plain[i])


def test_expected_weights_may_be_freed(target: CpuTarget, kernel: Kernel) -> None:
    x, kept = normal(ROWS, DEPTH, seed=9), normal(320, DEPTH, seed=1)
    for seed in range(20):
        gone = normal(3200, DEPTH, seed=seed)
        target.expect([gone, kept])
        linear(kernel, x, gone)
        linear(kernel, x, kept)
        del gone
        mx.clear_cache()
    assert mx.allclose(linear(kernel, x, kept), x @ kept.T, atol=1e-3)


@pytest.mark.parametrize("groups", [1, 2, 3, 64, 1000, 20011])
def test_every_group_runs_once(target: CpuTarget, groups: int) -> None:
    # The output begins as -1 in every integer: one addition makes it 0.
    source = KernelSource(
        "test_coverage",
        "linear.metal",
        "(void)x; __atomic_fetch_add(static_cast<int*>(y.data) + group.index, 1, __ATOMIC_RELAXED);",
        ("x",),
        ("y",),
    )
    kernel = target.compile(source)
    for _ in range(20):
        (y,) = kernel([mx.zeros(1)], [Output((groups,), mx.uint32)], groups=groups, poison=True)
        assert not y.any().item()
