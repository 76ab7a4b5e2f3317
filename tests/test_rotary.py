"""A table of cosines and sines stands for every rope that turns halves by its position, and for no other."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.rope_utils import (
    DynamicNTKScalingRoPE,
    Llama3RoPE,
    ProportionalRoPE,
    SuScaledRoPE,
    YarnRoPE,
)

from metile.rotary import rope_kind, rope_table, turns_halves

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}

ROPES: dict[str, Any] = {
    "plain": lambda d: nn.RoPE(d),
    "base 1e6": lambda d: nn.RoPE(d, base=1e6),
    "base 100": lambda d: nn.RoPE(d, base=100.0),
    "linear": lambda d: nn.RoPE(d, scale=0.25),
    "llama3": lambda d: Llama3RoPE(d, scaling_config=LLAMA3),
    "yarn": lambda d: YarnRoPE(d, scaling_factor=4.0, mscale=0.7),
    "longrope": lambda d: SuScaledRoPE(d, long_factor=[1.0 + i / 8 for i in range(d // 2)]),
    "proportional": lambda d: ProportionalRoPE(d, d // 2),
}


def turned(x: mx.array, table: mx.array) -> mx.array:
    """Return x [..., L, D] turned by a table [L, D]: what the kernel computes, in plain MLX."""
    half = x.shape[-1] // 2
    c, s, a, b = table[:, :half], table[:, half:], x[..., :half], x[..., half:]
    return mx.concatenate([a * c - b * s, a * s + b * c], axis=-1)


class Reversed(nn.Module):
    """Turns halves by an angle that falls with the position in the call, whatever the offset."""

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        return nn.RoPE(x.shape[-1])(x[..., ::-1, :], offset=0)[..., ::-1, :]


class Listed(nn.Module):
    """Holds its frequencies as a list, not as an array."""

    def __init__(self, factors: list[float]) -> None:
        super().__init__()
        self.factors = factors


# ---- tables ----


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("dimension", [64, 80, 128])
def test_a_table_turns_like_its_rope(name: str, dimension: int) -> None:
    rope = ROPES[name](dimension)
    assert turns_halves(rope, dimension)
    table = rope_table(rope, 300, dimension)
    assert table.shape == (1024, dimension)
    assert table.dtype == mx.float32
    x = mx.random.normal((2, 3, 9, dimension), key=mx.random.key(0))
    for offset in (0, 1, 37, 291):
        expected = rope(x, offset=offset)
        assert mx.abs(turned(x, table[offset : offset + 9]) - expected).max().item() <= 1e-4


def test_a_table_holds_cosines_and_sines() -> None:
    table = np.array(rope_table(nn.RoPE(64, base=500.0, scale=0.5), 1, 64))
    angles = 0.5 * np.arange(1024)[:, None] * 500.0 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(table, np.concatenate([np.cos(angles), np.sin(angles)], axis=-1), atol=2e-4)


def test_tables_grow_by_whole_chunks_and_keep_what_they_had() -> None:
    rope = nn.RoPE(64)
    sizes = [rope_table(rope, positions, 64).shape[0] for positions in (1, 1024, 1025, 2048, 2049)]
    assert sizes == [1024, 1024, 2048, 2048, 3072]
    small, large = rope_table(rope, 1024, 64), rope_table(rope, 1025, 64)
    assert mx.array_equal(large[:1024], small)
    x = mx.random.normal((1, 1, 6, 64), key=mx.random.key(0))
    across = turned(x, large[1021:1027])
    assert mx.abs(across - rope(x, offset=1021)).max().item() <= 1e-4


# ---- what is not of the form ----


@pytest.mark.parametrize(
    "rope",
    [
        nn.RoPE(64, traditional=True),
        nn.RoPE(32),  # the first half of a head only
        Llama3RoPE(64, traditional=True, scaling_config=LLAMA3),
        SuScaledRoPE(32),
        Reversed(),
        nn.Identity(),
        nn.Linear(64, 64),
        lambda x, offset: x[..., :32],
        lambda x: x,
    ],
    ids=["traditional", "partial", "traditional-llama3", "partial-su", "reversed", "no-offset", "linear", "short", "x"],
)
def test_other_modules_are_declined(rope: Any) -> None:
    assert not turns_halves(rope, 64)


@pytest.mark.parametrize("trained", [256, 4096])
def test_angles_that_change_with_the_context_are_declined(trained: int) -> None:
    # Within the context it was trained for this rope is a plain one, beyond it each length has a base of its own.
    rope = DynamicNTKScalingRoPE(64, trained, traditional=False, base=10000.0, factor=2.0)
    assert not turns_halves(rope, 64)


# ---- kinds ----


def test_ropes_of_equal_angles_are_of_one_kind() -> None:
    for make in ROPES.values():
        assert rope_kind(make(64)) == rope_kind(make(64))
        assert hash(rope_kind(make(64))) == hash(rope_kind(make(64)))


def test_ropes_of_other_angles_are_of_other_kinds() -> None:
    kinds = [rope_kind(make(64)) for make in ROPES.values()]
    kinds += [rope_kind(nn.RoPE(32)), rope_kind(nn.RoPE(64, traditional=True))]
    kinds += [rope_kind(Llama3RoPE(64, scaling_config=LLAMA3 | {"factor": 4.0}))]
    kinds += [rope_kind(Listed([1.0, 2.0])), rope_kind(Listed([1.0, 3.0]))]
    assert len(set(kinds)) == len(kinds)


def test_an_array_that_changes_changes_the_kind() -> None:
    one, other = SuScaledRoPE(256), SuScaledRoPE(256)
    other._freqs[77] += 1e-3  # in the middle of what is too long to print
    assert rope_kind(one) != rope_kind(other)
