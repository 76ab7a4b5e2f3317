"""Launches of compiled kernels: threadgroups over all cores, a time limit, and faults that leave Python alive."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from metile.errors import MetileError, mismatch
from metile.simulator import checks
from metile.simulator.counters import MULTIPLY_ACCUMULATES, Counters
from metile.simulator.faults import Launching, SimulatorFault, describe_fault, describe_stop
from metile.simulator.findings import Finding
from metile.simulator.guarded import copy_back, guarded
from metile.simulator.library import Outcome, Request, library, loaded
from metile.targets.cpu import thread_count

if TYPE_CHECKING:
    from metile.simulator.devices import Device
    from metile.simulator.program import Program

__all__ = ["Buffer", "Launch", "SimulatorFault", "launch", "library", "time_limit_seconds"]

TIME_LIMIT_VARIABLE = "METILE_SIMULATOR_TIME_LIMIT"
_TIME_LIMIT_SECONDS = 60.0
_MAX_THREADS = 1024
_THREADGROUP_BYTES = 32 << 10
_ARENA_BYTES = 1 << 20
_SLICE_MILLISECONDS = 50  # how long Python's signal handlers may have to wait
_STOP_SECONDS = 5.0

_one_launch = threading.Lock()
if hasattr(os, "register_at_fork"):

    def _unlock() -> None:
        global _one_launch
        _one_launch = threading.Lock()

    os.register_at_fork(after_in_child=_unlock)


@dataclass
class Buffer:
    """One buffer argument of a launch.

    Attributes:
        name: in messages.
        data: bytes, contiguous; overwritten when the buffer is an output.
        output: the kernel must write all of it, and it is copied back.
        initialised: `data` holds what the kernel may read; otherwise it starts poisoned.
        constant: in the constant address space.
        offset: bytes from the beginning of `data` to where the kernel's pointer points.
    """

    name: str
    data: npt.NDArray[np.uint8]
    output: bool = False
    initialised: bool = True
    constant: bool = False
    offset: int = 0


@dataclass(frozen=True)
class Launch:
    """What a launch came to.

    Attributes:
        counters: what it did.
        findings: defects, of a program compiled for checked mode.
        benign: overlapping writes of the same value.
    """

    counters: Counters
    findings: tuple[Finding, ...] = ()
    benign: tuple[Finding, ...] = ()


def time_limit_seconds() -> float:
    """Return the time limit of a launch: ``METILE_SIMULATOR_TIME_LIMIT``, or 60 seconds."""
    asked = os.environ.get(TIME_LIMIT_VARIABLE)
    if not asked:
        return _TIME_LIMIT_SECONDS
    try:
        seconds = float(asked)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise mismatch(TIME_LIMIT_VARIABLE, "a positive number of seconds", repr(asked))
    return seconds


def _three(name: str, what: str, sizes: Sequence[int]) -> tuple[int, int, int]:
    if not 1 <= len(sizes) <= 3 or any(not 0 <= size < 1 << 32 for size in sizes):
        raise mismatch(name, f"a {what} of one to three sizes", tuple(sizes))
    x, y, z = (*(int(size) for size in sizes), 1, 1)[:3]
    return x, y, z


def _check_limits(
    entry: str, threadgroup: Sequence[int], arguments: Mapping[int, int], device: Device | None, most: int | None
) -> int:
    """Return the threadgroup memory that the device allows.

    Raises:
        SimulatorFault: too many threads, or too much memory in arguments alone.
    """
    threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
    allowed = min(_MAX_THREADS, device.max_threads if device else _MAX_THREADS, most or _MAX_THREADS)
    if threads > allowed:
        raise SimulatorFault(f"[{entry}] expected at most {allowed} threads per threadgroup but got {threads}")
    if threads < 1:
        raise mismatch(entry, "a threadgroup of at least one thread", tuple(threadgroup))
    limit = min(_ARENA_BYTES, device.threadgroup_bytes if device else _THREADGROUP_BYTES)
    asked = sum(-(-size // 16) * 16 for size in arguments.values())
    if any(not 0 <= index < 8 for index in arguments):
        raise mismatch(entry, "threadgroup arguments of index 0 to 7", sorted(arguments))
    if asked > limit:
        raise SimulatorFault(f"[{entry}] expected at most {limit} bytes of threadgroup memory but got {asked}")
    return limit


@functools.lru_cache(maxsize=4096)
def image_range(path: str) -> tuple[int, int]:
    """Return where a loaded shared library lies in memory: the first address and the one after the last."""
    begin, end, real = 1 << 64, 0, os.path.realpath(path)
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith(real):
                first, _, last = line.split(maxsplit=1)[0].partition("-")
                begin, end = min(begin, int(first, 16)), max(end, int(last, 16))
    return (begin, end) if end else (0, 0)


def _wait(native: Any, limit: float) -> bool:
    """Wait for a launch to end; return whether it had to be stopped at the time limit."""
    deadline = time.monotonic() + limit
    try:
        while not native.metile_wait(_SLICE_MILLISECONDS):
            if time.monotonic() > deadline:
                return True
        return False
    except BaseException:
        _stop(native)
        raise


def _stop(native: Any) -> None:
    """End a launch, whatever its kernel does; a second interrupt does not leave it half ended."""
    deadline = time.monotonic() + _STOP_SECONDS
    interrupted: BaseException | None = None
    while time.monotonic() < deadline:
        try:
            native.metile_stop()
            if native.metile_wait(2):
                break
        except KeyboardInterrupt as error:
            interrupted = error
    else:
        raise MetileError("[simulator] expected a launch that can be stopped but got one that goes on")
    if interrupted:
        raise interrupted


def _request(at: Launching, limit: int, arguments: Mapping[int, int], workers: int) -> Request:
    request = Request()
    request.entry = at.program.entries[at.entry].address
    request.image_begin, request.image_end = at.image
    for item in at.placed:
        request.buffers[item.index] = item.address + item.buffer.offset
    for index, size in arguments.items():
        request.argument_bytes[index] = size
    request.threadgroup_limit = limit
    request.grid[:], request.threadgroup[:] = at.grid, at.threadgroup
    request.workers = workers
    return request


def _counters(outcome: Outcome) -> Counters:
    return Counters(
        threads=outcome.threads,
        barriers=outcome.barriers,
        collectives=outcome.collectives,
        multiply_accumulates=MULTIPLY_ACCUMULATES * outcome.matrix_operations,
        threadgroup_bytes=outcome.threadgroup_bytes,
        switches=outcome.switches,
    )


def _run(native: Any, at: Launching, request: Request, limit: float) -> Outcome:
    """Run a prepared launch.

    Raises:
        SimulatorFault: it faulted or ran out of time.
    """
    outcome = Outcome()
    if not native.metile_start(ctypes.byref(request)):
        raise MetileError(f"[{at.entry}] expected a worker thread but the system gave none")
    late = _wait(native, limit)
    if late:
        _stop(native)
    native.metile_outcome(ctypes.byref(outcome))
    if late:
        raise describe_stop(at, outcome.fault, limit)
    if outcome.faulted:
        raise describe_fault(at, outcome.fault)
    return outcome


def _checked_buffers(entry: str, buffers: Mapping[int, Buffer]) -> None:
    for index, buffer in buffers.items():
        if not 0 <= index < 32:
            raise mismatch(entry, "buffers of index 0 to 31", index)
        if buffer.data.dtype != np.uint8 or not buffer.data.flags.c_contiguous:
            raise mismatch(entry, f"{buffer.name} as contiguous bytes", buffer.data.dtype)


def launch(
    program: Program,
    entry: str,
    buffers: Mapping[int, Buffer],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    *,
    device: Device | None = None,
    threadgroup_arguments: Mapping[int, int] | None = None,
    threads: int | None = None,
    time_limit: float | None = None,
) -> Launch:
    """Run a kernel on copies of its buffers, and copy the outputs back.

    Args:
        program: a compiled program; one compiled for checked mode runs on one core, in a fixed order.
        entry: name of the kernel.
        buffers: by index.
        grid: threads in each direction; the last threadgroups may be partial.
        threadgroup: threads of a threadgroup in each direction.
        device: whose limits hold; None for those that every Apple GPU has.
        threadgroup_arguments: bytes of the threadgroup memory arguments, by index.
        threads: cores to use; None for all.
        time_limit: in seconds; None for `time_limit_seconds()`.

    Raises:
        SimulatorFault: the kernel faulted, ran out of time, waits for itself, or asks for more than the device has.
    """
    arguments = threadgroup_arguments or {}
    limit = time_limit_seconds() if time_limit is None else time_limit
    sizes, group = _three(entry, "grid", grid), _three(entry, "threadgroup", threadgroup)
    if entry not in program.entries:
        raise mismatch(program.path.name, f"one of the kernels {sorted(program.entries)}", entry)
    most = getattr(program.entries[entry], "max_threads", None)
    memory = _check_limits(entry, group, arguments, device, most)
    _checked_buffers(entry, buffers)
    native = loaded(program.check)
    workers = 1 if program.check else threads or thread_count()
    workers = min(workers, max(1, _groups(sizes, group)))
    with guarded(native, buffers) as placed, _one_launch:
        at = Launching(program, entry, placed, image_range(str(program.path)), sizes, group, memory)
        request = _request(at, memory, arguments, workers)
        done = _checked_run(native, at, request, limit) if program.check else _plain_run(native, at, request, limit)
        copy_back(placed)
        return done


def _plain_run(native: Any, at: Launching, request: Request, limit: float) -> Launch:
    return Launch(_counters(_run(native, at, request, limit)))


def _checked_run(native: Any, at: Launching, request: Request, limit: float) -> Launch:
    try:
        checks.begin(native, at.placed)
        outcome = _run(native, at, request, limit)
        findings, benign = checks.collect(native, at)
        counters = replace(_counters(outcome), traffic=checks.traffic(native, at.placed))
        return Launch(counters, findings, benign)
    finally:
        checks.end(native)


def _groups(grid: Sequence[int], threadgroup: Sequence[int]) -> int:
    counts = [-(-all_ // one) if one else 0 for all_, one in zip(grid, threadgroup, strict=True)]
    return counts[0] * counts[1] * counts[2]
