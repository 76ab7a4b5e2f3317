"""Dense linear layers: y = epilogue(x · Wᵀ), the families dense_matmul and dense_swiglu.

The kernels are ``kernels/linear.metal``. What they must equal stands in `LinearKey.reference`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from metile.ops.base import DTYPES, check_arrays, count_reasons
from metile.targets.base import KERNEL_TYPES, Kernel, KernelSource, Limits, Output

Shape = tuple[int, ...]
Epilogue = Literal["store", "bias", "residual", "swiglu"]
SCHEDULES = ("linear", "grouped2", "grouped4", "grouped8", "diagonal", "morton", "hilbert")

_STRUCTS = {"store": "Store", "bias": "Bias<{t}>", "residual": "Residual<{t}>", "swiglu": "SwiGLU"}
_BUILDERS = {
    "store": "Store{{}}",
    "bias": "Bias<{t}>{{matrix<const {t}>(extra).data}}",
    "residual": "Residual<{t}>{{matrix<const {t}>(extra)}}",
    "swiglu": "SwiGLU{{}}",
}
_ROWS_AT_ONCE = 8  # the decode program's limit; above it the matrix program reads weights once as well


@dataclass(frozen=True)
class LinearTile:
    """A point of the search space of a linear kernel.

    Attributes:
        program: ``rows``, the decode end, or ``matrix``.
        block_m: rows of x a threadgroup takes.
        block_n: rows of weights a threadgroup takes.
        wm: simdgroups along the rows of x.
        wn: simdgroups along the rows of weights.
        k_unroll: registers of k that the decode program takes a turn; 1 in the matrix program.
        outer_k: depth of a slice of k held in threadgroup memory; 0 is all of k.
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


@dataclass(frozen=True)
class LinearKey:
    """A linear layer at one bucket of rows.

    Attributes:
        epilogue: what follows the product; ``swiglu`` takes two weight matrices.
        rows: upper end of the bucket of rows of x.
        outputs: rows of each weight matrix, N.
        inputs: columns of each weight matrix, K.
        dtype: of x, weights and y.
    """

    epilogue: Epilogue
    rows: int
    outputs: int
    inputs: int
    dtype: str

    margin = 0.02

    @property
    def family(self) -> str:
        """The family in schema v8."""
        return "dense_swiglu" if self.epilogue == "swiglu" else "dense_matmul"

    @property
    def operands(self) -> int:
        """Weight matrices the kernel reads."""
        return 2 if self.epilogue == "swiglu" else 1

    def subject(self) -> str:
        """Return the key as one line."""
        return f"{self.family}[{self.epilogue}] rows={self.rows} n={self.outputs} k={self.inputs} {self.dtype}"

    def space(self, limits: Limits) -> list[LinearTile]:
        """Return the admissible candidates, the untuned default first."""
        fitting = _fitting(min(self.rows, _ROWS_AT_ONCE), self.operands, self.dtype, limits)
        admitted = [tile for tile in fitting if _shape_fault(self, tile, limits) is None]
        return sorted(admitted, key=lambda tile: _distance(self, tile, limits))

    def pruned(self, limits: Limits) -> dict[str, int]:
        """Return why candidates of the product were left out."""
        reasons = (is_valid(self, tile, limits) for tile in _product(min(self.rows, _ROWS_AT_ONCE), limits.lanes))
        return count_reasons([reason for reason in reasons if reason])

    def source(self, candidate: LinearTile) -> KernelSource:
        """Return the kernel of a candidate; shapes, outer_k and schedule are numbers of its launch."""
        t, struct = (
            KERNEL_TYPES[DTYPES[self.dtype]],
            _STRUCTS[self.epilogue].format(t=KERNEL_TYPES[DTYPES[self.dtype]]),
        )
        c, p = candidate, self.operands
        weights = ("w0", "w1")[:p]
        extra = ("extra",) if self.epilogue in ("bias", "residual") else ()
        matrices = ", ".join(f"matrix<const {t}>({name})" for name in weights)
        if c.program == "rows":
            call = f"linear_rows<{t}, {struct}, {c.block_m}, {c.block_n}, {c.wn}, {c.k_unroll}>"
            tail = "group"
            scratch = (
                f"RowAccumulator<{t}, {p}, {c.block_m}, {c.block_n}, {c.wn}, {c.k_unroll}>::bytes"
                f" + RowStage<{t}, {c.block_m}>::bytes(outer_k)"
            )
        else:
            call = f"linear_matrix<{t}, {struct}, {c.block_m}, {c.block_n}, {c.wm}, {c.wn}>"
            tail = "outer_k, Schedule(schedule), group"
            scratch = (
                f"Accumulator<{t}, {p}, {c.block_m}, {c.block_n}, {c.wm}, {c.wn}>::bytes(outer_k)"
                f" + Stage<{t}, {c.block_m}>::bytes(outer_k)"
            )
        body = f"""const Matrix<const {t}> weights[] = {{{matrices}}};
  {call}(matrix<const {t}>(x), weights, matrix<{t}>(y), {_BUILDERS[self.epilogue].format(t=t)}, {tail});"""
        tile = f"bm{c.block_m}_bn{c.block_n}_wm{c.wm}_wn{c.wn}_ku{c.k_unroll}"
        name = f"linear_{self.epilogue}_{self.dtype}_{c.program}_{tile}"
        return KernelSource(
            name, "linear.metal", body, ("x", *weights, *extra), ("y",), ("outer_k", "schedule"), scratch
        )

    def launch(
        self, kernel: Kernel, candidate: LinearTile, inputs: Sequence[mx.array], *, poison: bool = False
    ) -> list[mx.array]:
        """Run on (x [..., K], w [N, K] once or twice, then the bias [N] or residual [..., N]).

        Raises:
            MetileError: an input is of another shape or dtype.
        """
        leading, weight = inputs[0].shape[:-1], (self.outputs, self.inputs)
        x, y = (*leading, self.inputs), (*leading, self.outputs)
        check_arrays("linear", inputs, self._shapes(x, weight, y), self.dtype)
        rows = math.prod(leading)
        groups = -(-rows // candidate.block_m) * -(-self.outputs // candidate.block_n)
        outer_k = candidate.outer_k or self.inputs
        numbers = (outer_k, SCHEDULES.index(candidate.schedule))
        output = Output(y, inputs[0].dtype)
        return kernel(inputs, (output,), groups=groups, numbers=numbers, poison=poison)

    def _shapes(self, x: Shape, weight: Shape, y: Shape) -> tuple[Shape, ...]:
        if self.epilogue == "store":
            return x, weight
        if self.epilogue == "bias":
            return x, weight, y[-1:]
        return x, weight, y if self.epilogue == "residual" else weight

    def reference(self, inputs: Sequence[mx.array]) -> list[mx.array]:
        """Return plain MLX's y: x @ w.T, then the bias, the residual, or silu(gate) * up."""
        x, *rest = inputs
        first = x @ rest[0].T
        if self.epilogue == "swiglu":
            return [nn.silu(first) * (x @ rest[1].T)]
        return [first if self.epilogue == "store" else first + rest[1]]

    def example(self, rows: int, seed: int) -> list[mx.array]:
        """Return x ~ N(0, 1), weights ~ N(0, 1/K), and the epilogue's extra input."""
        keys = mx.random.split(mx.random.key(seed), 2 + self.operands)
        dtype, scale = DTYPES[self.dtype], self.inputs**-0.5
        arrays = [mx.random.normal((rows, self.inputs), key=keys[0])]
        for i in range(self.operands):
            arrays.append(mx.random.normal((self.outputs, self.inputs), key=keys[1 + i]) * scale)
        if self.epilogue == "bias":
            arrays.append(mx.random.normal((self.outputs,), key=keys[-1]))
        if self.epilogue == "residual":
            arrays.append(mx.random.normal((rows, self.outputs), key=keys[-1]))
        cast = [array.astype(dtype) for array in arrays]
        mx.eval(cast)
        return cast

    def weight_inputs(self) -> tuple[int, ...]:
        """Return the positions of the weight matrices."""
        return tuple(range(1, 1 + self.operands))

    def dispatch(self, candidate: LinearTile | None) -> dict[str, Any]:
        """Return the entry of ``selected_dispatches``."""
        fields: dict[str, Any] = {"block_m": 0, "block_n": 0, "k_unroll": 1, "schedule": ""}
        if self.epilogue != "swiglu":
            fields |= {"outer_k": 0, "wm": 0, "wn": 0}
        if candidate is not None:
            chosen = asdict(candidate)
            fields = {name: chosen[name] for name in fields}
        return fields | {
            "algorithm": "mlx" if candidate is None else "metile",
            "dtype": f"mlx.core.{self.dtype}",
            "input_features": self.inputs,
            "output_features": self.outputs,
            "rows": self.rows,
        }


@functools.cache
def _product(rows_at_once: int, lanes: int) -> tuple[LinearTile, ...]:
    """Return the whole product of plan fields, valid or not."""
    rows = [
        LinearTile("rows", rows_at_once, block_n, 1, wn, unroll, 0, "linear")
        for block_n, wn, unroll in itertools.product((16, 32, 64), (4, 8, 16, 32, 64), (1, 2, 4))
    ]
    matrix = [
        LinearTile("matrix", block_m, block_n, wm, wn, 1, outer_k, schedule)
        for block_m, block_n, wm, wn, outer_k, schedule in itertools.product(
            (lanes, 16, 32, 48, 64, 128),
            (16, 32, 48, 64, 96, 128, 256),
            (1, 2, 4, 8),
            (1, 2, 4, 8, 16),
            (0, 512, 2048),
            SCHEDULES,
        )
    ]
    return tuple(dict.fromkeys(rows + matrix))


@functools.cache
def _fitting(rows_at_once: int, operands: int, dtype: str, limits: Limits) -> tuple[LinearTile, ...]:
    """Return the part of the product that the device admits for some shape."""
    product = _product(rows_at_once, limits.lanes)
    return tuple(tile for tile in product if _tile_fault(tile, operands, dtype, limits) is None)


def is_valid(key: LinearKey, tile: LinearTile, limits: Limits) -> str | None:
    """Return why a candidate is inadmissible for `key` on a device, or None where it may run."""
    return _tile_fault(tile, key.operands, key.dtype, limits) or _shape_fault(key, tile, limits)


def _tile_fault(tile: LinearTile, operands: int, dtype: str, limits: Limits) -> str | None:
    """Return why a tile does not fit the device, whatever the shape."""
    if tile.block_n % limits.lanes or tile.block_n % tile.wn:
        return "block_n is not whole fragments for each simdgroup"
    tile_m, tile_n = tile.block_m // tile.wm, tile.block_n // tile.wn
    if tile.program == "rows":
        fits = operands * tile_n * tile_m + tile_m + 1 <= limits.registers
        return None if fits else "accumulators do not fit the registers"
    if tile.block_m % tile.wm or tile_m % limits.lanes:
        return "block_m is not whole fragments for each simdgroup"
    if dtype in limits.tile_dtypes:
        groups, panels = operands * tile_n // limits.tile_rows, tile_m // limits.tile_rows
        if tile_n % limits.tile_rows or panels > 2 or not 1 <= groups * panels <= 4:
            return "accumulators do not fit the tile registers"
    elif operands * tile_n * tile_m // limits.lanes + tile_m // limits.lanes + 1 > limits.registers:
        return "accumulators do not fit the registers"
    return None


def _shape_fault(key: LinearKey, tile: LinearTile, limits: Limits) -> str | None:
    """Return why a tile that fits the device does not fit a shape."""
    if tile.block_n >= key.outputs + 64:
        return "block_n is wider than the matrix"
    if tile.program == "rows":
        return "more rows than the decode program takes at once" if key.rows > _ROWS_AT_ONCE else None
    if tile.block_m > max(limits.lanes, _whole(key.rows, limits.lanes)):
        return "block_m is taller than the bucket"
    if tile.outer_k >= key.inputs:
        return "outer_k is not less than k"
    if tile.schedule != "linear" and key.rows <= tile.block_m:
        return "a single row of blocks has one order"
    depth = _whole(tile.outer_k or key.inputs, 2 * limits.lanes)
    if 4 * (key.operands * tile.block_n * (tile.block_m + 16) + tile.block_m * depth) > limits.threadgroup_bytes:
        return "a block does not fit threadgroup memory"
    return None


def _whole(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _distance(key: LinearKey, tile: LinearTile, limits: Limits) -> tuple[float, ...]:
    """Order candidates by how far they stand from what is known to do well; the first is the untuned default.

    At the decode end that is a few weight rows a turn; at the matrix end the largest register tile that fits, a block
    of about 128 x 128, all of k at once, and blocks that share weights side by side.
    """
    few_rows = key.rows <= 4 or (key.rows <= _ROWS_AT_ONCE and key.dtype not in limits.tile_dtypes)
    accumulators = tile.block_n // tile.wn * (tile.block_m // tile.wm)
    block = abs(math.log2(tile.block_n / (64 if tile.program == "rows" else 128)))
    tall = abs(math.log2(tile.block_m / min(128, _whole(key.rows, limits.lanes)))) if tile.program == "matrix" else 0
    schedule = 0 if tile.schedule in ("linear", "grouped2") else 1
    preferred = (tile.program == "rows") == few_rows
    return (
        not preferred,
        tile.outer_k != 0,
        schedule,
        tall + block - math.log2(accumulators) / 2,
        tile.outer_k,
    )
