"""What checked mode reports of a launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from metile.errors import MetileError

Kind = Literal[
    "race",
    "uninitialised read",
    "out of bounds",
    "barrier divergence",
    "unwritten output",
    "threadgroup memory",
    "threads",
]


@dataclass(frozen=True)
class Finding:
    """One defect, reported once a place in the source.

    Attributes:
        kind: what went wrong.
        variable: the buffer or threadgroup variable, or empty where there is none.
        offset: in bytes from the variable's beginning; negative before it.
        size: of the access or of the range, in bytes.
        thread: index in its threadgroup of the first thread that did it.
        threadgroup: position of its threadgroup in the grid.
        file: of the source line, or empty where unknown.
        line: of the source, from 1, or 0 where unknown.
        detail: the rest in words: the other thread, what kind of access.
        count: how often it happened.
    """

    kind: Kind
    variable: str = ""
    offset: int = 0
    size: int = 0
    thread: int = 0
    threadgroup: tuple[int, int, int] = (0, 0, 0)
    file: str = ""
    line: int = 0
    detail: str = ""
    count: int = 1

    def __str__(self) -> str:
        """Return one line that names the place, the defect and who did it."""
        place = f"{self.file}:{self.line}: " if self.file else ""
        target = f" of {self.size} bytes at {self.variable}{self.offset:+d}" if self.variable else ""
        who = ""
        if self.kind != "unwritten output":
            who = f" by thread {self.thread} of threadgroup {self.threadgroup}"
        times = f" ({self.count} times)" if self.count > 1 else ""
        detail = f": {self.detail}" if self.detail else ""
        return f"{place}{self.kind}{target}{who}{detail}{times}"


class FindingsError(MetileError):
    """A launch in checked mode had findings; the message lists them.

    Attributes:
        findings: the defects.
        benign: overlapping writes of the same value.
    """

    def __init__(self, findings: Sequence[Finding], benign: Sequence[Finding] = (), name: str = "check") -> None:
        listed = "".join(f"\n  {finding}" for finding in findings)
        super().__init__(f"[{name}] expected no findings but got {len(findings)}:{listed}")
        self.findings = tuple(findings)
        self.benign = tuple(benign)
