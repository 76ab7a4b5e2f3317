"""What every test shares: a cache of its own, and a compiler for `mx.compile`.

Plans and whatever else tests leave in the cache stay in a folder of this run. What is named by a digest of
its content and costs time to make (kernels, zig's own cache, converted checkpoints) is the real one's.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from metile.files import CACHE_VARIABLE, cache_root
from metile.toolchain import ensure_compile

SHARED = ("bin", "kernels", "models", "zig")

_session: tempfile.TemporaryDirectory[str] | None = None


def pytest_configure() -> None:
    """Point the cache at a folder of this run; processes that tests start inherit it."""
    global _session
    _session = tempfile.TemporaryDirectory(prefix="metile-tests-")
    root = cache_root()
    for name in SHARED:
        try:
            (root / name).mkdir(parents=True, exist_ok=True)
        except OSError:  # no cache that can be written: everything is made anew
            continue
        (Path(_session.name) / name).symlink_to((root / name).resolve())
    os.environ[CACHE_VARIABLE] = _session.name


def pytest_unconfigure() -> None:
    """Remove the run's folder, not what it links to."""
    if _session is not None:
        _session.cleanup()


def pytest_report_header() -> str:
    """Say what `mx.compile` compiles with; a machine without g++ is served before the first test."""
    found = ensure_compile()
    return f"mx.compile: {found.note or found.compiler}"
