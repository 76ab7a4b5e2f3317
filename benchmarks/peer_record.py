"""The record of benchmarks/peers.py: every engine's samples, and the figures that follow from them."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from cpu_record import Machine, Versions

from metile.files import write_atomic
from metile.measure import Paired
from metile.report_base import Record

METHOD = (
    "One process an engine, one at a time, the order rotated from round to round; greedy, the same token ids. "
    "mlx and metile: mlx-lm's generate_step, prefill is the prompt but its last token. llama.cpp: llama_decode and an "
    "argmax of the logits; torch: a forward pass of transformers; for both prefill is the whole prompt and ends with "
    "the first token. Time to the first token means the same for all. Decode counts the tokens after the first. Peak "
    "RSS is the process's whole, interpreter and libraries included, nothing subtracted."
)
Status = Literal["measured", "not installed", "failed"]
PACKAGES = ("mlx-lm", "torch", "transformers", "llama-cpp-python", "gguf")


class Sample(Record):
    """One generation, as a user would feel it."""

    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    time_to_first_token_seconds: float


class Spread(Record):
    """Speedups of paired rounds: their median, the least and the most; above 1 where the first side is faster."""

    median: float
    least: float
    most: float


class Speedups(Record):
    """Of one engine over another, in the rounds that both ran."""

    prefill: Spread
    decode: Spread
    first_token: Spread


class Context(Record):
    """Decoding after a long prompt.

    Attributes:
        tokens: of the prompt.
        fill_seconds: its prefill, once.
        decode_tokens_per_second: samples.
        median_tokens_per_second: of them.
        read_bytes: keys and values that a step reads, in the middle of the generation.
        share: of the speed after the short prompt.
        share_explained: what share the bytes explain: weights, keys and values of a step there over those here.
    """

    tokens: int
    fill_seconds: float
    decode_tokens_per_second: list[float]
    median_tokens_per_second: float
    read_bytes: int
    share: float
    share_explained: float


class Row(Record):
    """One engine at one precision.

    Attributes:
        engine: its name.
        precision: of the comparison it belongs to.
        weights: how it holds the weights.
        status: ``failed`` may come with the samples from before the failure.
        reason: why there is nothing, or no more.
        details: its settings and build, as it tells them.
        load_seconds: until the model was loaded, and patched where it is.
        samples: a round each.
        medians: of the samples.
        peak_rss_bytes: of the whole process after the rounds, and before a long context.
        over_plain: speedups over plain MLX.
        metile_over: speedups of metile over this engine.
        tokens: that it chose in the first round.
        first_difference: the place of the first token that is not plain MLX's; None where all are.
        context: decoding after a long prompt.
    """

    engine: str
    precision: str
    weights: str
    status: Status
    reason: str
    details: dict[str, str]
    load_seconds: float | None
    samples: list[Sample]
    medians: Sample | None
    peak_rss_bytes: int | None
    over_plain: Speedups | None
    metile_over: Speedups | None
    tokens: list[int]
    first_difference: int | None
    context: Context | None


class Workload(Record):
    """What every engine ran; plain MLX, which may be far slower, in the first `plain_rounds` rounds."""

    model: str
    threads: int
    prompt_tokens: int
    generation_tokens: int
    rounds: int
    plain_rounds: int
    context: int | None
    seed: int


class Model(Record):
    """Bytes that a decode step reads: all weights once, and keys and values of each token of context in 16 bits."""

    precision: str
    weight_bytes: int
    cache_bytes_per_token: int


class Run(Record):
    """The whole record."""

    benchmark: Literal["peers"]
    recorded_at: str
    seconds: float
    machine: Machine
    versions: Versions
    packages: dict[str, str | None]
    method: str
    workload: Workload
    models: list[Model]
    load_average_before: list[float]
    load_average_after: list[float]
    rows: list[Row]


def spread(baseline: Sequence[float], other: Sequence[float]) -> Spread:
    """Return the speedups of `other` over `baseline`, both in seconds, in the rounds that both have.

    Raises:
        MetileError: there is no such round.
    """
    rounds = min(len(baseline), len(other))
    paired = Paired(tuple(baseline[:rounds]), tuple(other[:rounds]))
    return Spread(median=paired.ratio, least=min(paired.ratios), most=max(paired.ratios))


def speedups(baseline: Sequence[Sample], other: Sequence[Sample]) -> Speedups | None:
    """Return the speedups of `other` over `baseline`, or None where they share no round."""
    if not baseline or not other:
        return None

    def of(seconds: Callable[[Sample], float]) -> Spread:
        return spread([seconds(sample) for sample in baseline], [seconds(sample) for sample in other])

    return Speedups(
        prefill=of(lambda sample: 1 / sample.prefill_tokens_per_second),
        decode=of(lambda sample: 1 / sample.decode_tokens_per_second),
        first_token=of(lambda sample: sample.time_to_first_token_seconds),
    )


def medians(samples: Sequence[Sample]) -> Sample | None:
    """Return the median of each figure."""
    if not samples:
        return None
    return Sample(**{name: median(getattr(sample, name) for sample in samples) for name in Sample.model_fields})


def first_difference(tokens: Sequence[int], plain: Sequence[int]) -> int | None:
    """Return the place, from 0, where two generations part, or None where one is the beginning of the other."""
    return next((place for place, pair in enumerate(zip(tokens, plain, strict=False)) if pair[0] != pair[1]), None)


def compared(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of one precision with what follows from holding them against plain MLX and metile."""
    by_name = {row.engine: row for row in rows}
    plain, ours = by_name.get("mlx"), by_name.get("metile")

    def held(row: Row) -> Row:
        changes = {
            "over_plain": speedups(plain.samples, row.samples) if plain and row is not plain else None,
            "metile_over": speedups(row.samples, ours.samples) if ours and row is not ours else None,
            "first_difference": first_difference(row.tokens, plain.tokens) if plain else None,
        }
        return row.model_copy(update=changes)

    return [held(row) for row in rows]


def context_of(
    tokens: int, fill_seconds: float, samples: Sequence[float], short: Sample, work: Workload, model: Model
) -> Context:
    """Return what decoding after a long prompt comes to, beside decoding after the short one.

    Args:
        tokens: of the long prompt.
        fill_seconds: of its prefill.
        samples: decoded tokens/s after it.
        short: the medians after the short prompt.
        work: with the short prompt's length.
        model: the bytes.
    """
    middle = work.generation_tokens // 2

    def step_bytes(length: int) -> int:
        return model.weight_bytes + model.cache_bytes_per_token * (length + middle)

    return Context(
        tokens=tokens,
        fill_seconds=fill_seconds,
        decode_tokens_per_second=list(samples),
        median_tokens_per_second=median(samples),
        read_bytes=model.cache_bytes_per_token * (tokens + middle),
        share=median(samples) / short.decode_tokens_per_second,
        share_explained=step_bytes(work.prompt_tokens) / step_bytes(tokens),
    )


def model_of(folder: Path, precision: str) -> Model:
    """Read the bytes of a decode step off a model folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = config["num_hidden_layers"] * config["num_key_value_heads"]
    return Model(
        precision=precision,
        weight_bytes=sum(path.stat().st_size for path in folder.glob("model*.safetensors")),
        cache_bytes_per_token=2 * heads * config["head_dim"] * 2,
    )


def packages() -> dict[str, str | None]:
    """Return the versions of the peers' packages, None where one is not installed."""

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {name: version(name) for name in PACKAGES}


def save(run: Run, path: Path) -> None:
    """Write a record, whole or not at all."""
    write_atomic(path, (run.model_dump_json(indent=1) + "\n").encode())


def load(path: Path) -> Run:
    """Read a record.

    Raises:
        pydantic.ValidationError: the file is not one.
    """
    return Run.model_validate_json(path.read_bytes())
