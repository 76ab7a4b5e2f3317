"""What a step takes for constant is told by identity, in Python and by the host library alike."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny_models import tiny

from metile.constants import Constants
from metile.instances import STATE, attach
from metile.targets.cpu_tape import unchanged

CHECKS: list[Callable[[Constants, nn.Module], bool]] = [Constants.unchanged, unchanged]


def swap_layers(model: Any) -> None:
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]


def change_class(model: Any) -> None:
    class Other(nn.Linear):  # type: ignore[misc]
        pass

    object.__setattr__(model.model.layers[1].mlp.up_proj, "__class__", Other)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "weight": lambda model: setattr(model.model.norm, "weight", mx.array(model.model.norm.weight)),
    "module": lambda model: setattr(model.model.layers[0].mlp, "up_proj", nn.Linear(64, 96, bias=False)),
    "number": lambda model: setattr(model.model.layers[1].self_attn, "scale", 0.5),
    "new attribute": lambda model: setattr(model.model.layers[1].mlp, "limit", 7.0),
    "new weight": lambda model: setattr(model.model.layers[1].mlp.up_proj, "bias", mx.zeros((96,))),
    "training": lambda model: model.model.layers[0].mlp.train(),
    "order of layers": swap_layers,
    "fewer layers": lambda model: model.model.layers.pop(),
    "more layers": lambda model: model.model.layers.append(model.model.layers[0]),
    "list for another": lambda model: setattr(model.model, "layers", list(model.model.layers)),
    "class": change_class,
    "attribute of the model": lambda model: setattr(model, "temperature", 2.0),
    "child of the model": lambda model: setattr(model, "lm_head", nn.Linear(64, 131, bias=False)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("check", CHECKS)
def test_a_change_is_seen(check: Callable[[Constants, nn.Module], bool], change: str) -> None:
    model = tiny()
    constants = Constants(model)
    assert check(constants, model)
    CHANGES[change](model)
    assert not check(constants, model)


@pytest.mark.parametrize("check", CHECKS)
def test_what_a_patch_keeps_on_the_model_is_no_constant(check: Callable[[Constants, nn.Module], bool]) -> None:
    model = tiny()
    constants = Constants(model)
    attach(model, object())
    assert check(constants, model)
    assert STATE in vars(model)


def test_values_are_all_that_modules_hold() -> None:
    model = tiny("qwen2")
    held = {id(value) for value in Constants(model).values()}
    layer = model.model.layers[1]
    assert {id(layer), id(layer.mlp.up_proj.weight), id(layer.self_attn.q_proj.bias), id(model.lm_head)} <= held
    assert id(layer.self_attn.scale) in held


def test_the_model_is_not_held() -> None:
    model = tiny()
    constants, gone = Constants(model), weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
    assert constants.held
