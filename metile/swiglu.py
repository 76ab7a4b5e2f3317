"""Whether a module computes down(silu(gate(x)) * up(x)), and with which linears: tried on numbers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from metile.instances import STATE, plain_class
from metile.linears import MATRIX, dtype_of, format_of, shape_of

Layout = tuple[str, str, str]  # the names of gate, up and down

NOT_SWIGLU = "gated but not SwiGLU"

# Error allowed of a row, relative to its norm: a few roundings. GELU in place of SiLU gives 3% and more.
_TOLERANCES = {mx.bfloat16: 1.5e-2, mx.float16: 3e-3, mx.float32: 1e-4}
_USUAL = (("gate", 0), ("up", 1), ("down", 2))


def arrange_swiglu(
    module: nn.Module, linears: Mapping[str, nn.Module], verdicts: dict[Any, Any]
) -> tuple[Layout | None, str]:
    """Tell gate, up and down of a SwiGLU block from each other.

    Args:
        module: holds three plain linears and nothing else with parameters.
        linears: the linears, by name.
        verdicts: what was found before; modules that differ in weights alone are checked once.

    Returns:
        The names of gate, up and down; or None and the reason, empty where the shapes are of something else.
    """
    if "." in "".join(linears):
        return None, ""
    layouts = list(_layouts(linears))
    if not layouts:
        return None, ""
    kind = _kind(module, linears)
    if kind not in verdicts:
        verdicts[kind] = _check(module, linears, layouts)
    verdict: tuple[Layout | None, str] = verdicts[kind]
    return verdict


def is_fused_swiglu(module: nn.Module, linears: Mapping[str, nn.Module], verdicts: dict[Any, Any]) -> bool:
    """Return whether a module of two plain linears is a SwiGLU block whose gate and up are one of them."""
    kind = _kind(module, linears)
    if kind not in verdicts:
        pair = list(linears.values())
        verdicts[kind] = any(_is_fused(module, wide, down) for wide, down in (pair, pair[::-1]))
    return bool(verdicts[kind])


def _is_fused(module: nn.Module, wide: nn.Module, down: nn.Module) -> bool:
    outputs, hidden = shape_of(down)
    if "bias" in wide or shape_of(wide) != (2 * hidden, outputs):
        return False
    gate, up = (_half(wide, slice(*bounds)) for bounds in ((0, hidden), (hidden, 2 * hidden)))
    x = _rows(gate, up)
    try:
        return x is not None and _agree(plain_class(module).__call__(module, x), _swiglu(x, gate, up, down))
    except Exception:
        return False


def _half(wide: nn.Module, rows: slice) -> nn.Module:
    """Return a linear of some of the rows of another."""
    half: nn.Module = copy.copy(wide)
    for name in MATRIX:
        if half.get(name) is not None:
            half[name] = half[name][rows]
    return half


def _layouts(linears: Mapping[str, nn.Module]) -> Iterator[Layout]:
    """Yield the orders that the shapes allow, the one that the names suggest first."""
    for gate, up, down in sorted(itertools.permutations(linears, 3), key=_strangeness):
        shapes = [shape_of(linears[name]) for name in (gate, up, down)]
        if shapes[0] == shapes[1] == shapes[2][::-1]:
            yield gate, up, down


def _strangeness(layout: Layout) -> int:
    return sum(word not in layout[place] for word, place in _USUAL)


def _kind(module: nn.Module, linears: Mapping[str, nn.Module]) -> Any:
    """Return everything but the weights' values that the module's result may depend on."""
    own = {name: value for name, value in vars(module).items() if name not in (STATE, "_no_grad")}
    attributes = tuple(sorted((name, repr(value)) for name, value in own.items()))
    held = tuple(sorted((name, type(value).__name__, repr(value)) for name, value in module.items()))
    ordered = [linears[name] for name in sorted(linears)]
    dtypes = tuple((dtype_of(part), "bias" in part, format_of(part)) for part in ordered)
    return plain_class(module), attributes, held, repr(dtypes)


def _check(module: nn.Module, linears: Mapping[str, nn.Module], layouts: list[Layout]) -> tuple[Layout | None, str]:
    for layout in layouts:
        parts = [linears[name] for name in layout]
        x = _rows(parts[0], parts[1])
        if x is None:
            return None, "its weights are zero or not finite: no telling what it computes"
        expected = _swiglu(x, *parts)
        try:
            actual = plain_class(module).__call__(module, x)
            if _agree(actual, expected):
                return layout, ""
        except Exception as error:
            return None, f"its call does not take one array: {str(error).splitlines()[:1]}"
    return None, NOT_SWIGLU


def _rows(gate: nn.Module, up: nn.Module) -> mx.array | None:
    """Return a row with gates about 1.5, where activations differ, and one up to 12, where limits act."""
    x = mx.random.normal((2, shape_of(gate)[1]), key=mx.random.key(0)).astype(dtype_of(gate))
    gates, ups = (_linear(x, part).astype(mx.float32) for part in (gate, up))
    spread = float(mx.sqrt(mx.mean(gates[0] * gates[0])).tolist())  # type: ignore[arg-type]
    peak = float(mx.maximum(mx.abs(gates[1]).max(), mx.abs(ups[1]).max()).tolist())  # type: ignore[arg-type]
    if not (0 < spread < float("inf") and 0 < peak < float("inf")):
        return None
    return x * mx.array([[1.5 / spread], [12 / peak]]).astype(x.dtype)


def _linear(x: mx.array, part: nn.Module) -> mx.array:
    return plain_class(part).__call__(part, x)  # type: ignore[no-any-return]


def _swiglu(x: mx.array, gate: nn.Module, up: nn.Module, down: nn.Module) -> mx.array:
    return _linear(nn.silu(_linear(x, gate)) * _linear(x, up), down)


def _agree(actual: Any, expected: mx.array) -> bool:
    if not isinstance(actual, mx.array) or actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    tolerance = _TOLERANCES[expected.dtype]
    actual, expected = actual.astype(mx.float32), expected.astype(mx.float32)
    error = mx.linalg.norm(actual - expected, axis=-1)
    return bool((error <= tolerance * mx.linalg.norm(expected, axis=-1)).all().item())
