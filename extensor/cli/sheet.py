"""Tables as data, problems that the user can solve, and words for what both show."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from pathlib import Path

from extensor.schema import FileError

__all__ = [
    "CommandError",
    "Sheet",
    "natural",
    "read_text",
    "shape_text",
    "system_problem",
    "tile_text",
]


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
