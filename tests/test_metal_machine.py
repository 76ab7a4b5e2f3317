"""Kernels of the Metal target on the GPU of this machine, or on the simulator where there is none.

What a Mac owner and the workflow for macOS run. With METILE_REQUIRE_METAL=1 a machine without Metal fails, so that a
green run of it means a real GPU. The whole product of candidates is for `make check-kernels`, on the simulator; here
each program meets every dtype and epilogue at ragged shapes, and a model is patched.
"""

from __future__ import annotations

import os
from typing import Any

import mlx.core as mx
import pytest
from kernel_checks import assert_near, numpy_of, thinned
from test_linear import reference as linear_reference
from tiny_models import tiny

from metile import models
from metile.dispatch import Plan
from metile.ops.attention import AttentionKey
from metile.ops.base import DTYPES, OpKey
from metile.ops.linear import LinearKey
from metile.ops.norm import NormKey
from metile.ops.rope import RopeKey
from metile.patch import apply
from metile.targets import choose_target
from metile.targets.base import Target

EPILOGUES = ("store", "bias", "residual", "swiglu")
PLAIN_TIMES = 8  # plain MLX rounds to the dtype between its steps
# Candidates of each kind: on the simulator, where each is a slow compilation and other tests try more, the default.
TRIED = 4 if mx.metal.is_available() else 1


@pytest.fixture(scope="module")
def target() -> Target:
    if not mx.metal.is_available():
        assert os.environ.get("METILE_REQUIRE_METAL") != "1", "expected a machine with Metal but got one without"
        return choose_target("simulator")
    return choose_target("metal")


def check(key: OpKey, candidate: Any, rows: int, target: Target) -> None:
    """Hold one launch, on poisoned outputs, against plain MLX in float32."""
    inputs = key.example(rows, 1)
    outputs = key.launch(target.compile(key.source(candidate)), candidate, inputs, poison=True)
    expected = key.reference([array.astype(mx.float32) for array in inputs])
    for output, want in zip(outputs, expected, strict=True):
        assert_near(output, numpy_of(want), times=PLAIN_TIMES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("program", "rows"), [("rows", 3), ("rows", 16), ("matrix", 67)])
def test_linear(target: Target, epilogue: Any, dtype: str, program: str, rows: int) -> None:
    key = LinearKey(epilogue, 4 if rows < 4 else 16 if rows <= 16 else 128, 131, 197, dtype)
    space = [tile for tile in key.space(target.limits) if tile.program == program]
    inputs = key.example(rows, 0)
    expected = linear_reference(key, inputs)
    for candidate in thinned(space[:200], 3)[:TRIED]:
        (y,) = key.launch(target.compile(key.source(candidate)), candidate, inputs, poison=True)
        assert_near(y, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("add", [False, True])
def test_norm(target: Target, add: bool, dtype: str) -> None:
    key = NormKey(add, 8, 577, 1e-5, dtype)
    for candidate in thinned(key.space(target.limits), 3)[:TRIED]:
        check(key, candidate, 7, target)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope(target: Target, dtype: str) -> None:
    key = RopeKey(16, 6, 2, 64, dtype)
    for candidate in thinned(key.space(target.limits), 3)[:TRIED]:
        check(key, candidate, 13, target)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "dimension"), [(1, (6, 2), 80), (1, (8, 1), 128), (33, (4, 4), 64)])
def test_attention(target: Target, rows: int, heads: tuple[int, int], dimension: int, dtype: str) -> None:
    key = AttentionKey(1 if rows == 1 else 64, 256, *heads, dimension, dtype)
    for candidate in thinned(key.space(target.limits), 2)[:TRIED]:
        check(key, candidate, rows, target)


def test_a_patched_model_says_what_the_plain_one_says(target: Target) -> None:
    model = tiny("llama", mx.float32, seed=3)
    tokens = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    expected = model(tokens)
    mx.eval(expected)
    found = models.find(model)
    keys = dict.fromkeys(key for site in found.sites for key in site.keys([8], 16))
    choices = {key: next(iter(key.space(target.limits)), None) for key in keys}
    with apply(model, Plan(target.name, frozenset(site.feature for site in found.sites), choices), target) as handle:
        handle.reset_engaged()
        got = model(tokens)
        mx.eval(got)
        assert sum(handle.engaged().values()) > 0
    assert mx.abs(got - expected).max().item() < 1e-4 * mx.abs(expected).max().item()
    assert mx.array_equal(model(tokens), expected)
