"""What a launch did, counted: the ground on which candidates are compared where nothing can be timed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MULTIPLY_ACCUMULATES = 512  # of one simdgroup_matrix operation, 8 x 8 x 8


@dataclass(frozen=True)
class Traffic:
    """Bytes of one buffer that a launch moved.

    Attributes:
        read: bytes that threads asked to read, every access counted.
        written: bytes that threads asked to write, every access counted.
        unique_read: bytes read, counted once a threadgroup.
        unique_written: bytes written, counted once a threadgroup.
    """

    read: int = 0
    written: int = 0
    unique_read: int = 0
    unique_written: int = 0


@dataclass(frozen=True)
class Counters:
    """Counts of one launch.

    Attributes:
        threads: threads that ran.
        barriers: threadgroup barriers, counted once a threadgroup.
        collectives: collective operations of simdgroups, counted once a simdgroup.
        multiply_accumulates: of simdgroup_matrix operations.
        threadgroup_bytes: the most threadgroup memory that a threadgroup used, arguments included.
        switches: changes from one fiber to another.
        traffic: bytes by buffer, or None where the program was not compiled for checked mode.
    """

    threads: int = 0
    barriers: int = 0
    collectives: int = 0
    multiply_accumulates: int = 0
    threadgroup_bytes: int = 0
    switches: int = 0
    traffic: Mapping[str, Traffic] | None = field(default=None)
