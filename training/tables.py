"""What the reports of comparisons and of quantization share: tables, and how plots look."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["known_mean", "markdown_table", "saved_figure"]

STYLE = {"axes.spines.top": False, "axes.spines.right": False}


def known_mean(values: Iterable[float | None]) -> float | None:
    """The mean of the numbers that are known, or None where none is."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]


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
