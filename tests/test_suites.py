"""Suites: what the packaged ones say, and every way in which a suite file can be wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from metile.demo import DEMO_MODELS
from metile.errors import MetileError
from metile.suites import SuiteModel, Workload, load_suite, suite_names

SEED = Workload(
    prompt_tokens=128,
    generation_tokens=64,
    trials=9,
    plan_trials=7,
    plan_decode_steps=8,
    confirmation_trials=9,
    delay_seconds=0.1,
    prefill_step_size=2048,
    seed=0,
)

GOOD = """
description = "one"
search_seconds = 10

[workload]
prompt_tokens = 8
generation_tokens = 4
trials = 1
plan_trials = 1
plan_decode_steps = 1
confirmation_trials = 1
delay_seconds = 0
prefill_step_size = 512
seed = 0

[[models]]
id = "owner/name"
kind = "hub"
revision = "main"
"""


# ---- the packaged suites -------------------------------------------------------------------------------


def test_names() -> None:
    assert suite_names() == ("4bit", "bf16-dense", "bf16-models", "demo")
    assert [load_suite(name).name for name in suite_names()] == list(suite_names())


def test_bf16_dense_is_the_workload_of_the_reports() -> None:
    suite = load_suite("bf16-dense")
    assert suite.workload == SEED
    revision = "29d8263c520bfdf9778d0e1906c378b262a5ff63"
    assert suite.models == (SuiteModel("mlx-community/Qwen2.5-1.5B-Instruct-bf16", revision, "hub"),)


def test_bf16_models_share_that_workload() -> None:
    four = load_suite("4bit")
    assert four.workload == load_suite("bf16-dense").workload
    assert all(model.id.endswith("-4bit") and model.kind == "hub" for model in four.models)
    suite = load_suite("bf16-models")
    assert suite.workload == SEED
    assert len(suite.models) == 7
    assert load_suite("bf16-dense").models[0] in suite.models
    assert all(model.id.startswith("mlx-community/") and model.id.endswith("-bf16") for model in suite.models)


def test_demo_fits_in_five_minutes() -> None:
    """The sum of the comment in the suite file, at 22 and 8 tokens/s of plain MLX."""
    suite = load_suite("demo")
    assert suite.models == (SuiteModel("demo:smollm2-135m-bf16", None, "demo"),)
    work = suite.workload
    prefill, token = work.prompt_tokens / 22, 1 / 8
    run = prefill + work.generation_tokens * token + 1  # plain, then metile
    features = 6 * 3.0
    plan = work.plan_trials * (prefill + work.plan_decode_steps * token + features)
    total = 8 + suite.search_seconds + plan + 10 + run * (1 + work.confirmation_trials + work.trials)
    assert 200 < total < 280


# ---- workloads -----------------------------------------------------------------------------------------


def test_workload_writes_the_keys_of_a_report() -> None:
    written = json.loads(json.dumps(SEED.to_dict()))
    assert written == {
        "confirmation_trials": 9,
        "delay_seconds": 0.1,
        "generation_tokens": 64,
        "plan_decode_steps": 8,
        "plan_trials": 7,
        "prefill_step_size": 2048,
        "prompt_tokens": 128,
        "seed": 0,
        "trials": 9,
    }
    assert Workload(**written) == SEED


def test_replace_keeps_what_is_not_given() -> None:
    assert SEED.replace(trials=3, seed=None) == dataclasses.replace(SEED, trials=3)
    assert SEED.replace(delay_seconds=2).delay_seconds == 2.0
    assert SEED.replace() == SEED


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("trials", 0, "trials to be an integer of at least 1 but got 0"),
        ("prompt_tokens", -1, "prompt_tokens to be an integer of at least 1 but got -1"),
        ("generation_tokens", 1.5, "generation_tokens to be an integer of at least 1 but got 1.5"),
        ("plan_trials", True, "plan_trials to be an integer of at least 1 but got True"),
        ("seed", -1, "seed to be an integer of at least 0 but got -1"),
        ("delay_seconds", -0.1, "delay_seconds to be non-negative seconds but got -0.1"),
        ("delay_seconds", float("nan"), "delay_seconds to be non-negative seconds but got nan"),
        ("delay_seconds", float("inf"), "delay_seconds to be non-negative seconds but got inf"),
        ("trails", 3, "seed but got trails"),
    ],
)
def test_replace_refuses(field: str, value: float, expected: str) -> None:
    with pytest.raises(MetileError) as caught:
        SEED.replace(**{field: value})
    assert str(caught.value).startswith("[workload] expected ")
    assert expected in str(caught.value)


# ---- models --------------------------------------------------------------------------------------------


def test_model_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SuiteModel.of(str(tmp_path)).kind == "local"
    assert SuiteModel.of("mlx-community/Qwen2.5-0.5B-Instruct-bf16").kind == "hub"
    for name in DEMO_MODELS:
        assert SuiteModel.of(name) == SuiteModel(name, None, "demo")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert SuiteModel.of("owner/name").kind == "local"


@pytest.mark.parametrize(
    "text", ["", "name", "demo:", "demo:nope", "/no/such/place", "../up", "./here", "a/b/c", "a b/c"]
)
def test_unknown_model_lists_the_forms(text: str) -> None:
    with pytest.raises(MetileError) as caught:
        SuiteModel.of(text)
    message = str(caught.value)
    assert message.startswith("[model] expected ")
    assert message.endswith(f"but got {text!r}")
    assert all(part in message for part in ("local model folder", "owner/name", *DEMO_MODELS))


# ---- suite files ---------------------------------------------------------------------------------------


def write(folder: Path, text: str) -> None:
    (folder / "mine.toml").write_text(text, encoding="utf-8")


def test_a_suite_file_of_ones_own(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    suite = load_suite("mine", tmp_path)
    assert suite_names(tmp_path) == ("mine",)
    assert suite.search_seconds == 10.0
    assert suite.models == (SuiteModel("owner/name", "main", "hub"),)
    other = SuiteModel.of("demo:smollm2-135m-4bit")
    assert suite.replace_models((other,)).models == (other,)
    with pytest.raises(dataclasses.FrozenInstanceError):
        suite.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("name", ["nope", "", "../suites/demo", "demo.toml"])
def test_unknown_suite_lists_what_exists(name: str) -> None:
    with pytest.raises(MetileError) as caught:
        load_suite(name)
    assert (
        str(caught.value) == f"[suite] expected one of the suites 4bit, bf16-dense, bf16-models, demo but got {name!r}"
    )


def test_no_suites_at_all(tmp_path: Path) -> None:
    with pytest.raises(MetileError, match=r"one of the suites \(none\) but got 'demo'"):
        load_suite("demo", tmp_path)


MODELS = GOOD[GOOD.index("[[models]]") :]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("trials = 1", "trails = 1", "trials"),
        ("\ntrials = 1", "", "but got none for trials"),
        ("\ntrials = 1", "\ntrials = 1\nextra = 2", "but got the unknown extra"),
        ("\ntrials = 1", '\ntrials = "1"', "trials to be an integer of at least 1 but got '1' (str)"),
        ("\ntrials = 1", "\ntrials = 0", "trials to be an integer of at least 1 but got 0 (int)"),
        ("\ntrials = 1", "\ntrials = true", "trials to be an integer of at least 1 but got True (bool)"),
        ("delay_seconds = 0", "delay_seconds = nan", "delay_seconds to be non-negative seconds but got nan"),
        ("search_seconds = 10", "search_seconds = 0", "search_seconds to be positive seconds but got 0"),
        ("search_seconds = 10", "", "but got none for search_seconds"),
        ("search_seconds = 10", "search_seconds = 10\nbudget = 1", "but got the unknown budget"),
        ('description = "one"', "description = 1", "description to be a non-empty string but got 1 (int)"),
        (
            'description = "one"',
            'description = " "',
            "description to be a non-empty string but got ' ' (str)",
        ),
        ("[workload]", "[[workload]]", "a table [workload] but got"),
        (MODELS, "", "but got none for models"),
        ('id = "owner/name"\n', "", "but got none for id"),
        ('id = "owner/name"', 'id = "name"', "a hub id of the form owner/name but got 'name'"),
        ('kind = "hub"', 'kind = "zip"', "a kind of hub, demo, local or random but got 'zip' (str)"),
        ('kind = "hub"', "kind = []", "a kind of hub, demo, local or random but got [] (list)"),
        ('kind = "hub"', 'kind = "demo"', "a demo checkpoint (demo:smollm2-135m-bf16"),
        (
            'kind = "hub"',
            'kind = "local"',
            "a revision of a hub model only but got one of owner/name, which is local",
        ),
        ('revision = "main"', "revision = 7", "revision to be a non-empty string but got 7 (int)"),
        ('revision = "main"', 'branch = "main"', "but got the unknown branch"),
        (MODELS, MODELS + MODELS, "each model once but got owner/name repeated"),
        ("seed = 0", "seed = ", "a readable TOML file but got"),
    ],
)
def test_faulty_suite_names_the_fault(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert old in GOOD
    write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(MetileError) as caught:
        load_suite("mine", tmp_path)
    assert str(caught.value).startswith("[suite mine] expected ")
    assert expected in str(caught.value)


@pytest.mark.parametrize("models", ["models = []", "models = 3", "models = [1]"])
def test_models_of_another_shape(tmp_path: Path, models: str) -> None:
    write(tmp_path, models + GOOD.replace(MODELS, ""))
    with pytest.raises(MetileError, match=r"\[suite mine\] expected (at least one )?tables? \[\[models\]\]"):
        load_suite("mine", tmp_path)


def test_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(MetileError, match="a readable TOML file"):
        load_suite("mine", tmp_path)
