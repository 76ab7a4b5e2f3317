"""The one form that every error about a caller's input takes."""

from __future__ import annotations


class MetileError(ValueError):
    """Input that metile cannot use; the message says what was expected and what came."""


class MetileTypeError(MetileError, TypeError):
    """An argument of the wrong type; caught as ValueError and as TypeError alike."""


def mismatch(op: str, expected: str, got: object) -> MetileError:
    """Build the error ``[op] expected X but got Y``, to be raised by the caller."""
    return MetileError(f"[{op}] expected {expected} but got {got}")


def wrong_type(op: str, expected: str, got: object) -> MetileTypeError:
    """Like `mismatch`, for an argument whose type (not its value) is at fault."""
    return MetileTypeError(f"[{op}] expected {expected} but got {got}")
