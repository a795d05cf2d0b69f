"""Tables as data, and how the command line prints them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from extensor.schema import FileError, printable

__all__ = ["CommandError", "Sheet", "shape_text", "show", "tile_text"]


NAME_WIDTH = 44
"""A first column is not folded up to so many characters."""


class CommandError(FileError):
    """A problem that the user can solve: printed as one line, exit code 2."""


@dataclass(frozen=True)
class Sheet:
    """A table as data; the command line and the docs print the same one."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def show(sheets: Iterable[Sheet]) -> None:
    """Print sheets as rich tables; wide enough to read where the output is not a terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, 160))
    for sheet in sheets:
        table = Table(title=escape(printable(sheet.title)), title_justify="left")
        for place, column in enumerate(sheet.columns):
            longest = max((len(row[place]) for row in sheet.rows), default=0)
            least = min(longest, NAME_WIDTH) if place == 0 else None  # names are read whole
            table.add_column(escape(column), overflow="fold", min_width=least)
        for row in sheet.rows:
            table.add_row(*(escape(printable(cell)) for cell in row))
        console.print(table)


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as tables show it, such as 3x4."""
    return "x".join(map(str, shape)) or "scalar"


def tile_text(tile: object) -> str:
    """A format's tile as tables show it: 1x32, or "per tensor"."""
    return shape_text(tile) if isinstance(tile, tuple) else f"per {tile}"
