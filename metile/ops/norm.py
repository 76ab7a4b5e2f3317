"""RMSNorm, alone and after a residual add: the families rms_norm and add_rms_norm.

The kernels are ``kernels/norm.metal``. What they must equal stands in `NormKey.reference`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from metile.ops.base import DTYPES, check_arrays, count_reasons
from metile.targets.base import KERNEL_TYPES, Kernel, KernelSource, Limits, Output


@dataclass(frozen=True)
class NormTile:
    """A point of the search space of a norm kernel: `block` rows a threadgroup of so many simdgroups."""

    block: int
    simdgroups: int = 1

    def label(self) -> str:
        """Return the fields as one word."""
        return f"b{self.block}" + (f"_s{self.simdgroups}" if self.simdgroups > 1 else "")


@dataclass(frozen=True)
class NormKey:
    """RMSNorm over the last axis at one bucket of rows.

    Attributes:
        add: whether a residual is added first; the sum is then the first of two outputs.
        rows: upper end of the bucket of rows.
        hidden: length of a row.
        eps: added to the mean square.
        dtype: of x, weight and outputs.
    """

    add: bool
    rows: int
    hidden: int
    eps: float
    dtype: str

    margin = 0.02

    @property
    def family(self) -> str:
        """The family in schema v8."""
        return "add_rms_norm" if self.add else "rms_norm"

    def subject(self) -> str:
        """Return the key as one line."""
        return f"{self.family} rows={self.rows} hidden={self.hidden} eps={self.eps:g} {self.dtype}"

    def space(self, limits: Limits) -> list[NormTile]:
        """Return the admissible candidates, the untuned default first."""
        return [tile for tile in _product(self, limits) if is_valid(self, tile, limits) is None]

    def pruned(self, limits: Limits) -> dict[str, int]:
        """Return why candidates were left out."""
        reasons = (is_valid(self, tile, limits) for tile in _product(self, limits))
        return count_reasons([reason for reason in reasons if reason])

    def source(self, candidate: NormTile) -> KernelSource:
        """Return the kernel of a candidate; eps is a number of its launch, as the bits of a float."""
        t = KERNEL_TYPES[DTYPES[self.dtype]]
        inputs = ("x", "residual", "weight") if self.add else ("x", "weight")
        outputs = ("sum", "y") if self.add else ("y",)
        residual, total = ("residual", "sum") if self.add else ("x", "y")
        body = f"""rms_norm<{t}, {str(self.add).lower()}, {candidate.block}>(
      matrix_of<const device {t}>(x), matrix_of<const device {t}>({residual}), matrix_of<const device {t}>(weight),
      matrix_of<device {t}>({total}), matrix_of<device {t}>(y), float_of_bits(eps), group);"""
        return KernelSource(
            name=f"{self.family}_{self.dtype}_{candidate.label()}",
            program="norm.metal",
            body=body,
            inputs=inputs,
            outputs=outputs,
            numbers=("eps",),
            scratch="Threads::bytes",
            simdgroups=candidate.simdgroups,
        )

    def launch(
        self, kernel: Kernel, candidate: NormTile, inputs: Sequence[mx.array], *, poison: bool = False
    ) -> list[mx.array]:
        """Run on (x [..., hidden], residual [..., hidden] where one is added, weight [hidden]).

        Raises:
            MetileError: an input is of another shape or dtype.
        """
        x = inputs[0]
        leading, weight = x.shape[:-1], (self.hidden,)
        shape = leading + weight
        check_arrays("norm", inputs, (shape, shape, weight) if self.add else (shape, weight), self.dtype)
        groups = -(-math.prod(leading) // candidate.block)
        outputs = (Output(shape, x.dtype),) * (2 if self.add else 1)
        bits = struct.unpack("<i", struct.pack("<f", self.eps))[0]
        return kernel(inputs, outputs, groups=groups, numbers=(bits,), poison=poison)

    def reference(self, inputs: Sequence[mx.array]) -> list[mx.array]:
        """Return plain MLX's norm, with the sum before it where a residual is added."""
        if not self.add:
            return [mx.fast.rms_norm(inputs[0], inputs[1], self.eps)]
        total = inputs[0] + inputs[1]
        return [total, mx.fast.rms_norm(total, inputs[2], self.eps)]

    def example(self, rows: int, seed: int) -> list[mx.array]:
        """Return x and the residual ~ N(0, 1), the weight about 1."""
        keys = mx.random.split(mx.random.key(seed), 3)
        arrays = [mx.random.normal((rows, self.hidden), key=key) for key in keys[: 2 if self.add else 1]]
        arrays.append(1 + 0.1 * mx.random.normal((self.hidden,), key=keys[2]))
        cast = [array.astype(DTYPES[self.dtype]) for array in arrays]
        mx.eval(cast)
        return cast

    def weight_inputs(self) -> tuple[int, ...]:
        """Return no position: a norm's weight is small, and warm in use too."""
        return ()

    def dispatch(self, candidate: NormTile | None) -> dict[str, Any]:
        """Return the entry of ``selected_dispatches``."""
        return {
            "algorithm": "mlx" if candidate is None else "metile",
            "block": 0 if candidate is None else candidate.block,
            "dtype": f"mlx.core.{self.dtype}",
            "eps": self.eps,
            "hidden": self.hidden,
            "row_bucket": self.rows,
        }


_ELEMENTS = 4  # of a row that a GPU's thread takes at once


def _product(key: NormKey, limits: Limits) -> list[NormTile]:
    """Return blocks of rows for one thread on a CPU; on a GPU about a thread for four elements of a row first."""
    if not limits.is_gpu:
        return [NormTile(block) for block in (1, 2, 4, 8, 16, 32)]
    tiles = [NormTile(block, simdgroups) for block in (1, 2, 4) for simdgroups in (1, 2, 4, 8, 16, 32)]
    wanted = key.hidden / (_ELEMENTS * limits.lanes)
    return sorted(tiles, key=lambda tile: (tile.block, abs(math.log2(tile.simdgroups / wanted))))


def is_valid(key: NormKey, tile: NormTile, limits: Limits) -> str | None:
    """Return why a candidate is inadmissible, or None where it may run."""
    if tile.block > key.rows:
        return "block is taller than the bucket"
    if limits.is_gpu and tile.simdgroups * limits.lanes > limits.threads:
        return f"more threads than the device's {limits.threads}"
    if tile.simdgroups > 1 and (tile.simdgroups // 2) * limits.lanes * _ELEMENTS >= key.hidden:
        return "more threads than elements of a row"
    return None
