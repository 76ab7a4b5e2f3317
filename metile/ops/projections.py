"""The q, k and v projections of attention in one launch: three linear layers of the same x, of family dense_matmul.

The kernels are those of `metile.ops.linear`, with the blocks of the three products on one grid; a decode step is
launched once in place of three times. What they must equal stands in `ProjectionsKey.reference`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from metile.ops.base import DTYPES, check_arrays
from metile.ops.linear import LinearKey
from metile.ops.linear_tile import SCHEDULES, LinearTile
from metile.targets.base import KERNEL_TYPES, Kernel, KernelSource, Limits, Output

_OUTPUTS = ("q", "k", "v")


@dataclass(frozen=True)
class ProjectionsKey:
    """The three projections at one bucket of rows.

    Attributes:
        rows: upper end of the bucket of rows of x.
        outputs: rows of the weight matrices of q, k and v, N of each.
        inputs: columns of each weight matrix, K.
        bias: whether a bias is added to each of the three, or to none.
        dtype: of x, weights, biases and outputs.
    """

    rows: int
    outputs: tuple[int, int, int]
    inputs: int
    bias: bool
    dtype: str

    margin = LinearKey.margin
    family = "dense_matmul"
    operands = 1  # weight matrices that a threadgroup reads

    @property
    def widest(self) -> LinearKey:
        """The largest of the three as a layer of its own, whose candidates are those of all."""
        return LinearKey("bias" if self.bias else "store", self.rows, max(self.outputs), self.inputs, self.dtype)

    def subject(self) -> str:
        """Return the key as one line."""
        widths = "+".join(map(str, self.outputs))
        return f"{self.family}[q k v {self.widest.epilogue}] rows={self.rows} n={widths} k={self.inputs} {self.dtype}"

    def space(self, limits: Limits) -> list[LinearTile]:
        """Return the admissible candidates, the untuned default first."""
        return self.widest.space(limits)

    def pruned(self, limits: Limits) -> dict[str, int]:
        """Return why candidates of the product were left out."""
        return self.widest.pruned(limits)

    def source(self, candidate: LinearTile) -> KernelSource:
        """Return the kernel of a candidate: that of a linear layer, called on one of three."""
        return _source(self.widest.source(candidate), candidate, KERNEL_TYPES[DTYPES[self.dtype]], self.bias)

    def launch(
        self, kernel: Kernel, candidate: LinearTile, inputs: Sequence[mx.array], *, poison: bool = False
    ) -> list[mx.array]:
        """Run on (x [..., K], wq, wk, wv [N, K] each, then bq, bk, bv [N] each where there are biases).

        Returns:
            q, k and v, [..., N] each.

        Raises:
            MetileError: an input is missing, or of another shape or dtype.
        """
        leading = inputs[0].shape[:-1] if inputs else ()
        weights = [(count, self.inputs) for count in self.outputs]
        biases = [(count,) for count in self.outputs] if self.bias else []
        check_arrays("projections", inputs, ((*leading, self.inputs), *weights, *biases), self.dtype)
        tall = -(-math.prod(leading) // candidate.block_m)
        groups = sum(tall * -(-count // candidate.block_n) for count in self.outputs)
        numbers = (candidate.outer_k or self.inputs, candidate.outer_k, SCHEDULES.index(candidate.schedule))
        outputs = [Output((*leading, count), inputs[0].dtype) for count in self.outputs]
        return kernel(inputs, outputs, groups=groups, numbers=numbers, poison=poison)

    def reference(self, inputs: Sequence[mx.array]) -> list[mx.array]:
        """Return plain MLX's q, k and v: x @ w.T, then the bias."""
        x, *rest = inputs
        products = [x @ weight.T for weight in rest[:3]]
        return [y + bias for y, bias in zip(products, rest[3:], strict=True)] if self.bias else products

    def example(self, rows: int, seed: int) -> list[mx.array]:
        """Return x ~ N(0, 1), weights ~ N(0, 1/K) and, if any, biases ~ N(0, 1)."""
        keys = iter(mx.random.split(mx.random.key(seed), 7))
        scale = self.inputs**-0.5
        arrays = [mx.random.normal((rows, self.inputs), key=next(keys))]
        arrays += [mx.random.normal((count, self.inputs), key=next(keys)) * scale for count in self.outputs]
        if self.bias:
            arrays += [mx.random.normal((count,), key=next(keys)) for count in self.outputs]
        cast = [array.astype(DTYPES[self.dtype]) for array in arrays]
        mx.eval(cast)
        return cast

    def weight_inputs(self) -> tuple[int, ...]:
        """Return the positions of the weight matrices."""
        return (1, 2, 3)

    def dispatch(self, candidate: LinearTile | None) -> dict[str, Any]:
        """Return the entry of ``selected_dispatches``: a product with the three weights below each other."""
        return self.widest.dispatch(candidate) | {"output_features": sum(self.outputs)}


def _source(linear: KernelSource, candidate: LinearTile, t: str, bias: bool) -> KernelSource:
    c, struct = candidate, f"Bias<{t}>" if bias else "Store"
    if c.program == "rows":
        call = f"projections_rows<{t}, {struct}, {c.block_m}, {c.block_n}, {c.wn}, {c.k_unroll}>"
        tail = "group"
    else:
        tile = f"{c.block_m}, {c.block_n}, {c.wm}, {c.wn}, {c.k_unroll}, METILE_FIXED(outer_k)"
        call, tail = f"projections_matrix<{t}, {struct}, {tile}>", "slice, Schedule(schedule), group"
    epilogues = [f"{struct}{{{f'matrix_of<const device {t}>(b{name}).data' if bias else ''}}}" for name in _OUTPUTS]
    parts = [
        f"Projection<{t}, {struct}>{{matrix_of<const device {t}>(w{name}), matrix_of<device {t}>({name}), {epilogue}}}"
        for name, epilogue in zip(_OUTPUTS, epilogues, strict=True)
    ]
    arguments = ",\n      ".join((f"matrix_of<const device {t}>(x)", *parts, tail))
    weights, biases = [f"w{name}" for name in _OUTPUTS], [f"b{name}" for name in _OUTPUTS if bias]
    return dataclasses.replace(
        linear,
        name=linear.name.replace("linear", "projections", 1),
        body=f"{call}(\n      {arguments});",
        inputs=("x", *weights, *biases),
        outputs=_OUTPUTS,
    )
