"""Detection goes by structure and by what a module computes; what it leaves out, it names with the reason."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.tuner.utils import linear_to_lora_layers
from tiny_models import tiny

from metile.errors import MetileError
from metile.finders import VOCABULARY_ROWS
from metile.models import find
from metile.ops.linear import LinearKey
from metile.ops.norm import NormKey
from metile.sites import Found, Site


class Gated(nn.Module):
    """down(activation(a) * b), with parts of any name."""

    def __init__(self, names: tuple[str, str, str], width: int = 32, hidden: int = 48, **options: Any) -> None:
        super().__init__()
        self.order = names
        self.activation = options.get("activation", nn.silu)
        gate_up_bias = options.get("gate_up_bias", False)
        for name, sizes in zip(names, ((width, hidden), (width, hidden), (hidden, width)), strict=True):
            bias = options.get("down_bias", False) if sizes == (hidden, width) else gate_up_bias
            setattr(self, name, nn.Linear(*sizes, bias=bias))

    def __call__(self, x: mx.array) -> mx.array:
        gate, up, down = (self[name] for name in self["order"])
        return down(self.activation(gate(x)) * up(x))


def kinds(found: Found) -> Counter[str]:
    return Counter(site.kind for site in found.sites)


def site_at(found: Found, path: str) -> Site:
    return next(site for site in found.sites if site.path == path)


def reasons(found: Found) -> dict[str, str]:
    return {item.path: item.reason for item in found.declined}


# ---- models of mlx-lm: two layers each ----

DECODER = {"decoder_layer": 2, "attention": 2, "swiglu_mlp": 2}


@pytest.mark.parametrize(
    ("kind", "tied", "expected"),
    [
        ("llama", False, DECODER | {"linear": 9, "rms_norm": 5}),
        ("llama", True, DECODER | {"linear": 8, "vocabulary": 1, "rms_norm": 5}),
        ("qwen2", True, DECODER | {"linear": 8, "vocabulary": 1, "rms_norm": 5}),
        ("qwen3", False, DECODER | {"linear": 9, "rms_norm": 9}),
        ("olmo2", True, {"swiglu_mlp": 2, "linear": 8, "vocabulary": 1, "rms_norm": 9}),
        ("gemma2", True, {"linear": 14, "vocabulary": 1}),
        ("gemma3_text", False, {"linear": 15}),
        ("phi3", False, {"decoder_layer": 2, "linear": 9, "rms_norm": 5}),
    ],
)
def test_what_is_found_in_a_model(kind: str, tied: bool, expected: dict[str, int]) -> None:
    assert kinds(find(tiny(kind, mx.bfloat16, tied=tied))) == expected


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_gelu_is_not_swiglu_in_any_dtype(dtype: mx.Dtype) -> None:
    for kind in ("gemma2", "gemma3_text"):
        assert reasons(find(tiny(kind, dtype)))["model.layers.1.mlp"] == "gated but not SwiGLU"


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_swiglu_is_found_in_every_dtype(dtype: mx.Dtype) -> None:
    assert kinds(find(tiny("llama", dtype)))["swiglu_mlp"] == 2


def test_a_fused_pair_is_declined_and_its_linears_are_projections() -> None:
    found = find(tiny("phi3"))
    assert reasons(found)["model.layers.0.mlp"] == "gate and up are one fused linear"
    assert site_at(found, "model.layers.0.mlp.gate_up_proj").feature == "dense_projections"


def test_a_norm_of_another_formula_is_declined_by_its_module() -> None:
    text = reasons(find(tiny("gemma2")))["model.norm"]
    assert text == "RMSNorm of mlx_lm.models.gemma2 is not mlx.nn.RMSNorm"


# ---- keys ----


def test_keys_of_a_model() -> None:
    found = find(tiny("qwen2", mx.bfloat16, tied=True))
    mlp = site_at(found, "model.layers.0.mlp")
    assert mlp.keys([1]) == [
        LinearKey("swiglu", 1, 96, 64, "bfloat16"),
        LinearKey("store", 1, 64, 96, "bfloat16"),
    ]
    query = site_at(found, "model.layers.0.self_attn.q_proj")
    assert query.keys([1, 100, 128]) == [
        LinearKey("bias", rows, 64, 64, "bfloat16") for rows in (1, 128)
    ]  # 100 rows are of the bucket of 128
    assert site_at(found, "model.norm").keys([2]) == [NormKey(False, 2, 64, 1e-5, "bfloat16")]
    assert query.keys([0, 5000]) == []


def test_a_vocabulary_is_not_searched_at_rows_that_nobody_reads() -> None:
    for tied, path in ((True, "model.embed_tokens"), (False, "lm_head")):
        site = site_at(find(tiny(tied=tied)), path)
        assert [key.rows for key in site.keys([1, VOCABULARY_ROWS, VOCABULARY_ROWS + 1, 512])] == [1, 16]


def test_a_norm_of_heads_meets_as_many_rows_as_heads() -> None:
    found = find(tiny("qwen3"))  # 4 query heads and 2 key heads
    assert [key.rows for key in site_at(found, "model.layers.0.self_attn.q_norm").keys([8])] == [16, 32]
    whole = find(tiny("olmo2"))  # normalises all heads at once
    assert [key.rows for key in site_at(whole, "model.layers.0.self_attn.q_norm").keys([8])] == [8]


def test_pairs_of_feature_and_key_come_once() -> None:
    pairs = find(tiny()).keys([1])
    assert len(pairs) == len(set(pairs))
    features = {feature for feature, _ in pairs}
    assert features == {"attention", "dense_mlp", "dense_projections", "graph_fusion", "rms_norm"}


# ---- gated blocks of any name ----


@pytest.mark.parametrize("names", [("w1", "w3", "w2"), ("down", "gate", "up"), ("a", "b", "c"), ("c", "b", "a")])
@pytest.mark.parametrize("hidden", [48, 32])  # 32: every part is square, shapes tell nothing
def test_names_do_not_matter(names: tuple[str, str, str], hidden: int) -> None:
    found = find(Gated(names, hidden=hidden))
    (site,) = found.sites
    assert site.parts == dict(zip(("gate", "up", "down"), names, strict=True))
    assert not found.declined


@pytest.mark.parametrize(
    "activation",
    [nn.gelu, nn.gelu_approx, nn.relu, nn.sigmoid, nn.tanh, lambda x: x, lambda x: mx.minimum(nn.silu(x), 7)],
    ids=["gelu", "gelu_approx", "relu", "sigmoid", "tanh", "identity", "limited"],
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_other_activations_are_declined(activation: Any, dtype: mx.Dtype) -> None:
    block = Gated(("gate", "up", "down"), activation=activation)
    block.set_dtype(dtype)
    found = find(block)
    assert reasons(found)[""] == "gated but not SwiGLU"
    assert kinds(found) == {"linear": 3}


def test_biases() -> None:
    (site,) = find(Gated(("g", "u", "d"), down_bias=True)).sites
    assert [key.epilogue for key in site.keys([1])] == ["swiglu", "bias"]
    found = find(Gated(("g", "u", "d"), gate_up_bias=True))
    assert reasons(found)[""] == "gate and up have biases"
    assert [key.epilogue for site in found.sites for key in site.keys([1])] == ["bias", "bias", "store"]


def test_weights_that_tell_nothing_are_declined() -> None:
    block = Gated(("g", "u", "d"))
    block.g.weight = mx.zeros_like(block.g.weight)
    assert "zero or not finite" in reasons(find(block))[""]


def test_layers_that_differ_in_more_than_weights_are_checked_each() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            names = ("gate", "up", "down")
            self.layers = [Gated(names), Gated(names, activation=nn.gelu), Gated(names)]

    found = find(Stack())
    assert [site.path for site in found.sites if site.kind == "swiglu_mlp"] == ["layers.0", "layers.2"]
    assert reasons(found) == {"layers.1": "gated but not SwiGLU"}


def test_a_block_with_more_in_it_is_left_alone() -> None:
    block = Gated(("g", "u", "d"))
    block.norm = nn.RMSNorm(48)  # something else happens in it
    assert kinds(find(block)) == {"linear": 3, "rms_norm": 1}
    block = Gated(("g", "u", "d"))
    block.scale = mx.ones((1,))
    assert kinds(find(block)) == {"linear": 3}
    block = Gated(("g", "u", "d"))
    block.dropout = nn.Dropout(0.0)  # nothing to learn, nothing that happens
    assert kinds(find(block)) == {"swiglu_mlp": 1}


# ---- what is not a plain layer ----


def test_adapters_are_declined_by_name_over_quantized_layers_too() -> None:
    model = tiny()
    nn.quantize(model.model.layers[0].self_attn, group_size=32)
    keys = ["mlp.gate_proj", "self_attn.q_proj"]
    linear_to_lora_layers(model, 2, {"rank": 2, "scale": 1.0, "dropout": 0.0, "keys": keys})
    found = find(model)
    why = reasons(found)
    assert why["model.layers.1.mlp"] == "gate_proj: LoRALinear is not a plain linear"
    assert why["model.layers.1.mlp.gate_proj"] == "LoRALinear is not a plain linear"
    assert why["model.layers.0.self_attn.q_proj"] == "LoRALinear is not a plain linear"
    paths = {site.path for site in found.sites}
    assert "model.layers.0.self_attn.k_proj" in paths
    assert "model.layers.1.mlp.up_proj" in paths  # the others of its block are projections
    assert not any(path.startswith("model.layers.1.mlp.gate_proj") for path in paths)


@pytest.mark.parametrize("shard", ["all-to-sharded", "sharded-to-all"])
def test_sharded_layers_are_declined(shard: str) -> None:
    layer = nn.layers.distributed.shard_linear(nn.Linear(32, 32), shard, group=mx.distributed.init())
    (declined,) = find(layer).declined
    assert declined.reason.endswith("is not a plain linear")


def test_subclasses_and_odd_weights_are_declined() -> None:
    class Doubled(nn.Linear):
        def __call__(self, x: mx.array) -> mx.array:
            return 2 * super().__call__(x)

    (declined,) = find(Doubled(8, 8)).declined
    assert declined.reason == "Doubled is not a plain linear"
    layer = nn.Linear(8, 8)
    layer.weight = layer.weight.astype(mx.bfloat16)
    (declined,) = find(layer).declined
    assert declined.reason == "weights of bfloat16 and float32, not of one of bfloat16, float16 and float32"
    layer = nn.Linear(8, 8, bias=False)
    layer.weight = layer.weight.astype(mx.int32)
    (declined,) = find(layer).declined
    assert "weights of int32" in declined.reason
    layer = nn.Linear(8, 8)
    layer.scale = mx.ones((8,))
    (declined,) = find(layer).declined
    assert declined.reason == "Linear holds scale besides its weights"


def test_a_module_used_twice_is_one_site() -> None:
    model = tiny()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    assert kinds(find(model))["swiglu_mlp"] == 1


def test_only_the_vocabulary_is_a_projection_among_embeddings() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(100, 16), nn.Embedding(50, 16)

    assert [site.path for site in find(Positions()).sites] == ["tokens"]


@pytest.mark.parametrize("thing", [None, "a model", {"weight": 1}])
def test_what_is_not_a_module_is_refused(thing: Any) -> None:
    with pytest.raises(MetileError, match=r"^\[find\] expected an mlx.nn.Module but got (NoneType|str|dict)$"):
        find(thing)


def test_an_empty_module_has_nothing() -> None:
    assert find(nn.Module()) == Found((), ())
