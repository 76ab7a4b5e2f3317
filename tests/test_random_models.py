"""Random models: published shapes, sane activations, and the whole way through the command."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from metile import hub, models
from metile.errors import MetileError
from metile.files import CACHE_VARIABLE
from metile.random_models import (
    CONFIGS,
    MANIFEST,
    RANDOM_MODELS,
    is_random,
    load_random,
    random_folder,
    write_folder,
)
from metile.suites import SuiteModel
from metile.tune import main

TINY = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 320, "vocab_size": 300, "head_dim": 32}  # fmt: skip

# Parameters of the published checkpoints, embeddings once where they are tied.
PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def tiny(folder: Path, name: str = "qwen2.5-1.5b", **changes: Any) -> tuple[Any, Any]:
    config = CONFIGS[name] | TINY | changes
    if config["model_type"] == "qwen2":
        del config["head_dim"]
    write_folder(folder, config)
    return load_random(folder)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_configuration_has_the_published_number_of_parameters(name: str) -> None:
    """Of one layer, which is built, all layers follow."""
    config = CONFIGS[name]
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")

    def count(layers: int) -> int:
        model = module.Model(module.ModelArgs.from_dict(config | {"num_hidden_layers": layers}))
        return sum(array.size for _, array in tree_flatten(model.parameters()))

    one, two = count(1), count(2)
    assert one + (config["num_hidden_layers"] - 1) * (two - one) == PARAMETERS[name]


def test_a_folder_holds_a_configuration_and_no_weights() -> None:
    folder = random_folder("random:qwen2.5-1.5b-4bit")
    assert is_random(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        MANIFEST,
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((folder / "config.json").read_text())
    assert (config["hidden_size"], config["num_key_value_heads"]) == (1536, 2)
    assert config["quantization"] == {"group_size": 64, "bits": 4}
    assert "quantization" not in RANDOM_MODELS["random:qwen2.5-1.5b"]
    with pytest.raises(MetileError, match=r"random:llama-3.2-3b-4bit but got 'random:nope'"):
        random_folder("random:nope")


@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "qwen2.5-7b", "llama-3.2-1b"])
def test_activations_stay_sane(name: str, tmp_path: Path) -> None:
    model, _ = tiny(tmp_path, name, num_hidden_layers=12)
    tokens = mx.random.randint(0, 300, (1, 40), key=mx.random.key(3))
    logits = model(tokens, cache=make_prompt_cache(model)).astype(mx.float32)
    assert 0.5 < float(logits.std().item()) < 3
    hidden = model.model(tokens).astype(mx.float32)
    assert 0.5 < float(mx.sqrt((hidden * hidden).mean()).item()) < 2
    # Every token says something of its own: no two positions agree.
    assert len(set(np.round(np.array(logits[0, :, 0]), 5).tolist())) > 30


@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "llama-3.2-3b"])
def test_two_loads_are_one_model_in_bfloat16(name: str, tmp_path: Path) -> None:
    first, second = tiny(tmp_path, name)[0], load_random(tmp_path)[0]
    for (path, a), (_, b) in zip(tree_flatten(first.parameters()), tree_flatten(second.parameters()), strict=True):
        assert a.dtype == mx.bfloat16, path
        assert mx.array_equal(a, b), path
    matrices = [array for _, array in tree_flatten(first.parameters()) if array.ndim == 2]
    assert not mx.array_equal(matrices[0][:8, :8], matrices[1][:8, :8])
    assert not first.training


def test_a_quantized_form_has_quantized_layers(tmp_path: Path) -> None:
    model, _ = tiny(tmp_path, quantization={"group_size": 64, "bits": 4})
    layer = model.layers[0].mlp.gate_proj
    assert isinstance(layer, nn.QuantizedLinear)
    assert (layer.group_size, layer.bits, layer.scales.dtype) == (64, 4, mx.bfloat16)
    assert isinstance(model.model.embed_tokens, nn.QuantizedEmbedding)


def test_finders_know_its_modules(tmp_path: Path) -> None:
    found = models.find(tiny(tmp_path)[0])
    assert {"decoder_layer", "attention", "swiglu_mlp", "linear", "rms_norm"} <= {site.kind for site in found.sites}


def test_the_tokenizer_knows_every_text(tmp_path: Path) -> None:
    _, tokenizer = tiny(tmp_path)
    text = "Grüße, 世界!\n\tx = 3"
    tokens = list(tokenizer.encode(text))
    assert len(tokens) == len(text.encode())
    assert max(tokens) < 256
    assert tokenizer.decode(tokens) == text


def test_names_are_classified_and_resolved() -> None:
    model = SuiteModel.of("random:llama-3.2-1b")
    assert (model.kind, model.revision) == ("random", None)
    assert is_random(hub.resolve(model, offline=True))
    with pytest.raises(MetileError, match=r"or random weights \(random:qwen2.5-0.5b, .* but got 'random:nope'"):
        SuiteModel.of("random:nope")


def test_the_command_takes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RANDOM_MODELS, "random:qwen2.5-0.5b", _tiny_config())  # type: ignore[arg-type]
    output = tmp_path / "report.json"
    options = ["--model", "random:qwen2.5-0.5b", "--target", "cpu", "--output", str(output), "--prompt-tokens", "8"]
    options += ["--generation-tokens", "4", "--trials", "1", "--confirmation-trials", "1", "--suite", "bf16-dense"]
    options += ["--search-seconds", "5"]
    monkeypatch.setattr("metile.tuner.MAX_CANDIDATES", 2)
    monkeypatch.setattr("metile.tuner.other_buckets", lambda workload: [])
    assert main(options) == 0
    (model,) = json.loads(output.read_text())["models"]
    assert model["model"] == "random:qwen2.5-0.5b"
    assert model["model_config"]["hidden_size"] == 128
    assert model["metile"]["decisions"]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_search_takes_some_seconds(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--search-seconds={seconds}", "--suite", "bf16-dense", "--target", "cpu"]) == 2
    assert "expected positive --search-seconds but got" in capsys.readouterr().err


def _tiny_config() -> dict[str, Any]:
    config = CONFIGS["qwen2.5-0.5b"] | TINY | {"num_hidden_layers": 1}
    del config["head_dim"]
    return config
