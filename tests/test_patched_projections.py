"""Patched attention projects in one launch where that was decided, and by its own three linears everywhere else."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers
from tiny_models import TARGET, assert_close, outputs, plan_for, tiny, tokens

from metile.dispatch import Plan
from metile.handle import Handle
from metile.models import find
from metile.ops.base import OpKey
from metile.ops.linear import LinearKey
from metile.ops.projections import ProjectionsKey
from metile.patch import apply
from metile.patched import Entry
from metile.sites import Site

KINDS = ["llama", "qwen2", "qwen3"]
NAMES = ("q_proj", "k_proj", "v_proj")
LAYERS = 2


def patched(model: nn.Module, *features: str, rows: tuple[int, ...] = (1, 2, 4, 16, 32)) -> Handle:
    return apply(model, plan_for(model, features or ("dense_projections",), rows), TARGET)


def launches(handle: Handle) -> dict[int, int]:
    """Return how often the projections were one launch, by bucket of rows."""
    keys = handle.engaged_keys().items()
    return {key.rows: count for key, count in keys if isinstance(key, ProjectionsKey) and count}


def alone(handle: Handle) -> int:
    """Return how often q, k, v and o of a model of hidden size 64 ran by themselves."""
    shapes = ((64, 64), (32, 64))
    keys = handle.engaged_keys().items()
    return sum(count for key, count in keys if isinstance(key, LinearKey) and (key.outputs, key.inputs) in shapes)


def attention_site(model: nn.Module) -> Site:
    return next(site for site in find(model).sites if site.kind == "attention")


def close(ours: list[mx.array], theirs: list[mx.array]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b)


# ---- right results ----


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_plain_model(kind: str, dtype: mx.Dtype, batch: int) -> None:
    model = tiny(kind, dtype)
    if kind == "qwen2":
        for layer in model.model.layers:
            for name in NAMES:
                shape = layer.self_attn[name].bias.shape
                layer.self_attn[name].bias = mx.random.normal(shape, key=mx.random.key(len(name))).astype(dtype)
    expected = outputs(model, batch)
    with patched(model) as handle:
        close(outputs(model, batch), expected)
        # a prompt of nine, two tokens, a prompt of eleven
        wanted = {1: {16: 2, 1: 2}, 2: {32: 2, 2: 2}}[batch]
        assert launches(handle) == {rows: LAYERS * count for rows, count in wanted.items()}
        assert alone(handle) == 4 * LAYERS  # o, which is as large as q
        counts = handle.engaged()
        assert list(counts) == ["dense_projections"]
        assert counts["dense_projections"] == sum(handle.engaged_keys().values())
        assert not any("raised" in reason for reasons in handle.passed().values() for reason in reasons)
    for ours, theirs in zip(outputs(model, batch), expected, strict=True):
        assert mx.array_equal(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_among_all_features(kind: str) -> None:
    model = tiny(kind, mx.bfloat16, **({"hidden_size": 256} if kind == "qwen2" else {"head_dim": 64}))
    expected = outputs(model)
    with patched(model, "attention", "dense_projections", "graph_fusion", "dense_mlp", "rms_norm") as handle:
        close(outputs(model), expected)
        assert launches(handle) == {16: 2 * LAYERS, 1: 2 * LAYERS}
        assert handle.engaged()["attention"] > 0
        kept = {kept.path: kept.feature for kept in handle.kept}
        assert kept["model.layers.0.self_attn"] == "attention"


def test_a_model_of_unequal_inputs_and_outputs() -> None:
    model = tiny("llama", hidden_size=48, num_attention_heads=3, num_key_value_heads=1, head_dim=24)
    (key,) = [key for _, key in attention_site(model).pairs([1]) if isinstance(key, ProjectionsKey)]
    assert key == ProjectionsKey(1, (72, 24, 24), 48, False, "float32")
    expected = outputs(model)
    with patched(model) as handle:
        close(outputs(model), expected)
        assert launches(handle)


# ---- which kernels run ----


def test_features_say_which_kernels_a_module_has() -> None:
    model = tiny()
    site = attention_site(model)
    assert list(site.ops) == ["attention", "rope", "projections"]
    assert site.under({"attention", "dense_projections", "rms_norm"}) is site
    one, other = site.under(["attention"]), site.under(["dense_projections"])
    assert one is not None
    assert other is not None
    assert (one.feature, list(one.ops)) == ("attention", ["attention", "rope"])
    assert (other.feature, list(other.ops)) == ("dense_projections", ["projections"])
    assert site.under(["rms_norm"]) is None
    assert [feature for feature, _ in other.pairs([1])] == ["dense_projections"]
    with patched(model, "attention") as handle:
        outputs(model)
        assert launches(handle) == {}
        assert {kept.feature for kept in handle.kept} == {"attention"}
    with patched(model, "rms_norm") as handle:
        assert not any(kept.path.endswith("attn") for kept in handle.kept)


def decided(model: nn.Module, wanted: Callable[[OpKey], bool]) -> Plan:
    plan = plan_for(model, ("dense_projections",), (1, 2, 4, 16))
    return Plan(plan.target, plan.features, {key: item if wanted(key) else None for key, item in plan.choices.items()})


def test_the_launch_comes_before_the_linears_where_it_was_decided() -> None:
    model = tiny("qwen2")
    expected = outputs(model)
    with apply(model, decided(model, lambda key: key.rows == 1 or isinstance(key, LinearKey)), TARGET) as handle:
        close(outputs(model), expected)
        assert launches(handle) == {1: 2 * LAYERS}
        assert alone(handle) == (2 + 2 * 4) * LAYERS  # o of two tokens, and all four of two prompts
    with apply(model, decided(model, lambda key: isinstance(key, LinearKey)), TARGET) as handle:
        close(outputs(model), expected)
        assert launches(handle) == {}
        assert alone(handle) == 4 * 4 * LAYERS
        reasons = {item.reason for item in handle.declined if item.path.endswith("self_attn")}
        assert reasons == {"plain MLX was decided for it"}
    with apply(model, decided(model, lambda key: isinstance(key, ProjectionsKey)), TARGET) as handle:
        close(outputs(model), expected)
        assert launches(handle) == {16: 2 * LAYERS, 1: 2 * LAYERS}
        assert {kept.path for kept in handle.kept} == {f"model.layers.{n}.self_attn" for n in range(LAYERS)}
        read = {id(weight) for weight in handle.weights()}
        linears = [layer.self_attn[name] for layer in model.model.layers for name in NAMES]
        assert read == {id(linear.weight) for linear in linears}


def test_a_plan_of_before_there_were_such_launches() -> None:
    model = tiny()
    plan = plan_for(model, ("attention", "dense_projections"), (1, 16))
    choices = {key: item for key, item in plan.choices.items() if not isinstance(key, ProjectionsKey)}
    expected = outputs(model)
    with apply(model, Plan("cpu", plan.features, choices), TARGET) as handle:
        close(outputs(model), expected)
        assert launches(handle) == {}
        assert alone(handle) == 4 * 4 * LAYERS


def test_rows_without_a_decision() -> None:
    model = tiny()
    expected = model(tokens(1, 40)), model(tokens(5, 1))
    with patched(model, rows=(1, 2)) as handle:
        close([model(tokens(1, 40)), model(tokens(5, 1))], list(expected))
        assert launches(handle) == {}
        reasons = handle.passed()["dense_projections"]
        assert reasons["nothing was decided for so many rows"] == (2 * 4) * LAYERS + 1  # each linear, for itself
        model(tokens(2, 1))
        assert launches(handle) == {2: LAYERS}


def test_projections_of_two_kinds_have_no_launch() -> None:
    mixed, partly = tiny("qwen2"), tiny("qwen2")
    for layer in mixed.model.layers:
        layer.self_attn.v_proj.set_dtype(mx.float16)
    for layer in partly.model.layers:
        del layer.self_attn.k_proj["bias"]
    for model in (mixed, partly):
        assert "projections" not in attention_site(model).ops
        expected = outputs(model)
        with patched(model, "attention", "dense_projections") as handle:
            close(outputs(model), expected)
            assert launches(handle) == {}
            assert handle.engaged()["dense_projections"] > 0


# ---- what changes after patching ----


def adapted(linear: nn.Linear, model: Any, name: str) -> None:
    linear_to_lora_layers(model, LAYERS, {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": [f"self_attn.{name}"]})
    for layer in model.model.layers:
        module = layer.self_attn[name]
        module.lora_b = 0.1 * mx.random.normal(module.lora_b.shape, key=mx.random.key(3))
        module.lora_a = 0.1 * mx.random.normal(module.lora_a.shape, key=mx.random.key(4))
    model.eval()


CHANGES: dict[str, Callable[[Any, Any, str], None]] = {
    "weight": lambda linear, model, name: linear.update({"weight": 3 * linear.weight}),
    "bias": lambda linear, model, name: linear.update({"bias": linear.bias + 1}),
    "quantized": lambda linear, model, name: nn.quantize(
        model, group_size=32, class_predicate=lambda path, _: path.endswith(name)
    ),
    "adapter": adapted,
    "another linear": lambda linear, model, name: model.model.layers[0].self_attn.update(
        {name: nn.Linear(64, linear.weight.shape[0], bias=True)}
    ),
    "an array more": lambda linear, model, name: linear.__setitem__("mask", mx.zeros((3,))),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_replaced_after_the_patch_computes(change: str, name: str) -> None:
    model = tiny("qwen2")
    for layer in model.model.layers:
        layer.self_attn[name].bias = mx.random.normal(layer.self_attn[name].bias.shape, key=mx.random.key(8))
    before = outputs(model)
    handle = patched(model)
    mx.random.seed(1)
    CHANGES[change](model.model.layers[0].self_attn[name], model, name)
    ours = outputs(model)
    both = change in ("quantized", "adapter")  # else one layer of two
    assert sum(launches(handle).values()) == (0 if both else 4)
    with handle.suspended():
        close(ours, outputs(model))
    if change != "an array more":
        assert not mx.allclose(ours[0], before[0], atol=1e-3)
    assert not handle.declined or all("raised" not in item.reason for item in handle.declined)
    again = patched(model)
    assert again is not handle  # what can be patched of the model as it is now
    close(outputs(model), ours)
    again.restore()
    close(outputs(model), ours)


@pytest.mark.parametrize("name", NAMES)
def test_patching_again_takes_up_other_weights(name: str) -> None:
    model = tiny()
    plan = decided(model, lambda key: isinstance(key, ProjectionsKey))  # no linear has a patch that would tell
    handle = apply(model, plan, TARGET)
    assert apply(model, plan, TARGET) is handle
    linear = model.model.layers[1].self_attn[name]
    linear.weight = 3 * linear.weight
    with handle.suspended():
        expected = outputs(model)
    with apply(model, plan, TARGET) as again:
        assert again is not handle
        again.reset_engaged()
        close(outputs(model), expected)
        assert launches(again) == {16: 2 * LAYERS, 1: 2 * LAYERS}


@pytest.mark.parametrize("part", [None, *NAMES])
def test_training_takes_the_plain_path_and_eval_comes_back(part: str | None) -> None:
    model = tiny()
    expected = outputs(model)
    with patched(model) as handle:
        for layer in model.model.layers:
            (layer.self_attn[part] if part else model).train()
        close(outputs(model), expected)
        assert launches(handle) == {}
        model.eval()
        close(outputs(model), expected)
        assert launches(handle) == {16: 2 * LAYERS, 1: 2 * LAYERS}


def test_a_linear_that_is_left_to_plain_mlx() -> None:
    model = tiny()
    expected = outputs(model)
    with patched(model) as handle:
        key_projection = model.model.layers[1].self_attn.k_proj
        own = apply(key_projection, handle.plan, TARGET)
        own.disable()
        close(outputs(model), expected)
        assert sum(launches(handle).values()) == 4  # of the other layer
        own.enable()
        close(outputs(model), expected)
        assert sum(launches(handle).values()) == 4 + 8
        own.restore()


def test_disabled_and_enabled() -> None:
    model = tiny()
    expected = outputs(model)
    with patched(model) as handle:
        assert patched(model) is handle
        handle.reset_engaged()  # looking for what can be patched has run some
        with handle.suspended():
            for ours, theirs in zip(outputs(model), expected, strict=True):
                assert mx.array_equal(ours, theirs)
        assert launches(handle) == {}
        close(outputs(model), expected)
        assert launches(handle)


def test_no_weight_is_kept_alive() -> None:
    model = tiny()
    handle = patched(model)
    outputs(model)
    nn.quantize(model, group_size=32)
    gc.collect()
    assert handle.weights() == []


# ---- transformations ----


def test_compiled_and_differentiated() -> None:
    model = tiny("qwen2")
    ids = tokens(1, 9)

    def loss(ids: mx.array) -> mx.array:
        return (model(ids) ** 2).mean()

    def gradients() -> Any:
        return nn.value_and_grad(model, loss)(ids)

    def by_input() -> mx.array:
        attention, x = model.model.layers[0].self_attn, mx.random.normal((1, 9, 64), key=mx.random.key(2))
        return mx.grad(lambda x: attention(x, "causal").sum())(x)  # type: ignore[no-any-return]

    expected, (value, wanted), slope = model(ids), gradients(), by_input()
    with patched(model) as handle:
        close([mx.compile(lambda ids: model(ids))(ids)], [expected])
        assert mx.allclose(by_input(), slope, rtol=1e-4, atol=1e-6)
        assert launches(handle) == {}
        assert handle.passed()["dense_projections"]["a transformation traces its input"] > 0
        close([model(ids)], [expected])
        assert launches(handle) == {16: LAYERS}
        handle.reset_engaged()
        got, found = gradients()  # with respect to the weights, of which it leaves copies
        assert_close(got, value)
        for (name, ours), (_, theirs) in zip(tree_flatten(found), tree_flatten(wanted), strict=True):
            assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-6), name
        close([model(ids)], [expected])
        assert launches(handle) == {}


# ---- kernels that raise ----


@pytest.mark.parametrize("where", ["launch", "source"])
def test_a_kernel_that_raises_costs_its_own_step_only(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    expected = outputs(model)
    handle = patched(model, "attention", "dense_projections")

    def raising(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no more threads\nand more")

    monkeypatch.setattr(ProjectionsKey, where, raising)
    cache = make_prompt_cache(model)
    close([model(tokens(1, 11)[:, :9], cache=cache)], expected[:1])
    assert [each.offset for each in cache] == [9, 9]
    failed = {item.path: item.reason for item in handle.declined if "raised" in item.reason}
    reason = "a kernel raised RuntimeError: no more threads"
    assert failed == {f"model.layers.{n}.self_attn": reason for n in range(LAYERS)}
    assert handle.passed()["attention"]["a kernel raised"] == LAYERS
    assert alone(handle) == 4 * LAYERS  # each linear by its own kernel
    monkeypatch.undo()
    handle.enable()  # what failed stays plain
    close(outputs(model), expected)
    assert launches(handle) == {}
    handle.restore()
    close(outputs(model), expected)


def test_a_launch_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    handle = patched(model)
    model(tokens(1, 1))
    planned: list[OpKey] = []
    real = ProjectionsKey.launch
    monkeypatch.setattr(ProjectionsKey, "launch", lambda key, *a, **n: planned.append(key) or real(key, *a, **n))
    cache = make_prompt_cache(model)
    for _ in range(3):
        model(tokens(1, 1), cache=cache)
    assert planned == []
    entries = [entry for entry in vars(handle)["_runtime"].entries.values() if isinstance(entry.key, ProjectionsKey)]
    assert [type(entry) for entry in entries] == [Entry]  # layers share it
    model(tokens(2, 1))
    assert {key.rows for key in planned} == {2}
    handle.restore()
