"""A patched model computes what the plain one does, with kernels where they were decided and nowhere else."""

from __future__ import annotations

import types
import weakref
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from tiny_models import TARGET, assert_close, outputs, patched, plan_for, tiny, tokens

from metile.dispatch import Plan
from metile.ops.linear import LinearKey
from metile.patch import apply
from metile.tracing import compiling

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
KINDS = [("llama", False), ("llama", True), ("qwen2", True), ("qwen3", False), ("olmo2", True)]
PARTLY = [("gemma2", True), ("gemma3_text", False), ("phi3", False)]


# ---- right results ----


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "tied"), KINDS + PARTLY)
def test_logits_are_those_of_the_plain_model(kind: str, tied: bool, dtype: mx.Dtype, batch: int) -> None:
    model = tiny(kind, dtype, tied=tied)
    expected = outputs(model, batch)
    with patched(model) as handle:
        assert handle
        for ours, theirs in zip(outputs(model, batch), expected, strict=True):
            assert_close(ours, theirs)
        engaged = handle.engaged()
    assert engaged["dense_projections"] > 0
    if (kind, tied) in KINDS:
        assert engaged["dense_mlp"] > 0
        assert engaged["rms_norm"] > 0
    for ours, theirs in zip(outputs(model, batch), expected, strict=True):
        assert mx.array_equal(ours, theirs)


@pytest.mark.parametrize("feature", ["dense_mlp", "dense_projections", "rms_norm"])
def test_a_feature_alone(feature: str) -> None:
    model = tiny("llama", mx.bfloat16)
    expected = outputs(model)
    with patched(model, feature) as handle:
        assert {kept.feature for kept in handle.kept} == {feature}
        for ours, theirs in zip(outputs(model), expected, strict=True):
            assert_close(ours, theirs)
        assert list(handle.engaged()) == [feature]
        assert handle.engaged()[feature] > 0


def test_rows_of_a_batch_equal_their_own_runs() -> None:
    model = tiny("qwen3")
    ids = tokens(3, 1)
    with patched(model):
        together = model(ids)
        for row in range(3):
            assert_close(together[row : row + 1], model(ids[row : row + 1]))


@pytest.mark.parametrize("tied", [False, True])
def test_greedy_generation_gives_the_same_tokens(tied: bool) -> None:
    model = tiny("llama", tied=tied)

    def generate() -> list[int]:
        prompts = [tokens(1, 12, seed)[0] for seed in range(3)]
        steps = [generate_step(prompt, model, max_tokens=12) for prompt in prompts]
        return [int(token) for step in steps for token, _ in step]

    plain = generate()
    with patched(model) as handle:
        assert generate() == plain
        assert all(handle.engaged()[name] > 0 for name in ("dense_mlp", "dense_projections", "rms_norm"))
    assert len(set(plain)) > 1


# ---- what takes the plain path ----


def test_only_decided_rows_run_kernels() -> None:
    model = tiny()
    plan = plan_for(model, rows=[1])
    expected = outputs(model, 1)
    with apply(model, plan, TARGET) as handle:
        model(tokens(1, 9))
        assert set(handle.engaged().values()) == {0}
        assert handle.passed()["dense_mlp"] == {"nothing was decided for so many rows": 2}
        for ours, theirs in zip(outputs(model), expected, strict=True):
            assert_close(ours, theirs)
        assert {key.rows for key in handle.engaged_keys()} == {1}


def test_plain_mlx_is_a_decision_too() -> None:
    model = tiny()
    plan = plan_for(model)
    choices = {
        key: (None if key.family == "dense_swiglu" else item)
        for key, item in plan.choices.items()
        if key.family != "rms_norm"
    }
    expected = outputs(model)
    with apply(model, Plan("cpu", plan.features - {"graph_fusion"}, choices), TARGET) as handle:
        for ours, theirs in zip(outputs(model), expected, strict=True):
            assert_close(ours, theirs)
        epilogues = {key.epilogue for key in handle.engaged_keys() if isinstance(key, LinearKey)}
        assert epilogues == {"store"}  # the down projections too
        assert "model.norm" in {item.path for item in handle.declined}


def test_logits_of_a_prompt_stay_lazy() -> None:
    for tied in (False, True):
        model = tiny(tied=tied)
        with patched(model, "dense_projections") as handle:
            model(tokens(1, 9))
            assert not any(key.outputs == 131 for key in handle.engaged_keys())
            reasons = handle.passed()["dense_projections"]
            assert reasons == {"logits of several positions are left for when they are read": 1}
            model(tokens(4, 1))
            assert [key.rows for key in handle.engaged_keys() if key.outputs == 131] == [4]


def test_training_takes_the_plain_path_and_eval_comes_back() -> None:
    model = tiny()
    with patched(model) as handle:
        model.train()
        model(tokens())
        assert set(handle.engaged().values()) == {0}
        assert set(handle.passed()["rms_norm"]) == {"the module is in training mode"}
        model.eval()
        model(tokens())
        assert handle.engaged()["rms_norm"] > 0


@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_those_of_the_plain_model(training: bool) -> None:
    model = tiny()
    ids = tokens(2, 6)

    def loss(model: Any, ids: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:]).mean()

    model.train(training)
    weights = tree_flatten(model.parameters())
    value, expected = nn.value_and_grad(model, loss)(model, ids)
    model.load_weights(weights)
    with patched(model):
        ours, gradients = nn.value_and_grad(model, loss)(model, ids)
        mx.eval(ours, gradients)
    assert_close(ours, value)
    for (name, a), (_, b) in zip(tree_flatten(gradients), tree_flatten(expected), strict=True):
        assert mx.allclose(a, b, atol=1e-6), name


def test_gradients_of_an_input() -> None:
    model = tiny()
    block = model.model.layers[0].mlp
    x = mx.random.normal((1, 3, 64))
    expected = mx.grad(lambda x: block(x).sum())(x)
    with patched(model) as handle:
        assert_close(mx.grad(lambda x: block(x).sum())(x), expected)
        assert set(handle.passed()["dense_mlp"]) == {"a transformation traces its input"}


@pytest.mark.parametrize("tied", [False, True])
def test_a_compiled_forward(tied: bool) -> None:
    model = tiny(tied=tied)
    ids = tokens(1, 1)
    expected = model(ids)
    with patched(model) as handle:
        forward = mx.compile(lambda ids: model(ids))
        for _ in range(2):
            assert_close(forward(ids), expected)
        assert_close(mx.compile(lambda ids: forward(ids) + 0)(ids), expected)
        assert not compiling() or set(handle.engaged().values()) == {0}
        assert_close(model(ids), expected)  # no trace has left anything behind
        assert handle.engaged()["dense_mlp"] > 0


def test_a_forward_compiled_over_its_state() -> None:
    model = tiny()
    ids, plan = tokens(1, 1), plan_for(model)
    expected = model(ids)
    apply(model, plan, TARGET)
    assert_close(mx.compile(model.__call__, inputs=model.state)(ids), expected)
    with apply(model, plan, TARGET) as handle:  # MLX gave the state other arrays: they are taken anew
        assert_close(model(ids), expected)
        assert handle.engaged()["dense_mlp"] > 0


def test_vmap_over_a_layer() -> None:
    model = tiny()
    layer, x = model.model.layers[0].self_attn.q_proj, mx.random.normal((3, 2, 64))
    expected = layer(x)
    with patched(model):
        assert_close(mx.vmap(layer)(x), expected)


def test_odd_inputs_take_the_plain_path() -> None:
    model = tiny(dtype=mx.bfloat16)
    layer, norm = model.model.layers[0].self_attn.q_proj, model.model.norm
    with patched(model) as handle:
        assert layer(mx.zeros((0, 64), mx.bfloat16)).shape == (0, 64)
        assert layer(mx.ones((2, 64))).dtype == mx.float32
        assert norm(mx.ones((2, 64))).dtype == mx.float32
        with pytest.raises(ValueError, match="matmul"):
            layer(mx.ones((2, 63), mx.bfloat16))
        assert not handle.engaged_keys()
        reasons = handle.passed()["dense_projections"]
        assert reasons == {"its input is empty or of another width": 2, "its input is of another dtype": 1}
        one = mx.random.normal((64,)).astype(mx.bfloat16)
        assert_close(layer(one), one @ layer.weight.T)
        assert handle.engaged()["dense_projections"] == 1


def test_layouts() -> None:
    model = tiny()
    layer, norm = model.model.layers[0].self_attn.q_proj, model.model.norm
    base = mx.random.normal((6, 128))
    views = [
        base[::-1, :64],
        base[:, ::2],
        mx.random.normal((64, 5)).T,
        base[::2, 64:],
        mx.broadcast_to(base[:1, :64], (4, 64)),
    ]
    expected = [(layer(x), norm(x)) for x in views]
    with patched(model) as handle:
        for x, (product, normed) in zip(views, expected, strict=True):
            assert_close(layer(x), product)
            assert_close(norm(x), normed)
        assert handle.engaged()["rms_norm"] == len(views)


def test_replaced_weights_take_the_plain_path() -> None:
    model = tiny()
    with patched(model) as handle:
        layer = model.model.layers[0].self_attn.q_proj
        layer.weight = layer.weight * 2
        model.model.layers[0].mlp.up_proj.weight = mx.zeros((96, 64))
        model.model.norm.eps = 0.5
        ours = model(tokens(1, 1))
        assert handle.passed()["dense_projections"] == {"its weights were replaced": 1}
        assert handle.passed()["dense_mlp"] == {"its weights were replaced": 1}
        assert handle.passed()["rms_norm"] == {"its eps was changed": 1}
    assert_close(ours, model(tokens(1, 1)))


def test_quantizing_a_patched_model_frees_and_replaces_its_weights() -> None:
    model = tiny()
    handle = patched(model)
    old = weakref.ref(model.model.layers[0].self_attn.q_proj.weight)
    nn.quantize(model, group_size=32, class_predicate=lambda path, module: "proj" in path)
    assert old() is None
    ours = model(tokens(1, 1))
    handle.restore()
    assert_close(ours, model(tokens(1, 1)))


def test_a_kernel_that_raises_leaves_its_module_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    expected = model(tokens(1, 1))
    handle = patched(model, "dense_mlp")
    good = TARGET.compile

    def bad(source: Any) -> Any:
        kernel = good(source)

        def launch(*_: Any, **__: Any) -> Any:
            raise RuntimeError("no more threads\nand more")

        return types.SimpleNamespace(source=source, bind=launch) if "swiglu" in source.name else kernel

    monkeypatch.setattr(TARGET, "compile", bad)
    for _ in range(2):
        assert_close(model(tokens(1, 1)), expected)
    assert handle.passed()["dense_mlp"] == {"a kernel raised": 2}  # once in each of two layers
    failed = [item for item in handle.declined if item.path.endswith("layers.1.mlp")]
    assert failed[0].reason == "a kernel raised RuntimeError: no more threads"
    handle.enable()  # not even on request
    assert_close(model(tokens(1, 1)), expected)
    assert handle.passed()["dense_mlp"] == {"a kernel raised": 2}
    handle.restore()
