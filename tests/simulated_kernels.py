"""Kernels for tests: made in one line, and run with a thread for each element of the output."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from metile.simulator import MetalKernel, metal_kernel

I = "uint i = thread_position_in_grid.x;\n"  # noqa: E741
COPY = I + "y[i] = x[i];"


def make(source: str, inputs: str = "x", outputs: str = "y", **options: Any) -> MetalKernel:
    name = options.pop("name", "k")
    return metal_kernel(name, inputs.split(), outputs.split(), source, **options)


def run(kernel: MetalKernel, *inputs: Any, like: Any = None, **options: Any) -> mx.array:
    """Run a kernel of one output, a thread for each of its elements."""
    like = inputs[0] if like is None else like
    given = {
        "inputs": list(inputs),
        "output_shapes": [like.shape],
        "output_dtypes": [like.dtype],
        "grid": (max(like.size, 1), 1, 1),
        "threadgroup": (32, 1, 1),
    }
    return kernel(**{**given, **options})[0]


def same(got: mx.array, want: mx.array) -> bool:
    return got.dtype == want.dtype and got.shape == want.shape and mx.array_equal(got, want, equal_nan=True).item()
