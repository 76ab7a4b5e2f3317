"""Decisions: which candidate runs an operation at a shape bucket, and the plan that says which features use them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from metile.ops.attention import AttentionKey
from metile.ops.attention_space import AttentionTile
from metile.ops.base import OpKey
from metile.ops.linear import LinearKey
from metile.ops.linear_tile import LinearTile
from metile.ops.norm import NormKey, NormTile
from metile.ops.projections import ProjectionsKey
from metile.ops.rope import RopeKey, RopeTile

# The plan features of schema v8, and our own where it has no word.
V8_FEATURES = ("affine_prefill", "attention", "dense_mlp", "graph_fusion", "quantized_mlp", "rms_norm")
OWN_FEATURES = ("dense_projections", "quantized_projections")
FEATURES = V8_FEATURES + OWN_FEATURES

_CANDIDATES: dict[type, type] = {
    LinearKey: LinearTile,
    NormKey: NormTile,
    AttentionKey: AttentionTile,
    RopeKey: RopeTile,
    ProjectionsKey: LinearTile,
}
_KEYS: dict[str, type] = {
    "linear": LinearKey,
    "norm": NormKey,
    "attention": AttentionKey,
    "rope": RopeKey,
    "projections": ProjectionsKey,
}


def _choice_to_json(key: OpKey, candidate: Any | None) -> dict[str, Any]:
    op = next(name for name, kind in _KEYS.items() if isinstance(key, kind))
    fields: Any = key
    return {"op": op, "key": asdict(fields), "candidate": None if candidate is None else asdict(candidate)}


def _choice_from_json(value: Any) -> tuple[OpKey, Any | None]:
    # JSON has no tuples; a key with a list would be another one, and have no hash.
    shape = {name: tuple(item) if isinstance(item, list) else item for name, item in value["key"].items()}
    key = _KEYS[value["op"]](**shape)
    fields = value["candidate"]
    return key, None if fields is None else _CANDIDATES[type(key)](**fields)


@dataclass(frozen=True)
class Decision:
    """What the search decided for one key.

    Attributes:
        key: the operation and its bucket.
        candidate: the kernel's plan fields, or None for plain MLX.
        speedup: median of paired ratios of plain MLX's time to the candidate's, 1.0 for plain MLX.
        reason: why plain MLX stayed, or what the winner won by.
        rejected: candidates that failed to compile or to verify, with the first reason of each.
        traffic: where nothing can be timed, how many times the bytes that are needed the candidate moves.
    """

    key: OpKey
    candidate: Any | None
    speedup: float
    reason: str
    rejected: Mapping[str, str] = field(default_factory=dict)
    traffic: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the decision without its key, as JSON values."""
        return {
            "candidate": None if self.candidate is None else asdict(self.candidate),
            "speedup": self.speedup,
            "reason": self.reason,
            "rejected": dict(self.rejected),
        } | ({} if self.traffic is None else {"traffic": self.traffic})

    @classmethod
    def from_json(cls, key: OpKey, value: Any) -> Decision | None:
        """Return the decision that `to_json` wrote for `key`, or None where the value is not one."""
        try:
            fields = value["candidate"]
            candidate = None if fields is None else _CANDIDATES[type(key)](**fields)
            traffic = value.get("traffic")
            return cls(
                key,
                candidate,
                float(value["speedup"]),
                str(value["reason"]),
                dict(value["rejected"]),
                None if traffic is None else float(traffic),
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True)
class Plan:
    """Which features are on, and the candidate of every key they may meet.

    Attributes:
        target: name of the target the decisions were taken on.
        features: names out of `FEATURES`.
        choices: for each key its candidate, or None for plain MLX.
    """

    target: str
    features: frozenset[str]
    choices: Mapping[OpKey, Any | None]

    def __bool__(self) -> bool:
        """Return whether the plan changes anything."""
        return bool(self.features)

    def only(self, features: Iterable[str]) -> Plan:
        """Return the same decisions with other features on."""
        return Plan(self.target, frozenset(features), self.choices)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        choices = sorted(self.choices.items(), key=lambda item: item[0].subject())
        return {
            "target": self.target,
            "features": sorted(self.features),
            "choices": [_choice_to_json(key, candidate) for key, candidate in choices],
        }

    @classmethod
    def from_json(cls, value: Any) -> Plan | None:
        """Return the plan that `to_json` wrote, or None where the value is not one."""
        try:
            features = frozenset(str(name) for name in value["features"])
            if not features <= set(FEATURES):
                return None
            return cls(str(value["target"]), features, dict(map(_choice_from_json, value["choices"])))
        except (AttributeError, KeyError, TypeError, ValueError):
            return None
