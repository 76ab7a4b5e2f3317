"""Findings of a launch in checked mode, read from the native checker and put into words."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from metile.errors import MetileError
from metile.simulator.counters import Traffic
from metile.simulator.faults import Launching
from metile.simulator.findings import Finding, Kind
from metile.simulator.guarded import Placed
from metile.simulator.lines import Place

_VARIABLES = 32  # indices from here on are of threadgroup variables
_MOST_RANGES = 64


class _Found(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("benign", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("other_thread", ctypes.c_uint32),
        ("other_threadgroup", ctypes.c_uint32),
        ("variable", ctypes.c_int32),
        ("count", ctypes.c_uint32),
        ("offset", ctypes.c_int64),
        ("size", ctypes.c_uint64),
        ("site", ctypes.c_uint64),
        ("other_site", ctypes.c_uint64),
    )


class _Traffic(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("read", "written", "unique_read", "unique_written"))


# By the native number: the kind, and the detail with {other} for the other thread.
_KINDS: tuple[tuple[Kind, str], ...] = (
    ("race", "write over a write by {other}"),
    ("race", "read of a write by {other}"),
    ("race", "write over a read by {other}"),
    ("uninitialised read", ""),
    ("out of bounds", "read"),
    ("out of bounds", "write"),
    ("barrier divergence", "{other} waits at another barrier"),
    ("barrier divergence", "{other} returned before the barrier"),
    ("barrier divergence", "{other} is not at this simdgroup barrier"),
    ("out of bounds", "index into an array"),
    ("barrier divergence", "threads wait for each other"),
    ("barrier divergence", "simdgroup_matrix operation with inactive lanes"),
)


def begin(native: Any, placed: Sequence[Placed]) -> None:
    """Prepare the checker for a launch.

    Raises:
        MetileError: there is no memory for it.
    """
    fine = native.metile_check_begin()
    for item in placed:
        poisoned = not item.buffer.initialised
        address, size = ctypes.c_uint64(item.address), ctypes.c_uint64(item.size)
        fine = fine and native.metile_check_buffer(item.index, address, size, int(poisoned))
    if not fine:
        raise MetileError("[simulator] expected memory for the checks of a launch but got none")


def _variable(native: Any, at: Launching, index: int) -> tuple[str, int]:
    """Return the name and size of what a finding is about."""
    if index < 0:
        return "", 0
    if index < _VARIABLES:
        item = next(item for item in at.placed if item.index == index)
        return item.buffer.name, item.size
    size = ctypes.c_uint64()
    native.metile_check_variable.restype = ctypes.c_char_p
    name = native.metile_check_variable(index - _VARIABLES, ctypes.byref(size))
    return (name or b"").decode(errors="replace"), size.value


def _finding(native: Any, at: Launching, found: _Found) -> Finding:
    kind, detail = _KINDS[found.kind]
    place = at.place(found.site) or Place("", 0)
    variable, size = _variable(native, at, found.variable)
    other = f"thread {found.other_thread}" + (" of another threadgroup" if found.other_threadgroup else "")
    detail = detail.format(other=other)
    if found.other_site:
        detail += f" ({at.place(found.other_site) or 'unknown line'})"
    if kind == "out of bounds" and found.size:
        detail += f" ({variable} has {size} bytes)" if variable else f" at address {found.offset:#x}"
    return Finding(
        kind=kind,
        variable=variable,
        offset=found.offset if variable else 0,
        size=found.size,
        thread=found.thread,
        threadgroup=(found.threadgroup[0], found.threadgroup[1], found.threadgroup[2]),
        file=place.file,
        line=place.line,
        detail=detail,
        count=found.count,
    )


def _merged(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Merge findings of one kind about one variable at one line: code may be compiled more than once."""
    merged: dict[tuple[object, ...], Finding] = {}
    for one in findings:
        key = (one.kind, one.variable, one.file, one.line or id(one))
        known = merged.get(key)
        merged[key] = replace(known, count=known.count + one.count) if known else one
    return tuple(merged.values())


def _unwritten(native: Any, item: Placed) -> list[Finding]:
    begin, end, ranges = ctypes.c_uint64(), ctypes.c_uint64(), list[tuple[int, int]]()
    after = ctypes.c_uint64(0)
    while len(ranges) < _MOST_RANGES and native.metile_check_unwritten(
        item.index, after, ctypes.byref(begin), ctypes.byref(end)
    ):
        ranges.append((begin.value, end.value))
        after = ctypes.c_uint64(end.value)
    return [
        Finding("unwritten output", variable=item.buffer.name, offset=low, size=high - low, detail="never written")
        for low, high in ranges
    ]


def collect(native: Any, at: Launching) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Return the findings of the launch that just ended, and the benign ones."""
    entries, abandoned = ctypes.POINTER(_Found)(), ctypes.c_uint32()
    count = native.metile_check_found(ctypes.byref(entries), ctypes.byref(abandoned))
    every = [(bool(entries[i].benign), _finding(native, at, entries[i])) for i in range(count)]
    findings = list(_merged([finding for benign, finding in every if not benign]))
    if not abandoned.value:
        for item in at.placed:
            if item.buffer.output and not item.buffer.initialised:
                findings += _unwritten(native, item)
    return tuple(findings), _merged([finding for benign, finding in every if benign])


def traffic(native: Any, placed: Sequence[Placed]) -> dict[str, Traffic]:
    """Return the bytes that the launch moved, by buffer."""
    moved = {}
    for item in placed:
        counts = _Traffic()
        native.metile_check_traffic(item.index, ctypes.byref(counts))
        moved[item.buffer.name] = Traffic(counts.read, counts.written, counts.unique_read, counts.unique_written)
    return moved


def end(native: Any) -> None:
    """Release the checker's memory."""
    native.metile_check_end()
