"""Launches timed together: each needs what the one before gave."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from metile.chain import Chain, linked
from metile.measure import sample


@pytest.mark.parametrize("shape", [(2, 3), (6,), (1, 2, 4), (5, 7)])
def test_an_input_is_made_of_outputs(shape: tuple[int, ...]) -> None:
    x = mx.zeros(shape, mx.float16)
    y = mx.arange(12, dtype=mx.float16).reshape(3, 4)
    following = linked(x, [mx.ones((100,), mx.float32), y])
    assert (following.shape, following.dtype) == (shape, mx.float16)
    assert np.array_equal(np.array(following).reshape(-1), np.resize(np.arange(12), x.size))


def test_an_input_of_another_dtype_is_cast() -> None:
    following = linked(mx.zeros((2,), mx.bfloat16), [mx.array([1.0, 2.0, 3.0])])
    assert following.dtype == mx.bfloat16
    assert following.tolist() == [1.0, 2.0]


def test_a_chain_goes_through_all_launches_in_one_evaluation() -> None:
    seen: list[float] = []
    given = iter(range(100))

    def launch(inputs: Sequence[mx.array]) -> list[mx.array]:
        x, step = inputs
        seen.append(step.item())
        return [x + step]

    chain = Chain(launch, lambda: [mx.array([0.0]), mx.array([float(next(given))])])
    run = chain.prepare(4)
    assert seen == [0.0, 1.0, 2.0, 3.0]  # built, with other weights each time, before it runs
    run()
    chain()
    assert seen[-1] == 4.0


def test_a_chain_is_sampled_as_one() -> None:
    prepared: list[int] = []
    ticks = iter([0.0, 8.0])

    class Work:
        def __call__(self) -> None:
            raise AssertionError("launches are not run one by one")

        def prepare(self, repeats: int) -> object:
            prepared.append(repeats)
            return lambda: None

    assert sample(Work(), 4, clock=lambda: next(ticks)) == 2.0
    assert prepared == [4]
