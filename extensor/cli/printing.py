"""How the command line prints tables; apart from `extensor.cli.sheet`, since rich takes memory."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from extensor.cli.sheet import Sheet
from extensor.schema import printable

__all__ = ["show"]

NAME_WIDTH, NARROW = 48, 12
"""A first column is not folded up to so many characters; in a table wider than the terminal."""


def show(sheets: Iterable[Sheet]) -> None:
    """Print sheets as rich tables; wide enough to read where the output is not a terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, 160))
    for sheet in sheets:
        table = _table(sheet, NAME_WIDTH)
        unlimited = console.options.update_width(10_000)
        if Measurement.get(console, unlimited, table).minimum > console.width:
            table = _table(sheet, NARROW)
        console.print(table)


def _table(sheet: Sheet, name_width: int) -> Table:
    """A sheet for the terminal: numbers stay whole and end below each other."""
    table = Table(title=escape(printable(sheet.title)), title_justify="left")
    if name_width == NARROW:
        table.box, table.padding = box.SIMPLE_HEAD, 0
    for place, column in enumerate(sheet.columns):
        cells = [row[place] for row in sheet.rows]
        longest = max(map(len, cells), default=0)
        numbers = any(cells) and all(_is_number(cell) for cell in cells)
        least = min(longest, name_width) if place == 0 else longest if numbers else None
        justify: Literal["left", "right"] = "right" if numbers else "left"
        table.add_column(escape(column), overflow="fold", min_width=least, justify=justify)
    for row in sheet.rows:
        table.add_row(*(escape(printable(cell)) for cell in row))
    return table


def _is_number(cell: str) -> bool:
    """Whether a cell is empty, a dash, or a number with or without a percent sign."""
    return cell in ("", "-") or bool(re.fullmatch(r"[-+±]?[\d.,]+(e[-+]?\d+)?%?", cell))
