"""What holds for every launch that does not say otherwise."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

from metile.errors import mismatch
from metile.simulator.devices import DEFAULT, Device

CHECK_VARIABLE = "METILE_SIMULATOR_CHECK"
_WORDS = {"": False, "0": False, "false": False, "1": True, "true": True}


@dataclass
class Settings:
    """Defaults of launches, and how often each kernel was launched under them.

    Attributes:
        device: the device to simulate.
        check: checked mode; None leaves it to ``METILE_SIMULATOR_CHECK``.
        launches: number of launches by kernel name.
    """

    device: Device = DEFAULT
    check: bool | None = None
    launches: Counter[str] = field(default_factory=Counter)


_current = [Settings()]


def current() -> Settings:
    """Return the settings in force."""
    return _current[0]


def replace(settings: Settings) -> Settings:
    """Put other settings in force; return those that were."""
    before, _current[0] = _current[0], settings
    return before


def checked(asked: bool | None) -> bool:
    """Return whether a launch is checked: as asked, else as installed, else as the environment says."""
    for answer in (asked, current().check):
        if answer is not None:
            return answer
    word = os.environ.get(CHECK_VARIABLE, "").strip().lower()
    if word not in _WORDS:
        raise mismatch(CHECK_VARIABLE, "0 or 1", repr(word))
    return _WORDS[word]
