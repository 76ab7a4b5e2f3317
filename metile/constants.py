"""What a recorded or traced step of a model takes for constant, and whether it still is what it was.

That is everything that the model's modules hold: weights, children, numbers and training flags, and their classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import is_
from typing import Any

import mlx.nn as nn

from metile.instances import STATE


class Constants:
    """What the modules of a model held at some time, told by identity.

    The model itself is not held: its own dictionaries are read anew, so that what keeps this does not keep the model.

    Attributes:
        dicts: modules below the model, which are dictionaries, and their attributes.
        lists: those that they hold.
        kinds: the class of each container, of `dicts` and then of `lists`.
        held: the values of all `dicts`, then the items of all `lists`.
    """

    def __init__(self, model: nn.Module) -> None:
        below = [module for module in model.modules() if module is not model]
        self.dicts: list[dict[str, Any]] = [each for module in below for each in (module, vars(module))]
        self.lists = [value for holder in (model, *below) for value in holder.values() if isinstance(value, list)]
        self.kinds = [type(container) for container in (*self.dicts, *self.lists)]
        self.held = list(self._now())
        self._root = _contents(model)

    def unchanged(self, model: nn.Module) -> bool:
        """Return whether `model`, the one of before, and all below it hold the very objects of before."""
        now = list(self._now())
        return (
            self.root_unchanged(model)
            and len(now) == len(self.held)
            and all(map(is_, map(type, chain(self.dicts, self.lists)), self.kinds))
            and all(map(is_, now, self.held))
        )

    def root_unchanged(self, model: nn.Module) -> bool:
        """Return whether the model itself, without what is below it, holds the very objects of before."""
        root = _contents(model)
        return len(root) == len(self._root) and all(map(is_, root, self._root))

    def values(self) -> Iterator[Any]:
        """Yield everything that the model's modules held."""
        return chain(self._root, self.held)

    def _now(self) -> Iterator[Any]:
        return chain(chain.from_iterable(map(dict.values, self.dicts)), chain.from_iterable(self.lists))


def _contents(model: nn.Module) -> list[Any]:
    """Return the class, keys and values of a module itself, but for what a patch keeps there."""
    fields = [pair for pair in vars(model).items() if pair[0] != STATE]
    return [type(model), *chain.from_iterable(chain(model.items(), fields))]
