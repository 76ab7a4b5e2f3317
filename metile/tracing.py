"""Telling an ordinary array from one that a transformation is tracing (mx.compile, grad, vmap, jvp).

A kernel that reads memory must never see a traced array: it has none. MLX does not say which arrays those
are, but it runs a compiled function anew, in Python, whenever an argument is traced; an ordinary one finds
the trace of an earlier call. Whether the function below was run tells one from the other, in 0.6 us.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx


class _Runs(threading.local):
    """How often the probe ran in Python, on this thread."""

    count = 0
    own = 0  # traces of ours that are under way


class _Mode:
    """Whether compilation was last seen off, of the whole process."""

    off = False


_runs, _mode = _Runs(), _Mode()
_toggling = threading.Lock()  # compilation is enabled and disabled for the whole process


def _identity(*arrays: mx.array) -> mx.array:
    _runs.count += 1
    return arrays[0]


_probe = mx.compile(_identity, shapeless=True)


def is_traced(*arrays: mx.array) -> bool:
    """Return whether a transformation is tracing any of `arrays`, one or more. Never evaluates them.

    Within `own_trace` none counts as traced.
    """
    if _runs.own:
        return False
    before = _runs.count
    _probe(*arrays)
    if _runs.count == before:
        return False
    return _runs_again(*arrays) and (compiling() or _traced_with_compilation(*arrays))


@contextmanager
def own_trace() -> Iterator[None]:
    """Trace a model with kernels that are nodes of MLX's graph, and so may be traced."""
    _runs.own += 1
    try:
        yield
    finally:
        _runs.own -= 1


def compiling() -> bool:
    """Return whether mx.compile compiles: not after `mx.disable_compile` nor with MLX_DISABLE_COMPILE set.

    Inside a backward pass the answer is no: MLX keeps every graph there, as if it traced all arrays.
    """
    ordinary = mx.array(0.0)
    _probe(ordinary)
    compiles = not _runs_again(ordinary)
    if compiles:
        _mode.off = False
    return compiles


def _runs_again(*arrays: mx.array) -> bool:
    """Return whether the probe runs in Python for arguments of a kind it has just met."""
    before = _runs.count
    _probe(*arrays)
    return _runs.count != before


def _traced_with_compilation(*arrays: mx.array) -> bool:
    """Return whether arrays are traced where nothing is compiled, by compiling for a moment."""
    with _toggling:
        if compiling():  # meanwhile another thread enabled it
            return _runs_again(*arrays)
        mx.enable_compile()
        ordinary = mx.array(0.0)
        _probe(ordinary)
        # In a backward pass nothing is compiled either way; whether it was off is what was seen before.
        if not _runs_again(ordinary):
            _mode.off = True
        try:
            _probe(*arrays)
            return _runs_again(*arrays)
        finally:
            if _mode.off:
                mx.disable_compile()
