"""What a kernel call refuses: the same as the installed MLX, with the same type and, where MLX has words, its words."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from simulated_kernels import COPY, I, make, run

from metile.errors import MetileError
from metile.simulator import metal_kernel
from metile.tracing import compiling

CALL: dict[str, Any] = {
    "inputs": [mx.ones(4)],
    "output_shapes": [(4,)],
    "output_dtypes": [mx.float32],
    "grid": (4, 1, 1),
    "threadgroup": (4, 1, 1),
}
DEFINITION: dict[str, Any] = {"name": "k", "input_names": ["x"], "output_names": ["y"], "source": COPY}

# MLX refuses these before it looks for Metal, so that its answer can be had on any machine.
BAD_CALLS: list[dict[str, Any]] = [
    {"inputs": []},
    {"inputs": [mx.ones(4), mx.ones(4)]},
    {"output_shapes": []},
    {"output_shapes": [(4,), (4,)]},
    {"output_dtypes": []},
    {"template": [("T", "float")]},
    {"template": [("T", 1.5)]},
    {"template": [("T", None)]},
]
BAD_TYPES: list[dict[str, Any]] = [
    {"inputs": [None]},
    {"inputs": None},
    {"output_shapes": 4},
    {"output_shapes": [4]},
    {"output_dtypes": ["float32"]},
    {"output_dtypes": [np.float32]},
    {"grid": (4, 1)},
    {"grid": 4},
    {"grid": (4, 1, 1.5)},
    {"grid": (1 << 31, 1, 1)},
    {"threadgroup": (4, 1)},
    {"threadgroup": ("4", 1, 1)},
    {"template": [("T",)]},
    {"template": [(1, 1)]},
    {"template": 3},
    {"unknown": 1},
]


def answers(change: dict[str, Any]) -> list[Exception]:
    """Return what MLX and the simulator raise for a call."""
    found: list[Exception] = []
    for make_kernel in (mx.fast.metal_kernel, metal_kernel):
        with pytest.raises((ValueError, TypeError)) as caught:
            make_kernel(**DEFINITION)(**{**CALL, **change})
        found.append(caught.value)
    return found


@pytest.mark.parametrize("change", BAD_CALLS, ids=str)
def test_bad_calls_are_refused_in_the_words_of_mlx(change: dict[str, Any]) -> None:
    theirs, ours = answers(change)
    assert str(ours) == str(theirs)
    assert isinstance(ours, ValueError)
    assert isinstance(theirs, ValueError)


@pytest.mark.parametrize("change", BAD_TYPES, ids=str)
def test_bad_types_are_type_errors_as_in_mlx(change: dict[str, Any]) -> None:
    theirs, ours = answers(change)
    assert isinstance(theirs, TypeError)
    assert isinstance(ours, TypeError)


@pytest.mark.parametrize("missing", CALL)
def test_every_argument_is_needed(missing: str) -> None:
    call = {name: value for name, value in CALL.items() if name != missing}
    for make_kernel in (mx.fast.metal_kernel, metal_kernel):
        with pytest.raises(TypeError):
            make_kernel(**DEFINITION)(**call)
    with pytest.raises(TypeError):
        metal_kernel(**DEFINITION)(*CALL.values())  # type: ignore[misc]


@pytest.mark.parametrize(
    "change",
    [
        {"output_names": []},
        {"compile_options": 3},
        {"compile_options": {"speed": 1}},
        {"compile_options": {"math_mode": "wild"}},
    ],
    ids=str,
)
def test_bad_definitions_are_refused_in_the_words_of_mlx(change: dict[str, Any]) -> None:
    said = []
    for make_kernel in (mx.fast.metal_kernel, metal_kernel):
        with pytest.raises(ValueError, match="metal_kernel") as caught:
            make_kernel(**{**DEFINITION, **change})
        said.append(str(caught.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("change", [{"input_names": None}, {"output_names": [1]}, {"output_names": "y"}], ids=str)
def test_names_are_lists_of_strings(change: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"\[metal_kernel\] expected"):
        metal_kernel(**{**DEFINITION, **change})


@pytest.mark.parametrize("mode", ["safe", "relaxed", "fast"])
def test_math_modes_are_taken(mode: str) -> None:
    assert run(make(COPY, compile_options={"math_mode": mode}), mx.ones(3)).tolist() == [1, 1, 1]


def test_sizes_that_cannot_be() -> None:
    for change, said in (
        ({"grid": (-1, 1, 1)}, "`grid` to be positive but got"),
        ({"threadgroup": (0, 1, 1)}, "`threadgroup` to be positive but got"),
        ({"output_shapes": [(-4,)]}, "shapes without negative axes"),
        ({"output_dtypes": [mx.float64]}, "a dtype that Metal has"),
        ({"device": "m0"}, "one of m1"),
    ):
        with pytest.raises(MetileError, match=said):
            metal_kernel(**DEFINITION)(**{**CALL, **change})


def test_a_cpu_stream_is_refused() -> None:
    kernel = metal_kernel(**DEFINITION)
    for stream in (mx.cpu, mx.Device(mx.cpu)):
        with pytest.raises(ValueError, match=r"\[metal_kernel\] Only supports the GPU\."):
            kernel(**CALL, stream=stream)
    for stream in (None, mx.gpu, mx.default_stream(mx.cpu)):
        assert kernel(**CALL, stream=stream)[0].tolist() == [1, 1, 1, 1]


def test_verbose_prints_the_text_of_mlx(capsys: pytest.CaptureFixture[str]) -> None:
    run(make(COPY, name="shown", header="// here\n"), mx.ones(9), verbose=True)
    printed = capsys.readouterr().out
    assert printed.startswith("Generated source code for `shown`:\n```\n// here\n[[kernel]] void custom_kernel_shown_")
    assert printed.endswith("}\n\n```\n")
    assert "#line" not in printed


@pytest.mark.parametrize("header", ["#define ONE 1", "constant int one = 1; // one"])
def test_a_header_that_swallows_the_signature(header: str) -> None:
    with pytest.raises(MetileError, match="a header that ends with a line break"):
        make(COPY, header=header)
    assert run(make(COPY, header=header + "\n"), mx.ones(3)).tolist() == [1, 1, 1]


def test_a_compile_error_names_the_line_of_the_source() -> None:
    with pytest.raises(MetileError, match=r"bad\.source:2"):
        run(make("\n  y[0] = nothing;", name="bad"), mx.ones(9))
    with pytest.raises(MetileError, match=r"bad\.header:1"):
        run(make("y[0] = 1;", name="bad", header="inline int f() { return nothing; }\n"), mx.ones(9))


def test_an_array_that_is_being_traced() -> None:
    kernel = make(COPY)
    with pytest.raises(MetileError, match=r"mx\.compile or mx\.vmap is tracing"):
        mx.compile(lambda x: run(kernel, x))(mx.ones(3))


def test_a_kernel_has_no_derivative_of_its_own() -> None:
    kernel = make(I + "y[i] = x[i] * 3;")
    x = mx.arange(1.0, 5.0)
    for on in (True, False):
        (mx.enable_compile if on else mx.disable_compile)()
        try:
            with pytest.raises(ValueError, match="Not implemented for CustomKernel"):
                mx.grad(lambda x: (run(kernel, x) * x).sum())(x)
            with pytest.raises(ValueError, match="Not implemented for CustomKernel"):
                mx.eval(mx.jvp(lambda x: run(kernel, x), [x], [x]))
            stopped = mx.grad(lambda x: (run(kernel, mx.stop_gradient(x)) * x).sum())(x)
        finally:
            mx.enable_compile()
        assert stopped.tolist() == [3, 6, 9, 12]


def test_a_kernel_with_a_derivative_beside_it() -> None:
    kernel = make(I + "y[i] = x[i] * x[i];")
    backward = make(I + "y[i] = x[i] * 2 * d[i];", "x d")

    @mx.custom_function
    def square(x: mx.array) -> mx.array:
        return run(kernel, x)

    @square.vjp
    def square_vjp(primal: mx.array, cotangent: mx.array, _: mx.array) -> mx.array:
        return run(backward, primal, cotangent)

    x = mx.arange(1.0, 11.0)
    for off in (False, True):  # a backward pass compiles nothing, and leaves the mode as it was
        (mx.disable_compile if off else mx.enable_compile)()
        try:
            assert mx.grad(lambda x: square(x).sum())(x).tolist() == (2 * x).tolist()
            assert compiling() is not off
        finally:
            mx.enable_compile()
