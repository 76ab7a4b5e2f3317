"""The seed record, ways to damage it, and small blocks of a report, for the tests of reports."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from metile import report
from metile.errors import MetileError
from metile.report_base import Loc

LINEAR = {
    "algorithm": "metile", "block_m": 64, "block_n": 64, "dtype": "mlx.core.bfloat16", "input_features": 576,
    "k_unroll": 1, "output_features": 1536, "rows": 1, "schedule": "linear",
}  # fmt: skip
TILE = {"outer_k": 32, "wm": 2, "wn": 2}
AFFINE = {"bits": 4, "group_size": 32, "mode": "affine"}

SEED = Path(__file__).parent / "data" / "metile-suite-bf16-dense.json"
TEXT = SEED.read_text()
RECORD: dict[str, Any] = json.loads(TEXT)
MODEL: Loc = ("models", 0)
SAMPLES: Loc = (*MODEL, "samples")
CONFIRMATION: Loc = (*MODEL, "plan_confirmation")
OURS = "MLX + meTile"
NULLABLE = {"num_attention_heads", "num_key_value_heads", "plan_confirmation", "revision"}
"""Keys of the seed that may be null without a contradiction at that key."""


def walk(value: Any, loc: Loc = ()) -> Iterator[tuple[Loc, Any]]:
    """Yield every node below `value` with its location."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*loc, key), item
        yield from walk(item, (*loc, key))


def at(record: Any, loc: Loc) -> Any:
    for part in loc:
        record = record[part]
    return record


def faults(record: Any) -> list[str]:
    """Return the faults that loading `record` reports, one a line; fails if it loads."""
    with pytest.raises(MetileError) as caught:
        report.loads(json.dumps(record))
    head, *lines = str(caught.value).split("\n")
    count = f"{len(lines)} fault" + "s" * (len(lines) > 1)
    assert head == f"[report] expected a suite record of schema 3 but got {count}:"
    return [line.strip() for line in lines]


def mutated(loc: Loc, value: Any) -> dict[str, Any]:
    record = copy.deepcopy(RECORD)
    at(record, loc[:-1])[loc[-1]] = value
    return record


def wrong_values(value: Any, nullable: bool) -> list[Any]:
    """Return values of another JSON type; a whole number for a float is none, JSON having one number."""
    nothing = [] if nullable else [None]
    match value:
        case bool():
            return [*nothing, 1, "true"]
        case int():
            return [*nothing, True, value + 0.5, str(value)]
        case float():
            return [*nothing, True, str(value), [value]]
        case str():
            return [*nothing, 1, [value]]
        case list():
            return [*nothing, {}, "[]"]
        case _:
            return [*nothing, [], 1]


NODES = list(walk(RECORD))
KEYS = [loc for loc, _ in NODES if isinstance(loc[-1], str)]
OBJECTS = [(), *(loc for loc, value in NODES if isinstance(value, dict))]
TYPES = [(loc, wrong) for loc, value in NODES for wrong in wrong_values(value, loc[-1] in NULLABLE)]


def sample(decode: float = 10, elapsed: float = 2, prefill: float = 100, first: float = 1) -> report.Sample:
    return report.Sample(
        decode_tokens_per_second=decode,
        elapsed_seconds=elapsed,
        prefill_tokens_per_second=prefill,
        time_to_first_token_seconds=first,
    )


def pair(decode: float = 1, end: float = 1, prefill: float = 1, ttft: float = 1) -> report.Speedups:
    return report.Speedups(decode_speedup=decode, end_to_end_speedup=end, prefill_speedup=prefill, ttft_speedup=ttft)


def native_record() -> dict[str, Any]:
    """Return the seed as a model with nothing to patch would give it."""
    record = copy.deepcopy(RECORD)
    model = record["models"][0]
    model |= {"plan_confirmation": None, "verification": None, "dense_mlp_implementation": None}
    model |= {"comparison_mode": "shared_native_fallback", "revision": None}
    model["candidate_plan"]["dense_mlp"] = model["selected_plan"]["dense_mlp"] = False
    model["selected_dispatches"] = {family: [] for family in report.FAMILIES}
    model["samples"][OURS] = model["samples"]["MLX"]
    samples = report.loads(TEXT).models[0].samples.mlx
    model["medians"] = report.medians_of(samples, samples).model_dump()
    return record
