"""Running a suite's workload on a model: one greedy generation, timed as a user would feel it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step, generation_stream

from metile.errors import mismatch
from metile.files import data_root
from metile.linears import is_embedding
from metile.report_rules import Sample
from metile.suites import Workload

Clock = Callable[[], float]


@dataclass(frozen=True)
class Generation:
    """One run: its figures, and the tokens it chose."""

    sample: Sample
    tokens: tuple[int, ...]


def vocabulary(model: nn.Module) -> int:
    """Return the number of tokens a model knows, from the shape of its embedding.

    Raises:
        MetileError: the model has no embedding.
    """
    sizes = [module.weight.shape[0] for _, module in model.named_modules() if is_embedding(module)]
    if not sizes:
        raise mismatch("model", "an embedding of tokens", "none")
    return int(max(sizes))


def random_prompt(model: nn.Module, tokens: int, seed: int) -> mx.array:
    """Return a prompt of random token ids, the same for the same model, length and seed: shape [tokens], int32."""
    prompt = mx.random.randint(0, vocabulary(model), (tokens,), key=mx.random.key(seed)).astype(mx.int32)
    mx.eval(prompt)
    return prompt


def token_ids(prompt: mx.array) -> list[int]:
    """Return a prompt's tokens as integers."""
    values: Any = prompt.tolist()
    return [int(token) for token in values]


def text_prompt(tokenizer: Any, tokens: int, seed: int) -> mx.array:
    """Return a prompt of English prose, which a model knows better than random tokens: shape [tokens], int32.

    Args:
        tokenizer: the model's.
        tokens: its length; a long one repeats the text.
        seed: where in the text it begins, in sentences.
    """
    sentences = (data_root("suites") / "prompt.txt").read_text().replace("\n\n", " ").strip().split(". ")
    start = seed % len(sentences)
    encoded = list(tokenizer.encode(". ".join(sentences[start:] + sentences[:start]) + " "))
    if not encoded:
        raise mismatch("prompt", "a tokenizer that knows some of the text", "no tokens")
    prompt = mx.array((encoded * (tokens // len(encoded) + 1))[:tokens], mx.int32)
    mx.eval(prompt)
    return prompt


def generate(model: nn.Module, prompt: mx.array, workload: Workload, clock: Clock = time.perf_counter) -> Generation:
    """Generate greedily and time it.

    Prefill is the prompt but its last token, with the cache evaluated; the time to the first token runs from the call
    until that token can be read; decode counts the tokens after the first.

    Args:
        model: an mlx-lm model.
        prompt: token ids, shape [prompt_tokens].
        workload: how many tokens, and the prefill step.
        clock: seconds.

    Returns:
        The figures in tokens/s and seconds, and the tokens.
    """
    if workload.delay_seconds:
        time.sleep(workload.delay_seconds)
    total = int(prompt.shape[0])
    prefilled: list[float] = []

    def progress(done: int, _: int) -> None:
        if done >= total - 1 and not prefilled:
            prefilled.append(clock())

    start = clock()
    steps = generate_step(
        prompt,
        model,
        max_tokens=workload.generation_tokens,
        prefill_step_size=workload.prefill_step_size,
        prompt_progress_callback=progress,
    )
    tokens = [next(steps)[0]]
    first = clock()
    tokens += [token for token, _ in steps]
    end = clock()
    mx.synchronize(generation_stream)  # mlx-lm began a step too many; the next run is not to wait for it
    decoded = max(len(tokens) - 1, 1)
    sample = Sample(
        decode_tokens_per_second=decoded / max(end - first, 1e-9),
        elapsed_seconds=end - start,
        prefill_tokens_per_second=max(total - 1, 1) / max(prefilled[0] - start, 1e-9),
        time_to_first_token_seconds=first - start,
    )
    return Generation(sample, tuple(tokens))


@dataclass(frozen=True)
class Probe:
    """Seconds of a short run: the prompt's prefix, and one decode step."""

    prefill: float
    step: float

    def total(self, workload: Workload) -> float:
        """Return the seconds that the whole workload would take at this pace."""
        return self.prefill + workload.generation_tokens * self.step


def probe(model: nn.Module, prompt: mx.array, workload: Workload, clock: Clock = time.perf_counter) -> Probe:
    """Time the prefill and `workload.plan_decode_steps` steps of a generation, for comparing plans cheaply."""
    short = workload.replace(generation_tokens=workload.plan_decode_steps + 1, delay_seconds=0.0)
    sample = generate(model, prompt, short, clock).sample
    tokens = max(int(prompt.shape[0]) - 1, 1)
    return Probe(tokens / sample.prefill_tokens_per_second, 1 / sample.decode_tokens_per_second)
