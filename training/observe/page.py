"""The page of an experiment: curves, a table that sorts, and the health of each arm's layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from .. import page
from ..callbacks import NOISE_RATIO
from ..svg import Line, lines

__all__ = ["write_page"]

MAX_LINES = 8


def write_page(results: dict[str, Any], path: Path) -> None:
    """Write one HTML file that loads nothing.

    Args:
        results: of `gather`.
        path: of the file.
    """
    arms = results["arms"]
    drawn = [
        Line(arm["arm"], list(range(1, len(arm["curve"]) + 1)), arm["curve"])
        for arm in sorted(arms, key=lambda arm: arm["gap"] or 0.0)
    ]
    charts = [
        Markup(lines(results["metric"], drawn[start : start + MAX_LINES], "epoch"))
        for start in range(0, len(drawn), MAX_LINES)
    ]
    timed = [Line(arm["arm"], arm["times"], arm["curve"]) for arm in arms if any(arm["times"])]
    by_time = [
        Markup(lines(results["metric"], timed[start : start + MAX_LINES], "seconds, alone"))
        for start in range(0, len(timed), MAX_LINES)
    ]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    style = (Path(page.__file__).parent / "page.css").read_text(encoding="utf-8")
    text = environment.get_template("page.html").render(
        style=Markup(style), charts=charts, by_time=by_time, noise_ratio=NOISE_RATIO, **results
    )
    path.write_text(text, encoding="utf-8")
