"""The pool of threads: how many there are, who may launch, and what a forked child gets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from small_kernels import linear, linear_source

from metile.errors import MetileError
from metile.targets.base import Kernel
from metile.targets.cpu import CpuTarget, thread_count

TASKS = Path("/proc/self/task")
linux = pytest.mark.skipif(not TASKS.is_dir(), reason="counts threads in /proc")

# Prints the threads that a first launch adds, then those of a thousand more, and checks the result.
COUNTER = """
import os, sys
sys.path.insert(0, {tests!r})
{before}
import mlx.core as mx
from small_kernels import linear, linear_source
from metile.targets.cpu import CpuTarget, thread_count
kernel = CpuTarget().compile(linear_source())
x, w = mx.ones((200, 64)), mx.ones((100, 64))
mx.eval(x, w, x @ w.T)  # MLX's own threads have started
tasks = lambda: len(os.listdir("/proc/self/task"))
idle = tasks()
y = linear(kernel, x, w)
first = tasks() - idle
for _ in range(1000):
    linear(kernel, x, w)
assert mx.array_equal(y, mx.full(y.shape, 64.0)).item()
print(thread_count(), first, tasks() - idle)
"""


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return CpuTarget().compile(linear_source())


def operands(seed: int = 0, rows: int = 70) -> tuple[mx.array, mx.array, np.ndarray]:
    """Return x and w, evaluated, and their product by numpy."""
    rng = np.random.default_rng(seed)
    x, w = (rng.standard_normal(shape, np.float32) for shape in ((rows, 96), (130, 96)))
    arrays = mx.array(x), mx.array(w)
    mx.eval(arrays)
    return *arrays, x @ w.T


def count_threads(before: str = "", **variables: str) -> list[int]:
    """Return of a fresh process: thread_count(), and the threads a first launch and all launches added."""
    program = COUNTER.format(tests=str(Path(__file__).parent), before=before)
    environment = {name: value for name, value in os.environ.items() if name != "METILE_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


@linux
def test_the_pool_is_as_large_as_the_cpus_this_process_may_use() -> None:
    cpus = len(os.sched_getaffinity(0))
    assert count_threads() == [cpus, cpus - 1, cpus - 1]  # the caller works too


@linux
def test_the_affinity_mask_is_respected() -> None:
    cpu = min(os.sched_getaffinity(0))
    assert count_threads(f"os.sched_setaffinity(0, {{{cpu}}})") == [1, 0, 0]


@linux
@pytest.mark.parametrize("threads", [1, 3])
def test_metile_threads_is_respected(threads: int) -> None:
    assert count_threads(METILE_THREADS=str(threads)) == [threads, threads - 1, threads - 1]


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_metile_threads_must_be_a_positive_integer(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("METILE_THREADS", value)
    with pytest.raises(MetileError, match=rf"expected a positive integer but got '{value}'"):
        thread_count()


@linux
def test_several_python_threads_share_one_pool(kernel: Kernel) -> None:
    cases = [operands(seed, rows) for seed, rows in enumerate((1, 31, 70, 200))]
    linear(kernel, *cases[0][:2])  # the pool has started
    idle, seen = len(os.listdir(TASKS)), []

    def work(number: int) -> bool:
        x, w, expected = cases[number]
        right = all(np.allclose(np.array(linear(kernel, x, w)), expected, atol=1e-4) for _ in range(50))
        seen.append(len(os.listdir(TASKS)))
        return right

    with ThreadPoolExecutor(len(cases)) as threads:
        assert all(threads.map(work, range(len(cases))))
    assert max(seen) <= idle + len(cases)
    deadline = time.monotonic() + 5
    while len(os.listdir(TASKS)) > idle and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread that was joined stays listed for a moment
    assert len(os.listdir(TASKS)) == idle


def test_a_sleeping_pool_wakes(kernel: Kernel) -> None:
    x, w, expected = operands()
    for _ in range(5):
        time.sleep(0.01)  # far longer than workers spin
        assert np.allclose(np.array(linear(kernel, x, w)), expected, atol=1e-4)


@linux
def test_an_idle_pool_takes_no_time(kernel: Kernel) -> None:
    x, w = mx.ones((70, 96)), mx.ones((130, 96))  # not by numpy, whose own threads spin for 0.1 s
    mx.eval(x, w)
    time.sleep(0.2)
    linear(kernel, x, w)
    time.sleep(0.01)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05


def child_status(kernel: Kernel) -> int:
    """Fork; the child launches and checks the result. Return its exit status, -1 when it hangs."""
    x, w, expected = operands()
    linear(kernel, x, w)
    child = os.fork()
    if child == 0:  # no MLX evaluation and no pytest in here
        try:
            right = [np.allclose(np.array(linear(kernel, x, w)), expected, atol=1e-4) for _ in range(20)]
            os._exit(0 if all(right) else 2)
        except BaseException:
            os._exit(3)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


@linux
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_pool_of_its_own(kernel: Kernel) -> None:
    assert child_status(kernel) == 0
    x, w, expected = operands()
    assert np.allclose(np.array(linear(kernel, x, w)), expected, atol=1e-4)  # the parent's still works


@linux
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_while_another_thread_launches(kernel: Kernel) -> None:
    x, w, _ = operands(1, 200)
    with ThreadPoolExecutor(1) as threads:
        busy = threads.submit(lambda: [linear(kernel, x, w) for _ in range(3000)] and None)
        statuses = [child_status(kernel) for _ in range(5)]
        busy.result()
    assert statuses == [0] * 5
