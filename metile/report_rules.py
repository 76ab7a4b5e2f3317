"""The arithmetic of a report: speedups of pairs, medians of trials, and the rule of confirmation."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from metile.report_base import Fault, Positive, Record

SPEEDUPS = {
    "decode_speedup": "decode_tokens_per_second",
    "end_to_end_speedup": "elapsed_seconds",
    "prefill_speedup": "prefill_tokens_per_second",
    "ttft_speedup": "time_to_first_token_seconds",
}
"""Each speedup and the metric it compares; above 1 always means that meTile is faster."""

NAMES = {
    "decode_speedup": "decode",
    "end_to_end_speedup": "end-to-end",
    "prefill_speedup": "prefill",
    "ttft_speedup": "TTFT",
}
DECODE_FLOOR = 0.99
FLOORS = {"ttft_speedup": 0.995, "end_to_end_speedup": 0.995}
WINS = {"ttft_speedup": 1.02, "end_to_end_speedup": 1.01}
DECODE_WIN = 1.01
PAIR_FLOOR = 0.98
GUARDED = ("decode_speedup", "ttft_speedup", "end_to_end_speedup")
VERIFICATION_LIMITS = {"kl_divergence": 1e-3, "mean_logit_error": 0.05, "max_logit_error": 0.5}
RELATIVE_TOLERANCE = 1e-9


class Sample(Record):
    """One run of the whole workload: prompt, first token, then the rest of the generation."""

    decode_tokens_per_second: Positive
    elapsed_seconds: Positive
    prefill_tokens_per_second: Positive
    time_to_first_token_seconds: Positive


class Speedups(Record):
    """One pair of runs compared, or the medians of many such pairs."""

    decode_speedup: Positive
    end_to_end_speedup: Positive
    prefill_speedup: Positive
    ttft_speedup: Positive


class Medians(Speedups):
    """The medians of the trials: of each label's own samples, and of the paired speedups.

    A speedup here is the median of the ratios within each pair, not the ratio of two medians.
    """

    metile_decode_tokens_per_second: Positive
    metile_elapsed_seconds: Positive
    metile_prefill_tokens_per_second: Positive
    metile_time_to_first_token_seconds: Positive
    mlx_decode_tokens_per_second: Positive
    mlx_elapsed_seconds: Positive
    mlx_prefill_tokens_per_second: Positive
    mlx_time_to_first_token_seconds: Positive


def speedups_of(mlx: Sample, metile: Sample) -> Speedups:
    """Compare one pair of runs: rates as meTile over MLX, times as MLX over meTile."""
    ratios = {}
    for name, metric in SPEEDUPS.items():
        native, ours = getattr(mlx, metric), getattr(metile, metric)
        ratios[name] = native / ours if metric.endswith("_seconds") else ours / native
    return Speedups(**ratios)


def median_speedups(pairs: Sequence[Speedups]) -> dict[str, float]:
    """Return the median over `pairs` of each speedup."""
    return {name: median(getattr(pair, name) for pair in pairs) for name in SPEEDUPS}


def medians_of(mlx: Sequence[Sample], metile: Sequence[Sample]) -> Medians:
    """Summarise the trials of both labels; trial i of one is paired with trial i of the other.

    Raises:
        ValueError: the lists are empty or differ in length.
    """
    pairs = [speedups_of(native, ours) for native, ours in zip(mlx, metile, strict=True)]
    values = median_speedups(pairs)
    for metric in SPEEDUPS.values():
        values[f"mlx_{metric}"] = median(getattr(sample, metric) for sample in mlx)
        values[f"metile_{metric}"] = median(getattr(sample, metric) for sample in metile)
    return Medians(**values)


def pairs_needed(count: int) -> int:
    """Return how many of `count` pairs make two thirds of them."""
    return (2 * count + 2) // 3


def refusals(pairs: Sequence[Speedups], decode_floor: float = DECODE_FLOOR) -> list[str]:
    """Say why a plan with these confirmation pairs is refused; an empty list means it is accepted.

    No guarded speedup (decode, TTFT, end-to-end) may have a median below its floor, or fewer than two
    thirds of its pairs above `PAIR_FLOOR`; and one of them must be a real win.
    """
    medians = median_speedups(pairs)
    needed = pairs_needed(len(pairs))
    reasons = []
    for name, floor in {"decode_speedup": decode_floor, **FLOORS}.items():
        if medians[name] < floor:
            reasons.append(f"{NAMES[name]} median {medians[name]:.4f} is below the floor {floor:g}")
    for name in GUARDED:
        steady = sum(getattr(pair, name) > PAIR_FLOOR for pair in pairs)
        if steady < needed:
            reasons.append(f"{NAMES[name]} is above {PAIR_FLOOR:g} in {steady} of {len(pairs)} pairs, {needed} needed")
    faster = sum(pair.decode_speedup >= DECODE_WIN for pair in pairs)
    if faster < needed and all(medians[name] < win for name, win in WINS.items()):
        missed = [f"{NAMES[name]} {medians[name]:.4f} (needs {win:g})" for name, win in WINS.items()]
        missed.append(f"decode at least {DECODE_WIN:g} in {faster} of {len(pairs)} pairs ({needed} needed)")
        reasons.append(f"no real win: {', '.join(missed)}")
    return reasons


def differences(found: Speedups, computed: dict[str, float], source: str) -> list[Fault]:
    """List each value of `found` that is not the one `computed` from its `source`."""
    return [
        Fault((name,), f"{value!r}, the median of its {source},", repr(getattr(found, name)))
        for name, value in computed.items()
        if abs(getattr(found, name) - value) > RELATIVE_TOLERANCE * abs(value)
    ]
