"""Changing what one module instance does, and nothing else.

The instance's class is exchanged for a subclass of its own class that differs in a few methods. What those
need is kept in an attribute outside the module's dictionary, so that parameters, children, saved weights and
isinstance are what they were; the way back is to give the instance its class again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.nn as nn

STATE = "_metile"  # the attribute of a patched instance
_PLAIN = "_metile_plain"  # the attribute of a patched class: the class it stands in for

_classes: dict[tuple[type, str], type] = {}


def plain_class(module: nn.Module) -> type:
    """Return the class of an instance as it is, or was before it was patched."""
    cls = type(module)
    plain: type = vars(cls).get(_PLAIN, cls)
    return plain


def state_of(module: nn.Module) -> Any | None:
    """Return the state of a patched instance, or None."""
    return vars(module).get(STATE)


def patched_class(plain: type, kind: str, methods: Mapping[str, Callable[..., Any]]) -> type:
    """Return the subclass of `plain` with `methods`, the same one each time for a `kind`.

    It has the name of `plain`, so that a model prints as before, and copies and pickles as `plain`.
    """
    cls = _classes.get((plain, kind))
    if cls is None:
        names = ("__module__", "__qualname__", "__doc__")
        namespace = {name: getattr(plain, name) for name in names}
        namespace |= {"__slots__": (), _PLAIN: plain, "__reduce_ex__": _reduce_as_plain, **methods}
        cls = _classes[plain, kind] = type(plain.__name__, (plain,), namespace)
    return cls


def swap(module: nn.Module, cls: type) -> None:
    """Give an instance another class, past the module's own ``__setattr__``."""
    object.__setattr__(module, "__class__", cls)


def attach(module: nn.Module, state: object) -> None:
    """Keep `state` on an instance, outside its dictionary."""
    object.__setattr__(module, STATE, state)


def detach(module: nn.Module) -> None:
    """Bring an instance back to its own class and forget its state."""
    swap(module, plain_class(module))
    if STATE in vars(module):
        object.__delattr__(module, STATE)


def _reduce_as_plain(self: nn.Module, protocol: Any) -> Any:
    """Describe an instance as one of its plain class: a copy of a patched module is a plain module."""
    plain: Any = plain_class(self)
    function, arguments, state, *rest = plain.__reduce_ex__(self, protocol)
    if getattr(function, "__name__", "") == "__newobj__":  # pickle would compare its class with that of the instance
        function, arguments = plain.__new__, (plain, *arguments[1:])
    if isinstance(state, dict):
        state = {name: value for name, value in state.items() if name != STATE}
    return (function, arguments, state, *rest)
