"""Patching changes one model and only that; it can be undone, switched, copied, adapted, and done twice."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from tiny_models import TARGET, assert_close, outputs, patched, plan_for, tiny, tokens

import metile
from metile.dispatch import Plan
from metile.errors import MetileError
from metile.handle import current
from metile.patch import apply


def classes(model: nn.Module) -> dict[str, type]:
    return {path: type(module) for path, module in model.named_modules()}


def contents(model: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(array)) for name, array in tree_flatten(model.parameters())]


# ---- hygiene ----


def test_restoring_brings_back_the_very_same() -> None:
    model = tiny(tied=True)
    before, held = classes(model), contents(model)
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    handle = patched(model)
    assert handle.applied
    assert classes(model) != before
    handle.restore()
    handle.restore()
    assert (classes(model), contents(model)) == (before, held)
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    assert not handle.applied
    handle.enable()
    assert classes(model) == before
    assert current(model) is None


def test_a_patched_model_looks_like_a_plain_one(tmp_path: Path) -> None:
    model = tiny("qwen2", tied=True)
    text, names, held = repr(model), [name for name, _ in model.named_modules()], contents(model)
    with patched(model):
        assert repr(model) == text
        assert [name for name, _ in model.named_modules()] == names
        assert contents(model) == held
        layer = model.model.layers[0]
        assert isinstance(layer.self_attn.q_proj, nn.Linear)
        assert isinstance(layer.mlp, type(tiny("qwen2").model.layers[0].mlp))
        model.save_weights(str(tmp_path / "patched.safetensors"))
    model.save_weights(str(tmp_path / "plain.safetensors"))
    saved = [mx.load(str(tmp_path / f"{name}.safetensors")) for name in ("patched", "plain")]
    assert list(saved[0]) == list(saved[1])
    assert all(mx.array_equal(saved[0][name], saved[1][name]) for name in saved[0])


def test_patching_twice_is_patching_once() -> None:
    model = tiny()
    before, plan = classes(model), plan_for(model)
    handle = apply(model, plan, TARGET)
    assert apply(model, plan, TARGET) is handle
    assert apply(model, plan_for(model), TARGET) is handle  # an equal plan
    assert current(model) is handle
    other = apply(model, plan.only(["rms_norm"]), TARGET)
    assert other is not handle
    assert not handle.applied
    assert {kept.feature for kept in other.kept} == {"rms_norm"}
    handle.restore()  # does not undo what took its place
    assert other.applied
    other.restore()
    assert classes(model) == before


def test_patching_again_after_new_weights_takes_them() -> None:
    model = tiny()
    plan = plan_for(model)
    first = apply(model, plan, TARGET)
    model.load_weights(tree_flatten(tiny(seed=5).parameters()))
    second = apply(model, plan, TARGET)
    assert second is not first
    ours = model(tokens(1, 1))
    assert second.engaged()["dense_mlp"] > 0
    second.restore()
    assert_close(ours, model(tokens(1, 1)))


def test_of_two_models_one_is_patched() -> None:
    one, two = tiny(), tiny(seed=7)
    before, expected = classes(two), outputs(two)
    with patched(one) as handle:
        assert classes(two) == before
        assert all(map(mx.array_equal, outputs(two), expected))
        assert set(handle.engaged().values()) == {0}
        with patched(two) as other:
            handle.restore()
            model_classes = classes(two)
            assert other.applied
            assert model_classes != before
    assert classes(two) == before


def test_a_part_may_be_patched_before_the_whole() -> None:
    model = tiny()
    before = classes(model)
    part = patched(model.model.layers[0])
    whole = patched(model)
    assert not part.applied
    part.restore()
    assert_close(model(tokens(1, 1)), tiny()(tokens(1, 1)))
    assert len(whole.kept) == 20
    whole.restore()
    assert classes(model) == before


def test_disabling_and_suspending() -> None:
    model = tiny()
    before = classes(model)
    handle = patched(model)
    handle.disable()
    assert classes(model) == before
    assert handle
    assert not handle.applied
    handle.enable()
    with handle.suspended():
        assert classes(model) == before
    assert handle.applied
    handle.disable()
    with handle.suspended():
        pass
    assert not handle.applied
    handle.restore()


def test_a_copy_is_plain_and_right() -> None:
    model = tiny(tied=True)
    before, expected = classes(model), outputs(model)
    handle = patched(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert classes(twin) == before
        assert all(map(mx.array_equal, outputs(twin), expected))
        with patched(twin) as other:
            assert len(other.kept) == len(handle.kept)
            assert_close(outputs(twin)[1], expected[1])
    assert handle.applied
    handle.restore()


def test_a_model_is_freed_with_its_handle_left_behind() -> None:
    model = tiny()
    handle, gone = patched(model), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not handle.applied
    handle.restore()


def test_a_module_without_training() -> None:
    """A module that never ran nn.Module's own set-up has no such attribute."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            self.gate, self.up = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
            self.down = nn.Linear(96, 64, bias=False)

        def __call__(self, x: mx.array) -> mx.array:
            return self.down(nn.silu(self.gate(x)) * self.up(x))

    block, x = Bare(), mx.random.normal((2, 64))
    expected = block(x)
    with patched(block) as handle:
        assert_close(block(x), expected)
        assert handle.engaged()["dense_mlp"] == 2


# ---- adapters ----


def adapt(model: nn.Module, **more: Any) -> None:
    config = {"rank": 4, "scale": 2.0, "dropout": 0.0, **more}
    linear_to_lora_layers(model, 2, config)
    for path, module in model.named_modules():
        if hasattr(module, "lora_b"):
            for name, key in zip(("lora_a", "lora_b"), mx.random.split(mx.random.key(len(path))), strict=True):
                setattr(module, name, 0.1 * mx.random.normal(module[name].shape, key=key))
    model.eval()


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_before_and_after(quantized: bool, when: str) -> None:
    model, reference = tiny(), tiny()
    keys = ["mlp.gate_proj", "self_attn.q_proj"]
    for each in (model, reference):
        if quantized:
            nn.quantize(each, group_size=32, class_predicate=lambda path, _: path.endswith("gate_proj"))
    adapt(reference, keys=keys)
    if when == "before":
        adapt(model, keys=keys)
    handle = patched(model)
    if when == "after":
        adapt(model, keys=keys)
    expected = outputs(reference)
    for ours, theirs in zip(outputs(model), expected, strict=True):
        assert_close(ours, theirs)
    if when == "before":
        reasons = {item.path: item.reason for item in handle.declined}
        assert reasons["model.layers.0.mlp.gate_proj"] == "LoRALinear is not a plain linear"
    handle.restore()
    assert all(map(mx.array_equal, outputs(model), expected))
    assert not any("_metile" in vars(module) for _, module in model.named_modules())


def test_fusing_adapters_in_a_patched_model() -> None:
    model = tiny()
    handle = patched(model)
    adapt(model, keys=["self_attn.q_proj"])
    expected = model(tokens(1, 1))
    for layer in model.model.layers:
        layer.self_attn.q_proj = layer.self_attn.q_proj.fuse()
    assert_close(model(tokens(1, 1)), expected)
    handle.restore()
    assert_close(model(tokens(1, 1)), expected)


# ---- the public function ----


def test_patch_takes_a_plan() -> None:
    model = tiny()
    plan = plan_for(model)
    with metile.patch(model, plan=plan) as handle:
        assert handle.plan == plan
        assert str(handle).startswith(
            "metile runs kernels in 20 modules: "
            "attention (2), dense_mlp (2), graph_fusion (2), rms_norm (5), dense_projections (9)"
        )
        assert repr(handle).startswith("<Handle: metile runs kernels in 20 modules")


def test_a_handle_that_changed_nothing_says_why() -> None:
    model = tiny()
    for handle, reason in (
        (metile.patch(model, tune="never"), "no plan is kept for this model on this machine"),
        (metile.patch(model, plan=Plan("cpu", frozenset(), {})), "the plan is plain MLX"),
        (
            metile.patch(nn.Module(), plan=plan_for(model)),
            "the model has nothing that is of the plan's features",
        ),
        (metile.patch(tiny(dtype=mx.float16), plan=plan_for(model)), "the plan has no kernel for any"),
    ):
        assert not handle
        assert str(handle).startswith(f"metile changed nothing: {reason}")
        assert not handle.kept
        assert not handle.applied
        handle.restore()
    assert "nothing was decided for it" in str(handle)


def test_what_was_left_alone_is_told_by_reason() -> None:
    with patched(tiny("gemma2")) as handle:
        assert "mlp and 1 more: gated but not SwiGLU" in str(handle)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "a name"}, r"[patch] expected a model, an mlx.nn.Module, but got str"),
        ({"plan": {}}, r"[patch] expected a metile.Plan or None but got dict"),
        ({"tune": "slowly"}, r"[patch] expected tune to be one of cached, quick, never but got 'slowly'"),
        (
            {"plan": Plan("tpu", frozenset(), {})},
            r"[target] expected one of auto, cpu, cuda, metal, simulator but got 'tpu'",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MetileError) as caught:
        metile.patch(**({"model": tiny()} | arguments))
    assert str(caught.value) == message


def test_a_plan_of_another_target_is_refused() -> None:
    with pytest.raises(MetileError, match=r"^\[patch\] expected a plan for the target cpu but got one for metal$"):
        apply(tiny(), Plan("metal", frozenset(), {}), TARGET)
