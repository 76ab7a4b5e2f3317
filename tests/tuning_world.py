"""A tiny model as a folder on disk, and a suite small enough to tune it in a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import save_model
from tiny_models import tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from metile.suites import Suite, SuiteModel, Workload

WORK = Workload(9, 3, 1, 1, 1, 1, 0.0, 2048, 0)
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "vocab_size": 131,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of single characters, 96 printable ones and an unknown."""
    vocabulary = {"<unk>": 0, **{chr(code): code - 31 for code in range(32, 127)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<unk>").save_pretrained(folder)


def write_model(folder: Path, seed: int = 0, dtype: mx.Dtype = mx.bfloat16, **changes: Any) -> Path:
    """Save a random llama as mlx-lm would; `changes` are of its configuration."""
    config = CONFIG | changes
    arguments = {name: value for name, value in config.items() if name not in ("model_type", "tie_word_embeddings")}
    model = tiny("llama", dtype, tied=config["tie_word_embeddings"], seed=seed, **arguments)
    folder.mkdir(parents=True)
    save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def suite(*folders: Path, seconds: float = 2.0, work: Workload = WORK) -> Suite:
    """Return a suite named ``tiny`` of models in folders."""
    return Suite("tiny", "for tests", work, tuple(SuiteModel.of(str(folder)) for folder in folders), seconds)


SUITE_TOML = """\
description = "for tests"
search_seconds = 0.5

[workload]
prompt_tokens = 20
generation_tokens = 5
trials = 2
plan_trials = 1
plan_decode_steps = 1
confirmation_trials = 2
delay_seconds = 0.0
prefill_step_size = 2048
seed = 0

[[models]]
id = "demo:smollm2-135m-bf16"
kind = "demo"
"""
