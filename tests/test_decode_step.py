"""Decode steps that MLX repeats, on a target whose kernels are nodes of MLX's graph, as those of a GPU are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama, qwen2
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from metile.decode_step import StepState
from metile.dispatch import Plan
from metile.handle import Handle
from metile.instances import state_of
from metile.models import find
from metile.ops.attention import AttentionKey
from metile.patch import apply
from metile.step_cache import StepCache, UntraceableError
from metile.targets.base import KernelSource, Limits, Output

LIMITS = Limits(32, 255, 232448, ("bfloat16", "float16"), 16, 1024, True, True, 65536)


class GraphKernel:
    """Attention of one query in plain MLX, as a kernel would be told to compute it."""

    def __init__(self, source: KernelSource) -> None:
        self.source, self.launches = source, 0

    def __call__(
        self,
        inputs: Sequence[mx.array],
        outputs: Sequence[Output],
        *,
        groups: int,
        numbers: Sequence[int] = (),
        poison: bool = False,
    ) -> list[mx.array]:
        self.launches += 1
        given = dict(zip(self.source.inputs, inputs, strict=True))
        known = dict(zip(self.source.numbers, numbers, strict=True))
        q, k, v = given["q"], given["k"], given["v"]
        if q.ndim == 3:
            q = q.reshape(q.shape[0], 1, known["heads"], -1).transpose(0, 2, 1, 3)
        count = given.get("count", mx.array([known["tokens"] or k.shape[2]]))
        mask = mx.arange(k.shape[2]) < count
        scale = np.array([known["scale"]], np.int32).view(np.float32).item()
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask[None])
        rest = [mx.zeros(output.shape, output.dtype) for output in outputs[1:]]
        return [y.transpose(0, 2, 1, 3).reshape(outputs[0].shape), *rest]

    def bind(
        self, outputs: Sequence[Output], *, groups: int, numbers: Sequence[int] = ()
    ) -> Callable[[Sequence[mx.array]], list[mx.array]]:
        return lambda inputs: self(inputs, outputs, groups=groups, numbers=numbers)


class GraphTarget:
    """A target of such kernels."""

    name, timed, limits = "cuda", True, LIMITS

    def __init__(self) -> None:
        self.kernels: list[GraphKernel] = []

    def chip(self) -> str:
        return "a graph"

    def prepare(self, weights: Any) -> int:
        return 0

    def expect(self, weights: Any) -> None:
        pass

    def compile(self, source: KernelSource) -> GraphKernel:
        self.kernels.append(GraphKernel(source))
        return self.kernels[-1]


SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 61,
    "tie_word_embeddings": True,
}


def make_model(kind: str = "llama") -> nn.Module:
    mx.random.seed(3)
    module = {"llama": llama, "qwen2": qwen2}[kind]
    model: nn.Module = module.Model(module.ModelArgs(model_type=kind, **SIZES, max_position_embeddings=512))
    model.eval()
    mx.eval(model.parameters())
    return model


def patched(model: nn.Module) -> tuple[Handle, GraphTarget]:
    target, found = GraphTarget(), find(model)
    choices = {key: key.space(LIMITS)[0] for _, key in found.keys([1], 256) if isinstance(key, AttentionKey)}
    return apply(model, Plan("cuda", frozenset({"attention"}), choices), target), target  # type: ignore[arg-type]


def decode(model: Any, tokens: Sequence[int], cache: list[Any], batch: int = 1) -> mx.array:
    """Return the logits of each token, one after another."""
    steps = [model(mx.array([[token]] * batch), cache=cache)[:, 0] for token in tokens]
    mx.eval(steps)
    return mx.stack(steps)


def begun(model: Any, length: int = 5, batch: int = 1) -> list[Any]:
    cache: list[Any] = make_prompt_cache(model)
    mx.eval(model(mx.arange(length * batch).reshape(batch, length) % 61, cache=cache))
    return cache


TOKENS = [7, 3, 50, 12, 60, 1, 0, 33]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("batch", [1, 3])
def test_steps_give_what_the_model_gives(kind: str, batch: int) -> None:
    model = make_model(kind)
    cache = begun(model, batch=batch)
    expected, kept = decode(model, TOKENS, cache, batch), [mx.array(layer.keys) for layer in cache]
    handle, target = patched(model)
    cache = begun(model, batch=batch)
    handle.reset_engaged()
    got = decode(model, TOKENS, cache, batch)
    assert mx.allclose(got, expected, atol=1e-4)
    assert [layer.offset for layer in cache] == [5 + len(TOKENS)] * 2
    for layer, keys in zip(cache, kept, strict=True):
        assert layer.keys.shape == keys.shape
        assert mx.allclose(layer.keys[:, :, : layer.offset], keys[:, :, : layer.offset], atol=1e-5)
    # Two tokens run in Python, the second of them traced as well; the others are repeated, and counted.
    assert sum(kernel.launches for kernel in target.kernels) == 2 * (2 + 1)
    assert handle.engaged()["attention"] == 2 * (len(TOKENS) + 1)
    assert not handle.declined
    handle.restore()
    assert type(model) is {"llama": llama, "qwen2": qwen2}[kind].Model
    assert mx.allclose(decode(model, TOKENS, begun(model, batch=batch), batch), expected, atol=1e-5)


def test_steps_follow_a_cache_that_grows() -> None:
    model = make_model()
    tokens = [index % 61 for index in range(12)]
    expected = decode(model, tokens, begun(model, 250))
    handle, _ = patched(model)
    cache = begun(model, 250)
    assert mx.allclose(decode(model, tokens, cache), expected, atol=1e-4)
    assert cache[0].keys.shape[2] == 512
    assert len(step_of(model).steps) == 2
    handle.restore()


def step_of(model: nn.Module) -> StepState:
    state = state_of(model)
    assert isinstance(state, StepState)
    return state


def test_two_sequences_may_be_built_before_either_runs() -> None:
    model = make_model()
    expected = [decode(model, TOKENS, begun(model, length)) for length in (4, 9)]
    patched(model)
    decode(model, TOKENS, begun(model))
    caches = [begun(model, length) for length in (4, 9)]
    steps: list[list[mx.array]] = [[], []]
    for token in TOKENS:
        for side, cache in zip(steps, caches, strict=True):
            side.append(model(mx.array([[token]]), cache=cache)[:, 0])
    mx.eval(steps)
    for side, wanted in zip(steps, expected, strict=True):
        assert mx.allclose(mx.stack(side), wanted, atol=1e-4)


def test_a_changed_weight_is_seen() -> None:
    model: Any = make_model()
    patched(model)
    cache = begun(model)
    decode(model, TOKENS[:4], cache)
    assert step_of(model).steps
    model.model.layers[1].mlp.gate_proj.weight = model.model.layers[1].mlp.gate_proj.weight * 2
    got = decode(model, TOKENS[4:], cache)
    other: Any = make_model()
    fresh = begun(other)
    decode(other, TOKENS[:4], fresh)
    other.model.layers[1].mlp.gate_proj.weight = other.model.layers[1].mlp.gate_proj.weight * 2
    assert mx.allclose(got, decode(other, TOKENS[4:], fresh), atol=1e-4)


def test_a_weight_that_changes_while_another_shape_decodes_is_seen() -> None:
    model: Any = make_model()
    patched(model)
    cache, pair = begun(model), begun(model, batch=2)
    decode(model, TOKENS[:4], cache)
    decode(model, TOKENS[:1], pair, batch=2)
    model.model.norm.weight = model.model.norm.weight * 3
    decode(model, TOKENS[1:4], pair, batch=2)  # traced anew, with other weights than the first
    other: Any = make_model()
    fresh = begun(other)
    decode(other, TOKENS[:4], fresh)
    other.model.norm.weight = other.model.norm.weight * 3
    assert mx.allclose(decode(model, TOKENS[4:], cache), decode(other, TOKENS[4:], fresh), atol=1e-4)


@pytest.mark.parametrize("change", ["module", "number", "training", "list"])
def test_what_a_trace_takes_for_constant_is_looked_at(change: str) -> None:
    model: Any = make_model()
    patched(model)
    decode(model, TOKENS[:4], begun(model))
    state = step_of(model)
    assert state._unchanged(model)
    layer = model.model.layers[0]
    if change == "module":
        layer.mlp.up_proj = nn.Linear(256, 96, bias=False)
    elif change == "number":
        layer.self_attn.scale = 0.5
    elif change == "training":
        layer.mlp.train()
    else:
        model.model.layers[0] = model.model.layers[1]
    assert not state._unchanged(model)


def test_what_is_no_step_runs_the_model() -> None:
    model: Any = make_model()
    plain = make_model()
    _, target = patched(model)
    decode(model, TOKENS[:4], begun(model))
    launches = [kernel.launches for kernel in target.kernels]
    rotating = [RotatingKVCache(64) for _ in range(2)]
    assert mx.allclose(decode(model, [5, 6], rotating), decode(plain, [5, 6], [RotatingKVCache(64) for _ in range(2)]), atol=1e-4)  # noqa: E501  # fmt: skip
    assert mx.allclose(model(mx.array([[5]])), plain(mx.array([[5]])), atol=1e-4)  # type: ignore[operator]
    uneven = begun(model)
    uneven[1].offset -= 1
    assert mx.isfinite(model(mx.array([[5]]), cache=uneven)).all()
    assert [kernel.launches for kernel in target.kernels][: len(launches)] != launches
    with pytest.raises(TypeError):
        model(mx.array([[5]]), begun(model), None, None, None)

    def loss(x: mx.array) -> mx.array:
        return model(mx.array([[5]]), cache=begun(model)).sum() * x

    assert mx.isfinite(mx.grad(loss)(mx.array(2.0)))


def test_a_model_that_looks_at_numbers_is_left_alone() -> None:
    class Looking(llama.Model):  # type: ignore[misc]
        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            if cache is not None and int(cache[0].offset) > 1 << 30:
                raise AssertionError
            return super().__call__(inputs, cache=cache)  # type: ignore[no-any-return]

    mx.random.seed(3)
    model = Looking(llama.ModelArgs(model_type="llama", **SIZES, max_position_embeddings=512))
    model.eval()
    expected = decode(model, TOKENS, begun(model))
    handle, _ = patched(model)
    assert mx.allclose(decode(model, TOKENS, begun(model)), expected, atol=1e-4)
    assert [item.reason for item in handle.declined if "decode step cannot be traced" in item.reason]
    assert type(model) is Looking


def test_a_step_that_gives_other_logits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    expected = decode(model, TOKENS, begun(model))
    handle, _ = patched(model)
    monkeypatch.setattr(StepCache, "update_and_fetch", lambda self, k, v: (self.keys * 3, self.values * 3))
    assert mx.allclose(decode(model, TOKENS, begun(model)), expected, atol=1e-4)
    assert [item.reason for item in handle.declined] == ["its traced decode step gives other logits"]


def test_a_layer_that_attends_by_plain_mlx_is_no_step() -> None:
    model: Any = make_model()
    handle, _ = patched(model)
    state_of(model.model.layers[1].self_attn).op = None  # as if nothing had been decided for it
    expected = decode(make_model(), TOKENS, begun(make_model()))
    assert mx.allclose(decode(model, TOKENS, begun(model)), expected, atol=1e-4)
    assert "a layer attends by plain MLX" in handle.declined[-1].reason


def test_masks_that_depend_on_the_context_cannot_be_traced() -> None:
    cache = StepCache(*[mx.zeros((1, 1, 8, 4))] * 2, mx.array([3]), mx.array([4]), mx.zeros((1,), mx.uint32), 4)  # type: ignore[arg-type]
    assert cache.make_mask(1) is None  # type: ignore[func-returns-value]
    for arguments in ({"N": 2}, {"N": 1, "window_size": 4}, {"N": 1, "return_array": True}):
        with pytest.raises(UntraceableError):
            cache.make_mask(**arguments)  # type: ignore[arg-type]
    keys, values = cache.update_and_fetch(mx.ones((1, 1, 1, 4)), 2 * mx.ones((1, 1, 1, 4)))
    assert keys[0, 0, :, 0].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert values[0, 0, :, 0].tolist() == [0, 0, 0, 2, 0, 0, 0, 0]


def test_no_step_where_kernels_run_when_they_are_called() -> None:
    model = make_model()
    target = GraphTarget()
    target.name = "cpu"
    found = find(model)
    choices = {key: key.space(LIMITS)[0] for _, key in found.keys([1], 256) if isinstance(key, AttentionKey)}
    apply(model, Plan("cpu", frozenset({"attention"}), choices), target)  # type: ignore[arg-type]
    assert state_of(model) is None
    assert isinstance(begun(model)[0], KVCache)
