"""A safetensors file, memory-mapped: its header is checked whole, its tensors are read one by one.

`extensor.io.safetensors_format` checks the header, and reads a whole file at once; this reader also
knows the 4- and 6-bit dtypes, which numpy has no name for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy.typing as npt

from extensor.io.pages import FilePages
from extensor.io.safetensors_format import (
    DTYPES,
    PACKED_DTYPES,
    CheckpointError,
    parse_header,
)

__all__ = ["SafetensorsFile"]

Array = npt.NDArray[Any]

_READABLE = {**DTYPES, **PACKED_DTYPES}


class SafetensorsFile:
    """The tensors of a file, on its pages.

    Args:
        path: the file.

    Attributes:
        path: the file.
        entries: where each tensor lies, by name, in the file's order.
        metadata: the file's strings.

    Raises:
        FileNotFoundError: if there is no such file.
        CheckpointError: if the header is damaged, or does not fit the file's length.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._pages = FilePages(self.path)
        self._content: Array = self._pages.bytes
        try:
            self.entries, self.metadata = parse_header(self._content, _READABLE)
        except CheckpointError as error:
            raise CheckpointError(
                f"{self.path}: {error}. Nothing was loaded; use an intact safetensors file"
            ) from None

    def let_go(self) -> None:
        """See `extensor.io.pages.FilePages.let_go`."""
        self._pages.let_go()

    def raw(self, name: str) -> Array:
        """A tensor's bytes: uint8, a view of the file's pages.

        Args:
            name: the tensor's.
        """
        entry = self.entries[name]
        return self._content[entry.start : entry.end]

    def array(self, name: str) -> Array:
        """A tensor as a read-only view of the file's pages; of packed dtypes the bytes of rows.

        Args:
            name: the tensor's.
        """
        entry, raw = self.entries[name], self.raw(name)
        if entry.dtype in PACKED_DTYPES:
            return raw.reshape(*entry.shape[:-1], -1) if raw.size else raw
        dtype = DTYPES[entry.dtype]
        if entry.start % dtype.itemsize:  # only hand-made files: numpy wants aligned views
            raw = raw.copy()
        return raw.view(dtype).reshape(entry.shape)
