"""Attention whose keys are shared by several threadgroups, on the emulation of ``cuda_emulation.h``.

Threadgroups run there one after another, in either order, so that the last or the first of them joins what all wrote.
"""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import arrays, reference
from test_cuda_vocabulary import TOLERANCE, Emulated, compiled, nvrtc

from metile.ops.attention import AttentionKey
from metile.ops.attention_space import AttentionTile
from metile.ops.base import DTYPES
from metile.targets.cuda_text import view_text

SMALL = AttentionTile("rows", 1, 16, 2, 64)


def check(
    key: AttentionKey, tile: AttentionTile, inputs: list[mx.array], *, order: int = 0, scale: float = 0.125
) -> mx.array:
    """Check a launch against float64, and that the counters are what they were."""
    kernel = Emulated(key.source(tile), key.dtype, order=order)
    y = key.attend(kernel, tile, inputs, scale=scale, causal=True)
    wanted = reference(*inputs, scale, True)
    error = np.abs(np.array(y.astype(mx.float32)) - wanted).max()
    assert error <= TOLERANCE[key.dtype] * np.abs(wanted).max(), error
    assert not kernel.after[-1].any()
    return y


# Every width of heads, ratio and dtype, one of each against the usual of the others.
CASES = [(dimension, (6, 1), "bfloat16") for dimension in (64, 80, 96, 128, 256)]
CASES += [(64, heads, "float16") for heads in ((1, 1), (4, 2), (16, 1))]
CASES += [(80, (2, 1), "float32"), (128, (16, 1), "bfloat16"), (256, (2, 1), "float32")]


@pytest.mark.parametrize(("dimension", "heads", "dtype"), CASES, ids=str)
def test_every_head(dimension: int, heads: tuple[int, int], dtype: str) -> None:
    key = AttentionKey(1, 256, *heads, dimension, dtype, batch=2)
    for tokens in (1, 16, 17, 75):
        check(key, SMALL, arrays(key, 1, tokens, batch=2, seed=tokens), order=tokens % 2, scale=dimension**-0.5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    tokens=st.integers(1, 200),
    parts=st.integers(2, 20),
    batch=st.integers(1, 3),
    order=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_any_context_and_number_of_parts(tokens: int, parts: int, batch: int, order: int, seed: int) -> None:
    key = AttentionKey(1, 256, 4, 2, 64, "float32")
    tile = AttentionTile("rows", 1, 16, 2, parts)
    check(key, tile, arrays(key, 1, tokens, batch=batch, seed=seed), order=order)


class MoreParts(AttentionKey):
    """Attention launched with parts that have no keys."""

    def parts(self, candidate: AttentionTile, tokens: int) -> int:
        """Return the tile's parts, whatever the context."""
        del tokens
        return candidate.parts


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("tokens", [1, 16, 33, 80])
@pytest.mark.parametrize("parts", [3, 7, 40, 64])
def test_parts_without_keys(parts: int, tokens: int, order: int) -> None:
    # 80 keys are 5 blocks of 16: of 3 parts two have two and one has one; of 7 the last two have none.
    key = MoreParts(1, 256, 2, 1, 64, "float32")
    tile = AttentionTile("rows", 1, 16, 2, parts)
    check(key, tile, arrays(key, 1, tokens, batch=2), order=order)


def test_strides_that_move_no_16_bytes_at_once() -> None:
    key = AttentionKey(1, 256, 6, 2, 80, "bfloat16")
    source = key.source(SMALL)
    q, k, v = arrays(key, 1, 70)
    # The emulation hands over contiguous arrays, so that the views are made in the kernel's own text.
    wide = [mx.concatenate([mx.zeros((*a.shape[:-1], 1), a.dtype), a], axis=-1) for a in (k, v)]
    body = source.body
    for name in ("k", "v"):
        body = body.replace(f"::heads<const device bfloat>({name})", f"narrow(::heads<const device bfloat>({name}))")
    narrow = "const auto narrow = [](auto all) { all.data += 1, all.columns -= 1; return all; };"
    changed = type(source)(**{**vars(source), "body": f"{narrow} {body}"})
    kernel = Emulated(changed, "bfloat16")

    class Launch:
        """Gives the kernel the wide arrays."""

        source = changed

        def __call__(self, inputs: Any, outputs: Any, **launch: Any) -> list[mx.array]:
            return kernel([inputs[0], *wide, inputs[3]], outputs, **launch)

    y = key.attend(Launch(), SMALL, [q, k, v], scale=0.1, causal=True)  # type: ignore[arg-type]
    wanted = reference(q, k, v, 0.1, True)
    assert np.abs(np.array(y.astype(mx.float32)) - wanted).max() <= TOLERANCE["bfloat16"] * np.abs(wanted).max()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_where_it_is(value: float) -> None:
    key = AttentionKey(1, 256, 4, 2, 64, "float32", batch=2)
    q, k, v = arrays(key, 1, 50, batch=2)
    before = np.array(check(key, SMALL, [q, k, v])).reshape(2, 4, 64)
    held = mx.array(v)
    held[1, 0, 20, 5] = value
    kernel = Emulated(key.source(SMALL), "float32")
    y = np.array(key.attend(kernel, SMALL, [q, k, held], scale=0.125, causal=True)).reshape(2, 4, 64)
    touched = np.zeros_like(y, bool)
    touched[1, :2, 5] = True  # of the two heads that share it
    assert (y[~touched] == before[~touched]).all()
    assert not np.isfinite(y[touched]).any()


def test_scores_that_would_overflow() -> None:
    key = AttentionKey(1, 256, 4, 2, 64, "float32")
    q, k, v = arrays(key, 1, 100)
    q, k = 100 * q, 100 * k  # scores of some 10^5, most below zero in one part
    check(key, SMALL, [q, k, v], scale=1.0)
    check(key, SMALL, [q, -mx.abs(k) * mx.sign(q[:, ::2]), v], scale=1.0)


def test_a_split_launch_is_that_of_one_threadgroup() -> None:
    """A context of a single block is one part, and then the two programs compute the same."""
    for dtype in DTYPES:
        key = AttentionKey(1, 256, 4, 2, 64, dtype)
        inputs = arrays(key, 1, 15)
        one = AttentionTile("rows", 1, 16, 2)
        y = key.attend(Emulated(key.source(one), dtype), one, inputs, scale=0.125, causal=True)
        assert mx.allclose(y, check(key, SMALL, inputs), rtol=0, atol=1e-6 if dtype == "float32" else 1e-2)


# What MLX writes before a kernel's text: arrays by their dtypes, strides of those that are asked for.
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "tile", [SMALL, AttentionTile("rows", 1, 16, 2), AttentionTile("rows", 1, 32, 4, 4, 2)], ids=AttentionTile.label
)
def test_a_number_of_tokens_that_is_read_when_the_kernel_runs(tile: AttentionTile, dtype: str) -> None:
    """The cache has room for more, which is not read; parts past the end of the context have no keys."""
    key = AttentionKey(1, 256, 8, 2, 64, dtype)
    kernel = Emulated(key.source(tile, counted=True), dtype)
    for tokens in (1, 16, 33, 70):
        q, k, v = arrays(key, 1, tokens, seed=tokens)
        room = mx.full((1, 2, 20, 64), float("nan"), k.dtype)
        cache = [mx.concatenate([array, room], axis=2) for array in (k, v)]
        y = key.attend(
            kernel, tile, [q, *cache], scale=0.125, causal=False, whole=True, count=mx.array([tokens], mx.int32)
        )
        wanted = reference(q, k, v, 0.125, True)
        assert np.abs(np.array(y.astype(mx.float32)) - wanted).max() <= TOLERANCE[dtype] * np.abs(wanted).max()
        assert tile.parts == 1 or not kernel.after[3].any()


_MLX = """typedef unsigned int uint32_t;
struct __nv_bfloat16 {{ unsigned short bits; }};
struct Strides {{
  long long at[8];
  __attribute__((device)) long long operator[](int axis) const {{ return at[axis]; }}
}};
{header}
__global__ void kernel_of_mlx({parameters}) {{
{body}}}
"""


@pytest.mark.skipif(nvrtc() is None, reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
@pytest.mark.parametrize("parts", [1, 16])
def test_the_text_compiles_under_the_signature_of_mlx(parts: int) -> None:
    key, tile = AttentionKey(1, 1024, 12, 2, 128, "bfloat16"), AttentionTile("rows", 1, 64, 8, parts)
    source = key.source(tile)
    text = view_text(source, ())
    kinds = {"sizes": "int32_t", "counters_data": "uint32_t", "partials_data": "float"}
    parameters = []
    for name in text.inputs:
        parameters.append(f"const {kinds.get(name, '__nv_bfloat16')}* {name}")
        if name.removesuffix("_data") in source.strided:
            parameters.append(f"const __grid_constant__ Strides {name}_strides")
    parameters += [f"{kinds.get(name, '__nv_bfloat16')}* {name}" for name in text.outputs]
    whole = _MLX.format(header=text.header, parameters=", ".join(parameters), body=text.body)
    log = compiled("typedef int int32_t;\n" + whole, "--gpu-architecture=sm_90a")
    assert re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log) == ["0"] * 3, log
