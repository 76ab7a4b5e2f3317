"""Decode steps on a tape: the launches of a step run by one call, where the target runs kernels when they are called.

The Python of a decode step takes longer than some of its kernels. It runs for a token or two of each shape while its
launches are recorded; the tape made of that runs for those after, see `metile.tape`. A tape is used only after it has
given, on copies of the caches, the very logits and keys that the model itself gave; what it takes for constant is
looked at before every step.

A tape writes keys and values where they lie in the cache. MLX's arrays are values, and several may share memory: a copy
of a cache does until one of them is written. So a tape writes only in memory that is its own, see `Ownership`.
"""

from __future__ import annotations

import copy
import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from metile.constants import Constants
from metile.decode_step import call_patched, is_step, launched_since, step_arguments
from metile.instances import patched_class, plain_class
from metile.linears import EMBEDDINGS
from metile.ops.attention import token_bucket
from metile.patched import Entry, Runtime, State
from metile.sites import Declined
from metile.step_cache import RecordedCache
from metile.tape import OpenStepError, Record, build, read
from metile.targets.cpu import recorded
from metile.targets.cpu_tape import CpuTape, addresses, unchanged

_MOST_TAPES = 16  # shapes whose tapes are kept
_MOST_RECORDS = 32  # in a row, none of which came to a tape that was used


@dataclass
class _Owned:
    """Memory of the caches of all layers, as a tape or plain MLX left it when they held so many tokens."""

    tokens: int
    held: list[mx.array]  # the very arrays: MLX writes in no memory that these share
    memory: ctypes.Array[Any]
    caches: list[weakref.ref[KVCache]] = field(default_factory=list)


class Ownership:
    """Which caches' memory a tape may write in.

    Just after plain MLX has written a token, a cache's arrays share their memory with nobody: if they had, MLX would
    have written a copy. That memory is then owned for as long as tokens are only added to it by tapes. Who copies the
    cache meanwhile shares the memory, but looks only at tokens that were there before, and no tape writes those. A
    cache that was trimmed, or was written by anybody else, holds another number of tokens or has other memory than
    what is owned: plain MLX writes its next token.
    """

    def __init__(self) -> None:
        self._owned: dict[int, _Owned] = {}  # by the id of each cache

    def of(self, caches: Sequence[KVCache]) -> _Owned | None:
        """Return what is owned of `caches`, if they hold as many tokens as they were left with."""
        owned = self._owned.get(id(caches[0]))
        if owned is None or owned.tokens != caches[0].offset or len(owned.caches) != len(caches):
            return None
        found = self._owned
        return owned if all(found.get(id(cache)) is owned for cache in caches) else None

    def adopt(self, caches: Sequence[KVCache]) -> None:
        """Own the memory of `caches`, to which plain MLX has just added a token."""
        halves = [array for cache in caches for array in (cache.keys, cache.values)]
        memory = addresses(halves)
        owned = _Owned(caches[0].offset, [copy.copy(array) for array in halves], memory)
        for cache in caches:
            number = id(cache)
            owned.caches.append(weakref.ref(cache, lambda _, number=number: self._owned.pop(number, None)))  # type: ignore[misc]
            self._owned[number] = owned

    def release(self, caches: Sequence[Any]) -> None:
        """Let MLX write where it likes."""
        for cache in caches:
            self._owned.pop(id(cache), None)


class Tape:
    """A tape of one shape of step.

    Attributes:
        launched: kernels that it launches, and how often.
        positions: tokens that its tables of angles reach.
    """

    def __init__(
        self,
        tape: CpuTape,
        embedding: Callable[[mx.array], mx.array],
        launched: list[tuple[Entry, int]],
        positions: int,
    ) -> None:
        self.tape, self.launched, self.positions = tape, launched, positions
        self._embedding = embedding

    def run(self, inputs: mx.array, caches: Sequence[Any], memory: ctypes.Array[Any], tokens: int) -> mx.array | None:
        """Return the logits of `inputs` [B, 1], or None where the tape does not fit; see `CpuTape.run`."""
        halves = [array for cache in caches for array in (cache.keys, cache.values)]
        return self.tape.run((self._embedding(inputs),), halves, memory, tokens)


@dataclass
class _Shape:
    """What is known of one shape of step: a record, then a tape, or why there is none."""

    record: Record | None = None
    tape: Tape | None = None
    refused: bool = False


class TapeState(State):
    """A model whose decode steps run on tapes."""

    __slots__ = ("constants", "layers", "lock", "owners", "records", "shapes")
    runs_kernels = False

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        plain = plain_class(model)
        self.path, self.feature, self.runtime = "", "attention", runtime
        self.module = weakref.ref(model, lambda _: self._forget())  # tapes hold what is below the model
        self.cls = patched_class(plain, "tape_step", {"__call__": call_patched})
        self.plain = plain.__call__
        self.ops, self.fixed, self.parts, self.read = (), (), (), ()
        self.entries, self.failed, self.one_position = {}, False, False
        self.constants: Constants | None = None
        self.shapes: dict[Any, _Shape] = {}
        self.owners, self.lock, self.records = Ownership(), threading.Lock(), 0

    def call(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run the model: a tape where the call is a step that has one, the model itself otherwise."""
        inputs, cache = step_arguments(arguments, named)
        if inputs is not None and is_step(module, inputs, cache) and self.lock.acquire(blocking=False):
            try:
                return self._step(module, inputs, cache)
            finally:
                self.lock.release()
        if isinstance(cache, list):
            self.owners.release(cache)
        return self.plain(module, *arguments, **named)

    def _step(self, module: Any, inputs: mx.array, cache: list[KVCache]) -> mx.array:
        if self.constants is not None and not unchanged(self.constants, module):
            self._forget()
        keys = cache[0].keys
        place = inputs.shape, keys.shape[:2], keys.shape[3], keys.dtype, token_bucket(cache[0].offset + 1)
        shape = self.shapes.get(place)
        if shape is None:
            if len(self.shapes) >= _MOST_TAPES:
                self.shapes.clear()
            shape = self.shapes[place] = _Shape()
        logits = self._play(shape, inputs, cache)
        return self._plain_step(module, shape, inputs, cache) if logits is None else logits

    def _play(self, shape: _Shape, inputs: mx.array, cache: list[KVCache]) -> mx.array | None:
        tape, owned = shape.tape, self.owners.of(cache)
        if tape is None or owned is None:
            return None
        tokens = owned.tokens
        if tokens >= tape.positions:
            shape.tape = None
            return None
        try:
            logits = tape.run(inputs, cache, owned.memory, tokens)
        except Exception as error:
            self._refuse(shape, f"its tape raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            return None
        if logits is None:
            if tape.tape.changed:
                shape.tape = None
            return None
        for layer in cache:
            layer.offset += 1
        owned.tokens, self.records = tokens + 1, 0
        for entry, count in tape.launched:
            entry.engaged += count
        return logits

    def _plain_step(self, module: Any, shape: _Shape, inputs: mx.array, cache: list[KVCache]) -> mx.array:
        """Run the model on a token, recorded where that is of use; own the caches' memory where a tape may."""
        self.owners.release(cache)
        if shape.refused:
            return self.plain(module, inputs, cache=cache)  # type: ignore[no-any-return]
        offset = cache[0].offset
        if shape.tape is None:
            logits = self._recorded(module, shape, inputs, cache)
        else:
            logits = self.plain(module, inputs, cache=cache)
        dtype = cache[0].keys.dtype
        if not shape.refused and all(
            layer.offset == offset + 1 and layer.keys.dtype == layer.values.dtype == dtype for layer in cache
        ):
            self.owners.adopt(cache)
        return logits

    def _recorded(self, module: Any, shape: _Shape, inputs: mx.array, cache: list[KVCache]) -> mx.array:
        tokens, caches = cache[0].offset, [RecordedCache.of(layer) for layer in cache]
        before = {id(entry): entry.engaged for entry in self.runtime.all_entries()}
        try:
            with recorded() as launches:
                logits: mx.array = self.plain(module, inputs, cache=caches)
        finally:
            for mine, layer in zip(caches, cache, strict=True):
                mine.give_back(layer)
        try:
            self._note(module, shape, inputs, cache, logits, read(launches, caches, logits, self._held(module), tokens))
            if shape.tape is not None:
                shape.tape.launched = launched_since(self.runtime, before)
        except OpenStepError as error:
            self._refuse(shape, f"its decode step has no tape: {error}")
        return logits

    def _note(
        self, module: Any, shape: _Shape, inputs: mx.array, cache: list[KVCache], logits: mx.array, record: Record
    ) -> None:
        """Keep a first record; make a tape of a second one, and keep it if it gives what the model gave."""
        self.records += 1
        if self.records > _MOST_RECORDS:
            raise OpenStepError("its modules change at every token")
        first, shape.record = shape.record, record
        if first is None or first.tokens == record.tokens:
            return
        tables = [table for table in self.runtime.tables.values() if id(table) in record.held]
        tape = Tape(
            build(first, record, cache),
            _embedding(module, inputs, record.embedded),
            [],
            min((table.shape[0] for table in tables), default=sys.maxsize),
        )
        if not _gives_the_same(tape, inputs, cache, logits):
            raise OpenStepError("the tape gives other logits, keys or values")
        shape.tape, shape.record = tape, None

    def _held(self, module: Any) -> list[mx.array]:
        if self.constants is None:
            self.constants = Constants(module)
        values = (*self.constants.values(), *self.runtime.tables.values())
        return [value for value in values if isinstance(value, mx.array)]

    def _refuse(self, shape: _Shape, reason: str) -> None:
        shape.record, shape.tape, shape.refused = None, None, True
        declined = Declined(self.path, reason)
        if declined not in self.runtime.failed:
            self.runtime.failed.append(declined)

    def _forget(self) -> None:
        self.shapes.clear()
        self.constants = None


def _embedding(module: nn.Module, inputs: mx.array, embedded: mx.array) -> Callable[[mx.array], mx.array]:
    """Return the embedding of a model that gives `embedded` for `inputs`.

    Raises:
        OpenStepError: none does.
    """
    for part in module.modules():
        if plain_class(part) in EMBEDDINGS:
            rows: mx.array = part(inputs)
            if rows.shape == embedded.shape and rows.dtype == embedded.dtype and _same(rows, embedded):
                return part  # type: ignore[no-any-return]
    raise OpenStepError("what the first kernel reads is not the embedding of the token")


def _gives_the_same(tape: Tape, inputs: mx.array, cache: Sequence[KVCache], logits: mx.array) -> bool:
    """Return whether a tape gives the logits, keys and values of a step that is done, on copies of its caches."""
    tokens, copies = cache[0].offset - 1, []
    for layer in cache:
        mine = KVCache()
        mine.keys, mine.values = copy.copy(layer.keys), copy.copy(layer.values)
        for array in (mine.keys, mine.values):
            array[..., tokens : tokens + 1, :] = float("nan")
        copies.append(mine)
    memory = addresses([array for mine in copies for array in (mine.keys, mine.values)])
    got = tape.run(inputs, copies, memory, tokens)
    if got is None or not _same(got, logits):
        return False
    pairs = (
        (getattr(mine, name), getattr(layer, name))
        for name in ("keys", "values")
        for mine, layer in zip(copies, cache, strict=True)
    )
    return all(_same(mine[..., : tokens + 1, :], theirs[..., : tokens + 1, :]) for mine, theirs in pairs)


def _same(a: mx.array, b: mx.array) -> bool:
    return bool(mx.array_equal(a, b, equal_nan=True).item())
