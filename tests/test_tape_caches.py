"""Decode steps on a tape whatever becomes of the cache: it grows, is trimmed, copied, saved, left and come back to.

The reference is the patched model without tapes: its top module is called as its plain class.
"""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, RotatingKVCache, load_prompt_cache, save_prompt_cache, trim_prompt_cache
from tape_models import begun, decode, ids, make, no_tapes, python_launches, same, state, warm
from tiny_models import patched

from metile.targets.cpu import recorded


@pytest.mark.parametrize("start", [250, 1019])
def test_a_cache_that_grows_into_another_bucket(start: int) -> None:
    model = make()
    patched(model)
    with no_tapes(model):
        expected = decode(model, begun(model, start), 12)
    cache = begun(model, start)
    assert same(decode(model, cache, 12), expected)
    assert cache[0].keys.shape[2] == (start + 262) // 256 * 256
    assert python_launches(model, cache) == 0


def test_a_prefill_chunk_in_the_middle() -> None:
    model = make()
    patched(model)

    def run() -> list[mx.array]:
        cache = begun(model)
        return [decode(model, cache), model(ids(1, 9, 7), cache=cache), decode(model, cache)]

    with no_tapes(model):
        expected = run()
    assert all(map(same, run(), expected))


def test_a_trimmed_cache() -> None:
    model = make()
    patched(model)

    def run() -> list[mx.array]:
        cache = begun(model)
        first = decode(model, cache)
        trim_prompt_cache(cache, 3)
        return [first, decode(model, cache, seed=8)]

    with no_tapes(model):
        expected = run()
    assert all(map(same, run(), expected))


def test_a_copy_goes_on_as_the_other_does() -> None:
    model = make()
    patched(model)

    def run() -> list[mx.array]:
        cache = begun(model)
        logits = [decode(model, cache)]
        other = copy.deepcopy(cache)
        for seed in range(3):
            logits += [decode(model, cache, 3, seed=seed), decode(model, other, 3, seed=10 + seed)]
        return logits

    with no_tapes(model):
        expected = run()
    assert all(map(same, run(), expected))


def test_a_copy_of_what_is_trimmed_afterwards_keeps_its_tokens() -> None:
    model = make()
    patched(model)
    warm(model)
    cache = begun(model)
    decode(model, cache)
    other = copy.deepcopy(cache)
    kept = [mx.array(layer.keys[:, :, :11]) + 0 for layer in other]
    mx.eval(kept)
    trim_prompt_cache(cache, 4)
    decode(model, cache, 5, seed=9)
    assert all(same(layer.keys[:, :, :11], keys) for layer, keys in zip(other, kept, strict=True))


def test_memory_that_was_written_elsewhere_is_not_owned() -> None:
    """A cache that comes back to the number of tokens it was left with, by other ways, has other memory."""
    model = make()
    patched(model)
    warm(model)
    cache = begun(model)
    decode(model, cache, 2)
    with no_tapes(model):
        decode(model, cache, 1, seed=4)
    other = copy.deepcopy(cache)
    kept = [layer.keys[:, :, :8] + 0 for layer in other]
    mx.eval(kept)
    trim_prompt_cache(cache, 1)
    assert state(model).owners.of(cache) is not None
    assert python_launches(model, cache) > 0
    assert all(same(layer.keys[:, :, :8], keys) for layer, keys in zip(other, kept, strict=True))
    assert python_launches(model, cache) == 0


def test_a_saved_cache_is_loaded(tmp_path: Path) -> None:
    model = make()
    patched(model)
    warm(model)
    cache = begun(model)
    decode(model, cache, 4)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    expected = decode(model, cache, 5)
    loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    assert same(decode(model, loaded, 5), expected)
    assert python_launches(model, loaded) == 0


def test_caches_in_turn_run_on_one_tape() -> None:
    model = make()
    patched(model)
    warm(model)
    with no_tapes(model):
        expected = [decode(model, begun(model, length), seed=length) for length in (4, 9, 30)]
    caches = [begun(model, length) for length in (4, 9, 30)]
    tokens = [ids(1, 6, length) for length in (4, 9, 30)]
    steps: list[list[mx.array]] = [[], [], []]
    for i in range(6):
        with recorded() as launches:
            for side, cache, token in zip(steps, caches, tokens, strict=True):
                side.append(model(token[:, i : i + 1], cache=cache))
        assert bool(launches) == (i == 0)
    assert all(same(mx.concatenate(side, axis=1), wanted) for side, wanted in zip(steps, expected, strict=True))


def test_other_caches_run_the_model() -> None:
    model = make()
    patched(model)
    warm(model)
    for caches in ([RotatingKVCache(64) for _ in range(2)], [KVCache() for _ in range(2)]):
        model(ids(1, 5), cache=caches)
        if isinstance(caches[1], KVCache):
            caches[1].offset -= 1
        assert python_launches(model, caches) > 0
    assert python_launches(model, begun(model)) > 0
    with recorded() as launches:
        mx.eval(model(ids(1, 1)))
    assert launches


def test_caches_that_are_gone_are_not_kept() -> None:
    model = make()
    patched(model)
    warm(model)
    gc.collect()
    cache = begun(model)
    decode(model, cache, 3)
    owners = state(model).owners._owned
    assert len(owners) == 2
    held = weakref.ref(cache[0])
    del cache
    gc.collect()
    assert held() is None
    assert not owners


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("chunk"), st.integers(2, 5)),
        st.tuples(st.just("trim"), st.integers(1, 4)),
        st.tuples(st.just("fork"), st.just(0)),
        st.tuples(st.just("switch"), st.integers(0, 3)),
        st.tuples(st.just("plain"), st.integers(1, 2)),
    ),
    min_size=3,
    max_size=12,
)


def play(model: Any, operations: list[tuple[str, int]]) -> list[mx.array]:
    caches, logits = [begun(model)], []
    cache = caches[0]
    for seed, (what, number) in enumerate(operations):
        if what == "step":
            logits.append(decode(model, cache, number, seed=seed))
        elif what == "chunk":
            model(ids(1, number, seed), cache=cache)
        elif what == "trim":
            trim_prompt_cache(cache, min(number, cache[0].offset - 1))
        elif what == "fork":
            caches.append(copy.deepcopy(cache))
        elif what == "switch":
            cache = caches[number % len(caches)]
        else:
            with no_tapes(model):
                logits.append(decode(model, cache, number, seed=seed))
    return logits + [decode(model, each, 2) for each in caches]


@pytest.fixture(scope="module")
def playing() -> Any:
    model = make()
    patched(model)
    warm(model)
    return model


@given(operations=OPERATIONS)
@settings(max_examples=60, deadline=None)
def test_any_history_of_caches(playing: Any, operations: list[tuple[str, int]]) -> None:
    with no_tapes(playing):
        expected = play(playing, operations)
    assert all(map(same, play(playing, operations), expected))
