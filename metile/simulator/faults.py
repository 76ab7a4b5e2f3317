"""Faults of kernels in words: what happened, where in memory, in which thread, and at which line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from metile.errors import MetileError
from metile.simulator.guarded import Placed
from metile.simulator.library import Fault
from metile.simulator.lines import Place, find_place

if TYPE_CHECKING:
    from metile.simulator.program import Program

_UNKNOWN_ADDRESS = (1 << 64) - 1
_NEAR_NULL = 1 << 16
_FAR = 1 << 20  # a distance from the nearest buffer at which naming it helps nobody

(
    _,
    BAD_ACCESS,
    ARITHMETIC,
    TRAP,
    STACK_OVERFLOW,
    STOPPED,
    DIFFERENT_BARRIERS,
    INACTIVE_LANES,
    TOO_MANY_MATRICES,
    DEADLOCK,
    THREADGROUP_MEMORY,
) = range(11)


class SimulatorFault(MetileError):  # noqa: N818 (what a kernel ran into, not what the caller did wrong)
    """A kernel that could not go on: a fault, a time limit, a deadlock, or more than the device has."""


@dataclass(frozen=True)
class Launching:
    """A launch in progress, for messages about it.

    Attributes:
        program: the compiled program.
        entry: name of the kernel.
        placed: its buffers in guarded memory.
        image: addresses of the loaded program: the first, and the one after the last.
        grid: threads in each direction.
        threadgroup: threads of a threadgroup in each direction.
        memory: threadgroup memory that the device allows, in bytes.
    """

    program: Program
    entry: str
    placed: Sequence[Placed]
    image: tuple[int, int]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    memory: int

    def place(self, site: int) -> Place | None:
        """Return the source line of a return address, or None where it is unknown."""
        begin, end = self.image
        return find_place(self.program.path, site - 1 - begin) if begin < site <= end else None

    def nearest(self, address: int) -> tuple[Placed, int] | None:
        """Return the buffer nearest to an address and the offset from its beginning, or None where all are far."""
        best: tuple[int, Placed] | None = None
        for item in self.placed:
            distance = max(item.address - address, address - item.address - item.size + 1, 0)
            if distance < _FAR and (best is None or distance < best[0]):
                best = distance, item
        return (best[1], address - best[1].address) if best else None


def _address(at: Launching, fault: Fault) -> str:
    address = int(fault.address)
    if address == _UNKNOWN_ADDRESS:
        return "one at no valid address"
    if address < _NEAR_NULL:
        return f"one through a null pointer (address {address})"
    near = at.nearest(address)
    if near is None:
        return f"one at address {address:#x}, far from every buffer"
    item, offset = near
    return f"one at byte {offset} of {item.buffer.name} ({item.size} bytes)"


def _where(at: Launching, fault: Fault) -> str:
    place = at.place(fault.site)
    line = f", {place}" if place else ""
    return f"thread {fault.thread} of threadgroup {tuple(fault.threadgroup)}{line}"


_TEXTS: dict[int, Callable[[Launching, Fault], tuple[str, str]]] = {
    BAD_ACCESS: lambda at, fault: ("accesses within its buffers", _address(at, fault)),
    ARITHMETIC: lambda at, fault: ("integer divisors other than zero", "a division by zero or an overflow of one"),
    TRAP: lambda at, fault: ("array indices within bounds", "a trap"),
    STACK_OVERFLOW: lambda at, fault: ("at most 64 KiB of stack a thread", "a stack overflow"),
    DIFFERENT_BARRIERS: lambda at, fault: (
        "all threads at one barrier",
        f"threads that wait at another ({at.place(fault.other_site) or 'unknown line'})",
    ),
    INACTIVE_LANES: lambda at, fault: ("simdgroup_matrix operations by all 32 lanes", "one with inactive lanes"),
    TOO_MANY_MATRICES: lambda at, fault: ("at most 512 live matrices a simdgroup", "more"),
    DEADLOCK: lambda at, fault: ("threads that can go on", "a deadlock"),
    THREADGROUP_MEMORY: lambda at, fault: (
        f"at most {at.memory} bytes of threadgroup memory",
        f"{fault.address}",
    ),
}


def describe_fault(at: Launching, fault: Fault) -> SimulatorFault:
    """Return the error of a fault, to be raised by the caller."""
    expected, got = _TEXTS[fault.kind](at, fault)
    return SimulatorFault(f"[{at.entry}] expected {expected} but got {got}: {_where(at, fault)}")


def describe_stop(at: Launching, fault: Fault, limit: float) -> SimulatorFault:
    """Return the error of a launch that ran out of time, to be raised by the caller."""
    where = f": {_where(at, fault)}" if fault.kind == STOPPED else ""
    return SimulatorFault(f"[{at.entry}] expected a launch of at most {limit:g} s but got one that goes on{where}")
