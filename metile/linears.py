"""What a linear layer or an embedding holds: dense weights, or the codes, scales and biases of a quantized matrix."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metile.errors import MetileError
from metile.instances import plain_class
from metile.ops.base import DTYPES, dtype_name
from metile.ops.linear import LinearKey
from metile.ops.weights import DENSE, WeightFormat, weight_format

# The arrays of a matrix, in the order in which kernels take them.
MATRIX = ("weight", "scales", "biases")

LINEARS: tuple[type, ...] = (nn.Linear, nn.QuantizedLinear)
EMBEDDINGS: tuple[type, ...] = (nn.Embedding, nn.QuantizedEmbedding)


def is_embedding(module: object) -> bool:
    """Return whether a module looks rows up in a table."""
    return isinstance(module, EMBEDDINGS)


def format_of(holder: Mapping[str, Any]) -> WeightFormat:
    """Return how the matrix of a layer is kept; of one without scales, as it is.

    Raises:
        MetileError: no kernel knows the format.
    """
    if "scales" not in holder:
        return DENSE
    mode, bits, group = (getattr(holder, name, None) for name in ("mode", "bits", "group_size"))
    return weight_format(f"affine{bits}g{group}" if mode == "affine" else str(mode))


def matrix_of(holder: Mapping[str, Any]) -> list[mx.array]:
    """Return the arrays of a layer's matrix, as kernels take them."""
    return [holder[name] for name in MATRIX if holder.get(name) is not None]


def shape_of(holder: Mapping[str, Any]) -> tuple[int, int]:
    """Return the shape [N, K] of a layer's matrix, whatever it is packed in."""
    outputs, columns = holder["weight"].shape
    kept = format_of(holder)
    return outputs, columns if kept.is_dense else columns * 32 // kept.bits


def dtype_of(holder: Mapping[str, Any]) -> mx.Dtype:
    """Return the dtype of a layer's inputs: that of its weights or scales.

    A block-scaled matrix says nothing of it: then that of its bias, or bfloat16, as the models that use them have.
    """
    arrays = (holder.get(name) for name in ("bias", "scales", "weight"))
    floats = (array.dtype for array in arrays if array is not None and array.dtype in DTYPES.values())
    return next(floats, mx.bfloat16)


def class_name(module: nn.Module) -> str:
    """Return a class's name, with its module's where the name alone would say nothing."""
    cls = plain_class(module)
    plain = cls.__name__ in ("Linear", "RMSNorm", "Embedding", "QuantizedLinear", "QuantizedEmbedding")
    return f"{cls.__name__} of {cls.__module__}" if plain else cls.__name__


def layer_fault(module: nn.Module, classes: Collection[type], what: str) -> str | None:
    """Return why `module` is not a plain instance of one of `classes` with weights that kernels take, or None."""
    cls = plain_class(module)
    if cls not in classes:
        return f"{class_name(module)} is not {what}"
    known = {"weight", "bias"} if cls in (nn.Linear, nn.Embedding, nn.RMSNorm) else {*MATRIX, "bias"}
    if extra := {name for name, value in module.items() if value is not None} - known:
        return f"{cls.__name__} holds {', '.join(sorted(extra))} besides its weights"
    weight = module.get("weight")
    if not isinstance(weight, mx.array) or not weight.size:
        return f"{cls.__name__} has no weight"
    return _quantized_fault(module) if "scales" in module else _dtypes_fault(module, ("weight", "bias"))


def _quantized_fault(module: nn.Module) -> str | None:
    try:
        kept = format_of(module)
        rows, columns = shape_of(module)
    except MetileError as error:
        return str(error)
    if reason := kept.fault(columns):
        return reason
    for name, shape in zip(MATRIX, kept.shapes(rows, columns), strict=False):
        array = module.get(name)
        if array is None or array.shape != shape:
            return f"its {name} are not of the shape {shape}"
    floats = ("scales", "biases", "bias") if kept.mode == "affine" else ("bias",)
    return _dtypes_fault(module, floats)


def _dtypes_fault(module: nn.Module, names: Collection[str]) -> str | None:
    dtypes = {module[name].dtype for name in names if module.get(name) is not None}
    if len(dtypes) > 1 or any(dtype_name(dtype) is None for dtype in dtypes):
        kinds = " and ".join(sorted(str(dtype).removeprefix("mlx.core.") for dtype in dtypes))
        return f"weights of {kinds}, not of one of bfloat16, float16 and float32"
    return None


def linear_fault(module: nn.Module) -> str | None:
    """Return why a module is not a linear layer that kernels can run, or None."""
    return layer_fault(module, LINEARS, "a plain linear")


def linear_op(module: nn.Module) -> LinearKey:
    """Return the key of a plain linear layer, or of an embedding used as one, at one row."""
    outputs, inputs = shape_of(module)
    dtype = dtype_name(dtype_of(module)) or ""
    return LinearKey("bias" if "bias" in module else "store", 1, outputs, inputs, dtype, format_of(module).name)
