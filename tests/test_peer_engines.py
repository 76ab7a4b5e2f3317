"""The engines that are compared, each on a tiny model, and the process that serves one."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model
from test_demo import write_gguf

from metile import demo

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

peer_engines: Any = importlib.import_module("peer_engines")
peer_gguf: Any = importlib.import_module("peer_gguf")
peer_worker: Any = importlib.import_module("peer_worker")

PACKAGES = {"llama.cpp": "llama_cpp", "torch": "torch"}
PROMPT, COUNT = [3, 7, 11, 4, 9, 5, 17], 6


def logits_of(folder: Path, tokens: Sequence[int]) -> np.ndarray:
    """Return what plain MLX computes in float32 of a folder's weights: logits of each position, [T, N]."""
    model = load_model(folder)[0]
    model.set_dtype(mx.float32)
    return np.array(model(mx.array([list(tokens)]))[0])


def assert_greedy(folder: Path, tokens: Sequence[int]) -> None:
    """Check that each token is the likeliest in float32, or as likely within what 16 bits amount to."""
    logits = logits_of(folder, [*PROMPT, *tokens[:-1]])[len(PROMPT) - 1 :]
    chosen = logits[range(len(tokens)), list(tokens)]
    assert (logits.max(-1) - chosen <= 0.03 * np.abs(logits).max()).all()
    assert len(tokens) == COUNT


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a small GGUF file and the bf16 folder of the same model."""
    root = tmp_path_factory.mktemp("tiny")
    source, folder = root / "tiny.gguf", root / "tiny-bf16"
    write_gguf(source)
    folder.mkdir()
    demo.convert(source, "bf16", folder)
    return source, folder


# ---- the worker ----


@pytest.mark.parametrize(("engine", "module"), PACKAGES.items())
def test_a_package_that_is_not_installed_is_named(engine: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    server = peer_worker.Server(peer_engines.ENGINES[engine])
    request = {"do": "load", "folder": "", "gguf": "", "threads": 1, "most_tokens": 8, "batch_tokens": 8}
    assert server.answer(request)["missing"] == module


def test_a_request_before_the_model_is_loaded_is_an_error() -> None:
    server = peer_worker.Server(peer_engines.PlainMlx)
    assert server.answer({"do": "generate"}) == {"error": "RuntimeError: nothing is loaded", "missing": None}


# ---- engines on a tiny model ----


def setup_of(folder: Path, file: Path | str = "") -> Any:
    return peer_engines.Setup(str(folder), str(file), 2, 64, len(PROMPT))


def assert_generates(engine: Any, folder: Path) -> None:
    """Check a generation, that it repeats, and that decoding after a filled cache is the same each time."""
    made = engine.generate(PROMPT, COUNT)
    assert_greedy(folder, made.tokens)
    assert engine.generate(PROMPT, COUNT).tokens == made.tokens
    assert made.prefill_tokens in (len(PROMPT), len(PROMPT) - 1)
    assert 0 < made.prefill_seconds <= made.first_seconds
    engine.fill(PROMPT)
    extended = [engine.extend(COUNT).tokens for _ in range(2)]
    assert extended[0] == extended[1]
    assert_greedy(folder, extended[0])


def test_plain_mlx_generates(tiny: tuple[Path, Path]) -> None:
    engine = peer_engines.PlainMlx(setup_of(tiny[1]))
    assert engine.load()["runs"] == "plain MLX"
    assert_generates(engine, tiny[1])


def test_metile_generates_and_says_what_runs(tiny: tuple[Path, Path]) -> None:
    engine = peer_engines.Metile(setup_of(tiny[1]))
    details = engine.load()
    assert details["plan"] == "quick: untuned defaults"
    assert details["runs"] == str(engine._handle)
    assert (int(details["kernels"]) > 0) == bool(engine._handle)
    assert (details["features"] == "none") == (not engine._handle)
    assert_generates(engine, tiny[1])


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_a_file_for_llama_cpp_holds_the_folders_numbers(tiny: tuple[Path, Path], kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    peer_gguf.write(*tiny, kind, path)
    again = tmp_path / "again"
    again.mkdir()
    old, new = gguf.GGUFReader(tiny[0]), gguf.GGUFReader(path)
    assert set(new.fields) >= {name for name in old.fields if not name.startswith("GGUF.")}
    assert new.fields["tokenizer.ggml.tokens"].contents() == old.fields["tokenizer.ggml.tokens"].contents()
    weights: Any = mx.load(str(tiny[1] / "model.safetensors"))
    permutations = 0
    for tensor, before in zip(new.tensors, old.tensors, strict=True):
        assert tensor.name == before.name
        assert tensor.tensor_type.name == ("F32" if before.tensor_type.name == "F32" else kind.upper())
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        stored = np.array(weights[peer_gguf._mlx_name(tensor.name)].astype(mx.float32))
        ordered = demo._undo_permutation(tensor.name, values, {
            "llama.attention.head_count": 2, "llama.attention.head_count_kv": 1
        })  # fmt: skip
        permutations += not np.array_equal(ordered, values)
        np.testing.assert_allclose(ordered, stored, rtol=0, atol=0 if kind == "bf16" else 2**-25)
    assert permutations == 2


def test_a_file_for_llama_cpp_is_written_once(tiny: tuple[Path, Path]) -> None:
    path = peer_gguf.gguf_of(*tiny, "f16")
    stamp = path.stat().st_mtime_ns
    assert peer_gguf.gguf_of(*tiny, "f16") == path
    assert path.stat().st_mtime_ns == stamp
    assert [item.name for item in path.parent.iterdir() if item.name.startswith(".")] == []


def engine_or_none(name: str, setup: Any) -> Any:
    """Return a loaded engine, or None where its package is not installed, which its worker must say."""
    if importlib.util.find_spec(PACKAGES[name]) is not None:
        engine = peer_engines.ENGINES[name](setup)
        assert engine.load()["threads"].startswith("2")
        return engine
    server = peer_worker.Server(peer_engines.ENGINES[name])
    answer = server.answer({"do": "load", **vars(setup)})
    assert answer["missing"] == PACKAGES[name]
    return None


def test_torch_generates_or_is_named_missing(tiny: tuple[Path, Path]) -> None:
    engine = engine_or_none("torch", setup_of(tiny[1]))
    if engine is not None:
        assert_generates(engine, tiny[1])


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_llama_cpp_generates_or_is_named_missing(tiny: tuple[Path, Path], kind: str) -> None:
    engine = engine_or_none("llama.cpp", setup_of(tiny[1], peer_gguf.gguf_of(*tiny, kind)))
    if engine is not None:
        assert_generates(engine, tiny[1])
