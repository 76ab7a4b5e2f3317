"""One way to run a linear kernel: the plan fields of schema v8's linear families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SCHEDULES = ("linear", "grouped2", "grouped4", "grouped8", "diagonal", "morton", "hilbert")


@dataclass(frozen=True)
class LinearTile:
    """A point of the search space of a linear kernel.

    Attributes:
        program: ``rows``, the decode end, or ``matrix``.
        block_m: rows of x a threadgroup takes.
        block_n: rows of weights a threadgroup takes.
        wm: simdgroups along the rows of x.
        wn: simdgroups along the rows of weights.
        k_unroll: steps of k taken at once: registers at the decode end, fragments at a GPU's matrix end.
        outer_k: depth of a slice of k held in threadgroup memory; 0 is all of k, which a GPU reads where it lies.
        schedule: block order on the grid.
    """

    program: Literal["rows", "matrix"]
    block_m: int
    block_n: int
    wm: int
    wn: int
    k_unroll: int
    outer_k: int
    schedule: str

    def label(self) -> str:
        """Return the fields as one word."""
        return (
            f"{self.program}_bm{self.block_m}_bn{self.block_n}_wm{self.wm}_wn{self.wn}"
            f"_ku{self.k_unroll}_ok{self.outer_k}_{self.schedule}"
        )
