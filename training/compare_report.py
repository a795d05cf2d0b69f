"""What a comparison shows: a table, Markdown, JSON, and a plot with error bars.

Mean and standard deviation are over seeds (sample standard deviation, n - 1) of the task's metric
after the last epoch. Runs that diverged count like any other: they spoil the mean, and their number
stands beside it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from extensor.inspect import Table
from extensor.quant.recipes import get_recipe

from .callbacks.progress import percent
from .comparison import CompareArgs, Finished
from .tables import COLORS, known_mean, markdown_page, saved_figure, write_files
from .tasks import Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Row", "draw", "markdown", "summarize", "write_report"]

Style = dict[str, Any]
"""Arguments of a drawing function of matplotlib."""


@dataclass(frozen=True)
class Row:
    """Results of one recipe over its seeds, in the metric's scale.

    A value that is not finite is None, and so is a mean over it. ``sd`` is None with one seed,
    ``gap`` without runs of a baseline (named in ``baseline``), shares in float32. ``gap_sd`` is the
    standard deviation of the gaps seed by seed: runs of one seed share first weights and batches,
    so it is smaller than the spread of either. None where the seeds are not the same.
    """

    recipe: str
    doc: str
    runs: int
    values: list[float | None]
    mean: float | None
    sd: float | None
    gap: float | None
    gap_sd: float | None
    baseline: str | None
    saturated: float | None
    flushed: float | None
    seconds_per_epoch: float
    skipped_steps: int
    diverged: int
    failed: int


def summarize(
    metric: Metric, finished: Sequence[Finished], recipes: Sequence[str], failed: Sequence[str] = ()
) -> list[Row]:
    """Rows in the order of ``recipes``; recipes without a finished run have none."""

    def scaled(run: Finished) -> float | None:
        value = run.result[metric.key]
        return None if value is None else metric.scale * value

    runs = {name: [run for run in finished if run.recipe == name] for name in recipes}
    values = {name: [scaled(run) for run in mine] for name, mine in runs.items() if mine}
    finite = {
        n: [v for v in some if v is not None] for n, some in values.items() if None not in some
    }
    means = {name: statistics.fmean(numbers) for name, numbers in finite.items()}
    baseline = next((name for name in metric.baselines if name in means), None)
    seeds = {name: [run.seed for run in mine] for name, mine in runs.items()}
    rows = []
    for name, numbers in values.items():
        results, mean = [r.result for r in runs[name]], means.get(name)
        sd = gap = gap_sd = None
        if mean is not None and len(numbers) > 1:
            sd = statistics.stdev(finite[name])
        if baseline is not None and mean is not None:
            gap = metric.difference(mean, means[baseline])
            if name != baseline and sd is not None and seeds[name] == seeds[baseline]:
                pairs = zip(finite[name], finite[baseline], strict=True)
                gap_sd = statistics.stdev(metric.difference(a, b) for a, b in pairs)
        rows.append(
            Row(
                recipe=name,
                doc=get_recipe(name).doc,
                runs=len(results),
                values=numbers,
                mean=mean,
                sd=sd,
                gap=gap,
                gap_sd=gap_sd,
                baseline=baseline,
                saturated=known_mean(r["saturated"] for r in results),
                flushed=known_mean(r["flushed"] for r in results),
                seconds_per_epoch=statistics.fmean(r["seconds_per_epoch"] for r in results),
                skipped_steps=sum(r["skipped_steps"] for r in results),
                diverged=sum(r["diverged"] is not None for r in results),
                failed=failed.count(name),
            )
        )
    return rows


def _head(metric: Metric, rows: Sequence[Row]) -> tuple[str, ...]:
    baseline = next((row.baseline for row in rows if row.baseline), metric.baselines[0])
    title = metric.title.removeprefix("test ").replace(", %", " %")
    gap = f"gap to {baseline}" + (", %" if metric.gap == "%" else "")
    return ("recipe", title, gap, "saturated", "flushed", "s/epoch", "skipped", "diverged")


def _value(metric: Metric, row: Row) -> str:
    spread = "" if row.sd is None else f" ± {row.sd:.{metric.digits}f}"
    return "not finite" if row.mean is None else f"{row.mean:.{metric.digits}f}{spread}"


def _cells(metric: Metric, row: Row) -> tuple[str, ...]:
    spread = "" if row.gap_sd is None else f" ± {row.gap_sd:.2f}"
    return (
        row.recipe,
        _value(metric, row),
        "-" if row.gap is None else f"{row.gap:+.2f}{spread}",
        percent(row.saturated),
        percent(row.flushed),
        f"{row.seconds_per_epoch:.1f}",
        str(row.skipped_steps),
        f"{row.diverged}/{row.runs}" + (f" ({row.failed} failed)" if row.failed else ""),
    )


def _table(metric: Metric, rows: Sequence[Row]) -> Table:
    return Table(_head(metric, rows), tuple(_cells(metric, row) for row in rows))


def markdown(args: CompareArgs, rows: Sequence[Row]) -> str:
    """The table in Markdown."""
    metric = args.metric
    gap = "per cent of the baseline" if metric.gap == "%" else "percentage points"
    intro = (
        f"{args.optimizer}, peak learning rate {args.lr:g}, batch {args.batch_size}, "
        f"{args.schedule} schedule. Mean ± standard deviation over seeds of test {metric.key} "
        f"after the last epoch; gap in {gap}, its spread seed by seed."
    )
    figure, notes = (f"test {metric.key}", "compare.png"), {row.recipe: row.doc for row in rows}
    return markdown_page(args.title, intro, _table(metric, rows), figure, notes)


def write_report(
    args: CompareArgs, rows: Sequence[Row], finished: Sequence[Finished], console: Console
) -> None:
    """Print the table; write compare.json, compare.md and compare.png."""
    metric, folder = args.metric, args.folder
    console.print(f"\n{args.title}\n\n{_table(metric, rows)}\n")
    settings = {k: v for k, v in dataclasses.asdict(args).items() if k not in ("out", "plot_only")}
    content = {
        "settings": settings,
        "rows": [dataclasses.asdict(row) for row in rows],
        "runs": [dataclasses.asdict(run) for run in finished],
    }
    size = (12.5, max(3.2, 1.6 + 0.42 * len(rows)))
    look = {"font.size": 10, "axes.grid": True, "grid.alpha": 0.25, "axes.axisbelow": True}
    with saved_figure(folder / "compare.png", args.title, size, **look) as figure:
        draw(figure, metric, rows, finished)
    write_files(folder, "compare", markdown(args, rows), content, console)


def draw(figure: Figure, metric: Metric, rows: Sequence[Row], finished: Sequence[Finished]) -> None:
    """Draw each recipe's mean with its error bar, and beside it the curves over epochs."""
    bars, curves = figure.subplots(1, 2, width_ratios=(1.15, 1))
    low, high = _limits(metric, rows)
    _draw_bars(bars, metric, rows, low, high)
    _draw_curves(curves, metric, rows, finished)
    curves.set_ylim(*_curve_limits(metric, finished, low, high))


def _limits(metric: Metric, rows: Sequence[Row]) -> tuple[float, float]:
    """The range shown: seeds and error bars of rows not far from the best, and room for labels."""
    means = [row.mean for row in rows if row.mean is not None] or [0.0]
    best = max(means) if metric.higher_is_better else min(means)
    close = [row for row in rows if row.mean is not None and abs(best - row.mean) <= metric.far]
    shown = [value for row in close for value in row.values if value is not None] or [best]
    for row in close:
        if row.mean is not None and row.sd is not None:
            shown += [row.mean - row.sd, row.mean + row.sd]
    room = 0.15 * max(max(shown) - min(shown), metric.far / 30)
    return min(shown) - room, max(shown) + room


def _curve_limits(
    metric: Metric, finished: Sequence[Finished], low: float, high: float
) -> tuple[float, float]:
    """The range shown of the curves, without their first epoch, which is often far off."""
    later = [metric.scale * v for run in finished for v in run.curve[1:] if v is not None]
    shown = [v for v in later if low - metric.far <= v <= high + metric.far]
    return min([low, *shown]), max([high, *shown])


def _draw_bars(axes: Axes, metric: Metric, rows: Sequence[Row], low: float, high: float) -> None:
    left = metric.higher_is_better
    edge = low if left else high
    paper = {"fc": "white", "ec": "none", "pad": 1}  # of labels over the baseline's line
    for place, row in enumerate(rows):
        color, label = COLORS[place % len(COLORS)], _value(metric, row)
        if row.mean is None or not low <= row.mean <= high:
            axes.plot(edge, place, marker="<" if left else ">", ms=9, color=color, clip_on=False)
            note = f"{label}, off the scale" + (", diverged" if row.diverged else "")
            side, shift = ("left", 14) if left else ("right", -14)
            look: Style = {"xytext": (shift, 0), "textcoords": "offset points", "ha": side}
            axes.annotate(note, (edge, place), color=color, bbox=paper, va="center", **look)
            continue
        shown = [value for value in row.values if value is not None]
        bar: Style = {"xerr": row.sd, "fmt": "D", "ms": 6, "capsize": 4, "elinewidth": 2}
        name: Style = {
            "xytext": (0, 9),
            "textcoords": "offset points",
            "ha": "center",
            "fontsize": 9,
        }
        axes.plot(shown, [place] * len(shown), "o", ms=5, color=color, alpha=0.35, mew=0)
        axes.errorbar(row.mean, place, color=color, **bar)
        axes.annotate(label, (row.mean, place), color=color, bbox=paper, **name)
        if row.recipe == row.baseline:
            axes.axvline(row.mean, color=color, ls="--", lw=1, alpha=0.6, zorder=0)
    axes.set_yticks(range(len(rows)), [row.recipe for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.set_xlim(low, high)
    axes.set_xlabel(f"{metric.title} (diamond: mean ± sd; dots: seeds)")


def _draw_curves(
    axes: Axes, metric: Metric, rows: Sequence[Row], finished: Sequence[Finished]
) -> None:
    for place, row in enumerate(rows):
        color = COLORS[place % len(COLORS)]
        curves = [
            [math.nan if v is None else metric.scale * v for v in run.curve]
            for run in finished
            if run.recipe == row.recipe
        ]
        columns = list(zip(*curves, strict=False))  # early stopping can end seeds apart
        x, style = range(1, len(columns) + 1), ("-", "--", "-.", ":")[place // len(COLORS) % 4]
        if columns:
            mean = [statistics.fmean(c) for c in columns]
            low, high = [min(c) for c in columns], [max(c) for c in columns]
            marker = "o" if len(columns) == 1 else ""  # one epoch makes no line
            axes.plot(x, mean, style, marker=marker, color=color, label=row.recipe)
            axes.fill_between(x, low, high, color=color, alpha=0.12, lw=0)
    axes.set_xlabel("epoch (line: mean; band: all seeds)")
    axes.set_ylabel(metric.title)
    if any(len(run.curve) > 1 for run in finished):
        axes.locator_params(axis="x", integer=True)
    else:
        axes.set_xticks([1])
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
