"""Every transformation that traces an array is noticed, and no ordinary array is taken for a traced one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import mlx.core as mx
import mlx.nn as nn
import pytest

from metile.tracing import compiling, is_traced


def watched(seen: list[bool]) -> Callable[[mx.array], mx.array]:
    """Return a function that notes whether its input, and what it computes from it, is traced."""

    def function(x: mx.array) -> mx.array:
        y = x * 2
        seen.extend((is_traced(x), is_traced(y)))
        return y.sum()

    return function


TRANSFORMS: dict[str, Callable[[Callable[[mx.array], mx.array], mx.array], object]] = {
    "compile": lambda f, x: mx.compile(f)(x),
    "compile_shapeless": lambda f, x: mx.compile(f, shapeless=True)(x),
    "compile_nested": lambda f, x: mx.compile(lambda y: mx.compile(f)(y + 1))(x),
    "grad": lambda f, x: mx.grad(f)(x),
    "grad_of_compiled": lambda f, x: mx.grad(mx.compile(f))(x),
    "second_grad": lambda f, x: mx.grad(lambda y: mx.grad(f)(y).sum())(x),
    "vmap": lambda f, x: mx.vmap(f)(x),
    "jvp": lambda f, x: mx.jvp(f, [x], [x]),
    "vjp": lambda f, x: mx.vjp(f, [x], [mx.array(1.0)]),
    "checkpoint": lambda f, x: mx.grad(lambda y: mx.checkpoint(f)(y))(x),
}


def _with_compilation(enabled: bool) -> Iterator[None]:
    """Enable or disable mx.compile, and leave it as it was."""
    was_enabled = compiling()
    (mx.enable_compile if enabled else mx.disable_compile)()
    yield
    (mx.enable_compile if was_enabled else mx.disable_compile)()


@pytest.fixture
def _compile_disabled() -> Iterator[None]:
    yield from _with_compilation(False)


@pytest.fixture(params=["compiling", "compile disabled"])
def _either_way(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from _with_compilation(request.param == "compiling")


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transformation_is_noticed(name: str) -> None:
    if name.startswith("compile") and not compiling():
        pytest.skip("nothing is traced by a compile that is disabled")
    seen: list[bool] = []
    TRANSFORMS[name](watched(seen), mx.random.normal((3, 4)))
    assert seen
    assert all(seen)


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.int32])
@pytest.mark.parametrize("shape", [(), (4,), (1, 1, 4), (0, 4), (2, 3, 4, 5)])
def test_an_ordinary_array_is_not_traced(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    x = mx.zeros(shape, dtype)
    assert not is_traced(x)
    assert not is_traced(x + 1)  # not evaluated
    assert not is_traced(x)


@pytest.mark.usefixtures("_compile_disabled")
def test_a_disabled_compile_stays_disabled() -> None:
    assert not is_traced(mx.ones((2,)))
    assert not compiling()
    mx.grad(watched([]))(mx.ones((2,)))
    assert not compiling()


def test_an_ordinary_array_inside_a_transformation_is_not_traced() -> None:
    constant, seen = mx.ones((4,)), []

    def function(x: mx.array) -> mx.array:
        seen.append(is_traced(constant))
        return (x * constant).sum()

    mx.grad(function)(mx.ones((4,)))
    mx.compile(function)(mx.ones((4,)))
    assert seen == [False, False]


def test_parameters_are_traced_within_value_and_grad() -> None:
    layer, x, seen = nn.Linear(4, 4), mx.ones((1, 4)), []

    def loss() -> mx.array:
        seen.append((is_traced(x), is_traced(layer.weight), is_traced(layer(x))))
        return layer(x).sum()

    nn.value_and_grad(layer, loss)()
    assert seen == [(False, True, True)]


def test_an_array_that_outlives_its_transformation_is_ordinary() -> None:
    kept: list[mx.array] = []

    def function(x: mx.array) -> mx.array:
        kept.append(x * 2)
        return kept[-1].sum()

    mx.grad(function)(mx.ones((4,)))
    assert not is_traced(kept[0])


def test_nothing_is_evaluated() -> None:
    """Memory tells: an array of a gigabyte is asked about but never made."""
    mx.reset_peak_memory()
    before = mx.get_active_memory()  # of whatever other tests left alive
    x = mx.zeros((1 << 14, 1 << 14))
    assert not is_traced(x)
    assert mx.get_peak_memory() - before < 1 << 28


def test_threads_do_not_disturb_each_other() -> None:
    wrong: list[str] = []
    begin = threading.Barrier(4)

    def ordinary() -> None:
        begin.wait()
        for size in range(1, 200):
            if is_traced(mx.ones((size,) + (1,) * (size % 3))):
                wrong.append("an ordinary array was taken for a traced one")

    def tracing() -> None:
        begin.wait()
        for _ in range(100):
            seen: list[bool] = []
            mx.grad(watched(seen))(mx.ones((3,)))
            if not all(seen):
                wrong.append("a traced array was taken for an ordinary one")

    threads = [threading.Thread(target=work) for work in (ordinary, ordinary, tracing, tracing)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
