"""Models with quantized weights: what is found, what a patch computes, and what stays plain.

A patched model multiplies the very weights that plain MLX multiplies, so its logits differ by roundings alone.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import TARGET, TOLERANCES, plan_for, tiny, tokens

from metile.dispatch import FEATURES
from metile.handle import Handle
from metile.models import find
from metile.ops.linear import LinearKey
from metile.patch import apply

MODES: dict[str, dict[str, Any]] = {
    "affine4g32": {"group_size": 32, "bits": 4},
    "affine3g32": {"group_size": 32, "bits": 3},
    "affine8g64": {"group_size": 64, "bits": 8},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}
QUANTIZED = {"affine_prefill", "quantized_mlp", "quantized_projections"}


def quantized(name: str = "affine4g32", kind: str = "llama", dtype: mx.Dtype = mx.bfloat16, **changes: Any) -> Any:
    model = tiny(kind, dtype, **({"hidden_size": 128, "intermediate_size": 192} | changes))
    return ready(model, **MODES[name])


def ready(model: Any, **how: Any) -> Any:
    nn.quantize(model, **how)
    model.eval()  # the new layers too
    mx.eval(model.parameters())
    return model


def logits(model: Any, batch: int = 1) -> list[mx.array]:
    """Return the logits of a prefill and of two decode steps over a cache."""
    ids, cache = tokens(batch, 25), make_prompt_cache(model)
    found = [model(ids[:, first:last], cache=cache) for first, last in ((0, 23), (23, 24), (24, 25))]
    mx.eval(found)
    return found


def compare(model: Any, batch: int = 1) -> Handle:
    """Check a patched model against itself unpatched, and that it is restored; return the handle's counts."""
    expected = logits(model, batch)
    handle = apply(model, plan_for(model), TARGET)
    for actual, wanted in zip(logits(model, batch), expected, strict=True):
        error = mx.abs(actual - wanted).max() / mx.abs(wanted).max()
        assert actual.dtype == wanted.dtype
        assert error.item() < 2 * TOLERANCES[wanted.dtype]
    handle.disable()
    assert all(mx.array_equal(a, b) for a, b in zip(logits(model, batch), expected, strict=True))
    return handle


@pytest.mark.parametrize("name", MODES)
def test_every_format_runs_kernels(name: str) -> None:
    model = quantized(name)
    handle = compare(model)
    counts = handle.engaged()
    assert all(counts[feature] > 0 for feature in QUANTIZED)
    assert counts["dense_mlp"] == counts["dense_projections"] == 0
    formats = {key.weights for key in handle.engaged_keys() if isinstance(key, LinearKey)}
    assert formats == {name}
    handle.restore()


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_other_dtypes_models_and_batches(kind: str, dtype: mx.Dtype) -> None:
    handle = compare(quantized(kind=kind, dtype=dtype), batch=2)
    assert handle.engaged()["quantized_projections"] > 0


@pytest.mark.parametrize("tied", [False, True])
def test_the_vocabulary_in_both_of_its_roles(tied: bool) -> None:
    """A tied embedding is looked up by plain MLX and multiplied by a kernel, of the same codes."""
    model = quantized(tied=tied)
    path = "model.embed_tokens" if tied else "lm_head"
    assert {site.path: site.feature for site in find(model).sites}[path] == "quantized_projections"
    rows = model.model.embed_tokens(mx.array([3, 5]))
    handle = compare(model)
    handle.enable()
    assert mx.array_equal(model.model.embed_tokens(mx.array([3, 5])), rows)
    # The vocabulary runs at one position: once for each of the two decode steps.
    assert max(key.outputs for key in handle.engaged_keys() if isinstance(key, LinearKey)) >= 131


def test_layers_of_several_formats_are_taken_one_by_one() -> None:
    model = tiny("llama", mx.bfloat16, hidden_size=128, intermediate_size=192)

    def mixed(path: str, _: nn.Module) -> Any:
        if path.endswith("v_proj") or path.endswith("down_proj"):
            return {"group_size": 32, "bits": 6}
        return {"group_size": 64, "bits": 3} if path.endswith("_proj") and "mlp" not in path else path.endswith("_proj")

    handle = compare(ready(model, class_predicate=mixed))
    formats = {key.weights for key in handle.engaged_keys() if isinstance(key, LinearKey)}
    assert formats == {"affine3g64", "affine6g32", "affine4g64", "dense"}


def test_features_at_decode_and_prefill_are_apart() -> None:
    model = quantized()
    everything = plan_for(model)
    for left_out, rows in (("affine_prefill", 23), ("quantized_mlp", 1)):
        plan = everything.only(set(FEATURES) - {left_out})
        handle = apply(model, plan, TARGET)
        logits(model)
        counts = handle.engaged()
        assert left_out not in counts
        assert all(counts[feature] > 0 for feature in QUANTIZED - {left_out})
        reasons = {reason for kinds in handle.passed().values() for reason in kinds}
        assert f"the plan has {left_out} off" in reasons, rows
        handle.restore()


def test_exchanged_scales_are_noticed() -> None:
    model = quantized()
    handle = apply(model, plan_for(model), TARGET)
    logits(model)
    for layer in model.model.layers:
        layer.mlp.down_proj.scales = layer.mlp.down_proj.scales * 2
    actual = logits(model)
    handle.restore()
    for ours, theirs in zip(actual, logits(model), strict=True):
        assert (mx.abs(ours - theirs).max() / mx.abs(theirs).max()).item() < 2 * TOLERANCES[mx.bfloat16]


def test_what_no_kernel_takes_is_declined_with_the_reason() -> None:
    model = quantized()
    first, second = model.model.layers
    first.self_attn.q_proj.bits = 1  # no weights of 1 bit lie there, and none would be read
    second.self_attn.o_proj.biases = second.self_attn.o_proj.biases.astype(mx.float16)
    second.mlp.gate_proj.extra = mx.zeros((3,))
    reasons = {item.path: item.reason for item in find(model).declined}
    assert "[weights] expected dense, mxfp4" in reasons["model.layers.0.self_attn.q_proj"]
    assert reasons["model.layers.1.self_attn.o_proj"].startswith("weights of bfloat16 and float16")
    assert reasons["model.layers.1.mlp"] == "gate_proj: QuantizedLinear holds extra besides its weights"


def test_inputs_of_another_dtype_are_left_to_plain_mlx() -> None:
    """Block-scaled weights do not say what they are multiplied with: what comes does."""
    model = quantized("mxfp4", dtype=mx.float32)
    handle = compare(model)
    assert "its input is of another dtype" in {reason for kinds in handle.passed().values() for reason in kinds}
