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

SHARED = ("kernels", "models", "simulator", "zig")

_session: tempfile.TemporaryDirectory[str] | None = None


def pytest_configure() -> None:
    """Point the cache at a folder of this run, and see to `mx.compile`, for child processes too."""
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
    ensure_compile()  # before a test runs a compiled function; prints a line where compile must be off


def pytest_unconfigure() -> None:
    """Remove the run's folder, not what it links to."""
    if _session is not None:
        _session.cleanup()
