"""The page of an experiment: curves, a table that sorts, and the health of each arm's layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from .. import page
from ..callbacks import NOISE_RATIO
from ..svg import Line, lines

__all__ = ["write_page"]

MAX_LINES = 8
OPTIONAL = ("joules", "diverged", "fallbacks", "alone")
"""Columns that are shown where an arm has something to say there."""


def write_page(results: dict[str, Any], path: Path) -> None:
    """Write one HTML file that loads nothing.

    Args:
        results: of `gather`.
        path: of the file.
    """
    best = -1 if results["higher_is_better"] else 1
    arms = sorted(
        results["arms"], key=lambda arm: math.inf if arm["gap"] is None else best * arm["gap"]
    )
    metric = results["metric"]
    curves = [Line(arm["arm"], _epochs(arm["curve"]), arm["curve"]) for arm in arms]
    gaps = [Line(arm["arm"], _epochs(arm["gap_curve"]), arm["gap_curve"]) for arm in arms]
    timed = [Line(arm["arm"], arm["times"], arm["curve"]) for arm in arms if any(arm["times"])]
    to_baseline = f"gap to {results['baseline']}, {results['gap_unit']}"
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    style = (Path(page.__file__).parent / "page.css").read_text(encoding="utf-8")
    text = environment.get_template("page.html").render(
        style=Markup(style),
        charts=_charts(metric, curves, "epoch", results["baseline"]),
        gap_charts=_charts(to_baseline, gaps, "epoch", results["baseline"]),
        by_time=_charts(metric, timed, "seconds, alone", results["baseline"]) if timed else [],
        switches=any("@" in arm["arm"] for arm in arms),
        shown={name for name in OPTIONAL if any(arm[name] for arm in arms)},
        noise_ratio=NOISE_RATIO,
        **{**results, "arms": arms},
    )
    path.write_text(text, encoding="utf-8")


def _epochs(curve: Sequence[Any]) -> list[int]:
    return list(range(1, len(curve) + 1))


def _charts(title: str, drawn: Sequence[Line], x_label: str, baseline: str) -> list[Markup]:
    """Charts of a few lines each; the baseline is the first line of all of them."""
    first = [line for line in drawn if line.name == baseline]
    rest = [line for line in drawn if line.name != baseline]
    size = MAX_LINES - len(first)
    starts = range(0, max(len(rest), 1), size)
    return [Markup(lines(title, [*first, *rest[i : i + size]], x_label)) for i in starts]
