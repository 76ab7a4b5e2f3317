"""The arithmetic of a report: speedups, medians, and when a plan is accepted."""

from __future__ import annotations

import re
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_data import TEXT, pair, sample

from metile import report
from metile.errors import MetileError
from metile.report_rules import pairs_needed, refusals


def test_seed_confirmation_is_what_its_pairs_give() -> None:
    confirmation = report.loads(TEXT).models[0].plan_confirmation
    assert confirmation is not None
    assert report.confirmation_of(confirmation.pairs) == confirmation
    assert confirmation.reasons == []


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        ([pair()] * 9, r"no real win: TTFT 1.0000 \(needs 1.02\), .* in 0 of 9 pairs \(6 needed\)"),
        ([pair(ttft=1.0199, end=1.0099)] * 9, "no real win"),
        ([pair(ttft=1.02)] * 9, ""),
        ([pair(end=1.01)] * 9, ""),
        ([pair(prefill=50)] * 9, "no real win"),
        ([pair(decode=1.01)] * 6 + [pair()] * 3, ""),
        ([pair(decode=1.01)] * 5 + [pair()] * 4, "no real win"),
        ([pair(decode=0.9899, ttft=2)] * 9, "decode median 0.9899 is below the floor 0.99"),
        ([pair(ttft=0.9949, end=2)] * 9, "TTFT median 0.9949 is below the floor 0.995"),
        ([pair(end=0.9949, ttft=2)] * 9, "end-to-end median 0.9949 is below the floor 0.995"),
        ([pair(ttft=2)] * 5 + [pair(ttft=0.98)] * 4, "TTFT is above 0.98 in 5 of 9 pairs, 6 needed"),
        ([pair(ttft=2)] * 6 + [pair(ttft=0.5)] * 3, ""),
        ([pair(ttft=2)], ""),
    ],
)
def test_rule_of_confirmation(pairs: list[report.Speedups], reason: str) -> None:
    confirmation = report.confirmation_of(pairs)
    assert confirmation.accepted == (not reason)
    assert re.search(reason, "; ".join(confirmation.reasons))


def test_confirmation_needs_a_pair() -> None:
    with pytest.raises(MetileError, match=r"\[report\] expected at least one confirmation pair"):
        report.confirmation_of([])


@given(st.integers(1, 100))
def test_two_thirds(count: int) -> None:
    needed = pairs_needed(count)
    assert 3 * needed >= 2 * count > 3 * (needed - 1)


near_one = st.floats(0.9, 1.1)
pair_lists = st.lists(st.builds(pair, near_one, near_one, near_one, near_one), min_size=1, max_size=12)


@given(pair_lists)
def test_verdict_does_not_depend_on_the_order_of_pairs(pairs: list[report.Speedups]) -> None:
    assert refusals(pairs) == refusals(pairs[::-1])


@given(pair_lists)
def test_a_plan_that_got_faster_is_not_refused_for_it(pairs: list[report.Speedups]) -> None:
    faster = [pair(*(value * 1.1 for value in old.model_dump().values())) for old in pairs]
    assert refusals(pairs) or not refusals(faster)


positive = st.floats(1e-3, 1e4)
samples = st.builds(sample, positive, positive, positive, positive)


@given(st.lists(st.tuples(samples, samples), min_size=1, max_size=9))
def test_medians_of_pairs(pairs: list[tuple[report.Sample, report.Sample]]) -> None:
    mlx, ours = ([pair[side] for pair in pairs] for side in (0, 1))
    medians = report.medians_of(mlx, ours)
    assert medians.mlx_elapsed_seconds == statistics.median(run.elapsed_seconds for run in mlx)
    assert medians.metile_elapsed_seconds == statistics.median(run.elapsed_seconds for run in ours)
    if len(pairs) % 2:
        swapped = report.medians_of(ours, mlx)
        assert medians.decode_speedup * swapped.decode_speedup == pytest.approx(1)
        assert medians.ttft_speedup * swapped.ttft_speedup == pytest.approx(1)


def test_faster_is_above_one() -> None:
    speedups = report.speedups_of(sample(10, 2, 100, 1), sample(20, 1, 400, 0.25))
    assert list(speedups.model_dump().values()) == [2, 2, 4, 4]


def test_medians_need_equal_lists() -> None:
    with pytest.raises(ValueError, match="shorter"):
        report.medians_of([sample()], [])
