"""The finders: each knows one kind of site by types, shapes and what a module computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from metile.decoder import AttentionLayout, arrange_attention, arrange_layer
from metile.instances import STATE, plain_class
from metile.linears import EMBEDDINGS, class_name, is_embedding, layer_fault, linear_fault, linear_op, shape_of
from metile.ops.attention import AttentionKey
from metile.ops.base import OpKey, dtype_name
from metile.ops.linear import LinearKey
from metile.ops.norm import NormKey
from metile.ops.projections import ProjectionsKey
from metile.ops.rope import RopeKey
from metile.rotary import turns_halves
from metile.sites import Declined, Site, Survey, arrays_of, children_of, is_weighted
from metile.swiglu import arrange_swiglu, is_fused_swiglu

# Logits of more positions at once are those of a prompt: nobody reads them, and plain MLX leaves them undone.
VOCABULARY_ROWS = 16


def _is_wrapper(module: nn.Module) -> bool:
    """Return whether a module adds matrices to one linear layer or embedding, as LoRA layers do."""
    inner = [child for _, child in children_of(module) if is_weighted(child)]
    return len(inner) == 1 and any(array.ndim >= 2 for array in arrays_of(module).values())


def _is_linear_like(module: nn.Module) -> bool:
    return not is_embedding(module) and (is_weighted(module) or _is_wrapper(module))


def swiglu_mlp(path: str, module: nn.Module, survey: Survey) -> Site | Declined | None:
    """Find down(silu(gate(x)) * up(x)), whatever its parts are called."""
    children = children_of(module)
    linears = {name: child for name, child in children if _is_linear_like(child)}
    if len(linears) not in (2, 3) or arrays_of(module) or _has_more(children, linears):
        return None
    faults = {name: linear_fault(child) for name, child in linears.items()}
    for name, reason in faults.items():
        if reason:
            return Declined(path, f"{name}: {reason}") if _may_be_gated(linears.values()) else None
    if len(linears) == 2:
        fused = is_fused_swiglu(module, linears, survey.verdicts)
        return Declined(path, "gate and up are one fused linear") if fused else None
    layout, reason = arrange_swiglu(module, linears, survey.verdicts)
    if layout is None:
        return Declined(path, reason) if reason else None
    gate, up, down = (linears[name] for name in layout)
    if "bias" in gate or "bias" in up:
        return Declined(path, "gate and up have biases")
    if linear_op(gate) != linear_op(up) or linear_op(gate).dtype != linear_op(down).dtype:
        return Declined(path, "gate and up are kept in different formats")
    survey.take((gate, up, down))
    ops = {"swiglu": dataclasses.replace(linear_op(gate), epilogue="swiglu"), "down": linear_op(down)}
    parts = dict(zip(("gate", "up", "down"), layout, strict=True))
    features = {name: _feature(op, "mlp") for name, op in ops.items()}
    return Site(path, module, "swiglu_mlp", features["swiglu"], ops, parts, features=features)


def _feature(op: LinearKey, what: str) -> str:
    """Return the plan feature of a layer: that of dense or of quantized weights."""
    return f"dense_{what}" if op.format.is_dense else f"quantized_{what}"


def _has_more(children: Iterable[tuple[str, nn.Module]], linears: Mapping[str, nn.Module]) -> bool:
    """Return whether other children than `linears` have parameters."""
    others: list[Any] = [child for name, child in children if name not in linears]
    return any(tree_flatten(child.parameters()) for child in others)


def _may_be_gated(linears: Collection[nn.Module]) -> bool:
    """Return whether the plain ones among three linears may be gate, up and down projections."""
    shapes = [shape_of(child) for child in linears if linear_fault(child) is None]
    return len(linears) == 3 and all(a in (b, b[::-1]) for a in shapes for b in shapes)


def linear(path: str, module: nn.Module, survey: Survey) -> Site | Declined | None:
    """Find linear layers, the vocabulary projection among them."""
    if not _is_linear_like(module):
        return None
    if reason := linear_fault(module):
        survey.take(child for _, child in children_of(module))
        return Declined(path, reason)
    op = linear_op(module)
    limit = VOCABULARY_ROWS if op.outputs in survey.table_rows else 0
    return Site(path, module, "linear", _feature(op, "projections"), {"linear": op}, most_rows=limit)


def vocabulary(path: str, module: nn.Module, survey: Survey) -> Site | Declined | None:
    """Find the embedding that projects to the vocabulary as well: the largest, if no linear has its rows."""
    if not is_embedding(module) or "weight" not in module:
        return None
    rows = module["weight"].shape[0]
    if rows < max(survey.table_rows) or rows in survey.output_rows:
        return None
    if reason := layer_fault(module, EMBEDDINGS, "a plain embedding"):
        return Declined(path, reason)
    op = linear_op(module)
    feature = _feature(op, "projections")
    return Site(path, module, "vocabulary", feature, {"linear": op}, most_rows=VOCABULARY_ROWS)


def rms_norm(path: str, module: nn.Module, survey: Survey) -> Site | Declined | None:
    """Find RMSNorm layers."""
    weight = module.get("weight")
    if plain_class(module) is not nn.RMSNorm:
        norm = isinstance(weight, mx.array) and weight.ndim == 1 and not children_of(module)
        return Declined(path, f"{class_name(module)} is not mlx.nn.RMSNorm") if norm else None
    if reason := layer_fault(module, (nn.RMSNorm,), "mlx.nn.RMSNorm"):
        return Declined(path, reason)
    assert isinstance(weight, mx.array)
    key = NormKey(False, 1, weight.size, float(module.eps), dtype_name(weight.dtype) or "")
    heads = _heads(weight.size, survey.parent)
    return Site(path, module, "rms_norm", "rms_norm", {"norm": key}, rows_per_row=heads, fixed={"eps": module.eps})


def _heads(width: int, parent: nn.Module | None) -> tuple[int, ...]:
    """Return how many rows of `width` a row of the model may be cut into where `parent` applies a norm.

    A norm beside linear layers that give rows of several times its width is one of attention heads.
    """
    siblings = children_of(parent) if parent is not None else []
    shapes = [shape_of(child) for _, child in siblings if linear_fault(child) is None]
    widths = {side for shape in shapes for side in shape}
    if width in widths:
        return (1,)
    return tuple(sorted({n // width for n, _ in shapes if n % width == 0})) or (1,)


def attention(path: str, module: nn.Module, survey: Survey) -> Site | Declined | None:
    """Find attention over a cache: four plain linears around it, rope, and norms of the heads if any."""
    children = children_of(module)
    linears = [(name, child) for name, child in children if _is_linear_like(child)]
    others = [(name, child) for name, child in children if not _is_linear_like(child)]
    if len(linears) != 4 or arrays_of(module) or any(linear_fault(child) for _, child in linears):
        return None
    kind = _kind("attention", module, children)
    if kind not in survey.verdicts:
        layout = arrange_attention(module, linears, others)
        survey.verdicts[kind] = layout, layout is not None and _turns(module, layout)
    layout, turned = survey.verdicts[kind]
    if layout is None:
        return Declined(path, "attention of a form that is not known")
    dtype = linear_op(linears[0][1]).dtype
    shape = layout.heads, layout.key_value_heads, layout.dimension, dtype
    ops: dict[str, OpKey] = {"attention": AttentionKey(1, 0, *shape)}
    if turned:
        ops["rope"] = RopeKey(1, *shape)
    features = {}
    projections = _projections([module[name] for name in (layout.q, layout.k, layout.v)])
    if projections is not None:
        ops["projections"], features["projections"] = projections, _feature(projections.widest, "projections")
    parts, fixed = {"q": layout.q}, _numbers(module)
    return Site(path, module, "attention", "attention", ops, parts, layout, fixed=fixed, features=features)


def _projections(linears: Sequence[nn.Module]) -> ProjectionsKey | None:
    """Return the key at one row of three plain linears of the same input, or None where no kernel takes them all."""
    q, k, v = map(linear_op, linears)
    if len({(op.epilogue, op.inputs, op.dtype, op.weights) for op in (q, k, v)}) > 1:
        return None
    return ProjectionsKey(1, (q.outputs, k.outputs, v.outputs), q.inputs, q.epilogue == "bias", q.dtype, q.weights)


def _turns(module: Any, layout: AttentionLayout) -> bool:
    """Return whether a table stands for the rope of an attention module, with nothing before it."""
    plain = layout.rope is not None and layout.q_norm is None
    return plain and turns_halves(module[layout.rope], layout.dimension)


def decoder_layer(path: str, module: nn.Module, survey: Survey) -> Site | Declined | None:
    """Find h + mlp(norm(h)) with h = x + attention(norm(x)): the sum and its norm are one kernel."""
    children = children_of(module)
    norms = [(name, child) for name, child in children if plain_class(child) is nn.RMSNorm]
    blocks = [(name, child) for name, child in children if plain_class(child) is not nn.RMSNorm]
    if len(norms) != 2 or len(blocks) != 2 or arrays_of(module) or "." in "".join(name for name, _ in blocks):
        return None
    if any(layer_fault(child, (nn.RMSNorm,), "mlx.nn.RMSNorm") for _, child in norms):
        return None
    weight = norms[0][1]["weight"]
    kind = _kind("layer", module, children)
    if kind not in survey.verdicts:
        names = [name for name, _ in norms], [name for name, _ in blocks]
        survey.verdicts[kind] = arrange_layer(module, *names, weight.size, weight.dtype)
    layout = survey.verdicts[kind]
    if layout is None:
        return Declined(path, "a decoder layer of a form that is not known")
    norm, dtype = module[layout.second_norm], dtype_name(weight.dtype) or ""
    ops: dict[str, OpKey] = {"add_norm": NormKey(True, 1, weight.size, float(norm.eps), dtype)}
    down = _plain_down(module[layout.mlp], survey)
    if down is not None:
        ops["down"] = dataclasses.replace(linear_op(down), epilogue="residual")
    parts = {"second_norm": layout.second_norm, "first_norm": layout.first_norm}
    return Site(path, module, "decoder_layer", "graph_fusion", ops, parts, layout, fixed=_numbers(module))


def _plain_down(mlp: nn.Module, survey: Survey) -> nn.Module | None:
    """Return the down projection of a SwiGLU block if it has no bias, or None."""
    linears = {name: child for name, child in children_of(mlp) if _is_linear_like(child)}
    if len(linears) != 3 or any(linear_fault(child) for child in linears.values()):
        return None
    layout, _ = arrange_swiglu(mlp, linears, survey.verdicts)
    return None if layout is None or "bias" in linears[layout[2]] else linears[layout[2]]


def _numbers(module: nn.Module) -> dict[str, int | float]:
    """Return the numbers that a module holds, such as heads and scales."""
    return {name: value for name, value in vars(module).items() if type(value) in (int, float)}


def _kind(what: str, module: nn.Module, children: Iterable[tuple[str, nn.Module]]) -> tuple[object, ...]:
    """Return what layers of a stack have in common when they differ in the values of their weights alone."""
    own = {name: value for name, value in vars(module).items() if name not in (STATE, "_no_grad")}
    own |= {name: value for name, value in module.items() if not isinstance(value, nn.Module | mx.array)}
    attributes = tuple(sorted((name, repr(value)) for name, value in own.items()))
    inner = tuple(
        (name, plain_class(part), repr(part), tuple((a.shape, str(a.dtype)) for a in arrays_of(part).values()))
        for root, child in children
        for name, part in [(root, child), *children_of(child)]
    )
    return (what, plain_class(module), attributes, inner)
