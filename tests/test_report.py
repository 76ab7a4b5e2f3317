"""The suite record: it round-trips byte for byte, and every way to damage it is caught where it is."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from report_data import (
    CONFIRMATION,
    KEYS,
    MODEL,
    OBJECTS,
    OURS,
    RECORD,
    SAMPLES,
    SEED,
    TEXT,
    TYPES,
    at,
    faults,
    mutated,
    native_record,
)

from metile import report
from metile.errors import MetileError
from metile.report_base import Loc, path_of


def test_seed_round_trips_byte_for_byte(tmp_path: Path) -> None:
    loaded = report.load(SEED)
    assert report.dumps(loaded) == TEXT
    report.save(loaded, tmp_path / "copy.json")
    assert (tmp_path / "copy.json").read_bytes() == SEED.read_bytes()
    assert loaded.models[0].accepted


@pytest.mark.parametrize("loc", KEYS, ids=path_of)
def test_missing_key(loc: Loc) -> None:
    record = copy.deepcopy(RECORD)
    del at(record, loc[:-1])[loc[-1]]
    assert faults(record) == [f"{path_of(loc)}: expected this key but got nothing"]


@pytest.mark.parametrize("loc", OBJECTS, ids=path_of)
def test_unknown_key(loc: Loc) -> None:
    record = copy.deepcopy(RECORD)
    at(record, loc)["extra key"] = 1
    assert faults(record) == [f"{path_of((*loc, 'extra key'))}: expected no such key but got 1"]


@pytest.mark.parametrize(
    ("loc", "wrong"), TYPES, ids=lambda part: repr(part) if not isinstance(part, tuple) else path_of(part)
)
def test_wrong_type(loc: Loc, wrong: Any) -> None:
    found = faults(mutated(loc, wrong))
    assert any(fault.startswith(f"{path_of(loc)}: expected ") for fault in found), found


DISPATCHES: Loc = (*MODEL, "selected_dispatches")
PRECISION: Loc = (*MODEL, "precision_comparison")
REPLACED: list[tuple[Loc, Any, str]] = [
    ((*CONFIRMATION, "pairs"), [], "at least 1 of them but got a list of 0"),
    (("models",), [], "at least 1 of them but got a list of 0"),
    ((*MODEL, "comparison_mode"), "shared_native_fallback", "'alternating' (a plan was confirmed)"),
    ((*MODEL, "comparison_mode"), "random", "'alternating' or 'shared_native_fallback'"),
    ((*CONFIRMATION, "accepted"), False, "true but got false"),
    ((*MODEL, "selected_plan", "rms_norm"), True, "false (not in the candidate plan) but got true"),
    ((*MODEL, "workload", "trials"), 10, ""),
    ((*MODEL, "workload", "confirmation_trials"), 3, ""),
    ((*MODEL, "schema_version"), 7, "8 but got 7"),
    (("schema_version",), 4, "3 but got 4"),
    (("suite",), "", "a text that is not empty but got ''"),
    ((*MODEL, "memory", "peak_bytes"), -1, "at least 0 but got -1"),
    ((*SAMPLES, "MLX", 0, "elapsed_seconds"), 0.0, "more than 0 but got 0.0"),
    (("recorded_at",), "2026-13-40T10:50:41Z", ""),
    (("recorded_at",), "2026-07-18 10:50", "a string like "),
    ((*MODEL, "recorded_at"), "2026-07-18T10:50:41Z", "a string like "),
    ((*DISPATCHES, "rms_norm", 0, "algorithm"), "torch", "'mlx' or 'metile' but got 'torch'"),
    ((*DISPATCHES, "dense_matmul", 1, "schedule"), "spiral", "'', 'linear', "),
    ((*DISPATCHES, "attention", 0, "dtype"), "bf16", "a string like "),
    ((*PRECISION, "class"), "mixed_precision", "'same_precision' but got 'mixed_precision'"),
    (("metile",), None, "an object but got null"),
]
ELSEWHERE = {"trials": (*SAMPLES, "MLX"), "confirmation_trials": (*CONFIRMATION, "pairs")}
"""Keys whose contradiction is reported where the counted list is."""


@pytest.mark.parametrize(("loc", "value", "expected"), REPLACED)
def test_value_that_cannot_be(loc: Loc, value: Any, expected: str) -> None:
    found = faults(mutated(loc, value))
    where = path_of(ELSEWHERE.get(str(loc[-1]), loc))
    assert any(fault.startswith(f"{where}: expected {expected}") for fault in found), found


@pytest.mark.parametrize(
    ("shortened", "fault"),
    [
        ([OURS], 'models[0].samples["MLX + meTile"]: expected 9 samples but got 8'),
        (["MLX"], 'models[0].samples["MLX + meTile"]: expected 8 samples but got 9'),
        (["MLX", OURS], "models[0].samples.MLX: expected 9 samples, the trials of the workload, but got 8"),
    ],
)
def test_samples_of_another_number(shortened: list[str], fault: str) -> None:
    record = copy.deepcopy(RECORD)
    for label in shortened:
        at(record, SAMPLES)[label].pop()
    assert fault in faults(record)


def test_renamed_label() -> None:
    record = copy.deepcopy(RECORD)
    samples = at(record, SAMPLES)
    samples["meTile"] = samples.pop(OURS)
    assert faults(record) == [
        'models[0].samples["MLX + meTile"]: expected this key but got nothing',
        "models[0].samples.meTile: expected no such key but got a list of 9",
    ]


def test_plan_without_confirmation() -> None:
    fault = "models[0].selected_plan.dense_mlp: expected false (no plan was confirmed) but got true"
    assert fault in faults(mutated(CONFIRMATION, None))


def test_weights_and_class_of_precision_agree() -> None:
    assert faults(mutated((*PRECISION, "prefill_weights"), "affine8")) == [
        "models[0].precision_comparison.same_weight_representation: expected false but got true",
        "models[0].precision_comparison.class: expected a class of mixed precision but got 'same_precision'",
    ]


@pytest.mark.parametrize("block", [(*MODEL, "medians"), (*CONFIRMATION, "medians")], ids=path_of)
@pytest.mark.parametrize("factor", [1 + 1e-6, 0.5])
def test_every_perturbed_median(block: Loc, factor: float) -> None:
    for key, value in at(RECORD, block).items():
        (fault,) = faults(mutated((*block, key), value * factor))
        assert fault.startswith(f"{path_of((*block, key))}: expected {value!r}, the median of its ")


def test_every_fault_is_listed() -> None:
    record = copy.deepcopy(RECORD)
    del record["suite"]
    record["models"][0]["memory"]["peak_bytes"] = "much"
    at(record, SAMPLES)[OURS].pop()
    assert faults(record) == [
        "models[0].memory.peak_bytes: expected an integer but got 'much'",
        'models[0].samples["MLX + meTile"]: expected 9 samples but got 8',
        "suite: expected this key but got nothing",
    ]


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("", "Expecting value"),
        (TEXT[:-100], "Expecting"),
        (re.sub(r'"kl_divergence": 0.0', '"kl_divergence": NaN', TEXT), "the number NaN"),
        ('{"suite": "a", "suite": "b"}', "the key 'suite' twice"),
        ("[" * 100_000, "objects nested too deeply"),
    ],
)
def test_text_that_is_not_json(text: str, got: str) -> None:
    with pytest.raises(MetileError, match=rf"^\[report\] expected JSON in here but got .*{re.escape(got)}"):
        report.loads(text, "here")


@pytest.mark.parametrize("text", ["[]", "null", "3"])
def test_json_that_is_no_object(text: str) -> None:
    assert faults(json.loads(text))[0].startswith("the record: expected an object but got ")


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "latin.json").write_bytes(b'{"suite": "\xe9"}')
    with pytest.raises(MetileError, match="expected UTF-8 text"):
        report.load(tmp_path / "latin.json")


def test_model_with_nothing_to_patch() -> None:
    record = native_record()
    loaded = report.loads(json.dumps(record))
    assert not loaded.models[0].accepted
    assert loaded.models[0].medians.ttft_speedup == 1
    assert json.loads(report.dumps(loaded)) == record


def test_shared_samples_must_be_shared() -> None:
    record = native_record()
    ours = copy.deepcopy(record["models"][0]["samples"][OURS])
    ours[3]["elapsed_seconds"] += 1e-9
    record["models"][0]["samples"][OURS] = ours
    assert any(fault.startswith('models[0].samples["MLX + meTile"][3]: expected the') for fault in faults(record))


@pytest.mark.parametrize("where", [(), MODEL], ids=path_of)
def test_additions_round_trip(where: Loc) -> None:
    additions = {
        "target": "cpu",
        "plan": {"selected": {"dense_projections": True}},
        "notes": ["a", None, 1.5],
    }
    for value in (additions, {}):
        record = mutated((*where, "metile"), value)
        loaded = report.loads(json.dumps(record))
        assert json.loads(report.dumps(loaded)) == record
    assert report.loads(TEXT).metile == {}


def test_additions_must_be_json() -> None:
    values = report.loads(TEXT).model_dump(by_alias=True)
    with pytest.raises(ValueError, match="finite number"):
        report.SuiteReport.model_validate({**values, "metile": {"rate": float("inf")}})


def test_whole_number_may_stand_for_a_float() -> None:
    loaded = report.loads(json.dumps(mutated((*MODEL, "verification", "kl_divergence"), 0)))
    assert report.dumps(loaded) == TEXT


def test_plan_features_by_name() -> None:
    assert report.PlanFeatures.of("rms_norm", "dense_mlp").names() == ["dense_mlp", "rms_norm"]
    with pytest.raises(ValueError, match="dense_projections"):
        report.PlanFeatures.of("dense_projections")


def test_precision() -> None:
    assert report.precision_of().model_dump(by_alias=True) == at(RECORD, (*MODEL, "precision_comparison"))
    mixed = report.precision_of(["affine8", "affine4", "affine8"], baseline_weights="bfloat16")
    assert mixed.kind == "mixed_precision"
    assert not mixed.same_weight_representation
    assert mixed.optimized_decode_weights == ["affine4", "affine8"]
    assert mixed.prefill_weights == "bfloat16"


def test_this_machine_describes_itself() -> None:
    assert re.fullmatch(r"\d+ GB|unknown", report.hardware().memory)
    assert re.match(r"\d+\.\d+", report.software().mlx)


def test_times_are_in_the_formats_of_the_record() -> None:
    record = mutated((*MODEL, "recorded_at"), report.model_now())
    record["recorded_at"] = report.now()
    report.loads(json.dumps(record))


def test_mac_describes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"machdep.cpu.brand_string": "Apple M5", "hw.model": "Mac17,2", "hw.memsize": str(32 * 2**30)}
    monkeypatch.setattr("metile.report.platform.system", lambda: "Darwin")
    monkeypatch.setattr("metile.report._sysctl", answers.get)
    machine = report.hardware()
    assert (machine.chip, machine.model_name, machine.memory) == ("Apple M5", "Mac17,2", "32 GB")
