"""The Metal target on a machine without Metal: kernels run on the simulator, and nothing they take can be timed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from metile.ops.base import OpKey
from metile.simulator.devices import Device, find_device
from metile.simulator.kernel import MetalKernel as SimulatedKernel
from metile.simulator.kernel import metal_kernel
from metile.targets.base import KernelSource, Output
from metile.targets.metal import MetalKernel, MetalTarget

COUNTED_GROUPS = 4  # threadgroups of a launch that are counted; the others move as much


@dataclass(frozen=True)
class Moved:
    """Bytes of a launch.

    Attributes:
        bytes: what its threadgroups read and wrote, each byte once a threadgroup.
        needed: its inputs and outputs, each byte once.
    """

    bytes: int
    needed: int

    @property
    def ratio(self) -> float:
        """How many times what is needed was moved."""
        return self.bytes / max(self.needed, 1)


class SimulatedTarget(MetalTarget):
    """A simulated Apple GPU. Its kernels run when they are called.

    Args:
        device: what to simulate; an M1 by default, the strictest family.
        check: whether every launch is checked for races, bounds and the like.
    """

    name = "simulator"
    timed = False

    def __init__(self, device: str | Device | None = None, *, check: bool = False) -> None:
        simulated = find_device(device)
        make = functools.partial(metal_kernel, strict=True, device=simulated)
        super().__init__(simulated, functools.partial(make, check=check))
        self._make_counted = functools.partial(make, check=True)

    def chip(self) -> str:
        """Return which GPU is simulated."""
        return f"{self.device.name}, simulated"

    def moved(self, key: OpKey, candidate: Any, inputs: Sequence[mx.array]) -> Moved:
        """Return the bytes that a launch moves, counted on its first threadgroups.

        Raises:
            FindingsError: the launch is checked as it is counted, and something was found.
        """
        counted = _Counted(key.source(candidate), self._make_counted, self.limits.lanes)
        outputs = key.launch(counted, candidate, inputs)
        needed = sum(array.nbytes for array in (*inputs, *outputs))
        return Moved(counted.bytes, needed)


class _Counted:
    """A kernel of which only the first threadgroups run, counted."""

    def __init__(self, source: KernelSource, make: Callable[..., SimulatedKernel], lanes: int) -> None:
        self.source, self.bytes = source, 0
        self._last: SimulatedKernel | None = None
        self._kernel = MetalKernel(source, functools.partial(self._made, make), lanes)

    def _made(self, make: Callable[..., SimulatedKernel], **text: Any) -> Callable[..., list[mx.array]]:
        self._last = kernel = make(**text)
        # Outputs begin written: those of threadgroups that do not run are no finding.
        return lambda **launch: kernel(**launch | {"init_value": 0})

    def __call__(
        self,
        inputs: Sequence[mx.array],
        outputs: Sequence[Output],
        *,
        groups: int,
        numbers: Sequence[int] = (),
        poison: bool = False,
    ) -> list[mx.array]:
        """Run the first threadgroups and count for all; see `metile.targets.base.Kernel`."""
        del poison
        some = min(groups, COUNTED_GROUPS)
        results = self._kernel(inputs, outputs, groups=some, numbers=numbers)
        if some and self._last is not None and self._last.last is not None:
            traffic = self._last.last.counters.traffic or {}
            arrays = {f"{name}_data" for name in (*self.source.inputs, *self.source.outputs)}
            moved = sum(item.unique_read + item.unique_written for name, item in traffic.items() if name in arrays)
            self.bytes = moved * groups // some
        return results

    def bind(self, outputs: Sequence[Output], *, groups: int, numbers: Sequence[int] = ()) -> Any:
        """Return the launch with everything fixed but the arrays."""
        return functools.partial(self, outputs=outputs, groups=groups, numbers=numbers)
