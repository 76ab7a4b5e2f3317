"""Models of real shape with random weights, for measuring speed where no hub is reachable: ``random:qwen2.5-1.5b``.

The architecture is mlx-lm's own class under the published configuration. Weights are drawn on a scale at which
activations neither vanish nor grow: what such a model says means nothing, what it takes does.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from metile.errors import mismatch
from metile.files import cache_root, write_atomic

PREFIX = "random:"
MANIFEST = "metile-random.json"
QUANTIZATION = {"group_size": 64, "bits": 4}
SEED = 0
_SPREAD = 0.1  # of norm weights around 1, and of biases

Config = dict[str, Any]


def _qwen(hidden: int, layers: int, heads: int, shared: int, inner: int, vocabulary: int, tied: bool) -> Config:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
    }


def _llama(hidden: int, layers: int, heads: int, shared: int, inner: int, head: int) -> Config:
    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "intermediate_size": inner,
        "vocab_size": 128256,
        "head_dim": head,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": scaling | {"original_max_position_embeddings": 8192},
        "max_position_embeddings": 131072,
    }


# Published configurations: hidden, layers, heads, key heads, inner, then the vocabulary and whether it is tied, or the
# length of a head.
CONFIGS: Mapping[str, Config] = {
    "qwen2.5-0.5b": _qwen(896, 24, 14, 2, 4864, 151936, True),
    "qwen2.5-1.5b": _qwen(1536, 28, 12, 2, 8960, 151936, True),
    "qwen2.5-3b": _qwen(2048, 36, 16, 2, 11008, 151936, True),
    "qwen2.5-7b": _qwen(3584, 28, 28, 4, 18944, 152064, False),
    "llama-3.2-1b": _llama(2048, 16, 32, 8, 8192, 64),
    "llama-3.2-3b": _llama(3072, 28, 24, 8, 8192, 128),
}
RANDOM_MODELS: Mapping[str, Config] = {
    PREFIX + name + ending: config | extra
    for name, config in CONFIGS.items()
    for ending, extra in (("", {}), ("-4bit", {"quantization": QUANTIZATION}))
}


def random_folder(model: str) -> Path:
    """Return a folder with the configuration and tokenizer of a random model; its weights are drawn when it is loaded.

    Args:
        model: one of `RANDOM_MODELS`.

    Raises:
        MetileError: an unknown name, or a cache that cannot be written.
    """
    if model not in RANDOM_MODELS:
        raise mismatch("model", f"one of {', '.join(RANDOM_MODELS)}", repr(model))
    folder = cache_root() / "models" / model.replace(":", "-")
    try:
        write_folder(folder, RANDOM_MODELS[model])
    except OSError as error:
        raise mismatch("model", f"a cache folder that can be written ({folder.parent})", error) from error
    return folder


def write_folder(folder: Path, config: Config) -> None:
    """Write what `load_random` needs of a model with this configuration."""
    files = {
        "config.json": config | {"torch_dtype": "bfloat16"},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False},
        MANIFEST: {"seed": SEED},
    }
    for name, content in files.items():
        write_atomic(folder / name, json.dumps(content, ensure_ascii=False, indent=1).encode())


def is_random(folder: Path) -> bool:
    """Return whether a folder is one of `random_folder`."""
    return (folder / MANIFEST).is_file()


def load_random(folder: Path) -> tuple[Any, Any]:
    """Return the model of a folder, in bfloat16 or quantized and ready for inference, and its tokenizer.

    Two loads give the same weights.
    """
    from mlx_lm.utils import load_tokenizer

    config = json.loads((folder / "config.json").read_text())
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    _draw(model, json.loads((folder / MANIFEST).read_text())["seed"])
    if quantization := config.get("quantization"):
        nn.quantize(model, **quantization)
    model.eval()
    mx.eval(model.parameters())
    return model, load_tokenizer(folder)


def _draw(model: Any, seed: int) -> None:
    """Give each parameter random values, one at a time: the widened copy of one is all that is needed beside them."""
    parameters = tree_flatten(model.parameters())
    layers = len(model.layers)
    drawn = []
    for (name, shape), key in zip(
        [(name, array.shape) for name, array in parameters],
        mx.random.split(mx.random.key(seed), len(parameters)),
        strict=True,
    ):
        mean, deviation = _scale(name, shape, layers)
        array = (mean + deviation * mx.random.normal(shape, key=key)).astype(mx.bfloat16)
        mx.eval(array)
        drawn.append((name, array))
    model.update(tree_unflatten(drawn))


def _scale(name: str, shape: tuple[int, ...], layers: int) -> tuple[float, float]:
    """Return mean and standard deviation of a parameter.

    A matrix keeps the scale of what it multiplies. What is added to the residual stream is smaller by the root of the
    number of additions, so that the stream ends at about the scale of one of them.
    """
    if len(shape) == 1:
        return (0.0 if name.endswith("bias") else 1.0), _SPREAD
    ends_block = name.endswith(("o_proj.weight", "down_proj.weight"))
    deviation = float(shape[-1] ** -0.5)
    return 0.0, deviation * (2 * layers) ** -0.5 if ends_block else deviation


def _tokenizer() -> dict[str, Any]:
    """Return a tokenizer.json that takes text byte by byte: it knows every text, and ids that every model has."""
    from tokenizers.pre_tokenizers import ByteLevel

    rule = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": rule,
        "decoder": rule,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
