"""Where metile keeps files, and how it writes them: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import platformdirs

CACHE_VARIABLE = "METILE_CACHE_DIR"


def cache_root() -> Path:
    """Return the folder of everything metile caches (kernels, plans, converted checkpoints).

    The environment variable ``METILE_CACHE_DIR`` overrides the user cache directory of the platform.
    """
    override = os.environ.get(CACHE_VARIABLE)
    return Path(override) if override else platformdirs.user_cache_path("metile")


def data_root(kind: str) -> Path:
    """Return the folder of packaged data, ``kernels`` or ``suites``.

    An installed wheel carries it inside the package; a checkout has it beside the package.
    """
    package = Path(__file__).resolve().parent
    packaged = package / "data" / kind
    return packaged if packaged.is_dir() else package.parent / kind


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data` so that a reader, or a crash, sees the old bytes or the new ones.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
