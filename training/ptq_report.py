"""What post-training quantization shows: a table, Markdown, JSON, and a plot."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from extensor.inspect import Table

from .config import RunConfig
from .tables import COLORS, markdown_page, saved_figure, write_files
from .tasks import Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["LayerResult", "SchemeResult", "write_results"]


@dataclass(frozen=True)
class LayerResult:
    """One quantized layer: its storage, and its own error on the float32 model's inputs."""

    layer: str
    kind: str
    weights: int
    nbytes: int
    cosine: float | None
    sqnr_db: float | None
    saturated: float | None
    flushed: float | None


@dataclass(frozen=True)
class SchemeResult:
    """One scheme: ``value`` and ``gap`` in the metric's scale, ``sqnr_db`` of the whole output."""

    scheme: str
    doc: str
    value: float | None
    gap: float | None
    loss: float | None
    perplexity: float | None
    nbytes: int
    bits_per_weight: float
    sqnr_db: float | None
    layers: list[LayerResult]

    @property
    def worst(self) -> LayerResult | None:
        """The layer with the largest error; None for the float32 model."""
        if not self.layers:
            return None
        return min(self.layers, key=lambda r: -math.inf if r.sqnr_db is None else r.sqnr_db)


def _columns(metric: Metric, text: bool) -> tuple[str, ...]:
    gap = "gap %" if metric.gap == "%" else "gap"
    value = metric.title.removeprefix("test ").replace(", %", " %").replace(", nats per token", "")
    return ("scheme", value, gap, "perplexity" if text else "loss", "KB", "bits/weight",
            "output dB", "worst layer", "its dB")  # fmt: skip


def _cells(metric: Metric, row: SchemeResult, text: bool) -> tuple[str, ...]:
    def shown(value: float | None, digits: int, sign: str = "") -> str:
        return "not finite" if value is None else f"{value:{sign}.{digits}f}"

    worst = row.worst
    return (
        row.scheme,
        shown(row.value, metric.digits),
        shown(row.gap, 2, "+"),
        shown(row.perplexity, 3) if text else shown(row.loss, 4),
        f"{row.nbytes / 1000:.1f}",
        f"{row.bits_per_weight:.2f}",
        shown(row.sqnr_db, 1) if worst else "",
        worst.layer if worst else "",
        shown(worst.sqnr_db, 1) if worst else "",
    )


def write_results(
    folder: Path,
    run: RunConfig,
    metric: Metric,
    rows: list[SchemeResult],
    calibration: dict[str, Any],
    console: Console,
) -> None:
    """Print the table; write ptq.json, ptq.md and ptq.png.

    Args:
        folder: where to.
        run: what was quantized.
        metric: its task's.
        rows: float32 first.
        calibration: "seen", what the calibration inputs were in words; the rest is for the JSON.
        console: where the table is printed.
    """
    text, seen = rows[0].perplexity is not None, calibration.pop("seen")
    table = Table(_columns(metric, text), tuple(_cells(metric, row, text) for row in rows))
    console.print(f"\n{run.label}, calibrated on {seen}\n\n{table}\n")
    content = {"run": run.as_dict(), **calibration, "metric": metric.key}
    content["rows"] = [dataclasses.asdict(row) for row in rows]
    title = f"{run.label}, quantized after training"
    intro = (
        f"`extensor ptq`, calibrated on {seen}, judged on the test data. KB (1000 bytes) "
        "are of everything the model stores; dB are signal to quantization noise, of the model's "
        "output and of the worst layer by itself."
    )
    figure = "test metric against bytes; each layer's error", "ptq.png"
    page = markdown_page(title, intro, table, figure, {row.scheme: row.doc for row in rows})
    _plot(folder / "ptq.png", title, metric, rows)
    write_files(folder, "ptq", page, content, console)


def _plot(path: Path, title: str, metric: Metric, everything: list[SchemeResult]) -> None:
    """One line for each scheme: its metric, its bytes, and each layer's error as a map."""
    dense, *rows = everything
    layers = [r.layer for r in rows[0].layers]
    map_width = max(2.6, 0.55 * len(layers))
    size = (6.4 + map_width, 1.6 + 0.3 * len(rows))
    with saved_figure(path, title, size, **{"font.size": 9}) as figure:
        score, sizes, errors = figure.subplots(
            1, 3, sharey=True, width_ratios=(2.4, 1.8, map_width)
        )
        _draw_scores(score, metric, dense, rows)
        _draw_bytes(sizes, dense, rows)
        _draw_errors(errors, layers, rows)
        score.set_yticks(range(len(rows)), [row.scheme for row in rows])
        score.set_ylim(len(rows) - 0.5, -0.5)


def _draw_scores(axes: Axes, metric: Metric, dense: SchemeResult, rows: list[SchemeResult]) -> None:
    for place, row in enumerate(rows):
        if row.value is None:
            axes.text(0.5, place, "not finite", transform=axes.get_yaxis_transform(), va="center")
            continue
        axes.plot([row.value], [place], "o", ms=6, color=_color(row.scheme), mew=0)
        if dense.value is not None:
            axes.plot([dense.value, row.value], [place, place], color=_color(row.scheme), lw=1.5)
    if dense.value is not None:
        axes.axvline(dense.value, color="#111111", ls="--", lw=1, alpha=0.6)
        axes.set_xlabel(f"{metric.title}\n(dashed: float32, {dense.value:.{metric.digits}f})")
    axes.grid(True, axis="x", alpha=0.25)
    axes.tick_params(axis="y", length=0)


def _draw_bytes(axes: Axes, dense: SchemeResult, rows: list[SchemeResult]) -> None:
    sizes = [row.nbytes / dense.nbytes for row in rows]
    axes.barh(range(len(rows)), sizes, 0.62, color=[_color(row.scheme) for row in rows], alpha=0.8)
    for place, row in enumerate(rows):
        axes.text(sizes[place], place, f" {row.bits_per_weight:.2f} bits", va="center", fontsize=8)
    axes.set_xlim(0, 1.65 * max(sizes))
    axes.set_xlabel(
        f"bytes stored, share of\nfloat32's {dense.nbytes / 1000:,.0f} KB; bits a weight"
    )
    axes.tick_params(axis="y", length=0)


def _draw_errors(axes: Axes, layers: list[str], rows: list[SchemeResult]) -> None:
    values = np.array([[r.sqnr_db for r in row.layers] for row in rows], float)
    axes.imshow(values, cmap="YlGnBu", vmin=10, vmax=55, aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        text = "NaN" if np.isnan(value) else f"{value:.0f}"
        color = "white" if value > 36 else "#222222"
        axes.text(j, i, text, ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(layers)), layers, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_xlabel("each layer by itself, SQNR in dB")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _color(scheme: str) -> str:
    """A colour for each family."""
    places = {"int8": 0, "int4": 5, "fp8": 2, "mx": 1}
    return COLORS[next((n for start, n in places.items() if scheme.startswith(start)), 3)]
