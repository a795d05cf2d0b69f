"""Memory-mapped files: their bytes as an array, whose pages can be freed after use."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FilePages"]


class FilePages:
    """The bytes of a file, mapped into memory as they are read.

    Args:
        path: the file.

    Attributes:
        bytes: uint8, read-only; empty for an empty file.

    Raises:
        FileNotFoundError: if there is no such file.

    >>> import pathlib, tempfile
    >>> from extensor.io.pages import FilePages
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "x").write_bytes(b"abc")
    ...     FilePages(pathlib.Path(folder, "x")).bytes.tolist()
    [97, 98, 99]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with open(path, "rb") as file:
            empty = os.fstat(file.fileno()).st_size == 0
            self._map = None if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.bytes: npt.NDArray[Any] = np.frombuffer(self._map or b"", np.uint8)

    def let_go(self) -> None:
        """Take what was read out of the process's memory; later readers get it from the file.

        >>> import pathlib, tempfile
        >>> from extensor.io.pages import FilePages
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "x").write_bytes(b"abc")
        ...     pages = FilePages(pathlib.Path(folder, "x"))
        ...     pages.let_go()
        ...     pages.bytes.tolist()
        [97, 98, 99]
        """
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
