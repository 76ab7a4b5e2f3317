"""The drop-in for mx.fast.metal_kernel: which kernel runs, dtypes, modes, devices."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from simulated_kernels import COPY, I, make, run, same

from metile.errors import MetileError
from metile.simulator import Finding, FindingsError, MetalKernel, SimulatorFault, custom
from metile.simulator.settings import CHECK_VARIABLE
from metile.simulator.signature import TYPE_NAMES
from metile.targets.compiler import CompileError

# Kernel identity (case 1)


def test_kernels_of_one_name_and_different_sources() -> None:
    twice, more = make(I + "y[i] = x[i] * 2;"), make(I + "y[i] = x[i] + 100;")
    x = mx.arange(64)
    first, second, third = run(twice, x), run(more, x), run(twice, x)
    mx.eval(first, second, third)
    assert same(first, x * 2)
    assert same(second, x + 100)
    assert same(third, x * 2)


def test_one_kernel_at_two_dtypes() -> None:
    kernel = make(I + "y[i] = x[i] * x[i] + T(1);")
    for _ in range(2):
        for dtype in (mx.float16, mx.float32):
            x = (mx.arange(40) / 7).astype(dtype)
            got = run(kernel, x, template=[("T", dtype)])
            assert got.dtype == dtype
            assert mx.allclose(got, x * x + 1, rtol=1e-6 if dtype == mx.float32 else 2e-3)


def test_seven_and_eight_elements_and_none() -> None:
    kernel = make(I + "y[i] = x[i] * w[i % (uint)w_shape[0]];", "x w")
    for count in (7, 8, 7, 1, 9):
        x, weight = mx.arange(count * 3, dtype=mx.float32), mx.arange(1, count + 1, dtype=mx.float32)
        assert same(run(kernel, x, weight), x * mx.tile(weight, 3))


def test_scalars_without_axes() -> None:
    kernel = make(I + "y[i] = x[i] * scale;", "x scale")
    x = mx.arange(10, dtype=mx.float32)
    for scale in (mx.array(2.5), 2.5, mx.array(3), 3, mx.array(0.5, mx.float16), True):
        assert same(run(kernel, x, scale), x * float(scale if not isinstance(scale, mx.array) else scale.item()))


def test_constness_is_part_of_the_kernel() -> None:
    """The text for a small array does not run with a large one, or the other way round."""
    kernel = make(I + "const AS T* p = x; y[i] = p[0];", header="#define AS constant\n")
    assert run(kernel, mx.ones(7), template=[("T", mx.float32)]).sum() == 7
    with pytest.raises(CompileError):
        run(kernel, mx.ones(8), template=[("T", mx.float32)])


def test_equal_template_values_of_different_types() -> None:
    kernel = make(I + "y[i] = is_same_v<decltype(V), const bool> || is_same_v<decltype(V), bool> ? -V : V;")
    x = mx.zeros(8, mx.int32)
    assert run(kernel, x, template=[("V", 1)]).tolist() == [1] * 8
    assert run(kernel, x, template=[("V", True)]).tolist() == [-1] * 8
    assert run(kernel, x, template=[("V", -3)]).tolist() == [-3] * 8


# Dtypes and values


@pytest.mark.parametrize("dtype", TYPE_NAMES, ids=str)
def test_every_dtype_in_and_out(dtype: mx.Dtype) -> None:
    x = (mx.arange(100) - 50 * (dtype not in (mx.uint8, mx.uint16, mx.uint32, mx.uint64))).astype(dtype)
    if dtype == mx.complex64:
        x = x + 1j
    assert same(run(make(COPY), x), x)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_all_sixteen_bit_patterns_pass_through(dtype: mx.Dtype) -> None:
    bits = mx.arange(1 << 16).astype(mx.uint16)
    got = run(make(COPY), mx.view(bits, dtype), threadgroup=(256, 1, 1))
    assert mx.array_equal(mx.view(got, mx.uint16), bits)


def test_unwritten_elements_are_nan_or_the_initial_value() -> None:
    kernel = make("if (thread_position_in_grid.x == 1) y[1] = 5;")
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        got = run(kernel, mx.zeros(3, dtype), check=False)
        assert mx.isnan(got).tolist() == [True, False, True]
    assert run(kernel, mx.zeros(3, mx.int32), check=False).tolist() == [-1, 5, -1]
    for dtype in (mx.bfloat16, mx.int32, mx.float32, mx.bool_):
        want = mx.array([2.75, 5, 2.75]).astype(dtype)
        assert same(run(kernel, mx.zeros(3, dtype), init_value=2.75, check=False), want)


def test_an_initial_value_counts_as_written_and_can_be_read() -> None:
    kernel = make("if (thread_position_in_grid.x == 0) y[1] += 1;")
    assert run(kernel, mx.zeros(3), init_value=4, check=True).tolist() == [4, 5, 4]


def test_atomic_outputs() -> None:
    kernel = make(
        I + "atomic_fetch_add_explicit(&y[i % 4], x[i], memory_order_relaxed);", atomic_outputs=True, name="add"
    )
    x = mx.arange(256)
    got = run(kernel, x, like=mx.zeros(4, mx.int32), grid=(256, 1, 1), init_value=0)
    assert same(got, x.reshape(64, 4).sum(axis=0))


def test_arrays_without_elements() -> None:
    kernel = make("if (x_shape[0] > 0) y[0] = x[0];")
    got = run(kernel, mx.zeros((0, 3)), like=mx.zeros((2, 0)), check=True)
    assert got.shape == (2, 0)


def test_two_outputs_of_different_kinds() -> None:
    kernel = make(I + "y[i] = x[i] * 2; z[i] = x[i] > 3;", outputs="y z")
    x = mx.arange(9)
    y, z = kernel(
        inputs=[x],
        output_shapes=[(3, 3), (9,)],
        output_dtypes=[mx.float16, mx.bool_],
        grid=(9, 1, 1),
        threadgroup=(4, 1, 1),
    )
    assert same(y, (x * 2).reshape(3, 3).astype(mx.float16))
    assert same(z, x > 3)


def test_inputs_are_left_as_they_are() -> None:
    x = mx.arange(10)
    run(make(I + "device int* p = (device int*)(size_t)x; y[i] = p[i]; p[i] = 0;"), x, check=False)
    assert x.tolist() == list(range(10))


# Modes


RACE = """
    threadgroup int shared[64];
    uint t = thread_index_in_threadgroup;
    shared[t] = x[t];
    y[t] = shared[63 - t];
"""


def launch_race(kernel: MetalKernel, **options: Any) -> mx.array:
    return run(kernel, mx.arange(64), threadgroup=(64, 1, 1), **options)


def test_findings_are_raised_with_the_line_of_the_source() -> None:
    kernel = make(RACE, name="reverse")
    with pytest.raises(FindingsError) as caught:
        launch_race(kernel, check=True)
    assert {finding.kind for finding in caught.value.findings} <= {"race", "uninitialised read"}
    assert caught.value.findings
    for finding in caught.value.findings:
        assert finding.file == "reverse.source"
    assert {finding.line for finding in caught.value.findings} <= {4, 5}  # the write, and the read
    assert "[reverse] expected no findings but got" in str(caught.value)
    assert "reverse.source:5: " in str(caught.value)


def test_findings_in_a_header_name_it() -> None:
    header = "\ninline int peek(const device int* x) {\n  return x[64];\n}\n"
    kernel = make("y[thread_position_in_grid.x] = peek(x);", header=header)
    found: list[Finding] = []
    launch_race(kernel, check=True, collect=found)
    assert [(finding.kind, finding.file, finding.line) for finding in found] == [("out of bounds", "k.header", 3)]


def test_findings_are_collected() -> None:
    kernel = make(RACE)
    found: list[Finding] = []
    launch_race(kernel, check=True, collect=found)
    assert kernel.last is not None
    assert found == list(kernel.last.findings)
    launch_race(kernel, check=True, collect=True)
    assert kernel.last.findings
    launch_race(kernel, check=False)
    assert not kernel.last.findings
    fixed = make(RACE.replace("x[t];\n", "x[t];\n    threadgroup_barrier(mem_flags::mem_threadgroup);\n"))
    assert same(launch_race(fixed, check=True), mx.arange(64)[::-1])


def test_check_is_asked_for_in_many_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHECK_VARIABLE, raising=False)
    launch_race(make(RACE))
    with pytest.raises(FindingsError):
        launch_race(make(RACE, check=True))
    launch_race(make(RACE, check=True), check=False)
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    with pytest.raises(FindingsError):
        launch_race(make(RACE))
    launch_race(make(RACE), check=False)
    monkeypatch.setenv(CHECK_VARIABLE, "0")
    launch_race(make(RACE))
    monkeypatch.setenv(CHECK_VARIABLE, "perhaps")
    with pytest.raises(MetileError, match=r"METILE_SIMULATOR_CHECK. expected 0 or 1 but got 'perhaps'"):
        launch_race(make(RACE))


def test_unwritten_outputs_are_found() -> None:
    found: list[Finding] = []
    run(make("if (thread_position_in_grid.x != 3) y[thread_position_in_grid.x] = 1;"), mx.zeros(9), check=True,
        collect=found)  # fmt: skip
    assert [(one.kind, one.variable, one.offset, one.size) for one in found] == [("unwritten output", "y", 12, 4)]


def test_counters_of_the_last_launch() -> None:
    kernel = make(I + "y[i] = x[i] + x[0];")
    assert kernel.last is None
    run(kernel, mx.zeros(64, mx.bfloat16), check=True)
    assert kernel.last is not None
    traffic = kernel.last.counters.traffic
    assert traffic is not None
    assert (traffic["x"].read, traffic["x"].unique_read, traffic["y"].written) == (256, 130, 128)
    assert kernel.last.counters.threads == 64
    assert kernel.launches == 1


def test_strict_mode_rejects_what_apple_rejects() -> None:
    source = I + "double d = x[i]; y[i] = d;"
    with pytest.raises(CompileError):
        run(make(source, strict=True), mx.ones(8))


def test_a_second_launch_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, calls = make(COPY), []
    from metile.simulator import kernel as module

    compile_program = module.compile_program
    monkeypatch.setattr(
        module, "compile_program", lambda *args, **options: (calls.append(1), compile_program(*args, **options))[1]
    )
    for count in (9, 10, 11):
        run(kernel, mx.arange(count))
    assert len(calls) == 1
    run(kernel, mx.arange(3))
    run(kernel, mx.arange(3), check=True)
    assert len(calls) == 3


def test_a_kernel_that_never_ends_or_faults_leaves_python_alive() -> None:
    with pytest.raises(SimulatorFault, match=r"at most 0\.2 s"):
        run(make("while (x[0] < 1) { } y[0] = 1;"), mx.zeros(9), time_limit=0.2, check=False)
    with pytest.raises(SimulatorFault, match=r"expected accesses within its buffers"):
        run(make("y[-(1l << 40)] = x[0];"), mx.zeros(9), check=False)
    assert same(run(make(COPY), mx.arange(5)), mx.arange(5))


# Devices (case 4)


@pytest.mark.parametrize("cap", [896, 832])
def test_a_pipeline_cap(cap: int) -> None:
    kernel, device = make(COPY), custom(pipeline_threads=cap)
    run(kernel, mx.arange(64), threadgroup=(cap, 1, 1), device=device)
    message = f"Thread group size \\(1024\\) is greater than  the maximum allowed threads per threadgroup \\({cap}\\)."
    with pytest.raises(ValueError, match=message):
        run(kernel, mx.arange(64), threadgroup=(1024, 1, 1), device=device)
    with pytest.raises(ValueError, match=message):
        run(make(COPY, device=device), mx.arange(64), threadgroup=(1024, 1, 1))
    run(kernel, mx.arange(64), threadgroup=(1024, 1, 1), device="m3-max")


@pytest.mark.parametrize("check", [False, True], ids=["fast", "checked"])
def test_too_much_threadgroup_memory(check: bool) -> None:
    """40,192 bytes are rejected, with the figure and the limit."""
    source = "threadgroup char tile[BYTES]; tile[0] = 1; y[thread_position_in_grid.x] = tile[0];"
    for size, fine in ((32768, True), (40192, False)):
        options: dict[str, Any] = {"template": [("BYTES", size)], "grid": (1, 1, 1), "check": check}
        if fine:
            run(make(source), mx.zeros(1), **options)
            continue
        with pytest.raises(SimulatorFault, match=r"at most 32768 bytes of threadgroup memory but got 40192"):
            run(make(source), mx.zeros(1), **options)
    big = custom(threadgroup_bytes=64 << 10)
    run(make(source), mx.zeros(1), template=[("BYTES", 40192)], grid=(1, 1, 1), check=check, device=big)


def test_numpy_and_mlx_agree_on_what_an_input_is() -> None:
    values = np.arange(12, dtype=np.float32)
    assert same(run(make(COPY), values, like=mx.array(values)), mx.array(values))
