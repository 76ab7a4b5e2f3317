"""How a weight matrix is kept: dense, or quantized in one of MLX's formats, used as it lies in memory.

A format is named in a key by one word: ``dense``, ``affine4g64`` (4 bits a code, a scale and a bias for 64 codes),
``mxfp4``, ``mxfp8`` or ``nvfp4``. The kernels' side is ``kernels/tile/packed.h``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from metile.errors import mismatch
from metile.ops.base import DTYPES
from metile.report_dispatches import BLOCK_FORMATS

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)

_AFFINE = re.compile(r"affine(\d)g(\d+)")
_STRUCTS = {"mxfp4": "Mxfp4", "mxfp8": "Mxfp8", "nvfp4": "Nvfp4"}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class WeightFormat:
    """A format of weights [N, K].

    Attributes:
        mode: ``dense``, ``affine``, or a block-scaled float format.
        bits: of a code, 0 where dense.
        group: codes that share a scale, 0 where dense.
    """

    mode: str
    bits: int = 0
    group: int = 0

    @property
    def name(self) -> str:
        """The format in one word."""
        return f"affine{self.bits}g{self.group}" if self.mode == "affine" else self.mode

    @property
    def is_dense(self) -> bool:
        """Whether weights are kept as they are multiplied."""
        return self.mode == "dense"

    @property
    def parts(self) -> tuple[str, ...]:
        """What the arrays of a matrix are: weights, or codes, scales and perhaps biases."""
        return ("w",) if self.is_dense else ("w", "s", "b") if self.mode == "affine" else ("w", "s")

    def shapes(self, outputs: int, inputs: int) -> tuple[Shape, ...]:
        """Return the shapes of a matrix's arrays."""
        if self.is_dense:
            return ((outputs, inputs),)
        scales = (outputs, inputs // self.group)
        return ((outputs, inputs * self.bits // 32), scales, scales)[: len(self.parts)]

    def dtypes(self, dtype: mx.Dtype) -> tuple[mx.Dtype, ...]:
        """Return the dtypes of a matrix's arrays beside inputs of `dtype`."""
        if self.is_dense:
            return (dtype,)
        return (mx.uint32, dtype, dtype) if self.mode == "affine" else (mx.uint32, mx.uint8)

    def fault(self, inputs: int) -> str | None:
        """Return why no kernel takes a matrix of so many columns, or None."""
        return "columns are not whole groups" if self.group and inputs % self.group else None

    def bytes(self, outputs: int, inputs: int, dtype: str) -> int:
        """Return the bytes of a matrix's arrays."""
        kinds = self.dtypes(DTYPES[dtype])
        return sum(a * b * kind.size for (a, b), kind in zip(self.shapes(outputs, inputs), kinds, strict=True))

    def element(self, t: str) -> str:
        """Return the element of the weights in kernel text, `t` being that of x."""
        if self.is_dense:
            return t
        packed = f"Affine<{self.bits}, {self.group}>" if self.mode == "affine" else _STRUCTS[self.mode]
        return f"Packed<{t}, {packed}>"

    def matrix(self, t: str, names: Sequence[str]) -> str:
        """Return the expression of a matrix in kernel text, from the names of its arrays."""
        if self.is_dense:
            return f"matrix_of<const device {t}>({names[0]})"
        return self.element(t).replace("Packed", "packed_matrix", 1) + f"({', '.join(names)})"

    def store(self, weights: mx.array) -> list[mx.array]:
        """Return the arrays of a matrix [N, K] in this format (lazy)."""
        if self.is_dense:
            return [weights]
        return list(mx.quantize(weights, **self._settings))

    def product(self, x: mx.array, arrays: Sequence[mx.array]) -> mx.array:
        """Return plain MLX's x @ w.T (lazy)."""
        if self.is_dense:
            return x @ arrays[0].T
        codes, scales, biases = self._taken(arrays)
        return mx.quantized_matmul(x, codes, scales, biases, transpose=True, **self._settings)

    def values(self, arrays: Sequence[mx.array], dtype: mx.Dtype) -> mx.array:
        """Return the matrix [N, K] as values of `dtype`, each rounded once (lazy)."""
        if self.is_dense:
            return arrays[0].astype(dtype)
        codes, scales, biases = self._taken(arrays)
        if biases is not None:  # the dtype of the scales is that of the result
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return mx.dequantize(codes, scales, biases, **self._settings).astype(dtype)

    def _taken(self, arrays: Sequence[mx.array]) -> tuple[mx.array, mx.array, mx.array | None]:
        return arrays[0], arrays[1], arrays[2] if self.mode == "affine" else None

    @property
    def _settings(self) -> Any:
        """The format as MLX's functions take it."""
        return {"group_size": self.group, "bits": self.bits, "mode": self.mode}


DENSE = WeightFormat("dense")


@functools.cache
def weight_format(name: str) -> WeightFormat:
    """Return the format of a name.

    Raises:
        MetileError: there is none.
    """
    if name == "dense":
        return DENSE
    if name in BLOCK_FORMATS:
        return WeightFormat(name, *BLOCK_FORMATS[name])
    found = _AFFINE.fullmatch(name)
    if found and int(found[1]) in AFFINE_BITS and int(found[2]) in AFFINE_GROUPS:
        return WeightFormat("affine", int(found[1]), int(found[2]))
    expected = f"dense, {', '.join(BLOCK_FORMATS)} or affine with one of {AFFINE_BITS} bits, such as affine4g64"
    raise mismatch("weights", expected, repr(name))
