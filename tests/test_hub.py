"""From a model's name to a folder: every form, every way to fail, and no long wait without a network."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from metile import hub
from metile.demo import DEMO_MODELS, demo_folder
from metile.errors import MetileError
from metile.suites import SuiteModel, load_suite

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PINNED = SuiteModel("owner/name", COMMIT, "hub")
REMEDIES = ("--suite demo", "--model PATH", "--offline")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and a hub that refuses the connection."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "hub"


def make_model(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names or ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def make_snapshot(cache: Path, *names: str) -> Path:
    """Lay out what a download leaves in the hub's cache."""
    repository = cache / "models--owner--name"
    folder = make_model(repository / "snapshots" / COMMIT, *names)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return folder


def refused(call: Callable[[], object], seconds: float = 5.0) -> str:
    """Return the one error's text, which must come soon."""
    start = time.perf_counter()
    with pytest.raises(MetileError) as caught:
        call()
    assert time.perf_counter() - start < seconds
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- local folders -------------------------------------------------------------------------------------


def test_local_folder_as_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "model")
    assert hub.resolve(str(folder), offline=True) == folder
    assert hub.resolve(SuiteModel(str(folder), None, "local"), offline=False) == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/model") == folder


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (("readme.txt",), "one without config.json, model*.safetensors"),
        (("config.json",), "one without model*.safetensors"),
        (("config.json", "pytorch_model.bin"), "one without model*.safetensors"),
        (("model.safetensors",), "one without config.json"),
    ],
)
def test_incomplete_folder_says_what_is_missing(tmp_path: Path, names: tuple[str, ...], missing: str) -> None:
    folder = make_model(tmp_path / "model", *names)
    assert refused(lambda: hub.resolve(str(folder))) == f"[model] expected a model folder at {folder} but got {missing}"


def test_shards_of_the_index_are_counted(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "config.json", "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    assert refused(lambda: hub.resolve(str(folder))).endswith("one without model-2.safetensors")
    for broken in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(broken)
        assert refused(lambda: hub.resolve(str(folder))).endswith("a readable model.safetensors.index.json")


def test_local_model_that_is_gone(tmp_path: Path) -> None:
    gone = SuiteModel(str(tmp_path / "gone"), None, "local")
    assert "which is not a folder" in refused(lambda: hub.resolve(gone))


# ---- demo checkpoints and unknown names ----------------------------------------------------------------


def test_demo_id() -> None:
    assert hub.resolve("demo:smollm2-135m-bf16", offline=True) == demo_folder("bf16")
    assert hub.resolve(load_suite("demo").models[0], offline=True) == demo_folder("bf16")


@pytest.mark.parametrize("text", ["demo:smollm2", "no-such-model", "/no/such/folder"])
def test_unknown_name_lists_the_forms(text: str) -> None:
    message = refused(lambda: hub.resolve(text))
    assert all(part in message for part in ("local model folder", "owner/name", *DEMO_MODELS))


# ---- the hub -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [PINNED, "owner/name"])
@pytest.mark.parametrize("offline", [True, False])
def test_nothing_here_and_no_network(cache: Path, model: SuiteModel | str, offline: bool) -> None:
    message = refused(lambda: hub.resolve(model, offline=offline))
    assert message.startswith("[hub] expected the files of owner/name")
    assert all(remedy in message for remedy in REMEDIES)
    assert ("--offline forbids a download" if offline else "no network") in message


def test_hub_that_never_answers(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "PROBE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        message = refused(lambda: hub.resolve("owner/name"))
    assert "no network (" in message
    assert "Timeout" in message


@pytest.fixture
def empty_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that answers and has nothing."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()


@pytest.mark.parametrize("model", [PINNED, "owner/name"])
def test_model_that_the_hub_lacks(empty_hub: None, model: SuiteModel | str) -> None:
    message = refused(lambda: hub.resolve(model))
    assert "404" in message
    assert all(remedy in message for remedy in REMEDIES)


@pytest.mark.parametrize("model", [PINNED, "owner/name"])
@pytest.mark.parametrize("offline", [True, False])
def test_cached_snapshot_serves_without_network(cache: Path, model: SuiteModel | str, offline: bool) -> None:
    folder = make_snapshot(cache)
    assert hub.resolve(model, offline=offline) == folder


def test_pinned_snapshot_asks_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_snapshot(cache)
    monkeypatch.setattr(hub, "_unreachable", None)
    assert hub.resolve(PINNED) == folder


@pytest.mark.parametrize("offline", [True, False])
def test_partial_snapshot_is_not_used(cache: Path, offline: bool) -> None:
    make_snapshot(cache, "config.json")
    assert "nothing complete in the hub's cache" in refused(lambda: hub.resolve(PINNED, offline=offline))


def test_download_is_pinned_and_narrow(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    folder = make_model(tmp_path / "downloaded")

    def download(name: str, **options: Any) -> str:
        calls.append({"id": name, **options})
        if options["local_files_only"]:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not here")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(hub, "_unreachable", lambda: None)
    assert hub.resolve(PINNED) == folder
    assert [call["local_files_only"] for call in calls] == [True, False]
    assert calls[1]["id"] == "owner/name"
    assert calls[1]["revision"] == COMMIT
    assert "model*.safetensors" in calls[1]["allow_patterns"]
    assert hub.resolve("owner/name") == folder
    assert len(calls) == 3  # a branch is looked up on the hub, not in the cache
    (folder / "config.json").unlink()
    assert "one without config.json" in refused(lambda: hub.resolve(PINNED))


def test_download_that_breaks_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise OSError("no space left\non the device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(hub, "_unreachable", lambda: None)
    assert "OSError: no space left; " in refused(lambda: hub.resolve("owner/name"))


# ---- loading -------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The demo checkpoint's folder, to be damaged; the weights are a link."""
    folder = tmp_path / "copy"
    source = demo_folder("bf16")
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    return folder


def change(folder: Path, **keys: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_load() -> None:
    model, tokenizer = hub.load(demo_folder("bf16"))
    assert len(model.layers) == 30
    assert not model.training
    assert tokenizer.decode(tokenizer.encode("Paris")) == "Paris"


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (
            {"model_type": "no_such_architecture"},
            "ValueError: Model type no_such_architecture not supported.",
        ),
        ({"model_type": None}, "KeyError: 'model_type'"),
        ({"hidden_size": None}, "TypeError: "),
        ({"num_hidden_layers": 29}, "ValueError: Received 9 parameters not in model"),
        ({"model_file": "model.py"}, "ValueError: The model at "),
    ],
)
def test_load_refuses_a_config(copy: Path, keys: dict[str, object], reason: str) -> None:
    change(copy, **keys)
    message = refused(lambda: hub.load(copy))
    assert message.startswith(f"[model] expected a folder that mlx-lm can load ({copy}) but got {reason}")


@pytest.mark.parametrize(
    ("name", "text"), [("config.json", "{"), ("model.safetensors", "short"), ("tokenizer.json", "{")]
)
def test_load_refuses_a_broken_file(copy: Path, name: str, text: str) -> None:
    (copy / name).unlink()
    (copy / name).write_text(text)
    assert "expected a folder that mlx-lm can load" in refused(lambda: hub.load(copy))


def test_load_of_an_incomplete_folder(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert "one without model*.safetensors" in refused(lambda: hub.load(copy))
