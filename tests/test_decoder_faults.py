"""Patched attention and layers under transformations, adapters, changed modules and kernels that raise."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.models.rope_utils import YarnRoPE
from mlx_lm.tuner.utils import linear_to_lora_layers
from test_patched_decoder import attended, patched, steps, wide
from tiny_models import TARGET, assert_close, tokens

from metile.handle import Handle
from metile.ops.attention import AttentionKey
from metile.ops.linear import LinearKey
from metile.ops.norm import NormKey
from metile.ops.rope import RopeKey
from metile.patched import Entry

TRACED = "a transformation traces its input"
ERROR = RuntimeError("no more threads\nand more")


def outputs(model: Any) -> list[mx.array]:
    return steps(model, [17, 1, 1], make_prompt_cache(model))


def close(ours: list[mx.array], theirs: list[mx.array]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b)


# ---- adapters ----


def adapt(model: nn.Module, key: str) -> None:
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": [key]})
    for path, module in model.named_modules():
        if hasattr(module, "lora_b"):
            module.lora_a = 0.1 * mx.random.normal(module.lora_a.shape, key=mx.random.key(len(path)))
            module.lora_b = 0.1 * mx.random.normal(module.lora_b.shape, key=mx.random.key(1 + len(path)))
    model.eval()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("key", ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj"])
def test_adapters(key: str, when: str) -> None:
    model, reference = wide(), wide()
    adapt(reference, key)
    expected = outputs(reference)
    if when == "before":
        adapt(model, key)
    handle = patched(model)
    if when == "after":
        adapt(model, key)
    close(outputs(model), expected)
    assert handle.engaged()["graph_fusion"] > 0
    assert ("attention" in {kept.feature for kept in handle.kept}) == (when == "after" or key.startswith("mlp"))
    if when == "after" and "proj" in key[10:] and key != "self_attn.q_proj":
        assert handle.engaged()["attention"] > 0  # it runs between whatever projections there are
    handle.restore()
    close(outputs(model), expected)


# ---- what changes after patching ----


def test_replaced_weights_and_numbers_take_the_plain_path() -> None:
    model = wide()
    handle = patched(model, "attention", "graph_fusion")
    one, two = model.model.layers
    one.post_attention_layernorm.eps = 0.5
    two.input_layernorm.weight = 3 * two.input_layernorm.weight
    one.self_attn.scale = 0.5
    two.self_attn.q_proj.weight = 2 * two.self_attn.q_proj.weight
    ours = model(tokens(1, 1))
    assert handle.passed() == {
        "attention": {"its scale was changed": 1, "its weights were replaced": 1},
        "graph_fusion": {"its eps was changed": 1, "its weights were replaced": 1},
    }
    handle.restore()
    assert mx.array_equal(ours, model(tokens(1, 1)))


@pytest.mark.parametrize("change", ["scale", "module", "frequencies"])
def test_a_rope_that_turns_by_other_angles(change: str) -> None:
    model = wide()
    for layer in model.model.layers:
        layer.self_attn.rope = YarnRoPE(64)
    handle = patched(model, "attention")
    outputs(model)
    before = {key: count for key, count in handle.engaged_keys().items() if isinstance(key, RopeKey)}
    assert any(before.values())
    for layer in model.model.layers:
        if change == "scale":
            layer.self_attn.rope.mscale = 1.5
        elif change == "module":
            layer.self_attn.rope = nn.RoPE(64, base=100.0)
        else:
            layer.self_attn.rope._freqs = 2 * layer.self_attn.rope._freqs
    ours = outputs(model)
    after = handle.engaged_keys()
    assert {key: after[key] for key in before} == before
    handle.restore()
    close(ours, outputs(model))


def test_a_block_that_was_exchanged_is_called_as_it_is() -> None:
    model = wide()
    handle = patched(model)
    model.model.layers[0].mlp = nn.Linear(64, 64)
    nn.quantize(model.model.layers[1].mlp, group_size=32)
    ours = outputs(model)
    assert handle.passed()["dense_mlp"] == {"its weights were replaced": 3}  # counted once a call
    handle.restore()
    close(ours, outputs(model))


# ---- calls of every form ----


def test_arguments_by_place_and_by_name() -> None:
    model = wide()
    layer, x = model.model.layers[0], mx.random.normal((1, 17, 64))
    expected = layer(x, "causal", KVCache())
    handle = patched(model)
    for arguments, named in (
        ((x, "causal", KVCache()), {}),
        ((x, "causal"), {"cache": KVCache()}),
        ((x,), {"cache": KVCache(), "mask": "causal"}),
    ):
        assert_close(layer(*arguments, **named), expected)
    assert_close(layer(x=x, mask="causal"), expected)  # not a call that a kernel takes
    for arguments, named in (((x, "causal"), {"mask": "causal"}), ((x, None, None, 1), {}), ((x,), {"positions": 1})):
        for module in (layer, layer.self_attn):
            with pytest.raises(TypeError):
                module(*arguments, **named)
    assert not handle.declined


def test_odd_inputs() -> None:
    model = wide(dtype=mx.bfloat16)
    layer, x = model.model.layers[0], mx.random.normal((1, 2, 64))  # of another dtype than the weights
    expected = layer(x), layer.self_attn(x)
    handle = patched(model, "attention", "graph_fusion")
    for ours, theirs in zip((layer(x), layer.self_attn(x)), expected, strict=True):
        assert mx.array_equal(ours, theirs)
        assert ours.dtype == mx.float32
    for shape in ((1, 0, 64), (0, 1, 64), (1, 2, 63), (2, 64)):  # plain MLX refuses them, and still does
        for module in (layer, layer.self_attn):
            with pytest.raises(ValueError, match=r"reshape|matmul|rms_norm|unpack"):
                module(mx.zeros(shape, mx.bfloat16))
    assert set(handle.engaged().values()) == {0}
    assert not handle.declined


# ---- transformations ----


def test_training_takes_the_plain_path() -> None:
    model = wide()
    handle = patched(model)
    model.train()
    model(tokens())
    assert set(handle.engaged().values()) == {0}
    assert handle.passed()["attention"] == {"the module is in training mode": 2}
    assert handle.passed()["graph_fusion"] == {"the module is in training mode": 2}


@pytest.mark.parametrize("trained", ["", "self_attn.k_proj", "self_attn.v_proj", "post_attention_layernorm"])
def test_gradients_of_some_weights(trained: str) -> None:
    """Where one projection alone is trained, the layer's input is ordinary and only its keys are traced."""
    model = wide()
    ids = tokens(2, 18)
    if trained:
        model.freeze()
        for layer in model.model.layers:
            layer.apply_to_modules(lambda path, module: module.unfreeze() if path == trained else None)

    def loss() -> mx.array:  # of no argument: MLX would give all weights of a model that is one anew
        return nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:]).mean()

    value, expected = nn.value_and_grad(model, loss)()
    handle = patched(model)
    ours, gradients = nn.value_and_grad(model, loss)()
    assert_close(ours, value)
    assert len(tree_flatten(gradients)) > 0
    for (name, a), (_, b) in zip(tree_flatten(gradients), tree_flatten(expected), strict=True):
        assert mx.abs(b).max() > 0
        assert mx.allclose(a, b, atol=1e-6), name
    assert not handle.declined
    if trained.startswith("self_attn"):
        assert handle.passed()["attention"] == {TRACED: 2}


def test_gradients_of_a_cache() -> None:
    model = wide()
    shape = (1, 2, 5, 64)
    prefix = [mx.random.normal(shape, key=mx.random.key(n)) for n in range(2)]

    def loss(keys: mx.array, values: mx.array) -> mx.array:
        caches = [KVCache() for _ in model.layers]
        for cache in caches:
            cache.update_and_fetch(keys, values)
        return model(tokens(1, 1), cache=caches).square().sum()

    for argument in (0, 1):
        gradient = mx.grad(loss, argnums=argument)
        expected = gradient(*prefix)
        handle = patched(model)
        ours = gradient(*prefix)
        assert mx.abs(expected).max() > 0
        assert_close(ours, expected)
        assert handle.passed()["attention"][TRACED] > 0
        handle.restore()


def test_compiled_over_a_cache() -> None:
    model = wide()
    ids = tokens(1, 1)
    plain = make_prompt_cache(model)
    model(tokens(1, 9), cache=plain)
    expected = [model(ids, cache=plain) for _ in range(2)]
    cache = make_prompt_cache(model)
    handle = patched(model)
    model(tokens(1, 9), cache=cache)

    def step(keys: list[mx.array]) -> mx.array:  # the input is a constant: the cache alone is traced
        for layer, held in zip(cache, keys, strict=True):
            layer.keys = held
        return model(ids, cache=cache)

    ours = mx.compile(step)([layer.keys for layer in cache])
    assert_close(ours, expected[0])
    assert not handle.declined
    assert_close(mx.compile(lambda ids: model(ids))(ids), model(ids))
    assert handle.passed()["attention"][TRACED] > 0
    assert handle.passed()["graph_fusion"][TRACED] > 0


def test_vmap_over_a_layer() -> None:
    model = wide()
    layer, x = model.model.layers[0], mx.random.normal((3, 1, 4, 64))
    expected = mx.stack([layer(each, "causal") for each in x])
    patched(model)
    assert_close(mx.vmap(lambda x: layer(x, "causal"))(x), expected)


# ---- kernels that raise ----


def raising(monkeypatch: pytest.MonkeyPatch, cls: type, method: str, wanted: Any) -> None:
    real = getattr(cls, method)

    def launch(self: Any, *arguments: Any, **named: Any) -> Any:
        if wanted(self):
            raise ERROR
        return real(self, *arguments, **named)

    monkeypatch.setattr(cls, method, launch)


FAULTS = {
    "attention": (AttentionKey, "attend", lambda key: True),
    "attention of decode": (AttentionKey, "attend", lambda key: key.rows == 1),
    "compilation of attention": (AttentionKey, "source", lambda key: True),
    "sum and norm": (NormKey, "launch", lambda key: key.add),
    "compilation of the norm": (NormKey, "source", lambda key: key.add),
    "residual": (LinearKey, "launch", lambda key: key.epilogue == "residual"),
    "compilation of swiglu": (LinearKey, "source", lambda key: key.epilogue == "swiglu"),
    "swiglu": (LinearKey, "launch", lambda key: key.epilogue == "swiglu"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_that_raises_costs_its_own_step_only(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide()
    expected = outputs(model)
    handle = patched(model)
    raising(monkeypatch, *FAULTS[fault])
    cache = make_prompt_cache(model)
    close(steps(model, [17, 1, 1], cache), expected)
    assert [each.offset for each in cache] == [19, 19]
    failed = failures(handle)
    assert set(failed.values()) == {"a kernel raised RuntimeError: no more threads"}
    ending = {"attention": ".self_attn", "swiglu": ".mlp"}
    suffix = next((end for word, end in ending.items() if word in fault), "")
    assert list(failed) == [f"model.layers.{n}{suffix}" for n in range(2)]  # each once
    handle.enable()
    close(outputs(model), expected)
    assert failures(handle) == failed
    handle.restore()
    close(outputs(model), expected)


def failures(handle: Handle) -> dict[str, str]:
    found = [item for item in handle.declined if "raised" in item.reason]
    assert len({item.path for item in found}) == len(found)
    return {item.path: item.reason for item in found}


def test_one_failing_layer_leaves_the_others_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide()
    expected = outputs(model)
    handle = patched(model, "attention")
    calls: list[int] = []

    def fourth(entry: Entry) -> bool:  # of layer 1, in the first decode step
        if entry.key.family == "attention":
            calls.append(1)
        return entry.key.family == "attention" and len(calls) == 4

    raising(monkeypatch, Entry, "run_bound", fourth)
    close(outputs(model), expected)
    assert list(failures(handle)) == ["model.layers.1.self_attn"]
    assert attended(handle) == 4
    assert handle.passed()["attention"] == {"a kernel raised": 1}
    assert TARGET.name == handle.plan.target
