"""Records of steps: what is closed, what of two records moves, and memory that is used again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metile.step_cache import RecordedCache
from metile.tape import (
    Cached,
    Embedded,
    Held,
    Made,
    OpenStepError,
    Own,
    Record,
    Result,
    _Memory,
    moving_numbers,
    read,
)


def array() -> mx.array:
    return mx.zeros((1,))


def launched(name: str, inputs: list[mx.array], outputs: list[mx.array], numbers: tuple[int, ...] = ()) -> Any:
    source = SimpleNamespace(name=name, numbers=("n",) * len(numbers))
    launch = SimpleNamespace(entry=len(name), groups=3, numbers=[*numbers, 0, 0])
    return SimpleNamespace(
        kernel=SimpleNamespace(source=source), launch=launch, inputs=tuple(inputs), outputs=tuple(outputs)
    )


class Step:
    """A layer's step: project, turn, attend, give the logits."""

    def __init__(self, offset: int = 5) -> None:
        self.x, self.weight, self.table, self.logits = array(), array(), array(), array()
        self.q, self.k, self.turned, self.y = array(), array(), array(), array()
        cache = RecordedCache()
        cache.offset, cache.updates = offset + 1, 1
        cache.given, cache.seen = (array(), array()), (array(), array())
        self.caches, self.held, self.tokens = [cache], [self.weight, self.table, array()], offset
        self.launches = [
            launched("project", [self.x, self.weight], [self.q, self.k], (17,)),
            launched("turn", [self.q, self.k, self.table], [self.turned, *cache.given], (offset, 4)),
            launched("attend", [self.turned, *cache.seen], [self.y]),
            launched("vocabulary", [self.y, self.x, self.weight], [self.logits]),
        ]

    def read(self) -> Record:
        return read(self.launches, self.caches, self.logits, self.held, self.tokens)


def test_a_closed_step() -> None:
    step = Step()
    record = step.read()
    weight, table = Held(id(step.weight)), Held(id(step.table))
    assert [note.read for note in record.notes] == [
        (Embedded(), weight),
        (Made(0, 0), Made(0, 1), table),
        (Made(1, 0), Cached(0, 0), Cached(0, 1)),
        (Made(2, 0), Embedded(), weight),
    ]
    assert [note.written for note in record.notes] == [
        (None, None),
        (None, Cached(0, 0), Cached(0, 1)),
        (None,),
        (Result(),),
    ]
    assert record.embedded is step.x
    assert list(record.held.values()) == [step.weight, step.table]
    assert (record.tokens, record.layers) == (5, 1)


def foreign(step: Step) -> None:
    step.launches[2].inputs = (array(), *step.caches[0].seen)


def bypassed(step: Step) -> None:
    step.launches[2].inputs = (step.turned, *step.caches[0].given)


def twice(step: Step) -> None:
    step.caches[0].updates = 2


def unused(step: Step) -> None:
    step.caches.append(RecordedCache())


def laid_out_by_mlx(step: Step) -> None:
    step.caches[0].given = (array(), array())


def scaled(step: Step) -> None:
    step.logits = array()


def later(step: Step) -> None:
    step.launches.append(launched("more", [step.logits], [array()]))


def constant(step: Step) -> None:
    step.held.append(step.x)


def nothing(step: Step) -> None:
    step.launches, step.caches = [], []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (foreign, "attend reads what plain MLX computes"),
        (bypassed, "attend reads what plain MLX computes"),
        (twice, "a layer does not use its cache once"),
        (unused, "a layer does not use its cache once"),
        (laid_out_by_mlx, "the keys or values of a layer are not what a kernel wrote"),
        (scaled, "the logits are not what the last kernel wrote"),
        (later, "the logits are not what the last kernel wrote"),
        (constant, "no kernel reads the embedding of the token"),
        (nothing, "the logits are not what the last kernel wrote"),
    ],
)
def test_a_step_that_is_not_closed(change: Any, reason: str) -> None:
    step = Step()
    change(step)
    with pytest.raises(OpenStepError, match=reason):
        step.read()


def pair(second: int = 6) -> tuple[Record, Record]:
    """Return the records of two steps of one model."""
    steps = Step(5), Step(second)
    steps[1].held = steps[0].held
    for old, new in zip(steps[0].launches, steps[1].launches, strict=True):
        new.kernel = old.kernel
        new.inputs = tuple(
            steps[0].weight if item is steps[1].weight else steps[0].table if item is steps[1].table else item
            for item in new.inputs
        )
    return steps[0].read(), steps[1].read()


@pytest.mark.parametrize("second", [6, 9, 2])
def test_the_numbers_that_grow_with_the_tokens(second: int) -> None:
    assert moving_numbers(*pair(second)) == [(False,), (True, False), (), ()]


@pytest.mark.parametrize("number", [6, 4, 15])
def test_a_number_that_changes_otherwise(number: int) -> None:
    first, second = pair(7)
    second.notes[1].launch.numbers[0] = number
    with pytest.raises(OpenStepError, match="does not grow with the tokens"):
        moving_numbers(first, second)


def test_as_many_tokens_tell_nothing_of_a_number_that_changed() -> None:
    first, second = pair(5)
    assert moving_numbers(first, second) == [(False,), (False, False), (), ()]
    second.notes[1].launch.numbers[0] = 6
    with pytest.raises(OpenStepError, match="does not grow with the tokens"):
        moving_numbers(first, second)


def test_launches_that_change() -> None:
    first, second = pair()
    other = Step(6).read()
    for changed in (other, Record(6, second.notes[1:], second.held, second.embedded, 1)):
        with pytest.raises(OpenStepError, match="launches change from token to token"):
            moving_numbers(first, changed)


@given(st.lists(st.one_of(st.integers(1, 400), st.none()), min_size=1, max_size=60))
def test_memory_is_used_again_and_never_twice_at_once(sizes: list[int | None]) -> None:
    memory, taken = _Memory(), list[Own]()
    for size in sizes:
        if size is None:
            if taken:
                memory.give(taken.pop(len(taken) // 2))
            continue
        own = Own(memory.take(size), (size,), 1)
        assert own.offset % 64 == 0
        assert own.offset + size <= memory.bytes
        assert all(own.offset + size <= other.offset or other.offset + other.shape[0] <= own.offset for other in taken)
        taken.append(own)
    assert memory.bytes <= 64 * 7 * len(sizes)


def test_memory_of_one_size_is_as_much_as_is_in_use() -> None:
    memory = _Memory()
    for _ in range(30):
        pair = [Own(memory.take(100), (50,), 2) for _ in range(2)]
        for own in pair:
            memory.give(own)
    assert memory.bytes == 2 * 128
