"""The record of a tuned model: what the tuner found out, laid out as schema v8 wants it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from metile.dispatch import OWN_FEATURES, V8_FEATURES, Decision
from metile.ops.attention import AttentionKey
from metile.report import (
    FAMILIES,
    ModelReport,
    PlanFeatures,
    Samples,
    SelectedDispatches,
    hardware,
    medians_of,
    model_now,
    precision_of,
    software,
)
from metile.report_schema import Memory, ModelConfig, RequestedFeatures, Verification, Workload

if TYPE_CHECKING:
    from metile.tuner import Tuning


def model_record(
    tuning: Tuning, model: nn.Module, path: Path, seconds: Mapping[str, float], revision: str | None
) -> ModelReport:
    """Return the schema v8 record of one model."""
    selected, candidate = tuning.selected, tuning.candidate
    on = selected.features if selected else frozenset[str]()
    tried = candidate.features if candidate else frozenset[str]()
    return ModelReport(
        candidate_plan=_v8(tried),
        comparison_mode="alternating" if selected else "shared_native_fallback",
        dense_mlp_implementation="fused" if "dense_mlp" in tried else None,
        features=_requested(tuning),
        hardware=hardware(),
        medians=medians_of(tuning.mlx_samples, tuning.metile_samples),
        memory=_memory(),
        model=tuning.spec.id,
        model_config=_config(model, path),
        plan_confirmation=tuning.confirmation,
        precision_comparison=precision_of(),
        recorded_at=model_now(),
        revision=revision,
        samples=Samples.of(list(tuning.mlx_samples), list(tuning.metile_samples)),
        schema_version=8,
        selected_dispatches=_dispatches(tuning.decisions),
        selected_plan=_v8(on),
        software=software(),
        verification=_verification(tuning),
        workload=Workload.model_validate(tuning.workload.to_dict()),
        metile=_additions(tuning, seconds),
    )


def _v8(features: frozenset[str]) -> PlanFeatures:
    return PlanFeatures.of(*(name for name in V8_FEATURES if name in features))


def _requested(tuning: Tuning) -> RequestedFeatures:
    offered = {site.feature for site in tuning.found.sites}
    flags = {name: name in offered for name in V8_FEATURES}
    return RequestedFeatures(**flags, model_autotune=True)


def _memory() -> Memory:
    return Memory(
        active_bytes=mx.get_active_memory(),
        cache_bytes=mx.get_cache_memory(),
        peak_bytes=mx.get_peak_memory(),
    )


def _config(model: nn.Module, path: Path) -> ModelConfig:
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    inner = config.get("text_config") or {}
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "vocab_size")
    values = {name: config.get(name, inner.get(name)) for name in names}
    if values["num_hidden_layers"] is None:
        values["num_hidden_layers"] = len(getattr(model, "layers", ())) or None
    return ModelConfig.model_validate({"model_type": config.get("model_type", type(model).__name__), **values})


def _dispatches(decisions: Mapping[Any, Decision]) -> SelectedDispatches:
    families: dict[str, list[dict[str, Any]]] = {name: [] for name in FAMILIES}
    for key, decision in decisions.items():
        if key.family not in families or (isinstance(key, AttentionKey) and key.rows > 1):
            continue  # v8 has no family for rope, and of attention, without a number of queries, lists the decode step
        entry = key.dispatch(decision.candidate)
        if entry not in families[key.family]:
            families[key.family].append(entry)
    return SelectedDispatches.model_validate(families)


def _verification(tuning: Tuning) -> Verification | None:
    if tuning.verdict is None:
        return None
    fields = asdict(tuning.verdict.fidelity)
    fields.pop("finite")
    return Verification(**fields)


def _additions(tuning: Tuning, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return our own additions; `metile.report_schema` documents the members."""
    verdict, selected, candidate = tuning.verdict, tuning.selected, tuning.candidate
    on = selected.features if selected else frozenset[str]()
    tried = candidate.features if candidate else frozenset[str]()
    decided = list(tuning.decisions.values())
    additions: dict[str, Any] = {
        "target": tuning.target.name,
        "chip": tuning.target.chip(),
        "model_revision": tuning.spec.revision,
        "plan": {
            "candidate": {name: name in tried for name in OWN_FEATURES},
            "selected": {name: name in on for name in OWN_FEATURES},
        },
        "plan_trials": [
            {"features": sorted(trial.features), "speedup": trial.speedup, "rounds": trial.rounds}
            for trial in tuning.trials
        ],
        "decisions": [
            {
                "subject": decision.key.subject(),
                "candidate": decision.candidate.label() if decision.candidate else None,
                "speedup": decision.speedup if decision.traffic is None else None,
                "traffic": decision.traffic,
                "reason": decision.reason,
                "rejected": len(decision.rejected),
            }
            for decision in decided
        ],
        "declined": [{"module": item.path, "reason": item.reason} for item in tuning.found.declined],
        "refused": list(tuning.refused),
        "timing": "measured" if tuning.target.timed else "simulated-traffic",
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "notes": list(tuning.notes),
    }
    if verdict is not None:
        additions["unverified"] = list(verdict.unverified)
        additions["excused"] = list(verdict.excused)
        additions["float32"] = _float32(verdict)
    return additions


def _float32(verdict: Any) -> dict[str, Any]:
    def facts(fidelity: Any) -> dict[str, Any] | None:
        return (
            None if fidelity is None else {name: value for name, value in asdict(fidelity).items() if name != "finite"}
        )

    return {
        "plan_error": facts(verdict.plan_error),
        "mlx_error": facts(verdict.plain_error),
        "near_tie": verdict.near_tie,
    }
