"""The simulated target and what stands in for time on it: traffic counted by launch, decided on, and reported as such.

The command runs on a tiny model from search to report; nothing of it may look like a measurement.
"""

from __future__ import annotations

import dataclasses
import io
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from rich.console import Console
from tiny_models import tiny
from tuning_world import suite, write_model

import metile
from metile import models, report, tuner
from metile.dispatch import Decision, Plan
from metile.errors import MetileError
from metile.files import CACHE_VARIABLE, cache_root
from metile.ops.attention import AttentionKey
from metile.ops.linear import LinearKey
from metile.ops.norm import NormKey
from metile.patch import apply
from metile.progress import Reporter
from metile.search import search
from metile.simulator.devices import DEVICES, custom
from metile.suites import SuiteModel
from metile.targets import choose_target
from metile.targets.base import Kernel, KernelSource
from metile.targets.simulated import COUNTED_GROUPS, SimulatedTarget
from metile.tuner import Tuner

TARGET = SimulatedTarget()
DECODE = LinearKey("store", 1, 192, 256, "bfloat16")
PREFILL = LinearKey("store", 64, 192, 256, "bfloat16")


def moved(key: Any, candidate: Any, rows: int) -> Any:
    return TARGET.moved(key, candidate, key.example(rows, 0))


# ---- the target ----


def test_the_target_is_chosen_by_name() -> None:
    target = choose_target("simulator")
    assert (target.name, target.timed, target.chip()) == ("simulator", False, "m1, simulated")
    assert choose_target("simulator") is target
    assert SimulatedTarget("m3-max").chip() == "m3-max, simulated"


@pytest.mark.skipif(mx.metal.is_available(), reason="this machine has Metal")
def test_metal_without_metal_names_the_simulator() -> None:
    expected = r"^\[target\] expected a machine with Metal \(the target simulator runs .* but got one without$"
    with pytest.raises(MetileError, match=expected):
        choose_target("metal")


def test_limits_are_those_of_the_device() -> None:
    small = custom(threadgroup_bytes=16 << 10).with_pipeline_threads(832)
    limits = SimulatedTarget(small).limits
    assert (limits.lanes, limits.threads, limits.threadgroup_bytes) == (32, 832, 16 << 10)
    assert all(SimulatedTarget(device).limits.is_gpu for device in DEVICES.values())


# ---- traffic ----


def test_a_decode_kernel_reads_its_weights_once() -> None:
    for candidate in [tile for tile in DECODE.space(TARGET.limits) if tile.program == "rows"][:4]:
        bytes_moved = moved(DECODE, candidate, 1)
        groups = 192 / candidate.block_n
        weights, y, x = 192 * 256 * 2, 192 * 2, 256 * 2
        assert bytes_moved.bytes == weights + y + groups * x
        assert bytes_moved.needed == weights + y + x


def test_a_matrix_kernel_reads_its_weights_once_a_row_of_blocks() -> None:
    tiles = [tile for tile in PREFILL.space(TARGET.limits) if tile.program == "matrix" and tile.schedule == "linear"]
    for block_m, block_n in ((64, 64), (32, 64), (16, 32)):
        candidate = next(tile for tile in tiles if (tile.block_m, tile.block_n) == (block_m, block_n))
        x, weights, y = 64 * 256 * 2, 192 * 256 * 2, 64 * 192 * 2
        assert moved(PREFILL, candidate, 64).bytes == x * 192 // block_n + weights * 64 // block_m + y


def test_a_large_launch_is_counted_on_its_first_threadgroups() -> None:
    key = NormKey(False, 64, 256, 1e-5, "float32")
    candidate = key.space(TARGET.limits)[0]
    assert candidate.block == 1
    assert COUNTED_GROUPS < 64
    x, weight = 64 * 256 * 4, 256 * 4
    assert moved(key, candidate, 64).bytes == 2 * x + 64 * weight  # x from the cache the second time, y once


def test_attention_reads_keys_and_values_once_for_all_heads_that_share_them() -> None:
    key = AttentionKey(1, 256, 4, 2, 64, "float16")
    inputs = key.example(1, 0)
    bytes_moved = TARGET.moved(key, key.space(TARGET.limits)[0], inputs)
    assert bytes_moved.bytes == sum(array.nbytes for array in inputs) + inputs[0].nbytes
    assert bytes_moved.ratio == 1


# ---- the search ----


def test_the_search_decides_by_traffic() -> None:
    stages: list[str] = []
    found = search(
        [PREFILL], TARGET, budget_seconds=60, max_candidates=4, progress=lambda state: stages.append(state.stage)
    )
    decision = found[PREFILL]
    ratios = [moved(PREFILL, tile, 64).ratio for tile in PREFILL.space(TARGET.limits)[:4]]
    assert decision.candidate is not None
    assert decision.traffic == pytest.approx(min(ratios), abs=1e-3)
    assert decision.speedup == 1.0
    assert "not timed" in decision.reason
    assert list(dict.fromkeys(stages)) == ["compile", "verify", "count", "decided"]


def test_a_wrong_kernel_is_rejected_before_it_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    source = LinearKey.source

    def broken(self: LinearKey, candidate: Any) -> KernelSource:
        right = source(self, candidate)
        if candidate.block_m == 64:
            return right
        return dataclasses.replace(right, body=right.body.replace("(x)", "(w0)"), name=right.name + "_broken")

    monkeypatch.setattr(LinearKey, "source", broken)
    space = PREFILL.space(TARGET.limits)
    decision = search([PREFILL], TARGET, budget_seconds=60, max_candidates=8)[PREFILL]
    wrong = [tile.label() for tile in space[:8] if tile.block_m != 64]
    assert wrong
    assert all("error" in decision.rejected[label] or "NaN" in decision.rejected[label] for label in wrong)
    assert decision.candidate is not None
    assert decision.candidate.block_m == 64


def test_what_apple_would_reject_is_rejected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    source = LinearKey.source

    def illegal(self: LinearKey, candidate: Any) -> KernelSource:
        right = source(self, candidate)
        return dataclasses.replace(right, body=f"double d = 1; (void)d; {right.body}", name=right.name + "_double")

    monkeypatch.setattr(LinearKey, "source", illegal)
    decision = search([DECODE], TARGET, budget_seconds=60, max_candidates=2)[DECODE]
    assert decision.candidate is None
    assert all("double" in reason for label, reason in decision.rejected.items() if not label.startswith("pruned"))


def test_a_decision_keeps_its_traffic() -> None:
    counted = Decision(DECODE, DECODE.space(TARGET.limits)[0], 1.0, "counted", {}, 1.25)
    assert Decision.from_json(DECODE, counted.to_json()) == counted
    timed = dataclasses.replace(counted, traffic=None)
    assert "traffic" not in timed.to_json()
    assert Decision.from_json(DECODE, timed.to_json()) == timed


# ---- a model ----


def test_a_patched_model_says_what_the_plain_one_says() -> None:
    model = tiny("llama", mx.float32, seed=3)
    tokens = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    expected = model(tokens)
    mx.eval(expected)
    found = models.find(model)
    keys = dict.fromkeys(key for site in found.sites for key in site.keys([8], 16))
    plan = Plan("simulator", frozenset(site.feature for site in found.sites), {
        key: next(iter(key.space(TARGET.limits)), None) for key in keys
    })  # fmt: skip
    with apply(model, plan, TARGET) as handle:
        handle.reset_engaged()
        got = model(tokens)
        assert sum(handle.engaged().values()) > 0
    assert mx.abs(got - expected).max().item() < 1e-4 * mx.abs(expected).max().item()
    assert mx.array_equal(model(tokens), expected)


# ---- the command ----


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a tiny model, with a cache of its own but for what is compiled."""
    for name in ("kernels", "simulator"):
        made = cache_root() / name
        made.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cache").mkdir(exist_ok=True)
        (tmp_path / "cache" / name).symlink_to(made.resolve())
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return write_model(tmp_path / "model")


def test_tuning_goes_from_search_to_report_and_claims_no_speed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "_UNTIMED_CANDIDATES", 1)
    tiny_suite = suite(folder, seconds=5)
    record = Tuner(tiny_suite, TARGET, Reporter(Console(file=io.StringIO()))).tune(SuiteModel.of(str(folder)))
    assert record.comparison_mode == "shared_native_fallback"
    assert not any(dict(record.selected_plan).values())
    assert record.plan_confirmation is None
    assert record.candidate_plan.attention
    assert record.candidate_plan.dense_mlp
    assert record.verification is not None
    medians = record.medians
    assert {medians.decode_speedup, medians.prefill_speedup, medians.ttft_speedup, medians.end_to_end_speedup} == {1.0}
    ours: Any = record.metile
    assert (ours["target"], ours["timing"]) == ("simulator", "simulated-traffic")
    assert ours["refused"] == ["m1, simulated: what is not timed is not selected"]
    assert all(decision["speedup"] is None for decision in ours["decisions"] if decision["candidate"])
    assert all(math.isfinite(decision["traffic"]) for decision in ours["decisions"] if decision["candidate"])
    assert any(decision["candidate"] for decision in ours["decisions"])
    result = report.SuiteReport(models=[record], recorded_at=report.now(), schema_version=3, suite="tiny")
    report.save(result, folder.parent / "report.json")
    assert report.load(folder.parent / "report.json") == result


def test_a_simulated_plan_is_not_what_patch_applies(folder: Path) -> None:
    from metile import hub

    model, _ = hub.load(folder)
    handle = metile.patch(model, tune="never")
    assert not handle


def test_kernels_are_protocol_kernels() -> None:
    kernel: Kernel = TARGET.compile(DECODE.source(DECODE.space(TARGET.limits)[0]))
    assert kernel.source.program == "linear.metal"
