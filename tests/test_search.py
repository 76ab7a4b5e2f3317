"""The search on made-up kernels and time, and on tiny real operations; no assertion here is about speed."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import search_world
from search_world import FakeKey, FakeTarget, FakeTile, World

from metile import dispatch
from metile.cache import PlanCache
from metile.check import fault, make_case, row_counts
from metile.dispatch import Decision
from metile.ops.linear import LinearKey
from metile.ops.norm import NormKey
from metile.search import NEAR, Progress, estimate, extend, nearest, sampled, search
from metile.store import DecisionStore, machine_key
from metile.targets.cpu import CpuTarget

KEY = FakeKey("op", 4)


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Give each test a world of its own."""
    new = World()
    monkeypatch.setattr(search_world, "WORLD", new)
    monkeypatch.setitem(dispatch._CANDIDATES, FakeKey, FakeTile)
    return new


def decide(world: World, budget_seconds: float = 10.0) -> Decision:
    return search([KEY], FakeTarget(), budget_seconds=budget_seconds, clock=world.clock)[KEY]


def store_at(folder: Path) -> DecisionStore:
    return DecisionStore(PlanCache("model", folder), machine_key(FakeTarget()))


# --- verification ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("misdeed", "reason"),
    [
        ("nan", "output 0 at 1 rows: 8 of 8 values are NaN or were never written"),
        ("unwritten", "output 0 at 1 rows: 1 of 8 values are NaN or were never written"),
        ("inf", "8 of 8 values are infinite"),
        ("zeros", "all values are zero"),
        ("raises", "raised RuntimeError: device lost"),
        ("shape", "expected outputs"),
        ("worse than plain MLX", "is more than 0.005 of the largest value"),
        ("one row only", "output 0 at 3 rows: error"),
        ("does not compile", "[compile] k.cpp:3: error: no"),
    ],
)
def test_a_wrong_kernel_is_rejected_by_name_and_the_right_one_wins(world: World, misdeed: str, reason: str) -> None:
    world.behaviour = {"a": misdeed}
    world.seconds = {"a": 1e-6, "b": 1e-3}
    decision = decide(world)
    assert decision.candidate == FakeTile("b")
    assert reason in decision.rejected["a"]
    assert "\n" not in decision.rejected["a"]
    assert "b" not in decision.rejected


@pytest.mark.parametrize("misdeed", ["nan", "unwritten", "zeros", "raises"])
def test_plain_mlx_stays_when_every_candidate_fails(world: World, misdeed: str) -> None:
    world.behaviour = dict.fromkeys(world.names, misdeed)
    decision = decide(world)
    assert (decision.candidate, decision.speedup) == (None, 1.0)
    assert decision.reason.startswith("no candidate passed verification; the default, a, ")
    assert {"a", "b"} < decision.rejected.keys()


def test_a_wrong_kernel_is_never_timed(world: World) -> None:
    world.behaviour = {"a": "zeros"}
    decide(world)
    assert world.kernel_calls["a"] == 1
    assert world.kernel_calls["b"] > 3


def test_candidates_over_the_limits_are_counted_and_never_compiled(world: World) -> None:
    world.names = ()
    decision = decide(world)
    assert decision.candidate is None
    assert decision.reason == "no candidate is admissible and compiles"
    assert decision.rejected == {"pruned: needs 40192 bytes of threadgroup memory": "3 candidates"}
    assert world.compiled == []


def test_a_failing_reference_leaves_plain_mlx(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> list[mx.array]:
        raise ValueError("no such shape")

    monkeypatch.setattr(FakeKey, "reference", explode)
    assert decide(world).reason == "the reference raised ValueError: no such shape"


def test_row_counts_hold_one_row_a_ragged_count_and_the_bucket() -> None:
    assert row_counts(1) == [1]
    assert row_counts(2) == [1, 2]
    assert row_counts(128) == [1, 65, 128]
    assert row_counts(4096) == [1, 257, 4096]


# --- timing ---------------------------------------------------------------------------------------------


def test_the_fastest_candidate_wins(world: World) -> None:
    world.names = tuple("abcdefgh")
    world.seconds = {"f": 5e-4}
    decision = decide(world)
    assert decision.candidate == FakeTile("f")
    assert decision.speedup == pytest.approx(20)
    assert "20x plain MLX in 9 pairs" in decision.reason


@pytest.mark.parametrize(("seconds", "reason"), [(0.0099, "not the margin"), (0.02, "plain MLX is faster")])
def test_plain_mlx_stays_unless_it_is_beaten_by_the_margin(world: World, seconds: float, reason: str) -> None:
    world.kernel_seconds = seconds
    decision = decide(world)
    assert decision.candidate is None
    assert reason in decision.reason


def test_a_candidate_that_fails_while_timed_does_not_win(world: World) -> None:
    world.seconds = {"a": 1e-4}

    def turn_bad(state: Progress) -> None:
        if state.stage == "time":
            world.behaviour["a"] = "raises"

    found = search([KEY], FakeTarget(), budget_seconds=10, progress=turn_bad, clock=world.clock)
    assert found[KEY].candidate == FakeTile("b")


@pytest.mark.parametrize("budget", [0.0, 5.0, 100.0])
def test_slow_plain_mlx_is_called_no_more_than_needed(world: World, budget: float) -> None:
    world.plain_seconds = 1.0
    assert decide(world, budget).candidate is not None
    at_least = len(row_counts(KEY.rows)) + 3  # the cases, and three pairs
    assert at_least <= world.plain_calls[KEY.subject()] <= max(at_least, budget / 2)


def test_keys_share_the_budget_and_hand_on_what_they_leave(world: World) -> None:
    world.names, world.kernel_seconds, world.plain_seconds = ("a",), 0.05, 0.2
    busy, idle = tuple(range(1, 41)), (1,)
    keys = [FakeKey(f"op{number}", 4, sizes=sizes) for number, sizes in enumerate((busy, busy, idle, busy))]
    ends = [0.0]

    def note(state: Progress) -> None:
        if state.stage == "decided":
            ends.append(world.now)

    search(keys, FakeTarget(), budget_seconds=40, progress=note, clock=world.clock)
    spent = [end - start for start, end in itertools.pairwise(ends)]
    a_call = world.plain_seconds + world.kernel_seconds
    assert 8 < spent[0] <= 10 + a_call
    assert 8 < spent[1] <= 10 + 2 * a_call
    assert spent[2] < 5  # a single candidate needs no race
    assert spent[3] > 13
    assert sum(spent) <= 40 + a_call


def test_keys_without_budget_are_still_decided_by_measurement(world: World) -> None:
    keys = [FakeKey(f"op{number}", 4) for number in range(3)]
    found = search(keys, FakeTarget(), budget_seconds=0, clock=world.clock)
    assert [found[key].candidate for key in keys] == [FakeTile("a")] * 3
    assert all("in 3 pairs" in found[key].reason for key in keys)


def test_compiling_stops_at_its_share_but_not_before_each_keys_default(world: World) -> None:
    world.names = tuple(f"k{number}" for number in range(40))
    world.compile_seconds = 0.5
    keys = [FakeKey("op0", 4), FakeKey("op1", 8)]
    found = search(keys, FakeTarget(), budget_seconds=20, clock=world.clock)
    assert world.compiled == list(world.names[:16])  # two batches of four seconds are 40% of the budget
    assert "no time was left to compile" in found[keys[0]].rejected["k39"]
    assert len(world.compiled) == len(set(world.compiled))


# --- what is tried --------------------------------------------------------------------------------------


def test_the_sample_is_the_head_of_the_space_and_a_spread_of_the_rest(world: World) -> None:
    world.names = tuple(f"k{number:03}" for number in range(500))
    target = FakeTarget()
    space = KEY.space(target.limits)
    chosen = sampled(KEY, target, 48, seed=0)
    assert chosen == sampled(KEY, target, 48, seed=0)
    assert chosen != sampled(KEY, target, 48, seed=1)
    assert chosen[:NEAR] == space[:NEAR]
    assert len(set(chosen)) == 48
    places = [space.index(tile) for tile in chosen]
    assert places == sorted(places)
    assert max(b - a for a, b in zip(places[NEAR:], places[NEAR + 1 :], strict=False)) < 2 * 476 / 24 + 1


@pytest.mark.parametrize("count", [0, 1, 5, NEAR, NEAR + 1, 48, 49])
def test_a_small_space_is_tried_whole(world: World, count: int) -> None:
    world.names = tuple(f"k{number}" for number in range(count))
    assert len(sampled(KEY, FakeTarget(), 48, seed=0)) == min(count, 48)
    assert len(sampled(KEY, FakeTarget(), 3, seed=0)) == min(count, 3)


def test_an_estimate_counts_kernels_once_and_runs_nothing(world: World) -> None:
    keys = [FakeKey("op0", 4, sizes=(1, 2, 4)), FakeKey("op1", 4)]
    rows = estimate(keys, FakeTarget(), budget_seconds=60)
    assert [(row.candidates, row.kernels) for row in rows] == [(6, 2), (2, 0)]
    near = FakeKey("op0", 8, sizes=tuple(range(1, 20)))
    more = estimate(keys, FakeTarget(), budget_seconds=60, neighbours=[keys[0], near])
    assert more[:2] == rows
    assert [(row.key, row.candidates, row.kernels) for row in more[2:]] == [(near, 7, 0)]
    assert all(row.seconds > 0 for row in rows)
    assert sum(row.seconds for row in estimate(keys, FakeTarget(), budget_seconds=1)) <= 1.001
    assert world.compiled == []
    assert world.now == 0


# --- neighbours -----------------------------------------------------------------------------------------


def test_neighbours_try_only_what_stands_nearest_to_the_winner(world: World) -> None:
    world.names = tuple("abcdef")
    sizes = (1, 2, 4, 8)
    won = Decision(FakeKey("op", 8, sizes=sizes), FakeTile("d", 4), 3.0, "won")
    other = Decision(FakeKey("another op", 4, sizes=sizes), FakeTile("e"), 3.0, "won")
    key = FakeKey("op", 4, sizes=sizes)
    decisions = {won.key: won, other.key: other}
    tried = nearest(key, FakeTarget(), decisions)
    assert tried[0] == FakeTile("a")
    assert tried[1] == FakeTile("d", 4)
    assert set(tried[2:]) == {FakeTile("d", 2), FakeTile("d", 8)}
    found = extend(decisions, [key], FakeTarget(), budget_seconds=10, clock=world.clock)
    assert found.keys() == {key}
    assert found[key].candidate in tried
    assert sorted(world.compiled) == ["a", "d"]


def test_where_plain_mlx_won_nearby_only_the_default_is_tried(world: World) -> None:
    stayed = Decision(FakeKey("op", 8), None, 1.0, "plain MLX is faster")
    assert nearest(KEY, FakeTarget(), {stayed.key: stayed}) == [FakeTile("a")]


def test_a_neighbour_is_verified_too(world: World) -> None:
    won = Decision(FakeKey("op", 8), FakeTile("b"), 3.0, "won")
    world.behaviour = {"a": "nan", "b": "zeros"}
    found = extend({won.key: won}, [KEY], FakeTarget(), budget_seconds=10, clock=world.clock)
    assert found[KEY].candidate is None
    assert "all values are zero" in found[KEY].rejected["b"]


def test_search_decides_neighbours_after_its_keys_and_as_far_as_the_budget_reaches(world: World) -> None:
    near = [FakeKey("op", rows) for rows in (2, 8)]
    order: list[str] = []

    def note(state: Progress) -> None:
        if state.stage == "decided":
            order.append(state.subject)

    arguments: dict[str, Any] = {"neighbours": [*near, KEY], "progress": note, "clock": world.clock}
    found = search([KEY], FakeTarget(), budget_seconds=20, **arguments)
    assert order == [key.subject() for key in (KEY, *near)]
    assert found.keys() == {KEY, *near}
    assert search([KEY], FakeTarget(), budget_seconds=0, **arguments).keys() == {KEY}


# --- keeping decisions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["compile", "verify", "time", "confirm", "decided"])
def test_an_interrupted_search_resumes_and_decides_nothing_twice(world: World, tmp_path: Path, stage: str) -> None:
    keys = [FakeKey(f"op{number}", 4) for number in range(3)]
    events: list[Progress] = []

    def interrupt(state: Progress) -> None:
        events.append(state)
        if state.stage == stage and (stage == "compile" or state.subject == keys[1].subject()):
            raise KeyboardInterrupt

    arguments: dict[str, Any] = {"budget_seconds": 30, "store": store_at(tmp_path), "clock": world.clock}
    with pytest.raises(KeyboardInterrupt):
        search(keys, FakeTarget(), progress=interrupt, **arguments)
    kept = [key for key in keys if store_at(tmp_path).get(key)]
    assert kept == keys[: {"compile": 0, "decided": 2}.get(stage, 1)]

    calls = Counter(world.plain_calls)
    arguments["store"] = store_at(tmp_path)
    found = search(keys, FakeTarget(), **arguments)
    assert list(found) == keys
    assert all(world.plain_calls[key.subject()] == calls[key.subject()] for key in kept)
    assert {key: store_at(tmp_path).get(key) for key in keys} == found

    calls = Counter(world.plain_calls)
    assert search(keys, FakeTarget(), **arguments) == found
    assert world.plain_calls == calls
    search(keys, FakeTarget(), fresh=True, **arguments)
    assert all(world.plain_calls[key.subject()] > calls[key.subject()] for key in keys)


def test_a_stored_candidate_outside_the_space_is_decided_anew(world: World, tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.put(Decision(KEY, FakeTile("gone"), 9.0, "won once"))
    found = search([KEY], FakeTarget(), budget_seconds=10, store=store, clock=world.clock)
    assert found[KEY].candidate in (FakeTile("a"), FakeTile("b"))
    assert store.get(KEY) == found[KEY]


def test_decisions_of_another_machine_are_not_found(tmp_path: Path) -> None:
    here = machine_key(FakeTarget())
    assert "lanes=4, registers=16" in here.limits
    DecisionStore(PlanCache("model", tmp_path), here).put(Decision(KEY, FakeTile("a"), 2.0, "won"))
    elsewhere = DecisionStore(PlanCache("model", tmp_path), replace(here, chip="another"))
    with pytest.warns(UserWarning, match="another machine"):
        assert elsewhere.get(KEY) is None


def test_progress_tells_the_stages_in_order_and_what_is_left(world: World) -> None:
    events: list[Progress] = []
    search([KEY], FakeTarget(), budget_seconds=10, progress=events.append, clock=world.clock)
    assert list(dict.fromkeys(event.stage for event in events)) == [
        "compile",
        "verify",
        "time",
        "confirm",
        "decided",
    ]
    left = [event.seconds_left for event in events]
    assert left == sorted(left, reverse=True)
    assert all(event.subject == KEY.subject() and event.done <= event.total for event in events)
    assert events[-1].candidate == "a"


# --- the real thing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        LinearKey("swiglu", 1, 64, 96, "bfloat16"),
        LinearKey("residual", 32, 80, 64, "float16"),
        LinearKey("store", 4, 64, 64, "float32"),
        NormKey(True, 4, 64, 1e-5, "bfloat16"),
    ],
    ids=lambda key: key.family,
)
def test_real_candidates_pass_and_a_decision_comes_out(key: Any, tmp_path: Path) -> None:
    target = CpuTarget()
    store = DecisionStore(PlanCache("model", tmp_path), machine_key(target))
    decision = search([key], target, budget_seconds=2, store=store, max_candidates=4)[key]
    assert [name for name, reason in decision.rejected.items() if "not tried" not in reason] == [
        f"pruned: {reason}" for reason in key.pruned(target.limits)
    ]
    assert decision.candidate is None or decision.candidate in key.space(target.limits)
    assert store.get(key) == decision


def test_a_real_kernel_with_the_wrong_weights_is_caught() -> None:
    key, target = LinearKey("store", 4, 64, 64, "bfloat16"), CpuTarget()
    tile = key.space(target.limits)[0]
    kernel = target.compile(key.source(tile))
    case = make_case(key, 4, 0, lambda: 0.0)
    assert fault(key, tile, kernel, case) is None
    case.inputs[1] = case.inputs[1] * 1.02
    assert "error" in (fault(key, tile, kernel, case) or "")
