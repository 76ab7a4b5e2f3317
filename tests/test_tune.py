"""The command, end to end on a tiny model: its report, resuming, interrupting, and what it says of bad input."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from rich.console import Console
from tuning_world import SUITE_TOML, write_model

from metile import models, report, suites, tune, tuner
from metile.cache import PlanCache
from metile.files import CACHE_VARIABLE, cache_root
from metile.plans import digest_of
from metile.report import SuiteReport
from metile.search import Progress
from metile.sites import Found
from metile.store import DecisionStore

SMALL = ("--trials", "1", "--confirmation-trials", "1", "--prompt-tokens", "9", "--generation-tokens", "3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, with a cache of its own but for compiled kernels, and a suite named tiny."""
    kernels, root, folder = cache_root() / "kernels", tmp_path / "cache", tmp_path / "work"
    for made in (root, folder, tmp_path / "suites"):
        made.mkdir()
    (root / "kernels").symlink_to(kernels.resolve())
    (tmp_path / "suites" / "tiny.toml").write_text(SUITE_TOML)
    monkeypatch.setenv(CACHE_VARIABLE, str(root))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(suites.load_suite, "__defaults__", (tmp_path / "suites",))
    monkeypatch.setattr(suites.suite_names, "__defaults__", (tmp_path / "suites",))
    return folder


def run(*arguments: object) -> tuple[int, str]:
    """Run the command on the tiny suite; return its exit code and what it printed."""
    file = io.StringIO()
    code = tune.main(["--suite", "tiny", *SMALL, *map(str, arguments)], Console(file=file, width=200))
    return code, file.getvalue()


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the keys that are decided."""
    seen: list[str] = []
    put = DecisionStore.put

    def counted(self: DecisionStore, decision: Any) -> None:
        seen.append(decision.key.subject())
        put(self, decision)

    monkeypatch.setattr(DecisionStore, "put", counted)
    return seen


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- a whole run ----


def test_a_report_is_written(model: Path, work: Path) -> None:
    code, text = run("--model", model)
    assert code == 0, text
    assert files(work) == ["metile-suite-tiny.json"]
    suite = report.load(work / "metile-suite-tiny.json")
    check(suite, model)
    for said in ("suite tiny, 9 prompt and 3 generated tokens", "✓ load", "✓ search", "✓ measure", "Dispatches"):
        assert said in text
    assert text.endswith("Report: metile-suite-tiny.json\n")


def check(suite: SuiteReport, model: Path) -> None:
    assert (suite.suite, suite.schema_version) == ("tiny", 3)
    (record,) = suite.models
    assert record.model == str(model)
    assert record.workload.prompt_tokens == 9
    assert record.workload.generation_tokens == 3
    assert len(record.samples.mlx) == len(record.samples.metile) == 1
    additions = record.metile
    assert additions["target"] == "cpu"
    assert additions["model_revision"] is None
    selected = bool(record.selected_plan.names()) or any(additions["plan"]["selected"].values())  # type: ignore[index,call-overload,union-attr]
    assert record.comparison_mode == ("alternating" if selected else "shared_native_fallback")
    assert selected == (not additions["refused"])
    if record.plan_confirmation is not None:
        assert record.plan_confirmation.accepted == selected
        assert len(record.plan_confirmation.pairs) == 1
        assert record.verification is not None
    decisions = additions["decisions"]
    assert isinstance(decisions, list)
    subjects = [decision["subject"] for decision in decisions]  # type: ignore[index,call-overload]
    assert len(set(subjects)) == len(subjects) > 5
    listed = [entry for _, entries in record.selected_dispatches for entry in entries]
    assert listed
    assert {entry.dtype for entry in listed} == {"mlx.core.bfloat16"}
    assert (record.features.dense_mlp, record.features.quantized_mlp) == (True, False)


def test_the_same_command_resumes(model: Path, work: Path, puts: list[str]) -> None:
    run("--model", model)
    first, before = list(puts), decisions(work)
    assert len(set(first)) == len(first) == len(before) > 5
    _, text = run("--model", model, "--resume")
    assert f"{len(first)} decided before" in text
    assert len(set(puts)) == len(puts)  # no key twice; some that the budget had not reached
    assert before.items() <= decisions(work).items()


def test_fresh_decides_anew(model: Path, puts: list[str]) -> None:
    run("--model", model)
    first = puts.copy()
    puts.clear()
    _, text = run("--model", model, "--fresh")
    assert "decided before" not in text
    assert len(set(first) & set(puts)) > 5


def decisions(work: Path) -> dict[str, Any]:
    found: Any = report.load(work / "metile-suite-tiny.json").models[0].metile["decisions"]
    return {decision["subject"]: decision for decision in found}


def test_two_models_share_a_report(model: Path, work: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", num_hidden_layers=2, dtype=mx.float32)
    code, text = run("--model", model, "--model", other, "--output", "both.json")
    assert code == 0, text
    records = report.load(work / "both.json").models
    assert [record.model for record in records] == [str(model), str(other)]
    assert f"load      {other}" in text
    assert files(work) == ["both.json"]


# ---- output ----


def test_a_report_goes_where_it_is_asked(model: Path, work: Path, tmp_path: Path) -> None:
    place = tmp_path / "new" / "folder" / "report.json"
    code, text = run("--model", model, "--output", place)
    assert code == 0
    assert report.load(place).suite == "tiny"
    assert files(place.parent) == ["report.json"]  # nothing half-written stays
    assert files(work) == []
    assert f"Report: {place}" in text


def test_a_report_is_replaced_whole_or_not_at_all(
    model: Path, work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (work / "old.json").write_text("the old report")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tuner.PlanCache, "_commit", lambda _: None)
    monkeypatch.setattr("metile.files.os.replace", full)
    code, _ = run("--model", model, "--output", "old.json")
    assert code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert said == "[tune] expected a report that can be written to old.json but got [Errno 28] No space left on device"
    assert (work / "old.json").read_text() == "the old report"
    assert files(work) == ["old.json"]


@pytest.mark.parametrize(
    ("output", "said"),
    [("folder", "--output to be a file but got folder, which is a folder"), ("file/x.json", "folder that can be writ")],
)
def test_a_place_for_no_report_is_refused_at_once(
    output: str, said: str, model: Path, work: Path, puts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (work / "folder").mkdir()
    (work / "file").write_text("")
    assert run("--model", model, "--output", output) == (2, "")
    assert said in " ".join(capsys.readouterr().err.split())
    assert puts == []


# ---- dry run ----


def test_a_dry_run_says_what_would_be_searched(model: Path, work: Path, puts: list[str]) -> None:
    code, text = run("--model", model, "--dry-run")
    assert code == 0
    assert "candidates" in text
    assert len(re.findall(r"rows=", text)) > 5
    assert re.search(r"\d+ shapes, \d+ candidates, \d+ kernels to compile\. The search would take about \d s", text)
    assert "each generate 3 tokens 2 times" in text
    assert puts == []
    assert files(work) == []
    assert not (cache_root() / "plans").exists()


def test_a_dry_run_of_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find", lambda _: Found((), ()))
    code, text = run("--model", model, "--dry-run")
    assert code == 0
    assert "nothing to search" in text


# ---- bad input ----


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--suite", "nope"], "[suite] expected one of the suites tiny but got 'nope'"),
        (["--model", "nope"], "a hub id of the form owner/name, or a demo checkpoint (demo:smollm2-135m-bf16"),
        (["--model", "demo:nope"], "but got 'demo:nope'"),
        (
            ["--target", "metal"],
            "a machine with Metal (the target simulator runs the same kernels here, untimed) but got",
        ),
        (["--target", "cuda"], "but got cuda"),
        (["--trials", "0"], "[workload] expected trials to be an integer of at least 1 but got 0"),
        (["--seed", "-1"], "[workload] expected seed to be an integer of at least 0 but got -1"),
        (["--prompt-tokens", "1"], "[tune] expected at least 2 prompt tokens, a prefix and a last one, but got 1"),
    ],
)
def test_bad_input(arguments: Sequence[str], said: str, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == (2, "")
    assert said in " ".join(capsys.readouterr().err.split())
    assert files(work) == []


@pytest.mark.parametrize("arguments", [["--resume", "--fresh"], ["--target", "abacus"], ["--trials", "many"], ["x"]])
def test_options_that_do_not_parse(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        run(*arguments)
    assert "usage: python -m metile.tune" in capsys.readouterr().err


# ---- a model that cannot be tuned ----


def test_a_model_with_nothing_to_patch(model: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "find", lambda _: Found((), ()))
    code, text = run("--model", model)
    assert code == 0, text
    (record,) = report.load(work / "metile-suite-tiny.json").models
    assert record.comparison_mode == "shared_native_fallback"
    assert record.metile["refused"] == ["the model holds nothing that metile knows how to patch"]
    assert all(not entries for _, entries in record.selected_dispatches)
    assert "the model holds nothing that metile knows how to patch" in text


def test_a_model_that_fails_leaves_the_others(model: Path, work: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    code, text = run("--model", broken, "--model", model)
    assert code == 1
    assert [record.model for record in report.load(work / "metile-suite-tiny.json").models] == [str(model)]
    assert f"✗ {broken}" in text
    assert "one without model*.safetensors" in text
    assert "1 of 2 models failed" in text


def test_an_error_of_another_kind_leaves_the_others(
    model: Path, work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tune_one, count = tuner.Tuner.tune, iter(range(2))

    def failing(self: tuner.Tuner, spec: Any) -> Any:
        if next(count) == 0:
            raise RuntimeError("out of memory")
        return tune_one(self, spec)

    monkeypatch.setattr(tuner.Tuner, "tune", failing)
    code, text = run("--model", model, "--model", f"{model}/")
    assert code == 1
    assert len(report.load(work / "metile-suite-tiny.json").models) == 1
    assert "RuntimeError: out of memory" in capsys.readouterr().err
    assert "1 of 2 models failed" in text


def test_nothing_is_written_where_every_model_fails(work: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, text = run("--model", tmp_path / "empty")
    assert code == 1
    assert files(work) == []
    assert "1 of 1 models failed" in text


# ---- interruption ----


def test_an_interrupted_run_goes_on(model: Path, work: Path, puts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    search = tuner.search

    def interrupted(*args: Any, progress: Any, **named: Any) -> Any:
        def told(state: Progress) -> None:
            progress(state)
            if state.stage == "decided" and len(puts) == 3:
                raise KeyboardInterrupt

        return search(*args, progress=told, **named)

    with monkeypatch.context() as patch:
        patch.setattr(tuner, "search", interrupted)
        code, text = run("--model", model)
    assert code == 130
    assert "Interrupted. What was decided is kept; the same command goes on from there." in text
    assert files(work) == []
    first = list(puts)
    assert len(first) == 3
    stored = json.loads(PlanCache(digest_of(tuner.hub.load(model)[0])).path.read_text())
    assert all(subject in json.dumps(stored) for subject in first)

    code, text = run("--model", model)
    assert code == 0
    assert "3 decided before" in text
    assert len(set(puts)) == len(puts) > 3  # no key twice
    check(report.load(work / "metile-suite-tiny.json"), model)


@pytest.mark.parametrize("stage", ["_plan", "_measure"])
def test_an_interruption_after_the_search(
    stage: str, model: Path, work: Path, puts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuner.Tuner, stage, stop)
    code, _ = run("--model", model)
    assert code == 130
    assert len(puts) > 5
    assert files(work) == []
