"""Suites: which models are tuned under which workload, read from suites/*.toml.

A suite file holds ``description``, ``search_seconds``, one ``[workload]`` table and one ``[[models]]``
table a model; its name is the file's.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

from metile.demo import DEMO_MODELS
from metile.errors import MetileError, mismatch
from metile.files import data_root
from metile.random_models import PREFIX, RANDOM_MODELS

ModelKind = Literal["hub", "demo", "local", "random"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
MODEL_FORMS = (
    f"a local model folder, a hub id of the form owner/name, or a demo checkpoint ({', '.join(DEMO_MODELS)}),"
    f" or random weights ({', '.join(RANDOM_MODELS)})"
)


@dataclass(frozen=True)
class Workload:
    """What is generated, and how often each stage measures it.

    Attributes:
        prompt_tokens: tokens of the prompt.
        generation_tokens: tokens generated after it.
        trials: measured pairs of the report.
        plan_trials: rounds in which the plan's features are compared.
        plan_decode_steps: tokens decoded in each of those rounds.
        confirmation_trials: pairs on which a plan is accepted or refused.
        delay_seconds: pause before each run.
        prefill_step_size: most prompt tokens in one forward pass.
        seed: seed of the prompt.
    """

    prompt_tokens: int
    generation_tokens: int
    trials: int
    plan_trials: int
    plan_decode_steps: int
    confirmation_trials: int
    delay_seconds: float
    prefill_step_size: int
    seed: int

    def __post_init__(self) -> None:
        """Reject wrong types, non-positive counts and a negative delay or seed."""
        for name in self.counts():
            _integer("workload", name, getattr(self, name), least=1)
        _integer("workload", "seed", self.seed, least=0)
        # An int delay, as TOML and the command line may give, becomes a float.
        object.__setattr__(self, "delay_seconds", _seconds("workload", "delay_seconds", self.delay_seconds))

    @classmethod
    def counts(cls) -> tuple[str, ...]:
        """Names of the fields that must be positive integers."""
        return tuple(f.name for f in dataclasses.fields(cls) if f.name not in ("delay_seconds", "seed"))

    def replace(self, **overrides: float | None) -> Workload:
        """Return the workload with some fields changed; ``None`` keeps a field, as an unset option does.

        Raises:
            MetileError: an unknown field or a value that a workload cannot have.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        names = [field.name for field in dataclasses.fields(self)]
        if unknown := sorted(set(given) - set(names)):
            raise mismatch("workload", f"the fields {', '.join(names)}", ", ".join(unknown))
        merged: dict[str, Any] = dataclasses.asdict(self) | given
        return Workload(**merged)

    def to_dict(self) -> dict[str, int | float]:
        """Return the fields as a report's ``workload`` holds them."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class SuiteModel:
    """A model to tune: a hub id with an optional revision, a demo checkpoint, a local folder, or random weights."""

    id: str
    revision: str | None
    kind: ModelKind

    @classmethod
    def of(cls, text: str) -> Self:
        """Classify a model named on the command line; an existing folder wins over a hub id.

        Raises:
            MetileError: neither a folder, nor a hub id, nor a demo checkpoint, nor a random model.
        """
        if text in DEMO_MODELS:
            return cls(text, None, "demo")
        if text in RANDOM_MODELS:
            return cls(text, None, "random")
        if not text.startswith(("demo:", PREFIX)):
            if text and Path(text).expanduser().is_dir():
                return cls(text, None, "local")
            if HUB_ID.fullmatch(text):
                return cls(text, None, "hub")
        raise mismatch("model", MODEL_FORMS, repr(text))


@dataclass(frozen=True)
class Suite:
    """A named set of models under one workload.

    Attributes:
        name: the suite file's name without its ending.
        description: one line for a person.
        workload: what every model runs.
        models: the models, in the order in which they are tuned.
        search_seconds: seconds that the dispatch search may take for each model, compilation included.
    """

    name: str
    description: str
    workload: Workload
    models: tuple[SuiteModel, ...]
    search_seconds: float

    def replace_models(self, models: tuple[SuiteModel, ...]) -> Suite:
        """Return the suite with other models, as ``--model`` asks."""
        return dataclasses.replace(self, models=models)


def suite_names(folder: Path | None = None) -> tuple[str, ...]:
    """Return the names of the suites that exist, sorted."""
    return tuple(sorted(path.stem for path in (folder or data_root("suites")).glob("*.toml")))


def load_suite(name: str, folder: Path | None = None) -> Suite:
    """Read a suite by name.

    Args:
        name: one of `suite_names`.
        folder: where the suite files are; the packaged ones if left out.

    Raises:
        MetileError: an unknown name (the message lists what exists), or a file that is not a suite.
    """
    folder = folder or data_root("suites")
    names = suite_names(folder)
    if name not in names:
        raise mismatch("suite", f"one of the suites {', '.join(names) or '(none)'}", repr(name))
    op = f"suite {name}"
    try:
        table = tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise mismatch(op, "a readable TOML file", error) from error
    _keys(op, "keys", table, {"description", "search_seconds", "workload", "models"})
    return Suite(
        name=name,
        description=_text(op, "description", table["description"]),
        workload=_workload(op, table["workload"]),
        models=_models(op, table["models"]),
        search_seconds=_seconds(op, "search_seconds", table["search_seconds"], positive=True),
    )


def _workload(op: str, table: object) -> Workload:
    if not isinstance(table, dict):
        raise mismatch(op, "a table [workload]", _shown(table))
    _keys(op, "keys of [workload]", table, {field.name for field in dataclasses.fields(Workload)})
    try:
        return Workload(**table)
    except MetileError as error:
        raise MetileError(str(error).replace("[workload]", f"[{op}]", 1)) from None


def _models(op: str, tables: object) -> tuple[SuiteModel, ...]:
    if not isinstance(tables, list) or not tables:
        raise mismatch(op, "at least one table [[models]]", _shown(tables))
    models = tuple(_model(op, table) for table in tables)
    ids = [model.id for model in models]
    if repeated := sorted({model for model in ids if ids.count(model) > 1}):
        raise mismatch(op, "each model once", f"{', '.join(repeated)} repeated")
    return models


def _model(op: str, table: object) -> SuiteModel:
    if not isinstance(table, dict):
        raise mismatch(op, "tables [[models]]", _shown(table))
    _keys(op, "keys of [[models]]", table, {"id", "kind"}, optional={"revision"})
    name, kind = _text(op, "id", table["id"]), table["kind"]
    if kind not in get_args(ModelKind):
        raise mismatch(op, "a kind of hub, demo, local or random", _shown(kind))
    if kind == "demo" and name not in DEMO_MODELS:
        raise mismatch(op, f"a demo checkpoint ({', '.join(DEMO_MODELS)})", repr(name))
    if kind == "random" and name not in RANDOM_MODELS:
        raise mismatch(op, f"random weights ({', '.join(RANDOM_MODELS)})", repr(name))
    if kind == "hub" and not HUB_ID.fullmatch(name):
        raise mismatch(op, "a hub id of the form owner/name", repr(name))
    revision = table.get("revision")
    if revision is not None and (kind != "hub" or not _text(op, "revision", revision)):
        raise mismatch(op, "a revision of a hub model only", f"one of {name}, which is {kind}")
    return SuiteModel(name, revision, kind)


def _keys(
    op: str,
    what: str,
    table: Mapping[str, Any],
    required: set[str],
    optional: frozenset[str] | set[str] = frozenset(),
) -> None:
    """Require exactly these keys, and name what is missing or unknown."""
    missing, unknown = sorted(required - set(table)), sorted(set(table) - required - optional)
    faults = [f"none for {', '.join(missing)}"] * bool(missing)
    faults += [f"the unknown {', '.join(unknown)}"] * bool(unknown)
    if faults:
        raise mismatch(op, f"the {what} {', '.join(sorted(required))}", " and ".join(faults))


def _text(op: str, name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise mismatch(op, f"{name} to be a non-empty string", _shown(value))
    return value


def _integer(op: str, name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise mismatch(op, f"{name} to be an integer of at least {least}", _shown(value))


def _seconds(op: str, name: str, value: object, *, positive: bool = False) -> float:
    """Return finite seconds as a float; NaN, infinity, booleans and negative values are refused."""
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else -1.0
    if not (0 <= number < float("inf")) or (positive and number == 0):
        raise mismatch(op, f"{name} to be {'positive' if positive else 'non-negative'} seconds", _shown(value))
    return number


def _shown(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"
