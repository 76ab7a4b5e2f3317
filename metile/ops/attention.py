"""Scaled dot-product attention over a KV cache: the family attention."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionTile:
    """A point of the search space of an attention kernel."""

    block: int


@dataclass(frozen=True)
class AttentionKey:
    """Attention at one bucket of queries and one of context."""

    rows: int
