"""The q, k and v projections of attention in one launch: three linear layers of the same x, in its families.

The kernels are those of `metile.ops.linear`, with the blocks of the three products on one grid; a decode step is
launched once in place of three times. What they must equal stands in `ProjectionsKey.reference`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from metile.ops.base import DTYPES, check_arrays
from metile.ops.linear import Epilogue, LinearKey
from metile.ops.linear_tile import SCHEDULES, LinearTile
from metile.ops.weights import WeightFormat, weight_format
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
        dtype: of x, biases and outputs, and of weights or of affine scales.
        weights: the format of the three: see `metile.ops.weights`.
    """

    rows: int
    outputs: tuple[int, int, int]
    inputs: int
    bias: bool
    dtype: str
    weights: str = "dense"

    margin = LinearKey.margin
    operands = 1  # weight matrices that a threadgroup reads

    @property
    def widest(self) -> LinearKey:
        """The largest of the three as a layer of its own, whose candidates are those of all."""
        epilogue: Epilogue = "bias" if self.bias else "store"
        return LinearKey(epilogue, self.rows, max(self.outputs), self.inputs, self.dtype, self.weights)

    @property
    def format(self) -> WeightFormat:
        """The format of the weights."""
        return weight_format(self.weights)

    @property
    def family(self) -> str:
        """The family in schema v8."""
        return self.widest.family

    def subject(self) -> str:
        """Return the key as one line."""
        widths, format = "+".join(map(str, self.outputs)), "" if self.format.is_dense else f" {self.weights}"
        shape = f"rows={self.rows} n={widths} k={self.inputs}"
        return f"{self.family}[q k v {self.widest.epilogue}] {shape} {self.dtype}{format}"

    def space(self, limits: Limits) -> list[LinearTile]:
        """Return the admissible candidates, the untuned default first."""
        return self.widest.space(limits)

    def pruned(self, limits: Limits) -> dict[str, int]:
        """Return why candidates of the product were left out."""
        return self.widest.pruned(limits)

    def source(self, candidate: LinearTile) -> KernelSource:
        """Return the kernel of a candidate: that of a linear layer, called on one of three."""
        return _source(self, self.widest.source(candidate), candidate)

    def launch(
        self, kernel: Kernel, candidate: LinearTile, inputs: Sequence[mx.array], *, poison: bool = False
    ) -> list[mx.array]:
        """Run on (x [..., K], wq, wk, wv [N, K] each, then bq, bk, bv [N] each where there are biases).

        A quantized matrix is its codes, its scales and, where the format has them, its biases.

        Returns:
            q, k and v, [..., N] each.

        Raises:
            MetileError: an input is missing, or of another shape or dtype.
        """
        leading = inputs[0].shape[:-1] if inputs else ()
        dtype, kinds = DTYPES[self.dtype], self.format.dtypes(DTYPES[self.dtype])
        weights = [shape for count in self.outputs for shape in self.format.shapes(count, self.inputs)]
        biases = [(count,) for count in self.outputs] if self.bias else []
        shapes, dtypes = [(*leading, self.inputs), *weights, *biases], [dtype, *kinds * 3, *[dtype] * len(biases)]
        check_arrays("projections", inputs, shapes, self.dtype, dtypes)
        tall = -(-math.prod(leading) // candidate.block_m)
        groups = sum(tall * -(-count // candidate.block_n) for count in self.outputs)
        numbers = (candidate.outer_k or self.inputs, candidate.outer_k, SCHEDULES.index(candidate.schedule))
        outputs = [Output((*leading, count), inputs[0].dtype) for count in self.outputs]
        return kernel(inputs, outputs, groups=groups, numbers=numbers, poison=poison)

    def reference(self, inputs: Sequence[mx.array]) -> list[mx.array]:
        """Return plain MLX's q, k and v: x @ w.T, then the bias."""
        x, count = inputs[0], len(self.format.parts)
        products = [self.format.product(x, inputs[1 + place * count :][:count]) for place in range(3)]
        biases = inputs[1 + 3 * count :]
        return [y + bias for y, bias in zip(products, biases, strict=True)] if self.bias else products

    def example(self, rows: int, seed: int) -> list[mx.array]:
        """Return x ~ N(0, 1), weights ~ N(0, 1/K) and, if any, biases ~ N(0, 1)."""
        keys, dtype = iter(mx.random.split(mx.random.key(seed), 7)), DTYPES[self.dtype]
        scale = self.inputs**-0.5
        arrays = [mx.random.normal((rows, self.inputs), key=next(keys)).astype(dtype)]
        for count in self.outputs:
            weights = mx.random.normal((count, self.inputs), key=next(keys)) * scale
            arrays += self.format.store(weights.astype(dtype))
        if self.bias:
            arrays += [mx.random.normal((count,), key=next(keys)).astype(dtype) for count in self.outputs]
        mx.eval(arrays)
        return arrays

    def weight_inputs(self) -> tuple[int, ...]:
        """Return the positions of the weight matrices' arrays."""
        return tuple(range(1, 1 + 3 * len(self.format.parts)))

    def dispatch(self, candidate: LinearTile | None) -> dict[str, Any]:
        """Return the entry of ``selected_dispatches``: a product with the three weights below each other."""
        return self.widest.dispatch(candidate) | {"output_features": sum(self.outputs)}


def _source(key: ProjectionsKey, linear: KernelSource, candidate: LinearTile) -> KernelSource:
    c, t, kept = candidate, KERNEL_TYPES[DTYPES[key.dtype]], key.format
    e, struct = kept.element(t), f"Bias<{t}>" if key.bias else "Store"
    if c.program == "rows":
        call = f"projections_rows<{e}, {struct}, {c.block_m}, {c.block_n}, {c.wn}, {c.k_unroll}>"
        tail = "group"
    else:
        tile = f"{c.block_m}, {c.block_n}, {c.wm}, {c.wn}, {c.k_unroll}, METILE_FIXED(outer_k)"
        call, tail = f"projections_matrix<{e}, {struct}, {tile}>", "slice, Schedule(schedule), group"
    arrays = [[f"{part}{name}" for part in kept.parts] for name in _OUTPUTS]
    biases = [f"extra_{name}" for name in _OUTPUTS if key.bias]
    epilogues = [f"{struct}{{matrix_of<const device {t}>({bias}).data}}" for bias in biases] or ["Store{}"] * 3
    parts = [
        f"Projection<{e}, {struct}>{{{kept.matrix(t, names)}, matrix_of<device {t}>({name}), {epilogue}}}"
        for name, names, epilogue in zip(_OUTPUTS, arrays, epilogues, strict=True)
    ]
    arguments = ",\n      ".join((f"matrix_of<const device {t}>(x)", *parts, tail))
    return dataclasses.replace(
        linear,
        name=linear.name.replace("linear", "projections", 1),
        body=f"{call}(\n      {arguments});",
        inputs=("x", *itertools.chain(*arrays), *biases),
        outputs=_OUTPUTS,
    )
