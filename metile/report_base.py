"""What every block of a report stands on: strict records, and faults that name their path."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

Loc = tuple[str | int, ...]

Text = Annotated[str, StringConstraints(min_length=1)]
Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]

_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "string_type": "a string",
}
_BOUNDS = {"greater_than": ("gt", "more than"), "greater_than_equal": ("ge", "at least")}


class Record(BaseModel):
    """A block of a report: every key is required, none may be added, and no type is converted.

    The one leniency is JSON's own: a whole number may stand where a float is meant, and is written as
    a float.
    """

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        revalidate_instances="subclass-instances",
    )


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a record: where, what stands there, and what should."""

    loc: Loc
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{path_of(self.loc)}: expected {self.expected} but got {self.got}"


def path_of(loc: Loc) -> str:
    """Write a location the way Python would reach it: ``models[0].samples["MLX + meTile"]``."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier():
            path += f".{part}" if path else part
        else:
            path += f"[{json.dumps(part)}]"
    return path or "the record"


def raise_faults(faults: Sequence[Fault]) -> None:
    """Fail a validator with all `faults`, their locations relative to the block it validates."""
    if faults:
        text = "; ".join(map(str, faults))
        raise PydanticCustomError("faults", "{text}", {"text": text, "faults": list(faults)})


def faults_of(error: ValidationError) -> list[Fault]:
    """Translate what pydantic found into faults."""
    return [fault for details in error.errors(include_url=False) for fault in _translate(details)]


def shown(value: object) -> str:
    """Describe an offending value briefly: scalars in full, containers by their kind."""
    if isinstance(value, Mapping | BaseModel):
        return "an object"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _translate(details: ErrorDetails) -> list[Fault]:
    context: dict[str, Any] = details.get("ctx", {})
    loc = details["loc"]
    kind = details["type"]
    if kind == "faults":
        return [Fault((*loc, *fault.loc), fault.expected, fault.got) for fault in context["faults"]]
    if kind == "missing":
        return [Fault(loc, "this key", "nothing")]
    if kind == "extra_forbidden":
        return [Fault(loc, "no such key", shown(details["input"]))]
    return [Fault(loc, _expectation(kind, context, details["msg"]), shown(details["input"]))]


def _expectation(kind: str, context: Mapping[str, Any], message: str) -> str:
    if kind == "literal_error":
        return str(context["expected"])
    if kind in ("too_short", "string_too_short"):
        return f"at least {context['min_length']} of them" if kind == "too_short" else "a text that is not empty"
    if kind == "string_pattern_mismatch":
        return f"a string like {context['pattern']}"
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"{words} {context[key]:g}"
    return _EXPECTED.get(kind, message[:1].lower() + message[1:])
