"""The suite record (schema 3) and the model record (schema 8) it holds, strictly typed.

Every record carries what it takes to check it: raw samples, the medians that must follow from them,
and the pairs that must justify the verdict. A record that contradicts itself is not a record.

**Our own additions** stand under one extra key, ``metile``, on the model record and on the suite record.
It is optional, a free JSON object, and never changes what a key of schema 8 means. Members in use:

========== ====================================================================================
target     ``cpu``, ``cuda``, ``metal`` or ``simulator``: what ran the kernels
chip       the target's own name of the processor, with the instruction set where that is a choice
plan       ``candidate`` and ``selected``: features that schema 8 has no word for, name to bool
declined   modules left alone, each with ``module`` and ``reason``
refused    why there is no plan, in sentences
unverified features that the fidelity check did not exercise
excused    limits exceeded where plain MLX's own distance from float32 is of that size too
float32    ``plan_error`` and ``mlx_error``: distance of each from a float32 run of the same weights
timing     ``measured``, or ``simulated-traffic``: bytes were counted, nothing was timed
seconds    spent, by phase
kernels    statistics of compiled kernels and tried candidates
notes      anything a reader should know, in sentences
========== ====================================================================================
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    StringConstraints,
    model_serializer,
    model_validator,
)

from metile.report_base import Count, Fault, NonNegative, Record, Size, Text, raise_faults
from metile.report_dispatches import Dtype, SelectedDispatches
from metile.report_rules import (
    Medians,
    Sample,
    Speedups,
    differences,
    median_speedups,
    medians_of,
    refusals,
)

MLX = "MLX"
METILE = "MLX + meTile"
SAME_PRECISION = "same_precision"

_MICROSECONDS = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{6})?\+00:00$"
_SECONDS = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"


def _real_time(text: str) -> str:
    datetime.fromisoformat(text)
    return text


ModelTime = Annotated[str, StringConstraints(pattern=_MICROSECONDS), AfterValidator(_real_time)]
SuiteTime = Annotated[str, StringConstraints(pattern=_SECONDS), AfterValidator(_real_time)]
PrecisionClass = Annotated[str, StringConstraints(pattern=r"^(same_precision|mixed_precision\w*)$")]


class Extended(Record):
    """A record that may carry our own additions, and is written without the key when it has none."""

    metile: dict[str, JsonValue] = Field(default_factory=dict)

    @model_serializer(mode="wrap")
    def _only_what_was_said(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = write(self)
        if "metile" not in self.model_fields_set:
            del data["metile"]
        return data


class PlanFeatures(Record):
    """Which features a plan switches on."""

    affine_prefill: bool
    attention: bool
    dense_mlp: bool
    graph_fusion: bool
    quantized_mlp: bool
    rms_norm: bool

    @classmethod
    def of(cls, *names: str) -> PlanFeatures:
        """Build the plan with exactly the features `names`."""
        return cls.model_validate({**dict.fromkeys(cls.model_fields, False), **dict.fromkeys(names, True)})

    def names(self) -> list[str]:
        """Return the features that are on, sorted."""
        return [name for name in PlanFeatures.model_fields if getattr(self, name)]


class RequestedFeatures(PlanFeatures):
    """Which features the run was allowed to try, and whether the tuner was to choose among them."""

    model_autotune: bool


class Hardware(Record):
    """The machine of the run, in its own words; ``unknown`` where it would not say."""

    chip: Text
    machine: Text
    memory: Text
    model_name: Text
    processor: Text
    release: Text
    system: Text


class Software(Record):
    """Versions of what ran."""

    mlx: Text
    mlx_lm: Text
    python: Text


class Memory(Record):
    """MLX's own account of its memory at the end of the run."""

    active_bytes: Count
    cache_bytes: Count
    peak_bytes: Count


class ModelConfig(Record):
    """The shape of the model; null where its architecture has no such number."""

    hidden_size: Size
    model_type: Text
    num_attention_heads: Size | None
    num_hidden_layers: Size
    num_key_value_heads: Size | None
    vocab_size: Size


class PrecisionComparison(Record):
    """At what precision the two labels ran, so that no speedup is read without it."""

    baseline_weights: Text
    kind: PrecisionClass = Field(alias="class")
    derived_from: Literal["selected_plan"]
    native_weights_preserved: bool
    optimized_decode_weights: Annotated[list[Text], Field(min_length=1)]
    prefill_weights: Text
    same_weight_representation: bool

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> PrecisionComparison:
        formats = {self.prefill_weights, *self.optimized_decode_weights}
        same = formats == {self.baseline_weights}
        faults = []
        if self.same_weight_representation != same:
            faults.append(Fault(("same_weight_representation",), _json(same), _json(not same)))
        if (self.kind == SAME_PRECISION) != same:
            wanted = repr(SAME_PRECISION) if same else "a class of mixed precision"
            faults.append(Fault(("class",), wanted, repr(self.kind)))
        raise_faults(faults)
        return self


class PlanConfirmation(Record):
    """The candidate plan against plain MLX on the whole workload, pair by alternating pair."""

    accepted: bool
    decode_speedup_floor: Annotated[float, Field(gt=0, le=1)]
    medians: Speedups
    pairs: Annotated[list[Speedups], Field(min_length=1)]

    @property
    def reasons(self) -> list[str]:
        """Why the plan was refused, in sentences; empty when it was accepted."""
        return refusals(self.pairs, self.decode_speedup_floor)

    @model_validator(mode="after")
    def _follows_from_pairs(self) -> PlanConfirmation:
        found = differences(self.medians, median_speedups(self.pairs), "pairs")
        faults = [Fault(("medians", *fault.loc), fault.expected, fault.got) for fault in found]
        reasons = self.reasons
        if self.accepted == bool(reasons):
            because = f" because {'; '.join(reasons)}," if reasons else ""
            faults.append(Fault(("accepted",), f"{_json(not reasons)}{because}", _json(self.accepted)))
        raise_faults(faults)
        return self


class Samples(Record):
    """The measured runs of both labels; run i of one is paired with run i of the other."""

    mlx: Annotated[list[Sample], Field(alias=MLX, min_length=1)]
    metile: Annotated[list[Sample], Field(alias=METILE, min_length=1)]

    @classmethod
    def of(cls, mlx: list[Sample], metile: list[Sample]) -> Samples:
        """Build the block from both lists."""
        return cls.model_validate({MLX: mlx, METILE: metile})

    @model_validator(mode="after")
    def _paired(self) -> Samples:
        if len(self.mlx) != len(self.metile):
            raise_faults([Fault((METILE,), f"{len(self.mlx)} samples", str(len(self.metile)))])
        return self


class Verification(Record):
    """Logits of the patched model against plain MLX on the same prompt."""

    actual_next_token: Count
    kl_divergence: NonNegative
    max_logit_error: NonNegative
    mean_logit_error: NonNegative
    next_token: Count
    reference_dtype: Dtype


class Workload(Record):
    """What one run is, and how many of each kind were fixed beforehand."""

    confirmation_trials: Count
    delay_seconds: NonNegative
    generation_tokens: Size
    plan_decode_steps: Count
    plan_trials: Count
    prefill_step_size: Size
    prompt_tokens: Size
    seed: Count
    trials: Size


class ModelReport(Extended):
    """What one model gained, the schema 8 record.

    A model whose plan was refused, or that has nothing to patch, selects no feature; its labels then
    share each sample (``shared_native_fallback``). `plan_confirmation` is null where there was no plan
    to confirm, `verification` null where none was verified, `dense_mlp_implementation` null where no
    dense MLP was patched, and `revision` (of the code that measured) null outside a checkout.
    """

    candidate_plan: PlanFeatures
    comparison_mode: Literal["alternating", "shared_native_fallback"]
    dense_mlp_implementation: Text | None
    features: RequestedFeatures
    hardware: Hardware
    medians: Medians
    memory: Memory
    model: Text
    config: ModelConfig = Field(alias="model_config")
    plan_confirmation: PlanConfirmation | None
    precision_comparison: PrecisionComparison
    recorded_at: ModelTime
    revision: Text | None
    samples: Samples
    schema_version: Literal[8]
    selected_dispatches: SelectedDispatches
    selected_plan: PlanFeatures
    software: Software
    verification: Verification | None
    workload: Workload

    @property
    def accepted(self) -> bool:
        """Whether a plan was confirmed; False as well when there was none to confirm."""
        return self.plan_confirmation is not None and self.plan_confirmation.accepted

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> ModelReport:
        raise_faults([*_median_faults(self), *_trial_faults(self), *_plan_faults(self)])
        return self


class SuiteReport(Extended):
    """The models of one suite, the schema 3 record."""

    models: Annotated[list[ModelReport], Field(min_length=1)]
    recorded_at: SuiteTime
    schema_version: Literal[3]
    suite: Text


def _json(value: bool) -> str:
    return "true" if value else "false"


def _median_faults(report: ModelReport) -> list[Fault]:
    computed = medians_of(report.samples.mlx, report.samples.metile).model_dump()
    found = differences(report.medians, computed, "samples")
    return [Fault(("medians", *fault.loc), fault.expected, fault.got) for fault in found]


def _trial_faults(report: ModelReport) -> list[Fault]:
    faults = []
    trials, count = report.workload.trials, len(report.samples.mlx)
    if count != trials:
        faults.append(Fault(("samples", MLX), f"{trials} samples, the trials of the workload,", str(count)))
    confirmation = report.plan_confirmation
    if confirmation and len(confirmation.pairs) != report.workload.confirmation_trials:
        wanted = f"{report.workload.confirmation_trials} pairs, the confirmation trials of the workload,"
        faults.append(Fault(("plan_confirmation", "pairs"), wanted, str(len(confirmation.pairs))))
    return faults


def _plan_faults(report: ModelReport) -> list[Fault]:
    faults = []
    allowed = report.candidate_plan.names() if report.accepted else []
    reason = "not in the candidate plan" if report.accepted else "no plan was confirmed"
    for name in report.selected_plan.names():
        if name not in allowed:
            faults.append(Fault(("selected_plan", name), f"false ({reason})", "true"))
    mode = "alternating" if report.accepted else "shared_native_fallback"
    if report.comparison_mode != mode:
        wanted = f"{mode!r} ({'a' if report.accepted else 'no'} plan was confirmed)"
        faults.append(Fault(("comparison_mode",), wanted, repr(report.comparison_mode)))
    elif not report.accepted:
        faults += _sharing_faults(report.samples)
    if report.accepted and report.verification is None:
        faults.append(Fault(("verification",), "the fidelity of the confirmed plan", "null"))
    if report.selected_plan.dense_mlp and report.dense_mlp_implementation is None:
        faults.append(Fault(("dense_mlp_implementation",), "how the selected dense MLP computes", "null"))
    return faults


def _sharing_faults(samples: Samples) -> list[Fault]:
    return [
        Fault(("samples", METILE, index), f"the sample that {MLX!r} has (shared native fallback)", "another")
        for index, (mlx, metile) in enumerate(zip(samples.mlx, samples.metile, strict=True))
        if mlx != metile
    ]
