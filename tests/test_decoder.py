"""Attention and decoder layers are told by numbers: what gives other numbers than the known form is left alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.tuner.lora import LoRALinear
from tiny_models import tiny

import metile.finders
from metile.decoder import AttentionLayout, LayerLayout
from metile.models import find
from metile.ops.attention import AttentionKey
from metile.ops.linear import LinearKey
from metile.ops.norm import NormKey
from metile.ops.projections import ProjectionsKey
from metile.ops.rope import RopeKey
from metile.sites import Found, Site

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
UNKNOWN_ATTENTION = "attention of a form that is not known"
UNKNOWN_LAYER = "a decoder layer of a form that is not known"


class Attention(nn.Module):
    """Attention with parts of any name and in any order, and one deviation from the known form if asked for."""

    def __init__(
        self,
        names: str = "q k v o",
        *,
        heads: int = 4,
        shared: int = 2,
        dimension: int = 16,
        scale: float | None = None,
        norms: str = "",
        rope: bool = True,
        deviation: str = "",
        **attributes: Any,
    ) -> None:
        super().__init__()
        self.names, self.norms, self.deviation = tuple(names.split()), tuple(norms.split()), deviation
        width = 48
        sizes = {"q": (width, heads), "k": (width, shared), "v": (width, shared), "o": (heads * dimension, None)}
        for name, role in zip(self.names, "qkvo", strict=True):
            inputs, count = sizes[role]
            self[name] = nn.Linear(inputs, count * dimension if count else width, bias=False)
        for name in self.norms:
            self[name] = nn.RMSNorm(dimension)
            self[name].weight = mx.random.uniform(0.5, 2, (dimension,), key=mx.random.key(len(name)))
        self.number, self.groups, self.width_of_a_head = heads, shared, dimension
        self.used = dimension**-0.5 if scale is None else scale
        if rope:
            self.turn = nn.RoPE(dimension)
        for name, value in attributes.items():
            setattr(self, name, value)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        batch, length, _ = x.shape
        parts = []
        for index, name in enumerate(self.names[:3]):
            y = self[name](x).reshape(batch, length, self.groups if index else self.number, -1)
            if index < len(self.norms):
                y = self[self.norms[index]](y)
            parts.append(y.transpose(0, 2, 1, 3))
        q, k, v = parts
        offset = cache.offset if cache is not None else 0
        if "turn" in self:
            q, k = self.turn(q, offset=offset), self.turn(k, offset=offset)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        if self.deviation == "far":  # as Llama 4 scales queries beyond 8192 tokens
            q = q * (1 + mx.floor((mx.arange(offset, offset + length) + 1) / 8192)[:, None])
        if self.deviation == "softcap":
            q = 50 * mx.tanh(q / 50)
        if self.deviation == "cached" and cache is not None:
            v = v * 1.5
        y = scaled_dot_product_attention(q, k, v, cache=cache, scale=self.used, mask=mask)
        y = y.transpose(0, 2, 1, 3).reshape(batch, length, -1)
        return self[self.names[3]](y * mx.sigmoid(y) if self.deviation == "gate" else y)


def layout_of(module: nn.Module) -> AttentionLayout | None:
    sites = [site for site in find(module).sites if site.kind == "attention"]
    return sites[0].layout if sites else None


def site_at(found: Found, path: str) -> Site:
    return next(site for site in found.sites if site.path == path)


def reasons(found: Found) -> dict[str, str]:
    return {item.path: item.reason for item in found.declined}


# ---- attention ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_roles_and_numbers_of_attention(dtype: mx.Dtype) -> None:
    module = Attention("wq wk wv wo", norms="zz aa", shared=2)
    module.set_dtype(dtype)
    assert layout_of(module) == AttentionLayout("wq", "wk", "wv", "wo", "turn", "zz", "aa", 4, 2, 16, 0.25)


@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (4, 2), (4, 1), (1, 1)])
def test_heads(heads: int, shared: int, rope: bool) -> None:
    layout = layout_of(Attention(heads=heads, shared=shared, rope=rope))
    assert layout is not None
    assert (layout.heads, layout.key_value_heads, layout.dimension) == (heads, shared, 16)
    assert layout.rope == ("turn" if rope else None)


def test_numbers_that_mislead_are_tried_and_dropped() -> None:
    layout = layout_of(Attention(scale=0.37, a=8, b=1, c=0.25, scale_of_old=0.5, layers=32, flag=True))
    assert layout is not None
    assert (layout.heads, layout.key_value_heads, layout.scale) == (4, 2, 0.37)
    layout = layout_of(Attention(scaling=0.11, number_of_layers=2))  # the attribute is not what is used
    assert layout is not None
    assert layout.scale == 0.25


@pytest.mark.parametrize("deviation", ["softcap", "gate", "cached", "far"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_forms_of_attention_are_declined(deviation: str, dtype: mx.Dtype) -> None:
    module = Attention(deviation=deviation)
    module.set_dtype(dtype)
    assert reasons(find(module))[""] == UNKNOWN_ATTENTION


def test_a_scale_that_is_nowhere_is_declined() -> None:
    module = Attention(scale=0.37)
    module["used"] = mx.array(0.37)  # an array of its own: not the known form at all
    assert find(module).declined == ()
    assert layout_of(module) is None

    class Secret(Attention):
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            self.used, shown = 0.37, self.used
            try:
                return super().__call__(x, mask, cache)
            finally:
                self.used = shown

    assert reasons(find(Secret()))[""] == UNKNOWN_ATTENTION


def test_parts_in_another_order_than_they_are_used_in_are_declined() -> None:
    module = Attention("q k v o")
    module.names = ("q", "v", "k", "o")  # keys and values have the same shapes
    assert reasons(find(module))[""] == UNKNOWN_ATTENTION


def test_a_norm_defined_before_the_projections() -> None:
    class First(Attention):
        def __init__(self) -> None:
            super().__init__(norms="a b")
            for name in "qkvo":
                self[name] = self.pop(name)  # now the last

    layout = layout_of(First())
    assert layout is not None
    assert (layout.q_norm, layout.k_norm) == ("a", "b")


@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
def test_weights_of_zeros_tell_nothing(name: str) -> None:
    module = Attention()
    module[name].weight = mx.zeros_like(module[name].weight)
    assert reasons(find(module))[""] == UNKNOWN_ATTENTION
    module[name].weight = mx.full(module[name].weight.shape, float("nan"))
    assert reasons(find(module))[""] == UNKNOWN_ATTENTION


def test_linears_in_a_list_are_left_alone() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [nn.Linear(32, 32) for _ in range(4)]

    assert [site.kind for site in find(Stack()).sites] == ["linear"] * 4


def test_attention_with_other_linears_is_not_looked_at() -> None:
    model = tiny()
    first, second = (layer.self_attn for layer in model.model.layers)
    first.q_proj = LoRALinear.from_base(first.q_proj, r=2)
    nn.quantize(second, group_size=32)  # which is plain enough
    found = find(model)
    assert "model.layers.0.self_attn" not in {site.path for site in found.sites} | reasons(found).keys()
    assert site_at(found, "model.layers.1.self_attn").kind == "attention"
    assert site_at(found, "model.layers.0").kind == "decoder_layer"


@pytest.mark.parametrize(
    ("kind", "attention", "layer"),
    [
        ("olmo2", UNKNOWN_ATTENTION, UNKNOWN_LAYER),  # norms of all heads at once; norms after the blocks
        ("gemma2", UNKNOWN_ATTENTION, None),  # logits are capped; norms of another class
        ("gemma3_text", UNKNOWN_ATTENTION, None),  # norms of another class in both
        ("phi3", None, "decoder_layer"),  # q, k and v are one linear
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_models_of_other_forms(kind: str, attention: str | None, layer: str | None, dtype: mx.Dtype) -> None:
    found = find(tiny(kind, dtype))
    why = reasons(found)
    if layer == "decoder_layer":
        assert site_at(found, "model.layers.1").kind == "decoder_layer"
    else:
        assert why.get("model.layers.1") == layer
    assert why.get("model.layers.1.self_attn") == attention


def test_qwen3_norms_its_heads() -> None:
    layout = site_at(find(tiny("qwen3")), "model.layers.0.self_attn").layout
    expected = "q_proj", "k_proj", "v_proj", "o_proj", "rope", "q_norm", "k_norm", 4, 2, 16, 0.25
    assert layout == AttentionLayout(*expected)


# ---- layers ----


class Layer(nn.Module):
    """h + mlp(norm(h)) with h = x + attention(norm(x)), parts of any order; or another form."""

    def __init__(self, form: str = "", **attributes: Any) -> None:
        super().__init__()
        self.form = form
        self.second, self.first = nn.RMSNorm(48, eps=1e-3), nn.RMSNorm(48, eps=1e-5)
        for norm, key in ((self.first, 1), (self.second, 2)):
            norm.weight = mx.random.uniform(0.5, 2, (48,), key=mx.random.key(key))
        self.feed, self.mix = nn.Sequential(nn.Linear(48, 48), nn.ReLU()), Attention()
        for name, value in attributes.items():
            setattr(self, name, value)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if self.form == "post":
            h = x + self.first(self.mix(x, mask, cache))
            return h + self.second(self.feed(h))
        branch = self.mix(self.first(x), mask, cache)
        if self.form == "parallel":
            return x + branch + self.feed(self.second(x))
        h = x + getattr(self, "multiplier", 1.0) * branch
        if self.form == "normed residual":
            h = self.second(h)
            return h + self.feed(h)
        return h + self.feed(self.second(h))


def test_parts_of_a_layer_are_told_by_what_they_do() -> None:
    site = site_at(find(Layer()), "")
    assert site.layout == LayerLayout("first", "mix", "second", "feed")
    assert site.keys([1]) == [NormKey(True, 1, 48, 1e-3, "float32")]
    assert site_at(find(Layer(multiplier=1.0)), "").kind == "decoder_layer"


@pytest.mark.parametrize("layer", [Layer("post"), Layer("parallel"), Layer("normed residual"), Layer(multiplier=0.5)])
def test_other_forms_of_a_layer_are_declined(layer: Layer) -> None:
    found = find(layer)
    assert reasons(found)[""] == UNKNOWN_LAYER
    assert site_at(found, "mix").kind == "attention"


def test_keys_of_a_layer_and_its_attention() -> None:
    found = find(tiny("qwen2", mx.bfloat16))
    assert site_at(found, "model.layers.0").keys([1, 9]) == [
        NormKey(True, 1, 64, 1e-5, "bfloat16"),
        LinearKey("residual", 1, 64, 96, "bfloat16"),
        NormKey(True, 16, 64, 1e-5, "bfloat16"),
        LinearKey("residual", 16, 64, 96, "bfloat16"),
    ]
    attention = site_at(found, "model.layers.0.self_attn")
    assert attention.keys([1, 9], context=300) == [
        key
        for rows in (1, 16)
        for key in (
            AttentionKey(rows, 1024, 4, 2, 16, "bfloat16"),
            RopeKey(rows, 4, 2, 16, "bfloat16"),
            ProjectionsKey(rows, (64, 32, 32), 64, True, "bfloat16"),
        )
    ]
    features = {type(key): feature for feature, key in attention.pairs([1])}
    assert features == {AttentionKey: "attention", RopeKey: "attention", ProjectionsKey: "dense_projections"}
    tokens = [key.tokens for key in attention.keys([512]) if isinstance(key, AttentionKey)]
    assert tokens == [1024]  # the queries are of the context
    normed = site_at(find(tiny("qwen3")), "model.layers.0.self_attn")
    assert list(normed.ops) == ["attention", "projections"]  # the norms of the heads come between projection and rope


def test_a_down_projection_with_a_bias_has_no_residual_epilogue() -> None:
    model = tiny()
    model.model.layers[0].mlp.down_proj.bias = mx.ones((64,))
    found = find(model)
    assert list(site_at(found, "model.layers.0").ops) == ["add_norm"]
    assert list(site_at(found, "model.layers.1").ops) == ["add_norm", "down"]


# ---- verdicts ----


def test_layers_of_a_kind_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    for name in ("arrange_attention", "arrange_layer"):
        real = getattr(metile.finders, name)
        monkeypatch.setattr(metile.finders, name, lambda *a, real=real, name=name: checked.append(name) or real(*a))
    model = tiny(num_hidden_layers=4)
    find(model)
    assert sorted(checked) == ["arrange_attention", "arrange_layer"]
    checked.clear()
    model.model.layers[2].self_attn.scale = 0.1
    found = find(model)
    assert sorted(checked) == ["arrange_attention"] * 2 + ["arrange_layer"]
    model.model.layers[3].self_attn.order = ["v", "k"]  # whatever that may mean
    checked.clear()
    found = find(model)
    assert checked.count("arrange_attention") == 3
    scales = [site.layout.scale for site in found.sites if site.kind == "attention"]
    assert scales == [0.25, 0.25, 0.1, 0.25]
