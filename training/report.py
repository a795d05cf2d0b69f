"""What a comparison shows: a table, Markdown, JSON, and a plot with error bars.

Mean and standard deviation are over seeds (sample standard deviation, n - 1); the gap to fp32 is in
percentage points of test accuracy after the last epoch. Runs that diverged count like any other:
they lower the mean, and their number stands beside it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from extensor.inspect import Table
from extensor.quant.recipes import get_recipe
from training.callbacks.progress import percent
from training.rundir import write_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from training.compare import CompareArgs

__all__ = ["Finished", "Row", "markdown", "plot", "summarize", "write_report"]

BASELINE = "fp32"
FAR_POINTS = 15.0
"""Rows further than this below the best are drawn at the plot's edge, labelled with their value."""
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#111111")
"""Okabe and Ito's palette: distinct for colour-blind readers too."""


@dataclass(frozen=True)
class Finished:
    """One finished run: its result.json, and test accuracy after each epoch."""

    recipe: str
    seed: int
    result: dict[str, Any]
    curve: list[float]


@dataclass(frozen=True)
class Row:
    """One recipe over its seeds. Accuracies and their sd are in per cent, the gap in points.

    ``sd`` is None with one seed, ``gap`` None without fp32 runs, shares None in float32.
    """

    recipe: str
    doc: str
    runs: int
    accuracies: list[float]
    mean: float
    sd: float | None
    gap: float | None
    saturated: float | None
    flushed: float | None
    seconds_per_epoch: float
    skipped_steps: int
    diverged: int
    failed: int


def summarize(
    finished: Sequence[Finished], recipes: Sequence[str], failed: Iterable[str] = ()
) -> list[Row]:
    """Rows in the order of ``recipes``; recipes without a finished run have none."""
    failures = list(failed)
    grouped = {name: [f.result for f in finished if f.recipe == name] for name in recipes}
    means = {
        name: statistics.fmean(100 * r["accuracy"] for r in results)
        for name, results in grouped.items()
        if results
    }
    rows = []
    for name, mean in means.items():
        results = grouped[name]
        accuracies = [100 * r["accuracy"] for r in results]
        rows.append(
            Row(
                recipe=name,
                doc=get_recipe(name).doc,
                runs=len(results),
                accuracies=accuracies,
                mean=mean,
                sd=statistics.stdev(accuracies) if len(accuracies) > 1 else None,
                gap=mean - means[BASELINE] if BASELINE in means else None,
                saturated=_mean(r["saturated"] for r in results),
                flushed=_mean(r["flushed"] for r in results),
                seconds_per_epoch=statistics.fmean(r["seconds_per_epoch"] for r in results),
                skipped_steps=sum(r["skipped_steps"] for r in results),
                diverged=sum(r["diverged"] is not None for r in results),
                failed=failures.count(name),
            )
        )
    return rows


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


COLUMNS = (
    "recipe",
    "accuracy %",
    "gap to fp32",
    "saturated",
    "flushed",
    "s/epoch",
    "skipped",
    "diverged",
)


def _cells(row: Row) -> tuple[str, ...]:
    spread = "" if row.sd is None else f" ± {row.sd:.2f}"
    trouble = f" ({row.failed} failed)" if row.failed else ""
    return (
        row.recipe,
        f"{row.mean:.2f}{spread}",
        "-" if row.gap is None else f"{row.gap:+.2f}",
        percent(row.saturated),
        percent(row.flushed),
        f"{row.seconds_per_epoch:.1f}",
        str(row.skipped_steps),
        f"{row.diverged}/{row.runs}{trouble}",
    )


def _title(args: CompareArgs) -> str:
    plural = "s" if args.epochs > 1 else ""
    return f"{args.model} on {args.dataset}, {args.epochs} epoch{plural}, {args.seeds} seeds"


def markdown(args: CompareArgs, rows: Sequence[Row]) -> str:
    """The table in Markdown."""
    lines = [f"# {_title(args)}", ""]
    lines.append(f"{args.optimizer}, peak learning rate {args.lr:g}, batch {args.batch_size}, ")
    lines[-1] += f"{args.schedule} schedule. Mean ± standard deviation over seeds of test accuracy "
    lines[-1] += "after the last epoch; gap in percentage points."
    lines += ["", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    lines += ["", "![test accuracy](compare.png)", ""]
    lines += [f"- `{row.recipe}`: {row.doc}" for row in rows]
    return "\n".join(lines) + "\n"


def write_report(
    folder: Path,
    args: CompareArgs,
    rows: Sequence[Row],
    finished: Sequence[Finished],
    console: Console,
) -> None:
    """Print the table; write compare.json, compare.md and compare.png."""
    table = Table(COLUMNS, tuple(_cells(row) for row in rows))
    console.print(f"\n{_title(args)}\n\n{table}\n")
    settings = {k: v for k, v in dataclasses.asdict(args).items() if k not in ("out", "plot_only")}
    content = {
        "settings": settings,
        "rows": [dataclasses.asdict(row) for row in rows],
        "runs": [dataclasses.asdict(run) for run in finished],
    }
    write_json(folder / "compare.json", content)
    (folder / "compare.md").write_text(markdown(args, rows), encoding="utf-8")
    plot(folder / "compare.png", _title(args), rows, finished)
    for name in ("compare.md", "compare.png", "compare.json"):
        console.print(f"{folder / name}")


def plot(path: Path, title: str, rows: Sequence[Row], finished: Sequence[Finished]) -> None:
    """Accuracy per recipe with error bars, and accuracy per epoch."""
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
        low, high = _limits(rows)
        _draw_bars(bars, rows, low, high)
        _draw_curves(curves, rows, finished)
        curves.set_ylim(min(low, _lowest_shown(finished, low)), high)
        figure.suptitle(title)
        figure.savefig(path, dpi=150)


def _limits(rows: Sequence[Row]) -> tuple[float, float]:
    """The accuracies shown to scale, with room for labels on the right."""
    best = max(max(row.accuracies) for row in rows)
    near = [a for row in rows for a in row.accuracies if best - row.mean <= FAR_POINTS]
    low = min(near)
    span = max(best - low, 0.5)
    return low - 0.15 * span, best + 0.15 * span


def _lowest_shown(finished: Sequence[Finished], low: float) -> float:
    """Curves start low: show them from their second epoch on, where there is one."""
    later = [100 * a for run in finished for a in run.curve[1:]]
    near = [a for a in later if a >= low - FAR_POINTS]
    return min(near, default=low)


def _draw_bars(axes: Axes, rows: Sequence[Row], low: float, high: float) -> None:
    for place, row in enumerate(rows):
        color = COLORS[place % len(COLORS)]
        label = _cells(row)[1]
        if row.mean < low:
            axes.plot(low, place, marker="<", ms=9, color=color, clip_on=False)
            note = f"  {label}, off the scale" + (", diverged" if row.diverged else "")
            axes.text(low, place, "  " + note, va="center", color=color)
            continue
        axes.plot(row.accuracies, [place] * row.runs, "o", ms=5, color=color, alpha=0.35, mew=0)
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
        if row.recipe == BASELINE:
            axes.axvline(row.mean, color=color, ls="--", lw=1, alpha=0.6, zorder=0)
    axes.set_yticks(range(len(rows)), [row.recipe for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.set_xlim(low, high)
    axes.set_xlabel("test accuracy, % (diamond: mean ± sd; dots: seeds)")


def _draw_curves(axes: Axes, rows: Sequence[Row], finished: Sequence[Finished]) -> None:
    for place, row in enumerate(rows):
        color = COLORS[place % len(COLORS)]
        curves = [[100 * a for a in run.curve] for run in finished if run.recipe == row.recipe]
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
    axes.set_ylabel("test accuracy, %")
    axes.locator_params(axis="x", integer=True)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
