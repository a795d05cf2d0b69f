"""Files written all or nothing: under another name first, then renamed.

A file gets its name only when every byte is on the disk. A full disk, a crash or a signal leaves an
older file as it was. What a killed process left under the other name, `remove_leftovers` removes.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["remove_leftovers", "replacing"]

_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new binary file that is renamed to ``path`` if the block ends without an error.

    Args:
        path: the file; its folder must exist.

    Yields:
        The file to write.

    Raises:
        OSError: if it cannot be written. An older file under ``path`` is then unchanged.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path}: expected a file name, got a directory")
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        file = open(temporary, "xb")  # noqa: SIM115 - closed below, before the rename
    except FileNotFoundError:
        raise FileNotFoundError(f"{path.parent}: no such directory; create it first") from None
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:  # a full disk names no file
            error.filename = os.fspath(path)
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make renames in a folder durable, on systems that can open a folder."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Delete what killed processes left of files that `replacing` was writing in a folder."""
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            path.unlink()
