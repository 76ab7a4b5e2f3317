"""A GGUF file of a folder's own bfloat16 weights, so that llama.cpp computes with the same numbers."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from metile.demo import BLOCK_NAMES, TOP_NAMES

Kind = Literal["bf16", "f16"]


def gguf_of(source: Path, folder: Path, kind: Kind) -> Path:
    """Return the file of a folder that was converted from `source`, writing it beside the folder on first use.

    Matrices are bfloat16, or float16, which holds all but the tiniest bfloat16 weights exactly; vectors are float32.
    """
    path = folder.with_name(f"{folder.name}-{kind}.gguf")
    if path.is_file():
        return path
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(source, folder, kind, Path(part))
        os.replace(part, path)
    finally:
        Path(part).unlink(missing_ok=True)
    return path


def write(source: Path, folder: Path, kind: Kind, path: Path) -> None:
    """Write the metadata of `source` and the weights of `folder`."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    types = gguf.GGMLQuantizationType
    matrix = types.BF16 if kind == "bf16" else types.F16
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_BF16 if kind == "bf16" else gguf.LlamaFileType.MOSTLY_F16))
    weights: Any = mx.load(str(folder / "model.safetensors"))
    for tensor in reader.tensors:
        values = _permuted(tensor.name, weights[_mlx_name(tensor.name)], reader)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, np.array(values.astype(mx.float32)), raw_dtype=types.F32)
        else:
            writer.add_tensor(tensor.name, _stored(values, kind), raw_dtype=matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored(values: mx.array, kind: Kind) -> npt.NDArray[Any]:
    """Return a matrix's bytes [N, 2 * K] in bfloat16, or its values [N, K] in float16."""
    if kind == "f16":
        return np.array(values.astype(mx.float16))
    return np.array(values.astype(mx.bfloat16).view(mx.uint16)).view(np.uint8)


def _mlx_name(name: str) -> str:
    """Turn ``blk.7.attn_q.weight`` into ``model.layers.7.self_attn.q_proj.weight``."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.{parts[3]}"
    return f"{TOP_NAMES[parts[0]]}.{parts[1]}"


def _permuted(name: str, values: mx.array, reader: Any) -> mx.array:
    """Put the rows of q and k in llama.cpp's order: each head's two rotary halves, row by row."""
    key = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(name.split(".")[-2])
    if key is None:
        return values
    heads = int(reader.fields[f"llama.attention.{key}"].contents())
    split = values.reshape(heads, 2, -1, values.shape[-1])
    return split.swapaxes(1, 2).reshape(values.shape)
