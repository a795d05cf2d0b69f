"""Writing checkpoints one weight at a time: safetensors files in shards, and GGUF files.

Weights go to a temporary file as they come. The header, which needs to know them all, is written
before their copy, so that no more than one weight is in memory.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from extensor.io.atomic import replacing
from extensor.io.gguf.container import write_gguf
from extensor.io.gguf.types import GgufType
from extensor.io.safetensors_format import DTYPES, PACKED_DTYPES

__all__ = ["GgufWriter", "SafetensorsWriter"]

Array = npt.NDArray[Any]

SHARD_BYTES = 5_000_000_000


@dataclass
class _Spool:
    """Bytes of weights in a temporary file, and where each lies."""

    folder: Path
    file: Any = field(init=False)
    size: int = 0

    def __post_init__(self) -> None:
        self.file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 - closed by its writer

    def add(self, content: Array) -> tuple[int, int]:
        flat = np.ascontiguousarray(content).reshape(-1)
        self.file.write(flat.view(np.uint8).data if flat.size else b"")
        self.size += content.nbytes
        return self.size - content.nbytes, content.nbytes

    def copy(self, start: int, size: int, to: BinaryIO) -> None:
        self.file.seek(start)
        left = size
        while left:
            block = self.file.read(min(left, 1 << 24))
            to.write(block)
            left -= len(block)

    def clear(self) -> None:
        self.file.seek(0)
        self.file.truncate()
        self.size = 0


class SafetensorsWriter:
    """Writes tensors to one file or to shards with an index.

    Args:
        folder: where the files go; it must exist.
        single: the name of the only file; None for ``model.safetensors`` or shards of it.
        shard_bytes: a shard is closed when it holds so many bytes.
    """

    def __init__(
        self, folder: Path, single: str | None = None, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.folder, self.single, self.limit = folder, single, shard_bytes
        self._spool = _Spool(folder)
        self._open: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        self._shards: list[tuple[Path, list[str]]] = []
        self.total = 0
        self.metadata: dict[str, str] = {"format": "pt"}

    def add(self, name: str, dtype: str, shape: tuple[int, ...], content: Array) -> None:
        """Add a tensor.

        Args:
            name: its name.
            dtype: the container's name of the dtype.
            shape: the shape that the header says.
            content: its bytes, in any dtype.

        Raises:
            ValueError: for a name that is taken.
        """
        if name in self._open or any(name in names for _, names in self._shards):
            raise ValueError(f"{name}: two tensors of this name would be stored")
        if self.single is None and self._spool.size + content.nbytes > self.limit and self._open:
            self._flush()
        start, size = self._spool.add(content)
        self._open[name] = (dtype, shape, start, size)
        self.total += size

    def finish(self) -> list[Path]:
        """Write what is left, and the index if there are several files; the files' paths."""
        if self._open or not self._shards:
            self._flush()
        if self.single is not None or len(self._shards) == 1:
            path = self.folder / (self.single or "model.safetensors")
            self._shards[0][0].replace(path)
            return [path]
        table: dict[str, str] = {}
        paths = []
        for number, (path, names) in enumerate(self._shards, 1):
            final = self.folder / f"model-{number:05}-of-{len(self._shards):05}.safetensors"
            path.replace(final)
            paths.append(final)
            table |= dict.fromkeys(names, final.name)
        index = {"metadata": {"total_size": self.total}, "weight_map": table}
        place = self.folder / "model.safetensors.index.json"
        with replacing(place) as file:
            file.write(json.dumps(index, indent=1).encode())
        return [*paths, place]

    def close(self) -> None:
        """Let go of the temporary file, after `finish` or without it."""
        self._spool.file.close()

    def _flush(self) -> None:
        """Write a shard: wide dtypes first, so that every tensor is aligned."""

        def width(item: tuple[str, tuple[str, tuple[int, ...], int, int]]) -> tuple[int, str]:
            dtype = item[1][0]
            return (0 if dtype in PACKED_DTYPES else -DTYPES[dtype].itemsize, item[0])

        order = sorted(self._open.items(), key=width)
        header: dict[str, Any] = {"__metadata__": self.metadata}
        at = 0
        for name, (dtype, shape, _, size) in order:
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        path = self.folder / f"shard-{len(self._shards) + 1}.part"
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, (_, _, start, size) in order:
                self._spool.copy(start, size, file)
        self._shards.append((path, [name for name, _ in order]))
        self._spool.clear()
        self._open = {}


class GgufWriter:
    """Writes a GGUF file.

    Args:
        path: the file; its folder must exist.
        metadata: as `write_gguf` takes it.
    """

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path, self.metadata = path, dict(metadata)
        self._spool = _Spool(path.parent)
        self._tensors: dict[str, tuple[GgufType, tuple[int, ...]]] = {}
        self._places: dict[str, tuple[int, int]] = {}

    def add(self, name: str, row: GgufType, shape: tuple[int, ...], content: Array) -> None:
        """Add a tensor.

        Args:
            name: GGUF's name of it.
            row: its type.
            shape: its shape.
            content: its bytes.

        Raises:
            ValueError: for a name that is taken.
        """
        if name in self._tensors:
            raise ValueError(f"{name}: two tensors of this name would be stored")
        self._tensors[name] = (row, shape)
        self._places[name] = self._spool.add(content)

    def finish(self) -> list[Path]:
        """Write the file, whole or not at all; its path."""

        def contents() -> Any:
            for name, (start, size) in self._places.items():
                self._spool.file.seek(start)
                yield name, np.frombuffer(self._spool.file.read(size), np.uint8)

        with replacing(self.path) as file:
            write_gguf(file, self.metadata, self._tensors, contents())
        return [self.path]

    def close(self) -> None:
        """Let go of the temporary file, after `finish` or without it."""
        self._spool.file.close()


def copy_files(source: Path, target: Path, names: tuple[str, ...]) -> list[str]:
    """Copy those of the named files that a folder has; their names."""
    found = [name for name in names if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, target / name)
    return found
