"""What a comparison shows: a table, Markdown, JSON, and a plot with error bars.

Mean and standard deviation are over seeds (sample standard deviation, n - 1) of the task's metric
after the last epoch. Runs that diverged count like any other: they spoil the mean, and their number
stands beside it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from extensor.inspect import Table
from extensor.quant.recipes import get_recipe
from training.callbacks.progress import percent
from training.comparison import CompareArgs, Finished
from training.rundir import write_json
from training.tasks.base import Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Row", "markdown", "plot", "summarize", "write_report"]

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#111111")
"""Okabe and Ito's palette: distinct for colour-blind readers too."""


@dataclass(frozen=True)
class Row:
    """One recipe over its seeds, in the metric's scale; the gap is what the metric says it is.

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
    metric: Metric,
    finished: Sequence[Finished],
    recipes: Sequence[str],
    failed: Iterable[str] = (),
) -> list[Row]:
    """Rows in the order of ``recipes``; recipes without a finished run have none."""
    failures = list(failed)
    runs = {name: [f for f in finished if f.recipe == name] for name in recipes}
    grouped = {name: [f.result for f in mine] for name, mine in runs.items() if mine}
    seeds = {name: [f.seed for f in mine] for name, mine in runs.items()}
    values = {
        name: [None if r[metric.key] is None else metric.scale * r[metric.key] for r in results]
        for name, results in grouped.items()
    }
    means = {name: _mean_or_none(numbers) for name, numbers in values.items()}
    known = {name: mean for name, mean in means.items() if mean is not None}
    baseline = next((name for name in metric.baselines if name in known), None)
    rows = []
    for name, results in grouped.items():
        mean, numbers = means[name], values[name]
        whole = [number for number in numbers if number is not None]
        gap = gap_sd = None
        if baseline is not None and mean is not None:
            gap = metric.difference(mean, known[baseline])
            if name != baseline and len(whole) > 1 and seeds[name] == seeds[baseline]:
                pairs = zip(whole, (v for v in values[baseline] if v is not None), strict=True)
                gap_sd = statistics.stdev(metric.difference(a, b) for a, b in pairs)
        rows.append(
            Row(
                recipe=name,
                doc=get_recipe(name).doc,
                runs=len(results),
                values=numbers,
                mean=mean,
                sd=None if mean is None or len(numbers) < 2 else statistics.stdev(whole),
                gap=gap,
                gap_sd=gap_sd,
                baseline=baseline,
                saturated=_mean(r["saturated"] for r in results),
                flushed=_mean(r["flushed"] for r in results),
                seconds_per_epoch=statistics.fmean(r["seconds_per_epoch"] for r in results),
                skipped_steps=sum(r["skipped_steps"] for r in results),
                diverged=sum(r["diverged"] is not None for r in results),
                failed=failures.count(name),
            )
        )
    return rows


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def columns(metric: Metric, rows: Sequence[Row]) -> tuple[str, ...]:
    """The table's head."""
    baseline = next((row.baseline for row in rows if row.baseline), metric.baselines[0])
    gap = f"gap to {baseline}" + (", %" if metric.gap == "%" else "")
    return (
        "recipe",
        metric.title.removeprefix("test ").replace(", %", " %"),
        gap,
        "saturated",
        "flushed",
        "s/epoch",
        "skipped",
        "diverged",
    )


def _value(metric: Metric, row: Row) -> str:
    spread = "" if row.sd is None else f" ± {row.sd:.{metric.digits}f}"
    return "not finite" if row.mean is None else f"{row.mean:.{metric.digits}f}{spread}"


def _gap(row: Row) -> str:
    spread = "" if row.gap_sd is None else f" ± {row.gap_sd:.2f}"
    return "-" if row.gap is None else f"{row.gap:+.2f}{spread}"


def _cells(metric: Metric, row: Row) -> tuple[str, ...]:
    trouble = f" ({row.failed} failed)" if row.failed else ""
    return (
        row.recipe,
        _value(metric, row),
        _gap(row),
        percent(row.saturated),
        percent(row.flushed),
        f"{row.seconds_per_epoch:.1f}",
        str(row.skipped_steps),
        f"{row.diverged}/{row.runs}{trouble}",
    )


def markdown(args: CompareArgs, rows: Sequence[Row]) -> str:
    """The table in Markdown."""
    metric = args.metric
    head = columns(metric, rows)
    gap = "per cent of the baseline" if metric.gap == "%" else "percentage points"
    lines = [f"# {args.title}", ""]
    lines.append(f"{args.optimizer}, peak learning rate {args.lr:g}, batch {args.batch_size}, ")
    lines[-1] += f"{args.schedule} schedule. Mean ± standard deviation over seeds of test "
    lines[-1] += f"{metric.key} after the last epoch; gap in {gap}, its spread seed by seed."
    lines += ["", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(_cells(metric, row)) + " |" for row in rows]
    lines += ["", f"![test {metric.key}](compare.png)", ""]
    lines += [f"- `{row.recipe}`: {row.doc}" for row in rows]
    return "\n".join(lines) + "\n"


def write_report(
    args: CompareArgs,
    rows: Sequence[Row],
    finished: Sequence[Finished],
    console: Console,
) -> None:
    """Print the table; write compare.json, compare.md and compare.png."""
    metric, folder = args.metric, args.folder
    table = Table(columns(metric, rows), tuple(_cells(metric, row) for row in rows))
    console.print(f"\n{args.title}\n\n{table}\n")
    settings = {k: v for k, v in dataclasses.asdict(args).items() if k not in ("out", "plot_only")}
    content = {
        "settings": settings,
        "rows": [dataclasses.asdict(row) for row in rows],
        "runs": [dataclasses.asdict(run) for run in finished],
    }
    write_json(folder / "compare.json", content)
    (folder / "compare.md").write_text(markdown(args, rows), encoding="utf-8")
    plot(folder / "compare.png", args.title, metric, rows, finished)
    for name in ("compare.md", "compare.png", "compare.json"):
        console.print(f"{folder / name}")


def plot(
    path: Path, title: str, metric: Metric, rows: Sequence[Row], finished: Sequence[Finished]
) -> None:
    """The metric per recipe with error bars, and per epoch."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "axes.axisbelow": True,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(11, max(3.2, 1.6 + 0.42 * len(rows))), layout="constrained")
        bars, curves = figure.subplots(1, 2, width_ratios=(1.15, 1))
        near = _near(metric, rows)
        low, high = _limits(metric, near)
        _draw_bars(bars, metric, rows, low, high)
        _draw_curves(curves, metric, rows, finished)
        curves.set_ylim(*_curve_limits(metric, finished, low, high))
        figure.suptitle(title)
        figure.savefig(path, dpi=150)


def _near(metric: Metric, rows: Sequence[Row]) -> list[float]:
    """The values shown to scale: of rows not far from the best."""
    known = [value for row in rows for value in row.values if value is not None]
    if not known:
        return [0.0]
    best = max(known) if metric.higher_is_better else min(known)
    close = [row for row in rows if row.mean is not None and abs(best - row.mean) <= metric.far]
    return [value for row in close for value in row.values if value is not None] or [best]


def _limits(metric: Metric, near: Sequence[float]) -> tuple[float, float]:
    """The range shown, with room for labels on both sides."""
    span = max(max(near) - min(near), metric.far / 30)
    return min(near) - 0.15 * span, max(near) + 0.15 * span


def _curve_limits(
    metric: Metric, finished: Sequence[Finished], low: float, high: float
) -> tuple[float, float]:
    """Curves start badly: show them from their second epoch on, where there is one."""
    later = [metric.scale * v for run in finished for v in run.curve[1:] if v is not None]
    near = [v for v in later if low - metric.far <= v <= high + metric.far]
    if metric.higher_is_better:
        return min([low, *near]), high
    return low, max([high, *near])


def _draw_bars(axes: Axes, metric: Metric, rows: Sequence[Row], low: float, high: float) -> None:
    edge = low if metric.higher_is_better else high
    for place, row in enumerate(rows):
        color = COLORS[place % len(COLORS)]
        label = _value(metric, row)
        if row.mean is None or not low <= row.mean <= high:
            left = metric.higher_is_better
            axes.plot(edge, place, marker="<" if left else ">", ms=9, color=color, clip_on=False)
            note = f"    {label}, off the scale" + (", diverged    " if row.diverged else "    ")
            axes.text(edge, place, note, va="center", ha="left" if left else "right", color=color)
            continue
        shown = [value for value in row.values if value is not None]
        axes.plot(shown, [place] * len(shown), "o", ms=5, color=color, alpha=0.35, mew=0)
        axes.errorbar(
            row.mean, place, xerr=row.sd, fmt="D", ms=6, color=color, capsize=4, elinewidth=2
        )
        axes.annotate(
            label,
            (row.mean, place),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=color,
        )
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
        epochs = min(map(len, curves))  # early stopping can end seeds at different epochs
        if epochs == 0:
            continue
        columns = list(zip(*(curve[:epochs] for curve in curves), strict=True))
        x = range(1, epochs + 1)
        style = ("-", "--", "-.", ":")[place // len(COLORS) % 4]
        axes.plot(x, [statistics.fmean(c) for c in columns], style, color=color, label=row.recipe)
        axes.fill_between(
            x, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.12, lw=0
        )
    axes.set_xlabel("epoch (line: mean; band: all seeds)")
    axes.set_ylabel(metric.title)
    axes.locator_params(axis="x", integer=True)
    higher = metric.higher_is_better
    axes.legend(frameon=False, fontsize=9, loc="lower right" if higher else "upper right")
