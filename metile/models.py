"""What in a model a kernel could run, found by structure: types, shapes and what a module computes, not names.

`find` walks a tree of modules and asks each finder of `FINDERS` about each module. What looks like something
that a kernel could run but is not, a LoRA layer for instance, is listed with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.nn as nn

from metile.errors import wrong_type
from metile.finders import attention, decoder_layer, linear, rms_norm, swiglu_mlp, vocabulary
from metile.sites import Declined, Found, Site, Survey, children_of

Finder = Callable[[str, nn.Module, Survey], Site | Declined | None]


def find(model: nn.Module) -> Found:
    """Find what kernels could run in a model.

    Args:
        model: any tree of MLX modules, patched or not.

    Raises:
        MetileTypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise wrong_type("find", "an mlx.nn.Module", type(model).__name__)
    survey = Survey(model)
    sites: list[Site] = []
    declined: list[Declined] = []
    for path, module, parent in _walk("", model, None, survey.taken):
        survey.parent = parent
        answers = (finder(path, module, survey) for finder in FINDERS)
        answer = next((answer for answer in answers if answer is not None), None)
        if isinstance(answer, Site):
            sites.append(answer)
        elif answer is not None:
            declined.append(answer)
    return Found(tuple(sites), tuple(declined))


def _walk(
    path: str, module: nn.Module, parent: nn.Module | None, done: set[int]
) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """Yield each module once, parents first; what is `done` meanwhile is passed over."""
    if id(module) in done:
        return
    done.add(id(module))
    yield path, module, parent
    for name, child in children_of(module):
        yield from _walk(f"{path}.{name}" if path else name, child, module, done)


# Asked in this order; the first that knows a module decides.
FINDERS: tuple[Finder, ...] = (
    decoder_layer,
    attention,
    swiglu_mlp,
    linear,
    vocabulary,
    rms_norm,
)
