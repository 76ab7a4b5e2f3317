"""The kernel dispatches of schema v8: nine families, each entry one decided shape bucket.

An entry with algorithm ``mlx`` says that plain MLX won; its tile fields are then 0, its schedule empty.
Entries of the affine and block-scaled families are the dense ones plus how the weight is quantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import StringConstraints, model_validator

from metile.report_base import Count, Fault, Positive, Record, Size, raise_faults

Algorithm = Literal["mlx", "metile"]
Schedule = Literal["", "linear", "grouped2", "grouped4", "grouped8", "diagonal", "morton", "hilbert"]
Dtype = Annotated[str, StringConstraints(pattern=r"^mlx\.core\.[a-z][a-z0-9]*$")]
AffineBits = Literal[2, 3, 4, 5, 6, 8]
AffineGroup = Literal[32, 64, 128]
BlockMode = Literal["mxfp4", "mxfp8", "nvfp4"]

BLOCK_FORMATS: dict[str, tuple[int, int]] = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
"""Bits and group size of each block-scaled mode; MLX knows no others."""


class Dispatch(Record):
    """What every family's entry says: who computes, and in which dtype."""

    algorithm: Algorithm
    dtype: Dtype


class NormDispatch(Dispatch):
    """RMSNorm over `hidden` features, for up to `row_bucket` rows; `block` is its threads a row."""

    block: Count
    eps: Positive
    hidden: Size
    row_bucket: Size


class AttentionDispatch(Dispatch):
    """Attention of head size `dimension` over a KV cache of up to `token_bucket` tokens."""

    batch: Size
    block: Count
    dimension: Size
    key_value_heads: Size
    query_heads: Size
    token_bucket: Size


class LinearDispatch(Dispatch):
    """A product of `rows` by `input_features` with a weight of `output_features`, in tiles."""

    block_m: Count
    block_n: Count
    input_features: Size
    k_unroll: Size
    output_features: Size
    rows: Size
    schedule: Schedule


class DenseMatmulDispatch(LinearDispatch):
    """A dense product: `outer_k` elements a step, `wm` by `wn` simdgroups a tile."""

    outer_k: Count
    wm: Count
    wn: Count


class DenseSwigluDispatch(LinearDispatch):
    """Gate and up projection with the SwiGLU of the two as epilogue."""


class AffineMatmulDispatch(DenseMatmulDispatch):
    """A product with an affine-quantized weight."""

    bits: AffineBits
    group_size: AffineGroup
    mode: Literal["affine"]


class AffineSwigluDispatch(DenseSwigluDispatch):
    """A SwiGLU of two affine-quantized projections."""

    bits: AffineBits
    group_size: AffineGroup
    mode: Literal["affine"]


class AffineResidualDispatch(LinearDispatch):
    """A product of few rows with an affine-quantized weight, the residual added as epilogue."""

    bits: AffineBits
    group_size: AffineGroup
    mode: Literal["affine"]


class BlockScaledDispatch(DenseMatmulDispatch):
    """A product with a weight in one of the block-scaled float formats."""

    bits: Literal[4, 8]
    group_size: Literal[16, 32]
    mode: BlockMode

    @model_validator(mode="after")
    def _format_exists(self) -> BlockScaledDispatch:
        bits, group_size = BLOCK_FORMATS[self.mode]
        found = {"bits": self.bits, "group_size": self.group_size}
        wanted = {"bits": bits, "group_size": group_size}
        raise_faults(
            [
                Fault((key,), f"{wanted[key]} for {self.mode}", str(found[key]))
                for key in wanted
                if wanted[key] != found[key]
            ]
        )
        return self


class SelectedDispatches(Record):
    """All nine families; a family that a model does not use has an empty list."""

    add_rms_norm: list[NormDispatch]
    affine_matmul: list[AffineMatmulDispatch]
    affine_residual_qmv: list[AffineResidualDispatch]
    affine_swiglu: list[AffineSwigluDispatch]
    attention: list[AttentionDispatch]
    block_scaled: list[BlockScaledDispatch]
    dense_matmul: list[DenseMatmulDispatch]
    dense_swiglu: list[DenseSwigluDispatch]
    rms_norm: list[NormDispatch]

    @classmethod
    def of(cls, families: Mapping[str, Sequence[Dispatch]]) -> SelectedDispatches:
        """Build the block from the families in use; the others stay empty."""
        return cls.model_validate(
            {
                **{name: [] for name in cls.model_fields},
                **{name: list(entries) for name, entries in families.items()},
            }
        )


FAMILIES = tuple(SelectedDispatches.model_fields)
"""The names of the nine families, sorted."""
