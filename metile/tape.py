"""A decode step as a list of launches: what was recorded of one, and when two of them make a tape.

The Python of a model runs once for a record, and its launches are noted with the arrays they read and wrote. A record
is *closed* where each array that a launch reads is what the model holds, what an earlier launch of the step wrote, the
embedding of the token, or a layer's cache. Plain MLX between two launches gives an array that is none of these.

Two records of one model, at different numbers of tokens in the cache, tell what changes with it: a number of a launch
that has grown by as much as the tokens have. If anything else differs there is no tape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from metile.step_cache import RecordedCache
from metile.targets.cpu import CpuKernel, Launch, Launched, OutputSpec
from metile.targets.cpu_tape import CpuTape, External, Own, Place, Result, Seen, TapeLaunch

_ALIGNMENT = 64


@dataclass(frozen=True)
class Made:
    """What an earlier launch wrote: its number in the step, and which of its outputs."""

    launch: int
    output: int


@dataclass(frozen=True)
class Held:
    """What the model holds, by the identity of the array."""

    number: int


@dataclass(frozen=True)
class Embedded:
    """The embedding of the token."""


@dataclass(frozen=True)
class Cached:
    """Keys or values of a layer: half 0 or 1."""

    layer: int
    half: int


Source = Made | Held | Embedded | Cached


class OpenStepError(Exception):
    """A step that is not closed; the message says what of it."""


@dataclass(frozen=True)
class Note:
    """One launch of a record; none of its arrays is kept.

    Attributes:
        kernel: what was launched.
        launch: everything of it but the arrays.
        entry: the address of its function.
        groups: threadgroups.
        read: where its inputs come from.
        written: where each of its outputs goes that is not just read by later launches.
        shapes: of its outputs.
    """

    kernel: CpuKernel
    launch: Launch = dataclasses.field(compare=False, repr=False)
    entry: int
    groups: int
    read: tuple[Source, ...]
    written: tuple[Cached | Result | None, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Record:
    """A closed step.

    Attributes:
        tokens: in the cache before it.
        notes: its launches.
        held: the arrays of the model that they read, by identity.
        embedded: the embedding of its token.
        layers: how many caches it wrote.
    """

    tokens: int
    notes: tuple[Note, ...]
    held: Mapping[int, mx.array]
    embedded: mx.array
    layers: int


class _Reader:
    """Tells where the arrays of a step's launches come from, in the order of the launches."""

    def __init__(self, caches: Sequence[RecordedCache], logits: mx.array, held: Mapping[int, mx.array]) -> None:
        self.held, self.logits = held, logits
        self.embedded: mx.array | None = None
        self.used: dict[int, mx.array] = {}
        self.sources: dict[int, Source] = {}
        self.given: dict[int, Cached] = {}
        for layer, cache in enumerate(caches):
            if cache.updates != 1:
                raise OpenStepError("a layer does not use its cache once")
            for half in (0, 1):
                self.sources[id(cache.seen[half])] = self.given[id(cache.given[half])] = Cached(layer, half)
        self.unwritten = set(self.given)

    def note(self, number: int, launched: Launched) -> Note:
        launch, name = launched.launch, launched.kernel.source.name
        read = tuple(self._source(array, name) for array in launched.inputs)
        written: list[Cached | Result | None] = []
        for output, array in enumerate(launched.outputs):
            place: Cached | Result | None = self.given.get(id(array))
            if place is None:
                self.sources[id(array)] = Made(number, output)
                place = Result() if array is self.logits else None
            self.unwritten.discard(id(array))
            written.append(place)
        shapes = tuple(array.shape for array in launched.outputs)
        return Note(launched.kernel, launch, launch.entry, launch.groups, read, tuple(written), shapes)

    def _source(self, array: mx.array, name: str) -> Source:
        number = id(array)
        if number in self.sources:
            return self.sources[number]
        if number in self.held:
            self.used[number] = array
            return Held(number)
        if number in self.given or (self.embedded is not None and self.embedded is not array):
            raise OpenStepError(f"{name} reads what plain MLX computes")
        self.embedded = array
        return Embedded()


def read(
    launches: Sequence[Launched],
    caches: Sequence[RecordedCache],
    logits: mx.array,
    held: Collection[mx.array],
    tokens: int,
) -> Record:
    """Return the record of a step.

    Args:
        launches: of the step, in their order.
        caches: of its layers, as the step left them.
        logits: what the model returned.
        held: the arrays of the model, and those made of its rope modules.
        tokens: in the cache before the step.

    Raises:
        OpenStepError: the step is not closed.
    """
    reader = _Reader(caches, logits, {id(array): array for array in held})
    notes = tuple(reader.note(number, launched) for number, launched in enumerate(launches))
    if reader.unwritten:
        raise OpenStepError("the keys or values of a layer are not what a kernel wrote")
    if not notes or not isinstance(notes[-1].written[-1], Result):
        raise OpenStepError("the logits are not what the last kernel wrote")
    if reader.embedded is None:
        raise OpenStepError("no kernel reads the embedding of the token")
    return Record(tokens, notes, reader.used, reader.embedded, len(caches))


def moving_numbers(first: Record, second: Record) -> list[tuple[bool, ...]]:
    """Return for each launch which of its numbers grow with the tokens.

    Raises:
        OpenStepError: the records differ by something else, or are of as many tokens.
    """
    if first.notes != second.notes:
        raise OpenStepError("its launches change from token to token")
    grown = second.tokens - first.tokens
    return [
        tuple(_moves(old, new, grown) for old, new in zip(_numbers(a), _numbers(b), strict=True))
        for a, b in zip(first.notes, second.notes, strict=True)
    ]


def _numbers(note: Note) -> list[int]:
    return note.launch.numbers[: len(note.kernel.source.numbers)]  # type: ignore[no-any-return]


def _moves(old: int, new: int, grown: int) -> bool:
    if old != new and (grown == 0 or new - old != grown):
        raise OpenStepError("a number of a kernel does not grow with the tokens")
    return old != new


class _Memory:
    """The tape's own memory, in which an array stays until the last launch that reads it."""

    def __init__(self) -> None:
        self.bytes = 0
        self._free: list[tuple[int, int]] = []  # offset, bytes

    def take(self, size: int) -> int:
        """Return the offset of so many bytes, those that were given back last where they are enough."""
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        for place in range(len(self._free) - 1, -1, -1):
            if self._free[place][1] == size:
                return self._free.pop(place)[0]
        offset, self.bytes = self.bytes, self.bytes + size
        return offset

    def give(self, place: Own) -> None:
        """Take an array's bytes back."""
        size = place.itemsize
        for length in place.shape:
            size *= length
        self._free.append((place.offset, -(-size // _ALIGNMENT) * _ALIGNMENT))


class _Layout:
    """Gives every array of a record its place in a tape."""

    def __init__(self, record: Record) -> None:
        self.memory = _Memory()
        self.held = {number: 1 + index for index, number in enumerate(record.held)}
        self.made: dict[Made, Place] = {}
        self.last: dict[Source, int] = {}
        for number, note in enumerate(record.notes):
            self.last |= dict.fromkeys(note.read, number)

    def places(self, number: int, note: Note) -> tuple[Place, ...]:
        """Return the places of what a launch reads and writes; to be called in the order of the launches."""
        read = [self._read(source) for source in note.read]
        written = [self._written(number, output, note) for output in range(len(note.written))]
        for source in dict.fromkeys(note.read):
            if isinstance(source, Made) and self.last[source] == number:
                self._forget(source)
        for output in range(len(note.written)):
            if Made(number, output) in self.made and Made(number, output) not in self.last:  # nobody reads it
                self._forget(Made(number, output))
        return (*read, *written)

    def _forget(self, made: Made) -> None:
        place = self.made.pop(made)
        if isinstance(place, Own):
            self.memory.give(place)

    def _read(self, source: Source) -> Place:
        if isinstance(source, Made):
            return self.made[source]
        if isinstance(source, Embedded):
            return External(0)
        if isinstance(source, Held):
            return External(self.held[source.number])
        return self._cache(source, Seen.TOKENS)

    def _written(self, number: int, output: int, note: Note) -> Place:
        goes, shape = note.written[output], note.shapes[output]
        if isinstance(goes, Cached):
            return self._cache(goes, Seen.TOKEN)
        if isinstance(goes, Result):
            return goes
        itemsize = _spec(note, output).bits // 8
        size = itemsize
        for length in shape:
            size *= length
        own = self.made[Made(number, output)] = Own(self.memory.take(size), shape, itemsize)
        return own

    def _cache(self, cached: Cached, seen: Seen) -> External:
        return External(1 + len(self.held) + 2 * cached.layer + cached.half, seen)


def _spec(note: Note, output: int) -> OutputSpec:
    spec: OutputSpec = note.launch.outputs[output]
    return spec


def build(first: Record, second: Record, caches: Sequence[Any]) -> CpuTape:
    """Return the tape of two records: what it reads anew is the embedding of the token.

    Args:
        first: a record.
        second: one of another number of tokens.
        caches: of the layers, any that are laid out like those it will run on.

    Raises:
        OpenStepError: they differ by more than the tokens.
    """
    layout = _Layout(second)
    launches = []
    for number, (note, moving) in enumerate(zip(second.notes, moving_numbers(first, second), strict=True)):
        numbers = tuple(
            value - second.tokens if moves else value for value, moves in zip(_numbers(note), moving, strict=True)
        )
        places = layout.places(number, note)
        launches.append(TapeLaunch(note.kernel, note.entry, note.groups, numbers, moving, places))
    halves = [array for cache in caches for array in (cache.keys, cache.values)]
    return CpuTape(
        launches,
        [second.embedded, *second.held.values(), *halves],
        inputs=1,
        caches=len(halves),
        output=_spec(second.notes[-1], len(second.notes[-1].written) - 1),
        own_bytes=layout.memory.bytes,
    )
