"""Patched attention and decoder layers compute what plain ones do, over any cache, and write it once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import (
    BatchKVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
    trim_prompt_cache,
)
from tiny_models import TARGET, assert_close, plan_for, tiny, tokens

from metile.dispatch import FEATURES, Plan
from metile.handle import Handle
from metile.models import find
from metile.ops.attention import AttentionKey
from metile.ops.linear import LinearKey
from metile.patch import apply

Forward = Callable[[Any], list[mx.array]]
ROWS = (1, 2, 16, 32)  # a bucket of few queries, which no attention kernel takes, among them


def wide(kind: str = "llama", dtype: mx.Dtype = mx.float32, **changes: Any) -> Any:
    """Return a model with heads of 64, which attention kernels take."""
    size = {"hidden_size": 256} if kind == "qwen2" else {"head_dim": 64}  # qwen2's four heads share the hidden size
    return tiny(kind, dtype, **(size | changes))


def patched(model: nn.Module, *features: str) -> Handle:
    return apply(model, plan_for(model, features or FEATURES, ROWS), TARGET)


def attended(handle: Handle) -> int:
    """Return how often an attention kernel ran, rope's aside."""
    return sum(count for key, count in handle.engaged_keys().items() if isinstance(key, AttentionKey))


def steps(model: Any, sizes: Sequence[int], cache: Any, batch: int = 1) -> list[mx.array]:
    """Return the logits of consecutive chunks of one sequence over a cache."""
    ids, found, first = tokens(batch, sum(sizes)), [], 0
    for size in sizes:
        found.append(model(ids[:, first : first + size], cache=cache))
        mx.eval(found[-1])
        first += size
    return found


def compare(model: Any, forward: Forward, *features: str, exactly: bool = False) -> Handle:
    """Check what a patched model gives, and that plain MLX comes back when it is disabled; return the handle."""
    expected = forward(model)
    handle = patched(model, *features)
    assert handle
    ours = forward(model)
    handle.disable()
    again = forward(model)
    for mine, theirs, restored in zip(ours, expected, again, strict=True):
        assert mx.array_equal(restored, theirs)
        if exactly:
            assert mx.array_equal(mine, theirs)
        assert_close(mine, theirs)
    return handle


# ---- right results ----


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_prefill_chunks_and_decode(kind: str, dtype: mx.Dtype, batch: int) -> None:
    def forward(model: Any) -> list[mx.array]:
        found = steps(model, [17, 16, 9, 1, 1, 3, 1], make_prompt_cache(model), batch)
        return [*found, model(tokens(batch, 11)), model(tokens(batch, 1))]

    handle = compare(wide(kind, dtype), forward)
    counts = handle.engaged()
    for feature in ("attention", "graph_fusion", "dense_mlp", "rms_norm", "dense_projections"):
        assert counts[feature] > 0, feature
    assert {key.rows for key in handle.engaged_keys() if isinstance(key, AttentionKey)} >= {1, 16}
    assert not any("raised" in reason for reasons in handle.passed().values() for reason in reasons)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (4, 2), (4, 1), (1, 1), (3, 1)])
def test_heads_that_share_keys(heads: int, shared: int, dtype: mx.Dtype) -> None:
    model = wide("llama", dtype, num_attention_heads=heads, num_key_value_heads=shared)
    handle = compare(model, lambda model: steps(model, [19, 1, 1], make_prompt_cache(model), 2), "attention")
    assert attended(handle) == 6


def test_attention_without_a_mask_looks_both_ways() -> None:
    model = wide()
    attention, x = model.model.layers[0].self_attn, mx.random.normal((2, 21, 64))
    handle = compare(model, lambda _: [attention(x), attention(x, None, None), attention(x, "causal")], "attention")
    assert attended(handle) == 3
    assert not mx.allclose(attention(x), attention(x, "causal"))


def test_a_context_that_outgrows_its_bucket() -> None:
    model = wide(num_hidden_layers=1)

    def forward(model: Any) -> list[mx.array]:
        return steps(model, [250] + [1] * 12, make_prompt_cache(model))

    expected = forward(model)
    found = find(model)
    keys = [key for context in (1, 1000) for _, key in found.keys((1, 256), context)]
    choices = {key: next(iter(key.space(TARGET.limits)), None) for key in keys if isinstance(key, AttentionKey)}
    with apply(model, Plan("cpu", frozenset({"attention"}), choices), TARGET) as handle:
        for ours, theirs in zip(forward(model), expected, strict=True):
            assert_close(ours, theirs)
        counts = {(key.rows, key.tokens): count for key, count in handle.engaged_keys().items()}
    assert counts == {(256, 256): 1, (1, 256): 6, (1, 1024): 6}
    # a plan of one bucket of context serves the others
    near = {key: item for key, item in choices.items() if key.tokens == 256}
    with apply(model, Plan("cpu", frozenset({"attention"}), near), TARGET) as handle:
        for ours, theirs in zip(forward(model), expected, strict=True):
            assert_close(ours, theirs)
        assert attended(handle) == 13


def test_greedy_generation_gives_the_same_tokens() -> None:
    model = wide("qwen3")

    def generate() -> list[int]:
        return [int(token) for token, _ in generate_step(tokens(1, 20)[0], model, max_tokens=20, prefill_step_size=16)]

    plain = generate()
    with patched(model) as handle:
        assert generate() == plain
        assert handle.engaged()["attention"] > 0
        assert handle.engaged()["graph_fusion"] > 0


# ---- caches ----


def test_a_rotating_cache_that_has_wrapped() -> None:
    def forward(model: Any) -> list[mx.array]:
        caches = [RotatingKVCache(max_size=24, keep=4) for _ in model.layers]
        return steps(model, [18] + [1] * 12 + [4, 1, 1], caches)

    handle = compare(wide(), forward, "attention")
    assert attended(handle) == 2 * (1 + 12 + 2)
    assert sum(handle.passed()["attention"].values()) == 2  # the four at once


def test_a_quantized_cache_is_left_to_plain_mlx() -> None:
    def forward(model: Any) -> list[mx.array]:
        caches = [QuantizedKVCache(group_size=32, bits=8) for _ in model.layers]
        return steps(model, [18, 1, 1], caches)

    handle = compare(wide(), forward, "attention", exactly=True)
    assert handle.passed()["attention"] == {"the cache is quantized": 6}
    assert handle.engaged()["attention"] == 0


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_that_is_an_array(additive: bool) -> None:
    seen = create_causal_mask(19, window_size=5)
    mask = mx.where(seen, 0.0, -1e9) if additive else seen
    x = mx.random.normal((2, 19, 64))
    handle = compare(wide(), lambda model: [model.model.layers[0].self_attn(x, mask)], "attention")
    assert handle.passed()["attention"] == {"the mask is an array": 1}


def test_a_batch_padded_on_the_left() -> None:
    def forward(model: Any) -> list[mx.array]:
        caches = [BatchKVCache([3, 0]) for _ in model.layers]
        first, *rest = steps(model, [18, 1, 1], caches, 2)
        return [first[:, 3:], *rest]  # the padding attends to nothing, and says nothing

    handle = compare(wide(), forward)
    assert handle.passed()["attention"] == {"the mask is an array": 6}
    assert handle.engaged()["graph_fusion"] > 0


def test_a_cache_trimmed_and_used_again() -> None:
    def forward(model: Any) -> list[mx.array]:
        cache = make_prompt_cache(model)
        found = steps(model, [20, 1, 1], cache)
        assert trim_prompt_cache(cache, 7) == 7
        found += [model(tokens(1, 16, seed=9), cache=cache), model(tokens(1, 1), cache=cache)]
        assert [each.offset for each in cache] == [32, 32]
        return found

    assert compare(wide(), forward).engaged()["attention"] > 0


def test_a_cache_filled_by_a_plain_model_goes_on_patched_and_back() -> None:
    model = wide("llama", mx.bfloat16)
    ids = tokens(1, 19)
    plain, mixed = make_prompt_cache(model), make_prompt_cache(model)
    expected = [model(ids, cache=plain), *(model(ids[:, :1], cache=plain) for _ in range(2))]
    found = [model(ids, cache=mixed)]
    with patched(model):
        found.append(model(ids[:, :1], cache=mixed))
    found.append(model(ids[:, :1], cache=mixed))
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs)


# ---- features alone and together ----


def epilogues(handle: Handle) -> set[str]:
    return {key.epilogue for key, count in handle.engaged_keys().items() if isinstance(key, LinearKey) and count}


def test_the_residual_is_added_by_the_way_down_where_the_block_is_patched() -> None:
    def forward(model: Any) -> list[mx.array]:
        return steps(model, [16, 1], make_prompt_cache(model))

    alone = compare(wide(), forward, "graph_fusion")
    assert alone.engaged() == {"graph_fusion": 4}  # a sum and its norm, in two layers, for two calls
    assert epilogues(alone) == set()
    both = compare(wide(), forward, "graph_fusion", "dense_mlp")
    assert both.engaged() == {"dense_mlp": 4, "graph_fusion": 8}
    assert epilogues(both) == {"swiglu", "residual"}
    block = compare(wide(), forward, "dense_mlp")
    assert epilogues(block) == {"swiglu", "store"}


def test_a_residual_without_a_kernel_for_the_block_above() -> None:
    model = wide()
    plan = plan_for(model, ("graph_fusion", "dense_mlp"), ROWS)
    expected = model(tokens(1, 1))
    for left_out in ("dense_swiglu", "add_rms_norm"):
        choices = {key: None if key.family == left_out else item for key, item in plan.choices.items()}
        with apply(model, Plan("cpu", plan.features, choices), TARGET) as handle:
            assert_close(model(tokens(1, 1)), expected)
            assert "residual" in epilogues(handle)
            assert not any(key.family == left_out for key in handle.engaged_keys())
