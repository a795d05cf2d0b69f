"""A safetensors file, memory-mapped: its header is checked whole, its tensors are read one by one.

Nothing is allocated before the header has been checked against the file's length, so that a header
cannot ask for more than the file holds. `extensor.io.safetensors_format` reads a whole file at once
through the library; this reader also knows the 4- and 6-bit dtypes, which numpy has no name for.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from extensor.io.safetensors_format import (
    DTYPES,
    METADATA_KEY,
    CheckpointError,
    other_kind,
)

__all__ = ["PACKED_DTYPES", "Entry", "SafetensorsFile"]

Array = npt.NDArray[Any]

PACKED_DTYPES = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Dtypes whose codes are packed, the first in the lowest bits, and their bits."""

_MAX_HEADER = 100_000_000  # bytes, as in the safetensors library


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies.

    Attributes:
        dtype: the container's name of it.
        shape: of the tensor.
        start, end: bytes of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.start


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
        size = self.path.stat().st_size
        if size < 8:
            raise self._error(f"truncated: expected 8 bytes and a header, got {size} bytes")
        self._content: Array = np.memmap(self.path, np.uint8, "r")
        length = int.from_bytes(self._content[:8].tobytes(), "little")
        if length > min(size - 8, _MAX_HEADER):
            if kind := other_kind(self._content[:32].tobytes()):
                raise self._error(kind)
            raise self._error(f"truncated or damaged: a header of {length} bytes in {size}")
        self._base, self._size = 8 + length, size
        header = self._parsed(self._content[8 : 8 + length].tobytes())
        metadata = header.pop(METADATA_KEY, {})
        if not isinstance(metadata, dict) or not all(
            isinstance(text, str) for text in metadata.values()
        ):
            raise self._error("bad header: expected metadata of strings")
        self.metadata: dict[str, str] = metadata
        entries = {name: self._entry(name, value) for name, value in header.items()}
        self._check_tiling(entries)
        self.entries = entries

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

    def _error(self, text: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {text}. Nothing was loaded; use an intact safetensors file"
        )

    def _parsed(self, text: bytes) -> dict[str, Any]:
        def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            table = dict(pairs)
            if len(table) < len(pairs):
                names = [name for name, _ in pairs]
                twice = sorted({name for name in names if names.count(name) > 1})
                raise self._error(f"bad header: expected each key once, got {twice} more than once")
            return table

        try:
            header = json.loads(text, object_pairs_hook=once)
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise self._error(f"bad header: {error}") from None
        if not isinstance(header, dict):
            raise self._error(f"bad header: expected an object, got {type(header).__name__}")
        return header

    def _entry(self, name: str, value: Any) -> Entry:
        try:
            dtype, shape, (start, end) = value["dtype"], value["shape"], value["data_offsets"]
            numbers = [*shape, start, end]
        except (KeyError, TypeError, ValueError):
            raise self._error(
                f"bad header: {name!r}: expected dtype, shape and data_offsets, got {value!r:.80}"
            ) from None
        if dtype not in DTYPES and dtype not in PACKED_DTYPES:
            known = ", ".join([*DTYPES, *PACKED_DTYPES])
            raise self._error(f"bad header: {name!r}: expected a dtype in {known}, got {dtype!r}")
        if not all(type(n) is int and n >= 0 for n in numbers):
            raise self._error(f"bad header: {name!r}: expected numbers of 0 or more, got {numbers}")
        bits = PACKED_DTYPES.get(dtype) or 8 * DTYPES[dtype].itemsize
        total = math.prod(shape) * bits
        if total % 8 or end - start != total // 8:
            raise self._error(
                f"bad header: {name!r}: {dtype} of shape {tuple(shape)} takes {total / 8:g} bytes, "
                f"the header gives {end - start}"
            )
        if end > self._size - self._base:
            raise self._error(
                f"truncated: {name!r} ends {end} bytes after the header, the file has "
                f"{self._size - self._base}"
            )
        return Entry(dtype, tuple(shape), self._base + start, self._base + end)

    def _check_tiling(self, entries: dict[str, Entry]) -> None:
        at = self._base
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
            if entry.start != at:
                raise self._error(
                    f"bad header: {name!r} starts at byte {entry.start}, expected {at}: tensors "
                    "overlap or leave a gap"
                )
            at = entry.end
        if at != self._size:
            raise self._error(f"damaged: {self._size - at} bytes after the last tensor")
