"""Timing on made-up clocks: no test here depends on real time."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metile.errors import MetileError
from metile.measure import (
    Halving,
    Paired,
    Progress,
    Rotation,
    halving,
    paired,
    repeat_for,
    sample,
    sets_needed,
)

seconds = st.floats(1e-6, 1e3)
rounds = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=12)


class FakeClock:
    """Time that passes only when work says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def work(self, duration: float, log: list[str] | None = None, name: str = "") -> Callable[[], None]:
        def run() -> None:
            self.now += duration
            if log is not None:
                log.append(name)

        return run


def of_rounds(pairs: list[tuple[float, float]]) -> Paired:
    return Paired(tuple(base for base, _ in pairs), tuple(other for _, other in pairs))


# --- paired ---------------------------------------------------------------------------------------------


def test_order_alternates_and_both_sides_start_fresh() -> None:
    clock, log = FakeClock(), list[str]()
    result = paired(
        clock.work(3.0, log, "A"),
        clock.work(1.5, log, "B"),
        trials=3,
        clock=clock,
        repeats=(1, 2),
        fresh=clock.work(50.0, log, "-"),
    )
    assert "".join(log) == "-A-BB" + "-BB-A" + "-A-BB"
    assert result == Paired((3.0, 3.0, 3.0), (1.5, 1.5, 1.5)), "preparing is not timed"
    assert result.ratio == 2.0


@given(trials=st.integers(1, 40))
def test_order_is_balanced(trials: int) -> None:
    clock, log = FakeClock(), list[str]()
    paired(clock.work(1, log, "A"), clock.work(1, log, "B"), trials=trials, clock=clock)
    first = Counter(log[::2])
    assert first["A"] - first["B"] == trials % 2
    assert Counter(log) == {"A": trials, "B": trials}


@given(rounds)
def test_swapping_the_sides_inverts_the_ratio(pairs: list[tuple[float, float]]) -> None:
    result = of_rounds(pairs)
    assert math.isclose(result.ratio * result.swapped().ratio, 1, rel_tol=1e-12)
    assert result.swapped().swapped() == result


@given(st.lists(seconds, min_size=1, max_size=12), st.floats(0, 1))
def test_a_side_neither_beats_nor_loses_to_itself(times: list[float], margin: float) -> None:
    result = Paired(tuple(times), tuple(times))
    assert result.ratio == 1
    assert result.deviation == 0
    assert result.quartiles == (1, 1)
    assert not result.wins(margin)


@given(rounds, st.floats(0, 0.5), st.floats(0, 0.5))
def test_laws_of_a_win(pairs: list[tuple[float, float]], margin: float, other: float) -> None:
    result = of_rounds(pairs)
    assert not (result.wins(margin) and result.swapped().wins(other)), "both cannot win"
    if result.wins(max(margin, other)):
        assert result.wins(min(margin, other)), "what wins by much wins by little"
    assert result.quartiles[0] <= result.quartiles[1]


@given(rounds.filter(lambda pairs: len(pairs) % 2 == 1))
def test_the_ratio_is_the_median_of_the_ratios(pairs: list[tuple[float, float]]) -> None:
    assert of_rounds(pairs).ratio == statistics.median(base / other for base, other in pairs)


def test_a_drifting_machine_does_not_move_paired_ratios() -> None:
    slowdown = (1.0, 3.0, 9.0, 2.0, 5.0)
    assert Paired(tuple(2 * f for f in slowdown), slowdown).ratio == 2
    assert Paired(tuple(2 * f for f in slowdown), slowdown).deviation == 0


def test_a_few_lucky_rounds_are_no_win() -> None:
    assert Paired((1.1,) * 4, (1.0,) * 4).wins(0.05)
    assert not Paired((1.1, 1.1, 0.9, 0.9, 1.1), (1.0,) * 5).wins(0.05), "two rounds in five were lost"
    assert not Paired((1.04,) * 4, (1.0,) * 4).wins(0.05)
    assert not Paired((1.0,) * 4, (math.inf,) * 4).wins(0)


@pytest.mark.parametrize(
    ("baseline", "candidate"),
    [
        ((), ()),
        ((1.0,), ()),
        ((0.0,), (1.0,)),
        ((math.inf,), (1.0,)),
        ((1.0,), (math.nan,)),
        ((1.0,), (-1.0,)),
    ],
)
def test_impossible_samples_are_refused(baseline: tuple[float, ...], candidate: tuple[float, ...]) -> None:
    with pytest.raises(MetileError, match=r"\[paired\] expected"):
        Paired(baseline, candidate)


def test_numbers_out_of_range_are_refused() -> None:
    clock = FakeClock()
    with pytest.raises(MetileError, match="trial"):
        paired(clock.work(1), clock.work(1), trials=0, clock=clock)
    with pytest.raises(MetileError, match="repeat"):
        sample(clock.work(1), 0, clock=clock)
    with pytest.raises(MetileError, match="margin"):
        Paired((1.0,), (1.0,)).wins(-0.1)


# --- samples --------------------------------------------------------------------------------------------


def test_a_sample_is_seconds_a_call() -> None:
    clock = FakeClock()
    assert sample(clock.work(0.25), 4, clock=clock) == 0.25
    assert sample(clock.work(0.0), clock=clock) > 0, "a clock that stood still gives no zero to divide by"


@given(call=st.floats(1e-6, 1), target=st.floats(1e-4, 0.1))
def test_repeats_reach_the_target_without_much_excess(call: float, target: float) -> None:
    clock, log = FakeClock(), list[str]()
    repeats = repeat_for(clock.work(call, log, "x"), target, clock=clock)
    assert repeats * call >= target * 0.999
    assert repeats == 1 or repeats * call <= max(1.2 * target, target + 2 * call)
    assert len(log) <= 1 + 3 * repeats


def test_the_first_call_and_a_clock_that_stands_still_do_not_mislead() -> None:
    clock = FakeClock()
    durations = itertools.chain([5.0], itertools.repeat(0.001))

    def compiled_at_first() -> None:
        clock.now += next(durations)

    assert repeat_for(compiled_at_first, 0.01, clock=clock) >= 10
    assert repeat_for(clock.work(0.0), 0.01, clock=clock, limit=1000) == 1000


# --- rotation -------------------------------------------------------------------------------------------


@given(set_bytes=st.integers(1, 10**9), cold=st.integers(0, 10**9), memory=st.integers(0, 10**10))
def test_sets_exceed_the_cache_unless_memory_forbids(set_bytes: int, cold: int, memory: int) -> None:
    count = sets_needed(set_bytes, cold_bytes=cold, memory_bytes=memory)
    assert count >= 1
    assert count == 1 or count * set_bytes <= memory
    assert count * set_bytes > cold or (count + 1) * set_bytes > memory
    assert count == 1 or (count - 1) * set_bytes <= cold, "no more than needed"


def test_rotation_returns_to_a_set_last() -> None:
    made: list[int] = []

    def factory(index: int) -> str:
        made.append(index)
        return f"set {index}"

    rotation = Rotation(factory, 10, cold_bytes=25, memory_bytes=1000)
    assert made == [0, 1, 2]
    assert rotation.is_cold
    assert len(rotation) == 3
    used: list[tuple[str, str]] = []
    first = rotation.bind(lambda buffers: used.append(("A", buffers)))
    second = rotation.bind(lambda buffers: used.append(("B", buffers)))
    for _ in range(2):
        first()
        second()
    assert used == [("A", "set 0"), ("B", "set 1"), ("A", "set 2"), ("B", "set 0")]


def test_rotation_says_when_memory_keeps_it_warm() -> None:
    rotation = Rotation(lambda index: index, 10, cold_bytes=25, memory_bytes=20)
    assert (len(rotation), rotation.is_cold) == (2, False)
    with pytest.raises(MetileError, match="byte"):
        Rotation(lambda index: index, 0, cold_bytes=25, memory_bytes=20)


# --- halving --------------------------------------------------------------------------------------------


class Machine:
    """Candidates with a fixed time each; sampling one makes that time pass."""

    def __init__(self, times: dict[str, float]) -> None:
        self.clock = FakeClock()
        self.times = times
        self.log: list[str] = []

    def __call__(self, name: str) -> float:
        self.log.append(name)
        self.clock.now += 1.0
        return self.times[name]

    def halving(self, budget: float = 1e9, **options: object) -> Halving[str]:
        return halving(list(self.times), self, budget_seconds=budget, clock=self.clock, **options)  # type: ignore[arg-type]


def test_the_fastest_is_found_and_measured_the_most() -> None:
    machine = Machine({"mlx": 10, "a": 4, "b": 3, "c": 2, "d": 5, "e": 6})
    outcome = machine.halving()
    assert outcome.finished
    assert outcome.survivors == ("c",)
    assert outcome.best == "c"
    assert outcome.results["c"].ratio == 5
    # 5 survivors once, 3 of them twice, 2 of them four times
    counts = Counter(machine.log)
    assert [counts[name] for name in "cbade"] == [7, 7, 3, 1, 1]
    assert counts["mlx"] == 7, "one sample of the incumbent beside each sweep"
    assert outcome.rounds == 3


def test_sweeps_alternate_their_direction() -> None:
    machine = Machine({"mlx": 10, "a": 1, "b": 2})
    machine.halving(repetitions=2)
    assert machine.log == ["mlx", "a", "b", "b", "a", "mlx"]


def test_groups_take_an_incumbent_each() -> None:
    machine = Machine({"mlx": 10, "a": 1, "b": 2, "c": 3})
    machine.halving(group=2, keep=0.1)
    assert machine.log == ["mlx", "a", "b", "mlx", "c"]


@pytest.mark.parametrize("times", [{"mlx": 1}, {"mlx": 1, "a": 2}, {"mlx": 1, "a": 1}, {"mlx": 1, "a": math.inf}])
def test_the_incumbent_stays_when_nothing_beats_it(times: dict[str, float]) -> None:
    outcome = Machine(times).halving()
    assert outcome.finished
    assert outcome.best == "mlx"


names = st.lists(st.sampled_from([1, 2, 3, 4.5, 8, math.inf]), min_size=1, max_size=20)


@given(times=names, budget=st.floats(0, 200), keep=st.floats(0.05, 0.95), group=st.integers(1, 9))
def test_laws_of_halving(times: list[float], budget: float, keep: float, group: int) -> None:
    table = {"mlx": 4.0} | {f"c{number}": time for number, time in enumerate(times)}
    machine, ticks = Machine(table), list[Progress[str]]()
    outcome = machine.halving(budget, keep=keep, group=group, progress=ticks.append)
    assert machine.clock.now - 100 <= budget + 2, "a sample that was begun is finished, and its incumbent's"
    assert set(outcome.survivors) | set(outcome.results) <= set(table) - {"mlx"}
    assert table[outcome.best] <= 4, "the best is no slower than plain MLX"
    assert [tick.done for tick in ticks] == list(range(len(ticks)))
    assert all(tick.done < tick.total for tick in ticks)
    assert all(0 <= tick.seconds_left <= budget for tick in ticks)
    if outcome.finished:
        assert not ticks or ticks[-1].done + 1 == ticks[-1].total, "the total was foreseen"
        assert table[outcome.best] == min(table.values()), "with samples free of noise the fastest wins"
    again = Machine(table)
    assert again.halving(budget, keep=keep, group=group) == outcome
    assert again.log == machine.log


def test_a_spent_budget_leaves_the_best_so_far() -> None:
    machine = Machine({"mlx": 10, "a": 4, "b": 3, "c": 2})
    outcome = machine.halving(3)
    assert machine.log == ["mlx", "a", "b"]
    assert not outcome.finished
    assert outcome.best == "b"
    assert outcome.survivors == ("b", "a", "c")
    assert Machine({"mlx": 10, "a": 4}).halving(0).best == "mlx"


def test_an_interruption_hands_back_what_was_measured() -> None:
    machine = Machine({"mlx": 10, "a": 4, "b": 3, "c": 2})
    states: list[Halving[str]] = []

    def interrupt_at_fourth(tick: Progress[str]) -> None:
        if tick.done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        machine.halving(progress=interrupt_at_fourth, record=states.append)
    assert [state.rounds for state in states] == [1, 1]
    assert states[-1].best == "c"
    assert not states[-1].finished
    assert set(states[-1].results) == {"a", "b", "c"}


def test_progress_shows_the_pace() -> None:
    machine, ticks = Machine({"mlx": 10, "a": 4, "b": 3}), list[Progress[str]]()
    machine.halving(1000, progress=ticks.append)
    assert [(tick.candidate, tick.done, tick.total) for tick in ticks] == [("a", 0, 2), ("b", 1, 2)]
    assert ticks[0].seconds_left == 999, "nothing to go by yet but the budget"
    assert ticks[1].seconds_left == 2, "two seconds a sample so far, one sample to go"


@pytest.mark.parametrize(
    "arguments",
    [{"candidates": []}, {"candidates": ["a", "a"]}, {"keep": 1.0}, {"repetitions": 0}, {"group": 0}],
)
def test_impossible_searches_are_refused(arguments: dict[str, object]) -> None:
    given = {"candidates": ["a", "b"], **arguments}
    with pytest.raises(MetileError, match=r"\[halving\] expected"):
        halving(measure=lambda _: 1.0, budget_seconds=1, **given)  # type: ignore[arg-type]
