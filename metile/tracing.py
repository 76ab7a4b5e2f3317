"""Telling an ordinary array from one that a transformation is tracing (mx.compile, grad, vmap, jvp).

A kernel that reads memory must never see a traced array: it has none. MLX does not say which arrays those
are, but it runs a compiled function anew, in Python, whenever an argument is traced; an ordinary one finds
the trace of an earlier call. Whether the function below was run tells one from the other, in 0.6 us.
"""

from __future__ import annotations

import threading

import mlx.core as mx


class _Runs(threading.local):
    """How often the probe ran in Python, on this thread."""

    count = 0


_runs = _Runs()
_TRIES = 4
_toggling = threading.Lock()  # compilation is enabled and disabled for the whole process


def _identity(*arrays: mx.array) -> mx.array:
    _runs.count += 1
    return arrays[0]


_probe = mx.compile(_identity, shapeless=True)


def is_traced(*arrays: mx.array) -> bool:
    """Return whether a transformation is tracing any of `arrays`, one or more. Never evaluates them."""
    before = _runs.count
    _probe(*arrays)
    if _runs.count == before:
        return False
    return _runs_again(*arrays) and (compiling() or _traced_with_compilation(*arrays))


def compiling() -> bool:
    """Return whether mx.compile compiles: not after `mx.disable_compile` nor with MLX_DISABLE_COMPILE set."""
    ordinary = mx.array(0.0)
    _probe(ordinary)
    # Uncompiled, the probe runs at every call; compiled, MLX may still trace it anew once in a while.
    return any(not _runs_again(ordinary) for _ in range(_TRIES))


def _runs_again(*arrays: mx.array) -> bool:
    """Return whether the probe runs in Python for arguments of a kind it has just met."""
    before = _runs.count
    _probe(*arrays)
    return _runs.count != before


def _traced_with_compilation(*arrays: mx.array) -> bool:
    with _toggling:
        if compiling():  # meanwhile another thread enabled it
            return _runs_again(*arrays)
        mx.enable_compile()
        try:
            _probe(*arrays)
            return _runs_again(*arrays)
        finally:
            mx.disable_compile()
