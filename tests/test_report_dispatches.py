"""The families that the seed record leaves empty: the dense entries plus how a weight is quantized."""

from __future__ import annotations

import json

import pytest
from report_data import AFFINE, LINEAR, MODEL, TILE, faults, mutated

from metile import report
from metile.report_dispatches import (
    AffineMatmulDispatch,
    AffineResidualDispatch,
    AffineSwigluDispatch,
    BlockScaledDispatch,
    DenseMatmulDispatch,
    Dispatch,
)


def test_quantized_families_are_the_dense_ones_plus_the_format() -> None:
    families: dict[str, list[Dispatch]] = {
        "affine_matmul": [AffineMatmulDispatch.model_validate({**LINEAR, **TILE, **AFFINE})],
        "affine_residual_qmv": [AffineResidualDispatch.model_validate({**LINEAR, **AFFINE})],
        "affine_swiglu": [AffineSwigluDispatch.model_validate({**LINEAR, **AFFINE})],
        "block_scaled": [
            BlockScaledDispatch.model_validate({**LINEAR, **TILE, "bits": 4, "group_size": 16, "mode": "nvfp4"})
        ],
    }
    built = report.SelectedDispatches.of(families)
    record = mutated((*MODEL, "selected_dispatches"), built.model_dump())
    loaded = report.loads(json.dumps(record))
    assert loaded.models[0].selected_dispatches == built
    assert json.loads(report.dumps(loaded)) == record


def test_quantized_format_that_mlx_does_not_have() -> None:
    entry = {**LINEAR, **TILE, "bits": 8, "group_size": 32, "mode": "mxfp4"}
    record = mutated((*MODEL, "selected_dispatches", "block_scaled"), [entry])
    assert faults(record) == ["models[0].selected_dispatches.block_scaled[0].bits: expected 4 for mxfp4 but got 8"]


def test_quantized_entry_does_not_pass_as_dense() -> None:
    entry = AffineMatmulDispatch.model_validate({**LINEAR, **TILE, **AFFINE})
    assert isinstance(entry, DenseMatmulDispatch)
    with pytest.raises(ValueError, match="dense_matmul"):
        report.SelectedDispatches.of({"dense_matmul": [entry]})
