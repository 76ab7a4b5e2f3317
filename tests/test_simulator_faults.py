"""Kernels that fault, loop forever or ask for too much: a clear error each, and the next launch is right."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from simulated_launches import BODY_LINE, TG, Ran, body, run

from metile.errors import MetileError
from metile.simulator.runtime import SimulatorFault, time_limit_seconds

N = 64
X = np.arange(N, dtype=np.float32)


def _run(statements: str, **arguments: Any) -> Ran:
    return run(body(statements), [np.zeros(N), X, np.uint32(1)], N, N, outputs=(0,), **arguments)


@pytest.fixture(autouse=True)
def _next_launch_is_right() -> Iterator[None]:
    yield
    for check in (False, True):
        ran = run(body(f"threadgroup float s[64];\ns[tid] = x[i];\n{TG}\ny[i] = s[63 - tid];"),
                  [np.zeros(N, np.float32), X, np.uint32(1)], N, N, outputs=(0,), check=check)  # fmt: skip
        np.testing.assert_array_equal(ran.arrays[0], X[::-1])
        assert ran.findings == ()


def _message(statements: str, **arguments: Any) -> str:
    with pytest.raises(SimulatorFault) as caught:
        _run(statements, **arguments)
    return str(caught.value)


def test_null_pointer() -> None:
    message = _message("device float* p = (device float*)(ulong)(n - 1);\nif (i == 7) p[1] = 2;\ny[i] = 0;")
    assert message == (
        "[k] expected accesses within its buffers but got one through a null pointer (address 4): "
        "thread 7 of threadgroup (0, 0, 0)"
    )


def test_read_past_a_buffer_names_it() -> None:
    message = _message("y[i] = x[i + n];")
    assert "but got one at byte 256 of b1 (256 bytes): thread 63" in message


def test_far_pointer() -> None:
    assert "far from every buffer" in _message("y[i] = x[(long)i - 400000000000l * n];")


def test_address_that_is_none() -> None:
    assert "at no valid address" in _message("y[i] = *(const device float*)((ulong)x | ((ulong)n << 62));")


def test_integer_division_by_zero() -> None:
    message = _message("y[i] = 7 / ((int)n - 1);")
    assert "[k] expected integer divisors other than zero but got a division by zero" in message


@pytest.mark.parametrize("check", [False, True])
def test_endless_loop_is_stopped(check: bool) -> None:
    message = _message("uint j = i;\nwhile (n == 1)\n  j = j * 5 + 1;\ny[i] = j;", time_limit=0.3, check=check)
    assert message.startswith("[k] expected a launch of at most 0.3 s but got one that goes on: thread 0 of")
    if check:
        assert f"kernel.metal:{BODY_LINE + 1}" in message or f"kernel.metal:{BODY_LINE + 2}" in message


def test_endless_loop_over_barriers_is_stopped() -> None:
    assert "at most 0.3 s" in _message(f"y[i] = 0;\nwhile (n == 1) {{ {TG} }}", time_limit=0.3)


def test_endless_number_of_threadgroups_is_stopped() -> None:
    with pytest.raises(SimulatorFault, match=r"at most 0\.2 s"):
        run(body("if (n == 2) y[i] = x[i];"), [X, X, np.uint32(1)], (1 << 20, 1 << 10), 32, time_limit=0.2)


def test_deep_recursion_overflows_the_stack() -> None:
    deep = "float deep(uint n, float x) {\n  volatile float a[64];\n  a[n & 63] = x;\n"
    deep += "  return n == 0 ? x : deep(n - 1, x + 1) + a[n & 63];\n}\n"
    text = deep + body("y[i] = deep(n == 1 ? 1000000 : 1, x[i]);")
    with pytest.raises(SimulatorFault, match="expected at most 64 KiB of stack a thread but got a stack overflow"):
        run(text, [X, X, np.uint32(1)], N, N)


@pytest.mark.parametrize("thread", [0, 1023])
def test_a_thread_has_64_kib_of_stack(thread: int) -> None:
    deep = "float deep(uint n, float x) {\n  volatile float a[64];\n  a[n & 63] = x;\n"
    deep += "  return n == 0 ? x : deep(n - 1, x + 1) + a[n & 63] * 0;\n}\n"
    text = deep + body(f"{TG}\ny[i] = tid == {thread} ? deep(150, 0.0f) : 0.0f;\n{TG}")
    ran = run(text, [np.zeros(1024, np.float32), X, np.uint32(1)], 1024, 1024, outputs=(0,))
    assert ran.arrays[0][thread] == 150


def test_different_barriers_are_a_fault_of_the_fast_mode() -> None:
    message = _message(f"for (uint j = 0; j < sg + n; j++) {{ {TG} }}\n{TG}\ny[i] = x[i];")
    assert message.startswith("[k] expected all threads at one barrier but got threads that wait at another")


def test_matrix_operation_with_inactive_lanes() -> None:
    matrix = "simdgroup_float8x8 a(1.0f), b(1.0f), c(0.0f);\nif (lane < 16) simdgroup_multiply_accumulate(c, a, b, c);"
    message = _message(matrix + "\ny[i] = c.thread_elements()[0];", options={"once_per_simdgroup": False})
    assert "simdgroup_matrix operations by all 32 lanes but got one with inactive lanes" in message


def test_too_many_threads() -> None:
    with pytest.raises(SimulatorFault) as caught:
        run(body("y[i] = 0;"), [X, X, np.uint32(1)], 2048, 2048)
    assert str(caught.value) == "[k] expected at most 1024 threads per threadgroup but got 2048"


@pytest.mark.parametrize("check", [False, True])
def test_too_much_threadgroup_memory(check: bool) -> None:
    message = _message("threadgroup float s[8193];\ns[tid] = x[i];\ny[i] = s[tid];", check=check)
    assert message.startswith("[k] expected at most 32768 bytes of threadgroup memory but got 32772")


def test_arguments_count_as_threadgroup_memory() -> None:
    statements = "threadgroup float s[64];\ns[tid] = x[i];\ny[i] = s[tid];"
    assert "at most 32768 bytes" in _message(statements, threadgroup_arguments={0: 32768})
    assert _message(statements, threadgroup_arguments={0: 40000}) == (
        "[k] expected at most 32768 bytes of threadgroup memory but got 40000"
    )


def test_limits_of_a_device() -> None:
    device: Any = SimpleNamespace(max_threads=32, threadgroup_bytes=128)
    assert "at most 32 threads per threadgroup but got 64" in _message("y[i] = 0;", device=device)
    device.max_threads = 64
    statements = "threadgroup float s[64];\ns[tid] = x[i];\ny[i] = s[tid];"
    assert "at most 128 bytes of threadgroup memory but got 256" in _message(statements, device=device)


def test_interrupt_stops_a_launch() -> None:
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        _run("uint j = i;\nwhile (n == 1) j = j * 5 + 1;\ny[i] = j;", time_limit=30)
    timer.join()


def test_faults_of_python_still_reach_its_handler() -> None:
    code = f"""
        import faulthandler, sys, ctypes
        sys.path[:0] = {[os.path.dirname(__file__)]!r}
        faulthandler.enable()
        import numpy as np
        from simulated_launches import body, run
        x = np.zeros(64, np.float32)
        run(body("y[i] = x[i];"), [x, x, np.uint32(1)], 64, 64)
        ctypes.string_at(0)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr


def test_handlers_are_back_after_a_launch() -> None:
    was = faulthandler.is_enabled()
    before = signal.getsignal(signal.SIGSEGV)
    _message("y[i] = x[i + n];")
    assert signal.getsignal(signal.SIGSEGV) == before
    assert faulthandler.is_enabled() == was


def test_forked_child_can_launch() -> None:
    _run("y[i] = x[i];")
    child = os.fork()
    if child == 0:
        try:
            ran = run(body("y[i] = x[i] + 1;"), [np.zeros(N, np.float32), X, np.uint32(1)], N, 32, outputs=(0,))
            os._exit(0 if (ran.arrays[0] == X + 1).all() else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_time_limit_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METILE_SIMULATOR_TIME_LIMIT", "2.5")
    assert time_limit_seconds() == 2.5
    for wrong in ("soon", "0", "-1", "nan"):
        monkeypatch.setenv("METILE_SIMULATOR_TIME_LIMIT", wrong)
        with pytest.raises(MetileError, match="expected a positive number of seconds"):
            time_limit_seconds()
    monkeypatch.delenv("METILE_SIMULATOR_TIME_LIMIT")
    assert time_limit_seconds() == 60
