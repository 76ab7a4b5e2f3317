"""Small random models of mlx-lm's own classes, and plans that put a kernel wherever one fits."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from metile.dispatch import FEATURES, Plan
from metile.handle import Handle
from metile.models import find
from metile.ops.base import OpKey
from metile.patch import apply
from metile.targets import choose_target

TARGET = choose_target("cpu")

# Largest error of logits, relative to the largest of them: a few roundings a layer.
TOLERANCES = {mx.float32: 1e-5, mx.float16: 5e-3, mx.bfloat16: 4e-2}

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 131,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
_EXTRA: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16, "rope_theta": 1e4, "max_position_embeddings": 512},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 64, "sliding_window_pattern": 2},
    "phi3": {"rope_theta": 1e4, "max_position_embeddings": 512},
    "olmo2": {"head_dim": 16},
}
_ROWS = (1, 2, 4, 8, 16, 32, 64)
_NO_TIE = {"gemma2", "gemma3_text"}


def tiny(
    kind: str = "llama", dtype: mx.Dtype = mx.float32, *, tied: bool = False, seed: int = 0, **changes: Any
) -> Any:
    """Return a model that is ready for inference, with weights of a scale that makes logits differ."""
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    arguments = _COMMON | {"model_type": kind} | _EXTRA.get(kind, {}) | changes
    if kind not in _NO_TIE:
        arguments["tie_word_embeddings"] = tied
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs(**arguments))
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    return model


def plan_for(model: nn.Module, features: Iterable[str] = FEATURES, rows: Iterable[int] = _ROWS) -> Plan:
    """Return a plan with the default candidate at every key the model meets."""
    keys = dict.fromkeys(key for _, key in find(model).keys(rows))
    return Plan("cpu", frozenset(features), {key: _default(key) for key in keys})


@functools.cache
def _default(key: OpKey) -> Any:
    return next(iter(key.space(TARGET.limits)), None)


def tokens(batch: int = 1, length: int = 9, seed: int = 1) -> mx.array:
    """Return random tokens of the models' vocabulary."""
    return mx.random.randint(0, _COMMON["vocab_size"], (batch, length), key=mx.random.key(seed))


def assert_close(actual: mx.array, expected: mx.array) -> None:
    """Check shape, dtype and, within the dtype's tolerance, values."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCES[expected.dtype]
    actual, expected = actual.astype(mx.float32), expected.astype(mx.float32)
    error = mx.abs(actual - expected).max().item()
    assert error <= tolerance * max(mx.abs(expected).max().item(), 1e-6), error


def patched(model: nn.Module, *features: str) -> Handle:
    """Run kernels wherever they fit, or in `features` only."""
    plan = plan_for(model)
    return apply(model, plan.only(features) if features else plan, TARGET)


def outputs(model: Any, batch: int = 1) -> list[mx.array]:
    """Return logits of a prompt, of two tokens after it with a cache, and of a prompt without one."""
    cache = make_prompt_cache(model)
    ids = tokens(batch, 11)
    found = [model(ids[:, :9], cache=cache)]
    found += [model(ids[:, i : i + 1], cache=cache) for i in (9, 10)]
    found.append(model(ids))
    mx.eval(found)
    return found
