"""A picture of a tensor's values on the grids of formats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from extensor.autograd.tensor import ExTensor, wrap
from extensor.inspect.grid import GridValues, grid_values
from extensor.inspect.noise import as_spec, check_source, normal_sqnr, sqnr
from extensor.quant.recipe_state import stats_of
from extensor.quant.spec import QuantSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot"]

BLUE, ORANGE, GREEN, GREY = "#56b4e9", "#d55e00", "#009e73", "#7f7f7f"
"""Of Okabe and Ito's palette: distinct for colour-blind readers too."""

BINS = 160
STEMS = 16
"""Grids of up to so many codes show how often each is used; others show where they are."""
SIDE = 1.36
"""How far beyond the top of a linear grid is shown; floor scales reach 4/3 of FP4's."""


@dataclass(frozen=True)
class _Row:
    """One format's panel."""

    spec: QuantSpec
    values: GridValues
    decibels: float
    normal: float
    saturated: float
    flushed: float
    bits: float


def plot(x: ExTensor, *formats: QuantSpec | str) -> Figure:
    """Draw a tensor's values on the grid of each format, with what rounding them costs.

    A panel for each format shows the histogram of the values, each in units of its block's scale;
    the grid's points, for 4-bit codes with the share of values rounded to each; in colour, what
    saturates and what becomes zero. Bars compare the `sqnr` of the formats; a tick on each marks
    `normal_sqnr`. Every value counts, however large the tensor.

    Args:
        x: dense floats of any shape with an axis.
        formats: names of formats, or specs; each gets a panel.

    Returns:
        A matplotlib figure, which pyplot does not know: ``figure.savefig("x.png")`` writes it, and
        a notebook shows it.

    Raises:
        ModuleNotFoundError: without matplotlib; the extra that brings it is named.
        TypeError: if ``x`` is no dense float tensor, or a format is neither a name nor a spec.
        ValueError: without formats, for NaN, Inf or zeros only in ``x``; for a spec with stochastic
            rounding, outliers or a zero point.

    >>> figure = et.inspect.plot(et.randn(64, 64, seed=0), "nvfp4", "mxfp4")
    >>> [axes.get_title("left").split()[0] for axes in figure.axes[:2]]
    ['nvfp4', 'mxfp4']
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "et.inspect.plot needs matplotlib, which is not installed; the way out: "
            "pip install 'extensor[train]'"
        ) from error
    check_source("plot", x)
    if not formats:
        raise ValueError('plot: expected formats, got none; for instance plot(x, "nvfp4", "mxfp4")')
    host = x.detach().to("cpu")
    rows = [_row(host, as_spec("plot", given)) for given in formats]

    class Shown(Figure):
        """A figure that notebooks show although pyplot does not know it."""

        def _repr_png_(self) -> bytes:
            from io import BytesIO

            file = BytesIO()
            self.savefig(file, format="png", dpi=110)
            return file.getvalue()

    style: Any = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}
    with rc_context(style):
        figure = Shown(figsize=(10.5, 1.15 + 1.75 * len(rows)), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(len(rows), 2, width_ratios=(3.4, 1))
        named: dict[str, Any] = {}
        for index, row in enumerate(rows):
            axes = figure.add_subplot(grid[index, 0])
            _panel(axes, row)
            handles, names = axes.get_legend_handles_labels()
            named |= dict(zip(names, handles, strict=True))
        figure.legend(named.values(), named, loc="outside lower left", ncols=5, frameon=False)
        _bars(figure.add_subplot(grid[:, 1]), rows)
        figure.suptitle(_title(host), x=0.01, ha="left", weight="bold")
    return figure


def _row(x: ExTensor, spec: QuantSpec) -> _Row:
    if spec.rounding != "nearest_even":
        raise ValueError(
            f"plot: expected rounding to nearest, got {spec.rounding!r}, which differs from seed "
            "to seed; sqnr(x, spec, seed=0) measures one"
        )
    q, counts = x.backend.quantize(x.data, spec.resolve(x.ndim))
    stats = stats_of(counts)
    ratio = sqnr(x, wrap(q, x.backend))  # refuses NaN and zeros
    values = grid_values(np.asarray(x.data, np.float32), spec)
    normal = normal_sqnr(spec.replace(axis=-1))
    shares = stats.saturated / stats.count, stats.flushed / stats.count
    return _Row(spec.resolve(x.ndim), values, ratio, normal, *shares, 8 * q.nbytes / x.size)


def _title(x: ExTensor) -> str:
    values = np.asarray(x.data, np.float64)
    rms = math.sqrt(float(np.mean(values**2)))
    peak = float(np.abs(values).max()) / rms if rms else 0.0
    return f"{'x'.join(map(str, x.shape))} values, {x.dtype.name}; largest {peak:.1f} times the rms"


def _panel(axes: Axes, row: _Row) -> None:
    """One format: the histogram, the grid, what lies beyond its ends."""
    element, scaled = row.values.element, row.values.scaled
    step = element.max - sorted(v for v in set(element.values) if v < element.max)[-1]
    beyond, zero = element.max + step / 2, element.min_positive / 2
    logarithmic = element.is_float and element.bits == 8
    if logarithmic:
        scaled = np.log2(np.abs(scaled))
        beyond, zero = math.log2(beyond), math.log2(zero)
        ends = (min(zero - 1, float(np.quantile(scaled, 0.001))), beyond + 1.5)
        points = sorted({math.log2(v) for v in element.values if 0 < v <= element.max})
        axes.set_xlabel("log2(|value| / block scale)")
    else:
        ends = (-SIDE * element.max, SIDE * element.max)
        points = [v for v in element.values if abs(v) <= element.max]
        axes.set_xlabel("value / block scale")
    counts, edges = np.histogram(np.clip(scaled, *ends), BINS, ends)
    heights = counts / max(int(counts.max()), 1)
    axes.stairs(heights, edges, fill=True, color=BLUE, alpha=0.75, label="values before rounding")
    centers = (edges[:-1] + edges[1:]) / 2
    lost = centers > beyond if logarithmic else np.abs(centers) > beyond
    small = centers < zero if logarithmic else np.abs(centers) < zero
    for where, color, name in ((lost, ORANGE, "saturated"), (small, GREEN, "become zero")):
        axes.stairs(np.where(where, heights, 0), edges, fill=True, color=color, label=name)
    spans = [(zero, ends[0], GREEN), (beyond, ends[1], ORANGE)]
    if not logarithmic:
        spans = [(-zero, zero, GREEN), (beyond, ends[1], ORANGE), (-beyond, ends[0], ORANGE)]
    for left, right, color in spans:
        axes.axvspan(left, right, color=color, alpha=0.10, lw=0)
    used = [(v, share) for v, share in row.values.shares() if abs(v) <= element.max]
    if len(points) <= STEMS:
        peak = max(share for _, share in used) or 1.0
        at, high = zip(*((v, share / peak) for v, share in used), strict=True)
        axes.vlines(at, 0, high, color="black", lw=1.0)
        axes.plot(at, high, "o", color="black", ms=3.2, label="codes, with their share")
    else:
        axes.plot(points, [-0.05] * len(points), "|", color="black", ms=6, label="codes")
    axes.set(xlim=ends, ylim=(-0.1 if len(points) > STEMS else 0, 1.12), yticks=[])
    axes.spines["left"].set_visible(False)
    tile = row.spec.tile
    blocks = f"{tile[0]}x{tile[1]}" if isinstance(tile, tuple) else f"one per {tile}"
    axes.set_title(f"{row.spec.format}   blocks {blocks}, {row.spec.rule}", loc="left", fontsize=9)
    notes = f"saturated {row.saturated:.2%}   become zero {row.flushed:.2%}"
    if row.values.zeros:
        notes += f"   were zero {row.values.zeros:.2%}"
    axes.set_title(notes, loc="right", fontsize=9, color="0.35")


def _bars(axes: Axes, rows: list[_Row]) -> None:
    """The formats' SQNR, beside what they have on normally distributed values."""
    at = list(range(len(rows)))
    finite = [row.decibels if math.isfinite(row.decibels) else 0.0 for row in rows]
    axes.barh(at, finite, height=0.34, color=BLUE)
    normal = [row.normal for row in rows]
    axes.plot(normal, at, "|", color="black", ms=16, mew=1.5)
    width = max(0.0, *finite, *normal) or 1.0
    for index, row in enumerate(rows):
        text = f"{row.decibels:.1f} dB" if math.isfinite(row.decibels) else "exact"
        axes.text(0, index - 0.24, f"{row.spec.format}: {text}, {row.bits:.3g} bits", va="bottom")
    axes.set(ylim=(len(rows) - 0.45, -0.75), yticks=[], xlim=(min(0.0, *finite), 1.08 * width))
    axes.set_title("signal over quantization noise", loc="left", fontsize=9)
    axes.set_xlabel("dB (tick: normal data)")
    axes.spines["left"].set_visible(False)
