"""What the reports of comparisons and of quantization share: tables, and how plots look."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from extensor.inspect import Table

from .rundir import write_json

__all__ = ["COLORS", "known_mean", "markdown_page", "saved_figure", "write_files"]

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#111111")
"""Okabe and Ito's palette: distinct for colour-blind readers too."""

STYLE = {"axes.spines.top": False, "axes.spines.right": False}


def known_mean(values: Iterable[float | None]) -> float | None:
    """The mean of the numbers that are known, or None where none is."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def markdown_page(
    title: str, intro: str, table: Table, figure: tuple[str, str], notes: Mapping[str, str]
) -> str:
    """A title, what is seen, a table, a figure (text and file), and what each row's name means."""
    head, *lines = ["| " + " | ".join(cells) + " |" for cells in (table.columns, *table.rows)]
    rule = "|" + "---|" * len(table.columns)
    parts = [f"# {title}", "", intro, "", head, rule, *lines, "", f"![{figure[0]}]({figure[1]})"]
    return "\n".join([*parts, "", *(f"- `{name}`: {doc}" for name, doc in notes.items())]) + "\n"


def write_files(
    folder: Path, name: str, page: str, content: Mapping[str, Any], console: Console
) -> None:
    """Write NAME.json and NAME.md, and say where these and the figure, NAME.png, are."""
    write_json(folder / f"{name}.json", content)
    (folder / f"{name}.md").write_text(page, encoding="utf-8")
    for kind in ("md", "png", "json"):
        console.print(f"{folder / name}.{kind}")


@contextmanager
def saved_figure(path: Path, title: str, size: tuple[float, float], **style: Any) -> Iterator[Any]:
    """A matplotlib figure to draw in, then written to a file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: Any = STYLE | style
    with mpl.rc_context(settings):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        figure.suptitle(title)
        figure.savefig(path, dpi=150)
