"""Linear layers, dense or quantized: y = epilogue(x · Wᵀ), all families of schema v8 that multiply by weights.

The kernels are ``kernels/linear.metal``. What they must equal stands in `LinearKey.reference`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from metile.ops import linear_cuda
from metile.ops.base import DTYPES, check_arrays, count_reasons
from metile.ops.linear_space import space_for
from metile.ops.linear_tile import SCHEDULES, LinearTile
from metile.ops.weights import WeightFormat, weight_format
from metile.targets.base import KERNEL_TYPES, Kernel, KernelSource, Limits, Output

Shape = tuple[int, ...]
Epilogue = Literal["store", "bias", "residual", "swiglu"]

FEW_ROWS = 16  # that a decode step may have, several sequences or drafted tokens together

_STRUCTS = {"store": "Store", "bias": "Bias<{t}>", "residual": "Residual<{t}>", "swiglu": "SwiGLU"}
_BUILDERS = {
    "store": "Store{{}}",
    "bias": "Bias<{t}>{{matrix_of<const device {t}>(extra).data}}",
    "residual": "Residual<{t}>{{matrix_of<const device {t}>(extra)}}",
    "swiglu": "SwiGLU{{}}",
}


@dataclass(frozen=True)
class LinearKey:
    """A linear layer at one bucket of rows.

    Attributes:
        epilogue: what follows the product; ``swiglu`` takes two weight matrices.
        rows: upper end of the bucket of rows of x.
        outputs: rows of each weight matrix, N.
        inputs: columns of each weight matrix, K.
        dtype: of x and y, and of weights or of affine scales.
        weights: the format of the weights: see `metile.ops.weights`.
    """

    epilogue: Epilogue
    rows: int
    outputs: int
    inputs: int
    dtype: str
    weights: str = "dense"

    margin = 0.02

    @property
    def format(self) -> WeightFormat:
        """The format of the weights."""
        return weight_format(self.weights)

    @property
    def family(self) -> str:
        """The family in schema v8; quantized weights with a residual have one of their own for few rows."""
        mode = self.format.mode
        if mode not in ("dense", "affine"):
            return "block_scaled"
        if self.epilogue == "swiglu":
            return f"{mode}_swiglu"
        few = mode == "affine" and self.epilogue == "residual" and self.rows <= FEW_ROWS
        return "affine_residual_qmv" if few else f"{mode}_matmul"

    @property
    def operands(self) -> int:
        """Weight matrices the kernel reads."""
        return 2 if self.epilogue == "swiglu" else 1

    def subject(self) -> str:
        """Return the key as one line."""
        format = "" if self.format.is_dense else f" {self.weights}"
        return f"{self.family}[{self.epilogue}] rows={self.rows} n={self.outputs} k={self.inputs} {self.dtype}{format}"

    def space(self, limits: Limits) -> list[LinearTile]:
        """Return the admissible candidates, the untuned default first."""
        space = space_for(limits)
        return sorted(space.admitted(self, limits), key=lambda tile: space.distance(self, tile, limits))

    def pruned(self, limits: Limits) -> dict[str, int]:
        """Return why candidates of the product were left out."""
        reasons = (is_valid(self, tile, limits) for tile in space_for(limits).product(self, limits))
        return count_reasons([reason for reason in reasons if reason])

    def source(self, candidate: LinearTile) -> KernelSource:
        """Return the kernel of a candidate; shapes, the depth of a slice and the schedule are numbers of its launch."""
        t, p, c = KERNEL_TYPES[DTYPES[self.dtype]], self.operands, candidate
        e, struct = self.format.element(t), _STRUCTS[self.epilogue].format(t=t)
        weights = [[f"{part}{index}" for part in self.format.parts] for index in range(p)]
        extra = ("extra",) if self.epilogue in ("bias", "residual") else ()
        if c.program == "rows":
            tile = f"{c.block_m}, {c.block_n}, {c.wn}, {c.k_unroll}"
            call, tail = f"linear_rows<{e}, {struct}, {tile}>", "group"
            scratch = f"RowAccumulator<{e}, {p}, {tile}, 0>::bytes + RowStage<{e}, {c.block_m}>::bytes(slice)"
        else:
            tile = f"{c.block_m}, {c.block_n}, {c.wm}, {c.wn}, {c.k_unroll}, METILE_FIXED(outer_k)"
            call, tail = f"linear_matrix<{e}, {struct}, {tile}>", "slice, Schedule(schedule), group"
            stage = f"Stage<{t}, {c.block_m}, METILE_FIXED(outer_k)>"
            scratch = f"Accumulator<{e}, {p}, {tile}>::bytes(slice) + {stage}::bytes(slice)"
        matrices = ", ".join(self.format.matrix(t, names) for names in weights)
        epilogue = _BUILDERS[self.epilogue].format(t=t)
        body = f"""const WeightsOf<{e}> weights[] = {{{matrices}}};
  {call}(
      matrix_of<const device {t}>(x), weights, matrix_of<device {t}>(y), {epilogue}, {tail});"""
        format = "" if self.format.is_dense else f"{self.weights}_"
        fields = f"bm{c.block_m}_bn{c.block_n}_wm{c.wm}_wn{c.wn}_ku{c.k_unroll}"
        return KernelSource(
            name=f"linear_{self.epilogue}_{self.dtype}_{format}{c.program}_{fields}",
            program="linear.metal",
            body=body,
            inputs=("x", *itertools.chain(*weights), *extra),
            outputs=("y",),
            numbers=("slice", "outer_k", "schedule"),
            scratch=scratch,
            fixed=("outer_k",),
            simdgroups=c.wm * c.wn,
            stages=linear_cuda.stages(c, p, DTYPES[self.dtype].size),
            likely=linear_cuda.likely_depths(c),
        )

    def launch(
        self, kernel: Kernel, candidate: LinearTile, inputs: Sequence[mx.array], *, poison: bool = False
    ) -> list[mx.array]:
        """Run on (x [..., K], w [N, K] once or twice, then the bias [N] or residual [..., N]).

        A quantized w is its codes, its scales and, where the format has them, its biases.

        Raises:
            MetileError: an input is of another shape or dtype.
        """
        leading = inputs[0].shape[:-1]
        y = (*leading, self.outputs)
        check_arrays("linear", inputs, *self._expected(leading))
        rows = math.prod(leading)
        groups = -(-rows // candidate.block_m) * -(-self.outputs // candidate.block_n)
        numbers = (candidate.outer_k or self.inputs, candidate.outer_k, SCHEDULES.index(candidate.schedule))
        output = Output(y, inputs[0].dtype)
        return kernel(inputs, (output,), groups=groups, numbers=numbers, poison=poison)

    def _expected(self, leading: Shape) -> tuple[list[Shape], str, list[mx.Dtype]]:
        """Return the shapes, the dtype and the dtypes of a launch's inputs."""
        dtype = DTYPES[self.dtype]
        shapes = [(*leading, self.inputs), *self.format.shapes(self.outputs, self.inputs) * self.operands]
        dtypes = [dtype, *self.format.dtypes(dtype) * self.operands]
        if self.epilogue in ("bias", "residual"):
            shapes.append((self.outputs,) if self.epilogue == "bias" else (*leading, self.outputs))
            dtypes.append(dtype)
        return shapes, self.dtype, dtypes

    def matrices(self, inputs: Sequence[mx.array]) -> list[list[mx.array]]:
        """Return the arrays of each weight matrix among a launch's inputs."""
        count = len(self.format.parts)
        return [list(inputs[1 + place * count : 1 + (place + 1) * count]) for place in range(self.operands)]

    def reference(self, inputs: Sequence[mx.array]) -> list[mx.array]:
        """Return plain MLX's y: x @ w.T, then the bias, the residual, or silu(gate) * up."""
        x, products = inputs[0], self.matrices(inputs)
        first = self.format.product(x, products[0])
        if self.epilogue == "swiglu":
            return [nn.silu(first) * self.format.product(x, products[1])]
        return [first if self.epilogue == "store" else first + inputs[-1]]

    def example(self, rows: int, seed: int) -> list[mx.array]:
        """Return x ~ N(0, 1), weights ~ N(0, 1/K), and the epilogue's extra input."""
        keys = mx.random.split(mx.random.key(seed), 2 + self.operands)
        dtype, scale = DTYPES[self.dtype], self.inputs**-0.5
        arrays = [mx.random.normal((rows, self.inputs), key=keys[0]).astype(dtype)]
        for i in range(self.operands):
            weights = mx.random.normal((self.outputs, self.inputs), key=keys[1 + i]) * scale
            arrays += self.format.store(weights.astype(dtype))
        if self.epilogue == "bias":
            arrays.append(mx.random.normal((self.outputs,), key=keys[-1]).astype(dtype))
        if self.epilogue == "residual":
            arrays.append(mx.random.normal((rows, self.outputs), key=keys[-1]).astype(dtype))
        mx.eval(arrays)
        return arrays

    def weight_inputs(self) -> tuple[int, ...]:
        """Return the positions of the weight matrices' arrays."""
        return tuple(range(1, 1 + self.operands * len(self.format.parts)))

    def dispatch(self, candidate: LinearTile | None) -> dict[str, Any]:
        """Return the entry of ``selected_dispatches``."""
        fields: dict[str, Any] = {"block_m": 0, "block_n": 0, "k_unroll": 1, "schedule": ""}
        if not self.family.endswith(("_swiglu", "_qmv")):
            fields |= {"outer_k": 0, "wm": 0, "wn": 0}
        kept = self.format
        if candidate is not None:
            chosen = asdict(candidate)
            fields = {name: chosen[name] for name in fields}
        if not kept.is_dense:
            fields |= {"bits": kept.bits, "group_size": kept.group, "mode": kept.mode}
        return fields | {
            "algorithm": "mlx" if candidate is None else "metile",
            "dtype": f"mlx.core.{self.dtype}",
            "input_features": self.inputs,
            "output_features": self.outputs,
            "rows": self.rows,
        }


def is_valid(key: LinearKey, tile: LinearTile, limits: Limits) -> str | None:
    """Return why a candidate is inadmissible for `key` on a device, or None where it may run."""
    return space_for(limits).fault(key, tile, limits)
