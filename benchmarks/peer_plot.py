"""The figures of a peers record as a picture: a panel a precision and metric, a bar an engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer_record import Row, Run

from metile.errors import mismatch

METRICS = {"prefill_tokens_per_second": "prefill, tokens/s", "decode_tokens_per_second": "decode, tokens/s"}
OURS, OTHERS = "#0b6e4f", "#9aa5b1"


def check(path: Path) -> None:
    """Refuse before anything is measured what could not be plotted afterwards.

    Raises:
        MetileError: matplotlib is not installed, or `path` is not a PNG file.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise mismatch("peers", "matplotlib, which --plot needs,", "none: run `pip install matplotlib`")
    if path.suffix != ".png":
        raise mismatch("peers", "--plot to be a file that ends in .png", path)


def write(run: Run, path: Path) -> None:
    """Write a PNG: medians as bars on a logarithmic scale, with the least and the most of the rounds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [(model.precision, metric) for model in run.models for metric in METRICS]
    figure: Any = Figure(figsize=(10, 2.6 * len(run.models)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(run.models), len(METRICS), squeeze=False).ravel()
    for axis, (precision, metric) in zip(axes, panels, strict=True):
        rows = [row for row in run.rows if row.precision == precision and row.medians is not None]
        _panel(axis, rows, metric)
        axis.set_title(f"{precision}: {METRICS[metric]}", loc="left", fontsize=10)
    work = run.workload
    figure.suptitle(
        f"{work.model}, {work.prompt_tokens} + {work.generation_tokens} tokens, {run.machine.chip},"
        f" {work.threads} threads",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _panel(axis: Any, rows: Sequence[Row], metric: str) -> None:
    middles = [getattr(row.medians, metric) for row in rows]
    samples = [[getattr(sample, metric) for sample in row.samples] for row in rows]
    below = [middle - min(found) for middle, found in zip(middles, samples, strict=True)]
    above = [max(found) - middle for middle, found in zip(middles, samples, strict=True)]
    colors = [OURS if row.engine == "metile" else OTHERS for row in rows]
    bars = axis.barh([row.engine for row in rows], middles, xerr=[below, above], color=colors, capsize=3)
    axis.bar_label(bars, [f"{middle:.3g}" for middle in middles], padding=6, fontsize=8)
    axis.invert_yaxis()
    axis.set_xscale("log")
    if middles:
        axis.set_xlim(min(middles) / 3, max(middles) * 4)
    axis.spines[["top", "right"]].set_visible(False)
