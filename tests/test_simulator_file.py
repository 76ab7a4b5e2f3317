"""Plain .metal files: kernels by name, buffers by index or name, function constants, threadgroup arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metile.errors import MetileError
from metile.simulator import Empty, FindingsError, MetalFile, SimulatorFault
from metile.simulator.file import find_dtype
from metile.targets.compiler import CompileError

TEXT = """#include <metal_stdlib>
using namespace metal;
constant bool negate [[function_constant(0)]];
constant int extra [[function_constant(3)]];

kernel void scale(
    device const float* x [[buffer(0)]],
    device float* y [[buffer(1)]],
    constant float& factor [[buffer(2)]],
    uint i [[thread_position_in_grid]]) {
  y[i] = (negate ? -x[i] : x[i]) * factor + extra;
}

template <typename T, int N>
kernel void fill(device T* y [[buffer(4)]], uint i [[thread_position_in_grid]]) {
  y[i] = T(N + int(i));
}
template [[host_name("fill_half")]] [[kernel]] void fill<half, 7>(device half*, uint);

kernel void reverse(
    device int* x [[buffer(0)]],
    threadgroup int* shared [[threadgroup(0)]],
    uint i [[thread_position_in_threadgroup]], uint n [[threads_per_threadgroup]]) {
  shared[i] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  x[i] = shared[n - 1 - i];
}

kernel void over(device const int* x, device int* y, uint i [[thread_position_in_grid]]) {
  y[i] = x[i + 1];
}
"""
CONSTANTS: dict[int | str, Any] = {0: False, "extra": 0}
GRID: dict[str, Any] = {"grid": (9, 1, 1), "threadgroup": (4, 1, 1)}


def opened(**options: Any) -> MetalFile:
    return MetalFile(text=TEXT, **{"constants": CONSTANTS, **options})


def test_names_of_kernels() -> None:
    assert sorted(opened().kernels) == ["fill_half", "over", "reverse", "scale"]


@pytest.mark.parametrize("constants", [{0: True, 3: 5}, {"negate": True, "extra": 5}, {0: 1, "extra": 5}])
def test_buffers_and_function_constants(constants: dict[int | str, Any]) -> None:
    x = np.arange(9, dtype=np.float32)
    outputs, launch = opened(constants=constants).run("scale", buffers={0: x, 1: Empty((9,)), 2: 2.5}, **GRID)
    assert list(outputs) == [1]
    assert isinstance(outputs[1], mx.array)
    assert outputs[1].tolist() == (-x * 2.5 + 5).tolist()
    assert launch.counters.threads == 9


def test_arrays_come_back_as_they_were_given() -> None:
    file = opened()
    for make in (np.zeros, mx.zeros):
        given = make((3, 3))
        given = given.astype(np.float32 if make is np.zeros else mx.float32)
        x = np.ones(9, np.float32)
        outputs, _ = file.run("scale", buffers={"x": x, "y": given, "factor": 3.0}, **GRID)
        assert type(outputs[1]) is type(given)
        assert outputs[1].shape == (3, 3)
        assert np.array_equal(np.array(outputs[1]), np.full((3, 3), 3.0))
        assert np.array_equal(np.array(given), np.zeros((3, 3)))  # what was given is left alone


def test_a_template_by_its_arguments_or_its_host_name() -> None:
    file = opened()
    got = file.run("fill<bfloat, -2>", buffers={4: Empty((3, 3), "bfloat16")}, **GRID).outputs[4]
    assert got.dtype == mx.bfloat16
    assert got.tolist() == [[-2, -1, 0], [1, 2, 3], [4, 5, 6]]
    got = file.run("fill_half", buffers={4: Empty((9,), np.float16)}, **GRID).outputs[4]
    assert (got.dtype, got.tolist()) == (mx.float16, list(range(7, 16)))


def test_threadgroup_arguments_and_buffers_changed_in_place() -> None:
    x = mx.arange(8)
    arguments: dict[str, Any] = {"grid": (8, 1, 1), "threadgroup": (8, 1, 1), "threadgroup_memory": {0: 32}}
    outputs, launch = opened().run("reverse", buffers={0: x}, **arguments)
    assert outputs[0].tolist() == list(range(7, -1, -1))
    assert launch.counters.threadgroup_bytes == 32
    with pytest.raises(SimulatorFault, match="at most 32768 bytes of threadgroup memory but got 40192"):
        opened().run("reverse", buffers={0: x}, **{**arguments, "threadgroup_memory": {"shared": 40192}})


def test_outputs_that_are_asked_for() -> None:
    x, y = mx.arange(10), mx.arange(1, 10)
    run = opened().run
    assert run("over", buffers={0: x, 1: y}, **GRID).outputs == {}  # it holds what it held
    assert list(run("over", buffers={0: x, 1: y}, outputs=["y"], **GRID).outputs) == [1]
    assert list(run("over", buffers={0: x, 1: y + 1}, outputs=[0], **GRID).outputs) == [0]


def test_findings_name_the_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "kernels.metal"
    path.write_text(TEXT)
    file = MetalFile(path, constants=CONSTANTS, check=True)
    buffers = {0: mx.arange(9), 1: Empty((9,), "int32")}
    with pytest.raises(FindingsError, match=r"kernels\.metal:30: out of bounds"):
        file.run("over", buffers=buffers, **GRID)
    _, launch = file.run("over", buffers=buffers, collect=True, **GRID)
    assert [(finding.kind, finding.variable, finding.offset) for finding in launch.findings] == [
        ("out of bounds", "x", 36)
    ]
    _, launch = file.run("over", buffers={0: mx.arange(11), 1: Empty((10,), "int32")}, collect=True, **GRID)
    assert [(one.kind, one.variable, one.offset) for one in launch.findings] == [("unwritten output", "y", 36)]


def test_files_beside_it_are_included(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "one.h").write_text("constant int one = 1;\n")
    (tmp_path / "more" / "two.h").write_text("constant int two = 2;\n")
    path = tmp_path / "k.metal"
    path.write_text('#include "one.h"\n#include "two.h"\nkernel void k(device int* y) { *y = one + two + THREE; }\n')
    file = MetalFile(path, include=[tmp_path / "more"], defines=["THREE=3"])
    assert file.run(buffers={0: Empty((1,), "int32")}, grid=(1, 1, 1), threadgroup=(1, 1, 1)).outputs[0].item() == 6


@pytest.mark.parametrize(
    ("kernel", "buffers", "said"),
    [
        ("none", {}, "one of the kernels .*scale.* but got 'none'"),
        (None, {}, "one of the kernels .*scale.* but got no name"),
        ("scale", {0: mx.zeros(9)}, r"buffers for 1 \(y\), 2 \(factor\) but got none"),
        ("over", {0: mx.arange(9), 1: mx.arange(9), 5: 1}, r"one of 0 \(x\), 1 \(y\) but got 5"),
        ("over", {"x": mx.arange(9), "z": mx.arange(9)}, r"one of 0 \(x\), 1 \(y\) but got 'z'"),
        ("over", {0: mx.arange(9), 1: "y"}, "an array, a scalar or Empty for each buffer but got 'y'"),
        ("over", {0: np.zeros(9), 1: 0}, "a dtype that Metal has .* but got 'float64'"),
        ("fill<half>", {4: mx.zeros(9)}, "fill"),
    ],
)
def test_what_does_not_fit_is_named(kernel: str | None, buffers: dict[int | str, Any], said: str) -> None:
    with pytest.raises(MetileError, match=said):
        opened().run(kernel, buffers=buffers, **GRID)


def test_files_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(MetileError, match="a file that can be read"):
        MetalFile(tmp_path / "none.metal")
    with pytest.raises(MetileError, match="either a path or a text but got neither"):
        MetalFile()
    with pytest.raises(MetileError, match=r"one of the function constants negate, extra but got 'more'"):
        opened(constants={"more": 1})
    with pytest.raises(CompileError, match=r"program_source:2"):
        MetalFile(text="kernel void k(device int* y) {\n  y[0] = nothing;\n}\n")
    with pytest.raises(CompileError, match="function constant"):
        opened(constants={}).run("scale", buffers={0: mx.zeros(9), 1: mx.zeros(9), 2: 1.0}, **GRID)


def test_dtypes_by_name() -> None:
    assert find_dtype("bfloat16") is mx.bfloat16
    assert find_dtype(np.uint8) is mx.uint8
    assert find_dtype(np.dtype("bool")) is mx.bool_
    assert find_dtype(mx.int64) is mx.int64
    with pytest.raises(MetileError, match="a dtype that Metal has"):
        find_dtype("double")
