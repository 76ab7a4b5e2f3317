"""One model is tuned: its buckets, what is refused and why, and what stands in its record."""

from __future__ import annotations

import dataclasses
import io
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from rich.console import Console
from tiny_models import TARGET, tiny
from tuning_world import WORK, suite, write_model

from metile import models, tuner, verify
from metile.dispatch import Decision, Plan
from metile.files import CACHE_VARIABLE, cache_root
from metile.plan import PlanSearch, Trial
from metile.plans import cached_plan
from metile.progress import Reporter
from metile.report import ModelReport, Sample
from metile.sites import Found
from metile.suites import SuiteModel, Workload
from metile.tuner import Tuner, Tuning, git_revision, other_buckets, workload_buckets
from metile.workload import Generation


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache of its own, but for compiled kernels."""
    kernels, root = cache_root() / "kernels", tmp_path / "cache"
    root.mkdir()
    (root / "kernels").symlink_to(kernels.resolve())
    monkeypatch.setenv(CACHE_VARIABLE, str(root))
    return root


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the search decide for each key's untuned default at once, and the plan take dense_mlp."""

    def search(keys: Any, target: Any, **_: Any) -> dict[Any, Decision]:
        return {key: Decision(key, next(iter(key.space(target.limits)), None), 2.0, "said so") for key in keys}

    def run(self: PlanSearch, features: list[str]) -> tuple[Trial, list[Trial]]:
        trial = Trial(frozenset({"dense_mlp"}), 2.0, 1)
        return trial, [trial]

    monkeypatch.setattr(tuner, "search", search)
    monkeypatch.setattr(PlanSearch, "run", run)


def sample(speed: float) -> Sample:
    return Sample(
        decode_tokens_per_second=speed,
        elapsed_seconds=1 / speed,
        prefill_tokens_per_second=speed,
        time_to_first_token_seconds=1 / speed,
    )


def generating(
    monkeypatch: pytest.MonkeyPatch, speed: float, plain: tuple[int, ...] = (1, 2, 3), ours: tuple[int, ...] = (1, 2, 3)
) -> None:
    """Let a plan run `speed` times as fast as plain MLX, and both generate these tokens."""

    def pairs(*_: Any, trials: int, **__: Any) -> list[tuple[Generation, Generation]]:
        return [(Generation(sample(1.0), plain), Generation(sample(speed), ours))] * trials

    monkeypatch.setattr(tuner, "paired_generations", pairs)


def make(folder: Path, work: Workload = WORK) -> Tuner:
    return Tuner(suite(folder, work=work), TARGET, Reporter(Console(file=io.StringIO())))


def tune(folder: Path) -> ModelReport:
    return make(folder).tune(SuiteModel.of(str(folder)))


def kept(folder: Path) -> Plan | None:
    return cached_plan(tuner.hub.load(folder)[0], TARGET)


# ---- buckets and keys ----


@pytest.mark.parametrize(
    ("prompt", "step", "own", "others"),
    [
        (2, 2048, [1], [2, 4, 8, 16]),
        (9, 2048, [8, 1], [2, 4, 16]),
        (128, 2048, [128, 1], [2, 4, 8, 16, 32, 64, 256]),
        (129, 128, [128, 1], [2, 4, 8, 16, 32, 64, 256]),
        (201, 128, [128, 1], [2, 4, 8, 16, 32, 64, 256]),  # 128 and 72 rows: one bucket
        (134, 128, [128, 8, 1], [2, 4, 16, 32, 64, 256]),
        (3000, 2048, [2048, 1024, 1], [2, 4, 8, 16, 32, 64, 128, 256, 512, 4096]),
        (9000, 8192, [1024, 1], [2, 4, 8, 16, 32, 64, 128, 256, 512, 2048]),  # no bucket holds 8192 rows
    ],
)
def test_buckets(prompt: int, step: int, own: list[int], others: list[int]) -> None:
    work = WORK.replace(prompt_tokens=prompt, prefill_step_size=step)
    assert workload_buckets(work) == own
    assert other_buckets(work) == others


def test_keys_are_met_once_and_neighbours_are_others(folder: Path) -> None:
    primary, secondary = make(folder, WORK.replace(prompt_tokens=30)).keys(models.find(tiny(dtype=mx.bfloat16)))
    assert len(set(primary)) == len(primary) > 0
    assert len(set(secondary)) == len(secondary) > 0
    assert not set(primary) & set(secondary)
    assert {1, 32} <= {key.rows for key in primary}
    assert {2, 4, 8, 16, 64} <= {key.rows for key in secondary}


def test_keys_of_a_model_without_sites(folder: Path) -> None:
    assert make(folder).keys(Found((), ())) == ([], [])


# ---- refused, and why ----


def verdict_of(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    judge = tuner.judge_plan

    def judged(*args: Any) -> verify.Verdict:
        return dataclasses.replace(judge(*args), **changes)

    monkeypatch.setattr(tuner, "judge_plan", judged)


@pytest.mark.usefixtures("defaults")
def test_an_accepted_plan_is_selected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generating(monkeypatch, 3.0)
    record = tune(folder)
    assert record.comparison_mode == "alternating"
    assert record.plan_confirmation is not None
    assert record.plan_confirmation.accepted
    assert record.selected_plan.names() == record.candidate_plan.names() == ["dense_mlp"]
    assert record.medians.decode_speedup == 3.0
    assert record.metile["refused"] == []
    assert record.metile["notes"] == ["the plan generates the same 3 greedy tokens as plain MLX"]
    plan = kept(folder)
    assert plan is not None
    assert plan.features == {"dense_mlp"}


@pytest.mark.usefixtures("defaults")
def test_a_plan_that_fails_verification_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict_of(folder, monkeypatch, ok=False, reasons=("max logit error 9 is above 0.5",))
    monkeypatch.setattr(tuner, "paired_generations", lambda *_, **__: pytest.fail("an unverified plan was run"))
    record = tune(folder)
    assert record.comparison_mode == "shared_native_fallback"
    assert record.candidate_plan.names() == ["dense_mlp"]
    assert record.selected_plan.names() == []
    assert record.plan_confirmation is None
    assert record.verification is not None
    assert record.metile["refused"] == ["max logit error 9 is above 0.5"]
    assert record.samples.mlx == record.samples.metile
    assert record.medians.end_to_end_speedup == 1.0
    assert kept(folder) == Plan("cpu", frozenset(), {})


@pytest.mark.usefixtures("defaults")
@pytest.mark.parametrize("speed", [0.5, 1.0])
def test_a_plan_that_does_not_win_is_refused(folder: Path, speed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    generating(monkeypatch, speed)
    record = tune(folder)
    assert record.comparison_mode == "shared_native_fallback"
    assert record.plan_confirmation is not None
    assert not record.plan_confirmation.accepted
    assert record.metile["refused"] == record.plan_confirmation.reasons
    assert record.metile["refused"]
    assert record.selected_plan.names() == []
    assert not kept(folder)


def test_no_kernel_that_wins_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tuner, "search", lambda keys, *_, **__: {key: Decision(key, None, 1.0, "MLX is faster") for key in keys}
    )
    record = tune(folder)
    assert record.metile["refused"] == ["no kernel beats plain MLX on any shape of this model"]
    assert record.metile["plan_trials"] == []
    assert record.verification is None
    assert record.candidate_plan.names() == []


@pytest.mark.usefixtures("defaults")
def test_no_features_that_win_are_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlanSearch, "run", lambda *_: (None, [Trial(frozenset({"dense_mlp"}), 0.7, 1)]))
    record = tune(folder)
    assert record.metile["refused"] == ["no set of features beats plain MLX on this model"]
    assert record.metile["plan_trials"] == [{"features": ["dense_mlp"], "speedup": 0.7, "rounds": 1}]


# ---- tokens ----


@pytest.mark.usefixtures("defaults")
@pytest.mark.parametrize(
    ("gap", "said"), [(0.0, "a near-tie by the float32 run"), (9.0, "not a near-tie by the float32 run")]
)
def test_a_token_that_differs_is_explained(
    folder: Path, gap: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generating(monkeypatch, 2.0, plain=(1, 2, 3), ours=(1, 5, 3))
    monkeypatch.setattr(verify, "_tie", lambda *_: verify.Tie(gap, gap, 0.5))
    note = f"the first greedy token that differs from plain MLX is number 1: {said}"
    assert tune(folder).metile["notes"] == [note]


@pytest.mark.usefixtures("defaults")
def test_an_early_end_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generating(monkeypatch, 2.0, plain=(1, 2, 3), ours=(1, 2))
    assert tune(folder).metile["notes"] == ["the generations differ in length"]


# ---- the record ----


@pytest.mark.usefixtures("defaults")
def test_a_second_model_has_its_own_figures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generating(monkeypatch, 2.0)
    both = make(folder)
    both.reporter.seconds["search"] = 1000.0  # of the model before
    timing = both.tune(SuiteModel.of(str(folder))).metile["seconds"]
    assert isinstance(timing, dict)
    assert list(timing) == ["load", "search", "plan", "verify", "confirm", "measure"]
    assert timing["search"] < 100  # type: ignore[operator]


def test_a_tuning_selects_what_was_confirmed() -> None:
    tuning = Tuning(SuiteModel.of("a/b"), WORK, TARGET, Found((), ()), candidate=Plan("cpu", frozenset(), {}))
    assert tuning.selected is None


# ---- the revision ----


def test_the_revision_is_that_of_the_code(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    package, installed = tmp_path / "metile", tmp_path / ".venv" / "site-packages" / "metile"
    package.mkdir()
    installed.mkdir(parents=True)
    assert git_revision(package) is None
    git("init", "-q")
    assert git_revision(package) is None  # no commit yet
    git("commit", "-q", "--allow-empty", "-m", "first")
    assert git_revision(package) == git("rev-parse", "HEAD")
    assert git_revision(installed) is None  # that commit is somebody else's


def test_a_machine_without_git_has_no_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_revision() is None
