"""Which search space a linear kernel has on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from metile.ops import linear_cpu, linear_cuda, linear_metal
from metile.ops.linear_tile import LinearTile
from metile.targets.base import Limits

if TYPE_CHECKING:
    from metile.ops.linear import LinearKey


class Space(Protocol):
    """The candidates of one kind of machine."""

    def product(self, key: LinearKey, limits: Limits) -> Sequence[LinearTile]:
        """Return the whole product of plan fields, valid or not."""

    def admitted(self, key: LinearKey, limits: Limits) -> list[LinearTile]:
        """Return the valid part of the product."""

    def fault(self, key: LinearKey, tile: LinearTile, limits: Limits) -> str | None:
        """Return why a candidate is inadmissible, or None where it may run."""

    def distance(self, key: LinearKey, tile: LinearTile, limits: Limits) -> tuple[float, ...]:
        """Order candidates; the first is the untuned default."""


def space_for(limits: Limits) -> Space:
    """Return the space of NVIDIA's GPUs, whose matrix unit takes 16 rows of weights, of other GPUs, or of CPUs."""
    if not limits.is_gpu:
        return linear_cpu
    return linear_cuda if limits.tile_rows == linear_cuda.FRAGMENT_COLUMNS else linear_metal
