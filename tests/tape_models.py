"""What tests of decode steps on a tape share: models, their steps, and the model without tapes as the reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import tiny

from metile.handle import Handle
from metile.instances import plain_class, state_of, swap
from metile.tape_step import TapeState
from metile.targets.cpu import recorded

WIDE: dict[str, Any] = {"hidden_size": 256}  # heads of 64, which kernels of one query take


def make(kind: str = "llama", dtype: mx.Dtype = mx.float32, **changes: Any) -> Any:
    return tiny(kind, dtype, **{"tied": True, **WIDE, **changes})


def state(model: nn.Module) -> TapeState:
    found = state_of(model)
    assert isinstance(found, TapeState)
    return found


@contextmanager
def no_tapes(model: nn.Module) -> Iterator[None]:
    """Run the model's own Python, kernels and all."""
    cls = type(model)
    swap(model, plain_class(model))
    try:
        yield
    finally:
        swap(model, cls)


def ids(batch: int, length: int, seed: int = 1) -> mx.array:
    return mx.random.randint(0, 131, (batch, length), key=mx.random.key(seed))


def begun(model: Any, length: int = 5, batch: int = 1) -> list[Any]:
    cache: list[Any] = make_prompt_cache(model)
    mx.eval(model(ids(batch, length), cache=cache))
    return cache


def decode(model: Any, cache: list[Any], steps: int = 6, batch: int = 1, seed: int = 2) -> mx.array:
    """Return the logits of random tokens, one after another: [B, steps, vocabulary]."""
    tokens = ids(batch, steps, seed)
    logits = [model(tokens[:, i : i + 1], cache=cache) for i in range(steps)]
    together = mx.concatenate(logits, axis=1)
    mx.eval(together)
    return together


def python_launches(model: Any, cache: list[Any], seed: int = 3) -> int:
    """Return how many launches of a step the model's Python made: none where it ran on a tape."""
    with recorded() as launches:
        decode(model, cache, 1, cache[0].keys.shape[0], seed)
    return len(launches)


def warm(model: Any, batch: int = 1) -> None:
    decode(model, begun(model, batch=batch), 3, batch)
    assert any(shape.tape is not None for shape in state(model).shapes.values())


def same(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and bool(mx.array_equal(a, b).item())


def tape_reasons(handle: Handle) -> list[str]:
    return [item.reason for item in handle.declined if "tape" in item.reason]
