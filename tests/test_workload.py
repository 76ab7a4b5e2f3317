"""A generation is timed where a user would feel it, and prompts are the same every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import tiny

from metile import workload as module
from metile.errors import MetileError
from metile.suites import Workload
from metile.workload import Probe, generate, probe, random_prompt, text_prompt, vocabulary

WORK = Workload(9, 4, 1, 1, 2, 1, 0.0, 2048, 0)
PROMPT = mx.array([5, 3, 8, 1, 9, 2, 7, 4, 6])


class Steady:
    """A model that takes a second a token by its own clock, and says what it was called on."""

    def __init__(self, model: Any) -> None:
        self.model, self.now = model, 10.0
        self.calls: list[int] = []

    def clock(self) -> float:
        return self.now

    @property
    def layers(self) -> Any:
        return self.model.layers

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        self.calls.append(tokens.shape[1])
        self.now += tokens.shape[1]
        return self.model(tokens, cache=cache)


class Letters:
    """A tokenizer that gives each letter its number."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


# ---- generate ----


def test_figures_by_a_clock_of_its_own(model: Any) -> None:
    steady = Steady(model)
    run = generate(steady, PROMPT, WORK, steady.clock)  # type: ignore[arg-type]
    # mlx-lm begins the step after a token before it hands the token out: the first is out after 8 + 1 + 1 s, and
    # the last step is one too many.
    assert steady.calls == [8, 1, 1, 1, 1, 1]
    assert run.sample.prefill_tokens_per_second == pytest.approx(1.0)
    assert run.sample.time_to_first_token_seconds == pytest.approx(10.0)
    assert run.sample.elapsed_seconds == pytest.approx(13.0)
    assert run.sample.decode_tokens_per_second == pytest.approx(1.0)


def test_a_long_prompt_is_prefilled_in_steps(model: Any) -> None:
    steady = Steady(model)
    run = generate(steady, PROMPT, WORK.replace(prefill_step_size=3), steady.clock)  # type: ignore[arg-type]
    assert steady.calls[:4] == [3, 3, 2, 1]
    assert run.sample.prefill_tokens_per_second == pytest.approx(1.0)


def test_tokens_are_the_greedy_ones(model: Any) -> None:
    cache, context = make_prompt_cache(model), PROMPT[None]
    expected = []
    for _ in range(WORK.generation_tokens):
        context = mx.argmax(model(context, cache=cache)[:, -1:], axis=-1)
        expected.append(int(context.item()))
    assert generate(model, PROMPT, WORK).tokens == tuple(expected)


@pytest.mark.parametrize(("prompt", "tokens"), [(1, 1), (2, 1), (1, 3)])
def test_short_workloads(model: Any, prompt: int, tokens: int) -> None:
    run = generate(model, PROMPT[:prompt], WORK.replace(generation_tokens=tokens))
    assert len(run.tokens) == tokens
    assert all(value > 0 for value in vars(run.sample).values())


def test_the_pause_comes_before_the_clock(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    generate(model, PROMPT, WORK)
    assert slept == []
    asked: list[int] = []

    def clock() -> float:
        asked.append(len(slept))
        return float(len(asked))

    generate(model, PROMPT, WORK.replace(delay_seconds=0.25), clock)
    assert slept == [0.25]
    assert set(asked) == {1}


# ---- probe ----


def test_a_probe_times_prefill_and_steps(model: Any) -> None:
    steady = Steady(model)
    work = WORK.replace(prefill_step_size=5, plan_decode_steps=3)
    found = probe(steady, PROMPT, work, steady.clock)  # type: ignore[arg-type]
    assert steady.calls == [5, 3, 1, 1, 1, 1, 1]  # the last is one that mlx-lm starts and does not wait for
    assert found == Probe(8.0, 1.0)
    assert found.total(work) == 8 + 4 * 1


def test_a_probe_walks_the_greedy_path(model: Any) -> None:
    seen: list[mx.array] = []

    def watched(tokens: mx.array, cache: Any = None) -> mx.array:
        seen.append(tokens)
        return model(tokens, cache=cache)

    watched.layers = model.layers  # type: ignore[attr-defined]
    probe(watched, PROMPT, WORK.replace(plan_decode_steps=4))  # type: ignore[arg-type]
    fed = [int(tokens.item()) for tokens in seen[2:]]
    assert fed == list(generate(model, PROMPT, WORK.replace(generation_tokens=5)).tokens)


# ---- prompts ----


@pytest.mark.parametrize("tokens", [1, 9, 5000, 20000])
def test_prose_of_any_length(tokens: int) -> None:
    prompt = text_prompt(Letters(), tokens, 0)
    assert prompt.shape == (tokens,)
    assert prompt.dtype == mx.int32
    assert mx.array_equal(prompt, text_prompt(Letters(), tokens, 0))


def test_the_seed_moves_the_beginning_of_the_prose() -> None:
    def text(seed: int) -> str:
        return "".join(map(chr, text_prompt(Letters(), 4000, seed).tolist()))  # type: ignore[arg-type]

    first, second = text(0), text(1)
    assert first != second
    begin = first.index(". ") + 2
    assert second.startswith(first[begin : begin + 200])
    sentences = (module.data_root("suites") / "prompt.txt").read_text().replace("\n\n", " ").strip().split(". ")
    assert text(len(sentences)) == first


def test_a_tokenizer_that_knows_nothing_is_refused() -> None:
    class Mute:
        def encode(self, text: str) -> list[int]:
            return []

    with pytest.raises(MetileError, match=r"^\[prompt\] expected a tokenizer that knows some of the text but got"):
        text_prompt(Mute(), 5, 0)


def test_random_prompts(model: Any) -> None:
    prompt = random_prompt(model, 500, seed=3)
    assert prompt.shape == (500,)
    assert prompt.dtype == mx.int32
    assert 0 <= mx.min(prompt).item() <= mx.max(prompt).item() < 131
    assert mx.array_equal(prompt, random_prompt(model, 500, seed=3))
    assert not mx.array_equal(prompt, random_prompt(model, 500, seed=4))


@pytest.mark.parametrize("make", [lambda m: m, lambda m: nn.quantize(m, group_size=32) or m])
def test_the_vocabulary(make: Callable[[Any], Any]) -> None:
    assert vocabulary(make(tiny())) == 131


def test_a_model_without_an_embedding_is_refused() -> None:
    with pytest.raises(MetileError, match=r"^\[model\] expected an embedding of tokens but got none$"):
        vocabulary(nn.Linear(4, 4))
