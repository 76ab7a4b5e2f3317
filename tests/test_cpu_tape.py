"""A tape of three small kernels over a cache, against numpy."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metile.targets.base import KernelSource, Output
from metile.targets.cpu import CpuTarget, OutputSpec
from metile.targets.cpu_tape import CpuTape, External, Own, Result, Seen, TapeLaunch, addresses

HEADS, DIMENSION, ROOM = 2, 4, 6
SIZE = HEADS * DIMENSION

SCALE = "float* to = static_cast<float*>(y.data); const uint i = group.index;"
SOURCES = {
    # t = x * w, an element a threadgroup
    "scale": KernelSource(
        "tape_scale",
        "linear.metal",
        f"{SCALE} to[i] = static_cast<const float*>(x.data)[i] * static_cast<const float*>(w.data)[i];",
        ("x", "w"),
        ("y",),
    ),
    # the new token of each head: t + position
    "put": KernelSource(
        "tape_put",
        "linear.metal",
        f"""const Heads<device float> cache = ::heads<device float>(k);
  const float* from = static_cast<const float*>(t.data) + group.index * {DIMENSION};
  for (long i = 0; i < {DIMENSION}; ++i)
    cache.head(0, group.index).row(0)[i] = (cache.rows == 1 ? from[i] : -1.0f) + float(position);""",
        ("t",),
        ("k",),
        ("position",),
    ),
    # the sum of all tokens of each head, and as many threadgroup bytes as tokens
    "total": KernelSource(
        "tape_total",
        "linear.metal",
        f"""const Heads<const device float> cache = ::heads<const device float>(k);
  float sum = 0;
  for (long m = 0; m < cache.rows; ++m)
    for (long i = 0; i < {DIMENSION}; ++i) sum += cache.head(0, group.index).row(m)[i];
  group.memory<char>(0)[tokens - 1] = 1;
  static_cast<float*>(y.data)[group.index] = sum + 1000 * float(tokens);""",
        ("k",),
        ("y",),
        ("tokens",),
        scratch="tokens",
        strided=("k",),
    ),
}
TARGET = CpuTarget()


def normal(*shape: int, seed: int) -> mx.array:
    array = mx.random.normal(shape, key=mx.random.key(seed))
    mx.eval(array)
    return array


def entry(kernel: Any) -> int:
    numbers = [1] * len(kernel.source.numbers)
    return int(kernel._describe([Output((1,), mx.float32)], 1, numbers, False).entry)


def launch(name: str, groups: int, places: Any, numbers: tuple[int, ...] = ()) -> TapeLaunch:
    kernel: Any = TARGET.compile(SOURCES[name])
    return TapeLaunch(kernel, entry(kernel), groups, numbers, (True,) * len(numbers), places)


def make_tape(w: mx.array, cache: mx.array) -> CpuTape:
    t = Own(64, (1, SIZE), 4)
    launches = [
        launch("scale", SIZE, (External(0), External(1), t)),
        launch("put", HEADS, (t, External(2, Seen.TOKEN)), (0,)),
        launch("total", HEADS, (External(2, Seen.TOKENS), Result()), (1,)),
    ]
    output = OutputSpec(2, (1, HEADS), 2, 32)
    return CpuTape(
        launches, [mx.zeros((1, SIZE)), w, cache], inputs=1, caches=1, output=output, own_bytes=64 + 4 * SIZE
    )


def expected(x: mx.array, w: mx.array, cache: np.ndarray[Any, Any], tokens: int) -> np.ndarray[Any, Any]:
    """Put the token in `cache`; return the result."""
    cache[0, :, tokens] = (np.array(x) * np.array(w)).reshape(HEADS, DIMENSION) + tokens
    return cache[0, :, : tokens + 1].sum((1, 2))[None] + 1000 * (tokens + 1)


def test_a_tape_runs_again_and_again() -> None:
    w, cache = normal(SIZE, seed=1), normal(1, HEADS, ROOM, DIMENSION, seed=2)
    tape, memory, known = make_tape(w, cache), addresses([cache]), np.array(cache)
    results = []
    for tokens in range(ROOM):
        x = normal(1, SIZE, seed=10 + tokens)
        results.append((tape.run([x], [cache], memory, tokens), expected(x, w, known, tokens)))
    for got, wanted in results:  # each in memory of its own
        assert got.shape == (1, HEADS)
        assert np.allclose(np.array(got), wanted, atol=1e-4)
    assert np.array_equal(np.array(cache)[0, :, 5], known[0, :, 5])
    assert np.allclose(np.array(cache), known, atol=1e-6)


def test_a_cache_in_other_strides() -> None:
    w = normal(SIZE, seed=1)
    cache = normal(1, ROOM, HEADS, DIMENSION, seed=2).swapaxes(1, 2)
    mx.eval(cache)
    tape, known, x = make_tape(w, cache), np.array(cache), normal(1, SIZE, seed=3)
    got = tape.run([x], [cache], addresses([cache]), 2)
    assert got is not None
    assert np.allclose(np.array(got), expected(x, w, known, 2), atol=1e-4)
    assert np.allclose(np.array(cache), known, atol=1e-6)


def test_a_weight_written_in_place_is_read_where_it_is_now() -> None:
    w, cache = normal(SIZE, seed=1), mx.zeros((1, HEADS, ROOM, DIMENSION))
    tape, x = make_tape(w, cache), normal(1, SIZE, seed=3)
    w[2:5] = 7.0
    got = tape.run([x], [cache], addresses([cache]), 0)
    assert np.allclose(np.array(got), expected(x, w, np.zeros(cache.shape), 0), atol=1e-4)


@pytest.mark.parametrize("tokens", [ROOM, ROOM + 5])
def test_a_cache_without_room(tokens: int) -> None:
    cache = mx.zeros((1, HEADS, ROOM, DIMENSION))
    tape = make_tape(normal(SIZE, seed=1), cache)
    assert tape.run([mx.ones((1, SIZE))], [cache], addresses([cache]), tokens) is None
    assert not tape.changed


@pytest.mark.parametrize(
    "other",
    [
        mx.zeros((1, HEADS, ROOM, DIMENSION)),
        mx.zeros((1, HEADS + 1, ROOM, DIMENSION)),
        mx.zeros((1, HEADS, ROOM, 2 * DIMENSION)),
        mx.zeros((1, HEADS, ROOM, DIMENSION), mx.float16),
        mx.zeros((1, HEADS, DIMENSION, ROOM)).swapaxes(2, 3),
        mx.zeros((HEADS, ROOM, DIMENSION)),
    ],
)
def test_a_cache_that_is_not_owned_or_of_another_layout(other: mx.array) -> None:
    cache = mx.zeros((1, HEADS, ROOM, DIMENSION))
    tape = make_tape(normal(SIZE, seed=1), cache)
    owned = addresses([cache]) if other.shape == cache.shape and other.dtype == cache.dtype else addresses([other])
    assert tape.run([mx.ones((1, SIZE))], [other], owned, 1) is None
    assert not tape.changed
    assert not np.array(other).any()


@pytest.mark.parametrize("x", [mx.ones((1, SIZE + 1)), mx.ones((SIZE,)), mx.ones((1, SIZE), mx.float16)])
def test_an_input_of_another_layout(x: mx.array) -> None:
    cache = mx.zeros((1, HEADS, ROOM, DIMENSION))
    tape = make_tape(normal(SIZE, seed=1), cache)
    assert tape.run([x], [cache], addresses([cache]), 1) is None
    assert tape.changed
    assert tape.run([mx.ones((1, SIZE))], [cache], addresses([cache]), 1) is not None
    assert not tape.changed


def test_what_has_no_memory_is_an_error() -> None:
    cache = mx.zeros((1, HEADS, ROOM, DIMENSION))
    tape = make_tape(normal(SIZE, seed=1), cache)
    with pytest.raises(TypeError):
        tape.run(["x"], [cache], addresses([cache]), 1)  # type: ignore[list-item]
    with pytest.raises(TypeError):
        addresses([None])  # type: ignore[list-item]


def test_arrays_that_share_memory_have_one_address() -> None:
    array = normal(3, 4, seed=1)
    a, b, c = addresses([array, array.reshape(4, 3), array + 1])
    assert a == b != c
