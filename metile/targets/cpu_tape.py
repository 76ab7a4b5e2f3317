"""A tape of the CPU target: the launches of a whole step, run by one call. See ``kernels/host/tape.h``."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import mlx.core as mx

from metile.constants import Constants
from metile.errors import MetileError
from metile.targets.cpu import MAX_DIMS, Capsule, CpuKernel, OutputSpec, host

_ALIGNMENT = 64  # bytes, of an array in the tape's own memory
_OWN_MEMORY, _OUTPUT = -1, -2  # sources of a slot that are not from outside
_CHANGED, _NOT_OWNED = 1_000_000, 2_000_000  # statuses of metile_tape_run


class _Array(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("ndim", ctypes.c_int64),
        ("shape", ctypes.c_int64 * MAX_DIMS),
        ("strides", ctypes.c_int64 * MAX_DIMS),
    )


class _External(ctypes.Structure):
    _fields_ = (("cached", ctypes.c_int64), ("itemsize", ctypes.c_int64), ("expected", _Array))


class _Slot(ctypes.Structure):
    _fields_ = (("source", ctypes.c_int64), ("seen", ctypes.c_int64))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("groups", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("moving", ctypes.c_int64),
        ("numbers", ctypes.c_int64 * 16),
    )


class _Tape(ctypes.Structure):
    _fields_ = (
        ("launches", ctypes.c_void_p),
        ("arrays", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("externals", ctypes.c_void_p),
        ("bound", ctypes.c_void_p),
        ("launch_count", ctypes.c_int64),
        ("slot_count", ctypes.c_int64),
        ("external_count", ctypes.c_int64),
        ("output", OutputSpec),
    )


class Seen(IntEnum):
    """What a launch sees of an array from outside: all, or of a cache the new token, or that and those before it."""

    WHOLE = 0
    TOKEN = 1
    TOKENS = 2


@dataclass(frozen=True)
class External:
    """An array from outside the tape, by its place among them."""

    index: int
    seen: Seen = Seen.WHOLE


@dataclass(frozen=True)
class Own:
    """An array in the tape's own memory.

    Attributes:
        offset: in bytes, a multiple of 64.
        shape: of the array, which is contiguous.
        itemsize: bytes of an element.
    """

    offset: int
    shape: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True)
class Result:
    """The array that a run of the tape returns."""


Place = External | Own | Result


@dataclass(frozen=True)
class TapeLaunch:
    """A launch of a tape.

    Attributes:
        kernel: what is launched.
        entry: the address of its function.
        groups: threadgroups.
        numbers: those of the launch; of a moving one, what it is more than the tokens in the cache.
        moving: for each number whether it grows with the tokens.
        places: of its inputs, then of its outputs.
    """

    kernel: CpuKernel
    entry: int
    groups: int
    numbers: tuple[int, ...]
    moving: tuple[bool, ...]
    places: tuple[Place, ...]


class CpuTape:
    """A list of launches in memory, ready to run.

    Attributes:
        changed: whether an array from outside, no cache, was found laid out otherwise: the tape is of no use any more.

    Args:
        launches: in their order; one of them gives the result.
        inputs: how many of the arrays from outside are given anew at every run, the first of them.
        externals: the arrays from outside as they were, caches last.
        caches: how many of them are caches [B, H, room, D].
        output: of the result.
        own_bytes: of the tape's own memory.

    Raises:
        MetileError: an array has no buffer.
    """

    def __init__(
        self,
        launches: Sequence[TapeLaunch],
        externals: Sequence[mx.array],
        *,
        inputs: int,
        caches: int,
        output: OutputSpec,
        own_bytes: int,
    ) -> None:
        self._kernels = [launch.kernel for launch in launches]  # keeps their libraries
        self._memory = ctypes.create_string_buffer(own_bytes + _ALIGNMENT)
        start = -(-ctypes.addressof(self._memory) // _ALIGNMENT) * _ALIGNMENT
        places = [place for launch in launches for place in launch.places]
        self._slots = (_Slot * len(places))(*[_slot(place) for place in places])
        self._arrays = (_Array * len(places))(*[_array(place, start) for place in places])
        self._launches = (_Launch * len(launches))()
        first = 0
        for launch, raw in zip(launches, self._launches, strict=True):
            _fill(raw, launch, first)
            first += len(launch.places)
        self._externals = (_External * len(externals))()
        for index, (array, external) in enumerate(zip(externals, self._externals, strict=True)):
            if host().metile_describe(array, ctypes.addressof(external)) != 0:
                raise MetileError(f"[tape] expected an array with a buffer but got one of {array.shape}")
            external.cached = index >= len(externals) - caches
        self._bound = (_Array * len(externals))()
        self._tape = _Tape(
            *(ctypes.addressof(part) for part in (self._launches, self._arrays, self._slots, self._externals)),
            ctypes.addressof(self._bound),
            len(launches),
            len(places),
            len(externals),
            output,
        )
        constants = externals[inputs : len(externals) - caches]
        objects: Any = ctypes.py_object * len(externals)
        self._objects: Any = objects(*[None] * inputs, *constants, *[None] * caches)
        self._inputs, self._first_cache = inputs, len(externals) - caches
        self.changed = False
        self._run = host().metile_tape_run

    def run(
        self, inputs: Sequence[mx.array], caches: Sequence[mx.array], owned: ctypes.Array[Any], tokens: int
    ) -> mx.array | None:
        """Run once, one call at a time; put the new token in the caches and return the result.

        Args:
            inputs: the arrays that are given anew.
            caches: [B, H, room, D] with `tokens` in them and room for one more.
            owned: the memory that `caches` must have, see `addresses`.
            tokens: in the caches so far.

        Returns:
            The result; None, with nothing written, where `caches` have other memory or an array from outside is laid
            out otherwise than it was.
        """
        objects = self._objects
        objects[: self._inputs] = inputs
        objects[self._first_cache :] = caches
        capsules: list[object] = [None]
        try:
            status = self._run(
                ctypes.addressof(self._tape), ctypes.addressof(objects), ctypes.addressof(owned), tokens, id(capsules)
            )
        finally:  # what is given anew is not kept
            objects[: self._inputs] = [None] * self._inputs
            objects[self._first_cache :] = [None] * len(caches)
        if status == -1:
            raise MemoryError("[tape] expected memory for the output but got none")
        self.changed = _CHANGED <= status < _NOT_OWNED
        return None if status else mx.from_dlpack(Capsule(capsules[0]))


def addresses(arrays: Sequence[mx.array]) -> ctypes.Array[Any]:
    """Return the addresses of the memory of arrays, which are evaluated."""
    found = (ctypes.c_void_p * len(arrays))()
    external = _External()
    for index, array in enumerate(arrays):
        if host().metile_describe(array, ctypes.addressof(external)) != 0:
            raise MetileError(f"[tape] expected an array with a buffer but got one of {array.shape}")
        found[index] = external.expected.data
    return found


def unchanged(constants: Constants, model: Any) -> bool:
    """Return what `constants.unchanged(model)` does, in a sixth of the time."""
    held = constants.dicts, constants.lists, constants.kinds, constants.held
    return constants.root_unchanged(model) and bool(host().metile_unchanged(*held))


def _slot(place: Place) -> _Slot:
    if isinstance(place, External):
        return _Slot(place.index, place.seen)
    return _Slot(_OWN_MEMORY if isinstance(place, Own) else _OUTPUT, Seen.WHOLE)


def _array(place: Place, start: int) -> _Array:
    array = _Array()
    if isinstance(place, Own):
        array.data, array.ndim = start + place.offset, len(place.shape)
        for axis, length in enumerate(place.shape):
            array.shape[axis] = length
            array.strides[axis] = place.itemsize * math.prod(place.shape[axis + 1 :])
    return array


def _fill(raw: _Launch, launch: TapeLaunch, first: int) -> None:
    raw.entry, raw.scratch = launch.entry, launch.kernel.scratch_function()
    raw.groups, raw.first, raw.count = launch.groups, first, len(launch.places)
    raw.numbers[: len(launch.numbers)] = list(launch.numbers)
    raw.moving = sum(1 << index for index, moves in enumerate(launch.moving) if moves)
