"""What `mx.grad` and `mx.jvp` see of a kernel that ran at once: an operation without derivatives, as MLX's is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from metile.tracing import is_traced


def as_operation(inputs: Sequence[mx.array], outputs: list[mx.array]) -> list[mx.array]:
    """Return outputs that depend on the inputs where a transformation traces those.

    Without it the outputs would be constants, whose gradients are zero, silently. A kernel inside an
    `mx.custom_function` that has its own derivative, or behind `mx.stop_gradient`, is not asked for one.
    """
    if not inputs or not is_traced(*inputs):
        return outputs
    operation = mx.custom_function(lambda _, made: made)
    operation.vjp(_refuse("vjp"))
    operation.jvp(_refuse("jvp"))
    operation.vmap(_refuse("vmap"))
    return cast(list[mx.array], operation(list(inputs), outputs))


def _refuse(transformation: str) -> Any:
    def refuse(*_: object) -> None:
        raise ValueError(f"[Primitive::{transformation}] Not implemented for CustomKernel.")

    return refuse
