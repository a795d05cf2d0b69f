"""Tables as data, and how the command line prints them."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from extensor.schema import FileError, printable

__all__ = [
    "CommandError",
    "Sheet",
    "natural",
    "read_text",
    "shape_text",
    "show",
    "system_problem",
    "tile_text",
]


NAME_WIDTH, NARROW = 48, 12
"""A first column is not folded up to so many characters; in a table wider than the terminal."""


class CommandError(FileError):
    """A problem that the user can solve: printed as one line, exit code 2."""


WAYS_OUT = {
    errno.ENOSPC: "the disk is full; the way out: free some space, or write to another disk",
    errno.EROFS: "the disk is read-only; the way out: write to another folder",
    errno.EACCES: "not allowed; the way out: another path, or other permissions",
    errno.EISDIR: "expected a file, got a folder",
    errno.ENOENT: "no such file or folder",
}


def system_problem(error: OSError) -> str:
    """What the system refused, with the path and the way out."""
    if error.errno not in WAYS_OUT:
        return str(error)
    path = f"{error.filename}: " if error.filename is not None else ""
    return f"{path}{WAYS_OUT[error.errno]}"


def read_text(path: Path) -> str:
    """A text file in UTF-8.

    Raises:
        CommandError: if there is none, or it is something else.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(system_problem(error)) from None
    except UnicodeDecodeError as error:
        raise CommandError(
            f"{path}: expected a text in UTF-8, got byte {error.object[error.start]:#04x} at "
            f"{error.start}; the way out for Western European texts: "
            f"iconv -f WINDOWS-1252 -t UTF-8 {path} > utf8.txt"
        ) from None


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


def natural(name: str) -> list[tuple[int, str]]:
    """The key of the natural sort order, by numbers' values: layers.2 before layers.10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as tables show it, such as 3x4."""
    return "x".join(map(str, shape)) or "scalar"


def tile_text(tile: object) -> str:
    """A format's tile as tables show it: 1x32, or "per tensor"."""
    return shape_text(tile) if isinstance(tile, tuple) else f"per {tile}"
