"""The safetensors container, read strictly and written canonically.

A file is: eight bytes, the header's length (little-endian); the header, JSON that
maps each tensor's name to dtype, shape and offsets, padded with spaces to eight
bytes; the tensors' bytes, without holes. `read` believes nothing: it checks the
whole header against the file's size before it allocates an array, and rejects the
duplicate keys that the reference implementation accepts.

Source: the safetensors format description, version 0.8.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import numpy.typing as npt

__all__ = ["DTYPES", "METADATA_KEY", "CheckpointError", "read", "write"]

Array = npt.NDArray[Any]

METADATA_KEY = "__metadata__"
MAX_HEADER_BYTES = 100_000_000
ALIGNMENT = 8

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
"""The container's dtype names and the numpy dtypes their bytes are."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckpointError(ValueError):
    """A file that is not what it should be. Nothing was loaded."""


def write(file: BinaryIO, tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write a container to an open binary file. Bytes depend only on the content.

    Args:
        file: open for writing, at its start.
        tensors: arrays of a dtype in `DTYPES`, of any shape and memory order.
        metadata: strings by name.

    Raises:
        TypeError: for a dtype the container cannot hold.
        ValueError: for an empty or reserved name, or a header that is too long.
    """
    plain = {name: _little_endian(name, array) for name, array in tensors.items()}
    # Wide dtypes first keeps every tensor aligned to its item size without padding.
    order = sorted(plain, key=lambda name: (-plain[name].dtype.itemsize, name))
    header: dict[str, Any] = {METADATA_KEY: dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for name in order:
        array = plain[name]
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"header: wanted at most {MAX_HEADER_BYTES} bytes, got {len(text)}; "
            "put large values in tensors, not in metadata"
        )
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for name in order:
        # A flat byte view: extension dtypes (bfloat16) have no buffer protocol of their own.
        file.write(plain[name].reshape(-1).view(np.uint8).data)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Array], dict[str, str]]:
    """Read a container: (tensors by name, metadata strings). The arrays are fresh and writable.

    Raises:
        FileNotFoundError: if there is no such file.
        CheckpointError: if the file is truncated, has bytes to spare, or its header is not a valid
            one. The message names the file and what is wrong with it.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            header, start = _read_header(file, size)
            metadata = _check_metadata(header.pop(METADATA_KEY, {}))
            _check_entries(header, size - start)
            tensors = {name: _read_tensor(file, start, name, e) for name, e in header.items()}
        except CheckpointError as error:
            raise CheckpointError(
                f"{os.fspath(path)}: {error}. Nothing was loaded; use an intact safetensors file"
            ) from None
    return tensors, metadata


def _little_endian(name: str, array: Array) -> Array:
    if not name or name == METADATA_KEY:
        raise ValueError(
            f"tensor name: wanted a non-empty name other than {METADATA_KEY!r}, got {name!r}"
        )
    # ascontiguousarray would turn a scalar into a vector.
    array = np.asarray(array, order="C")
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype not in _NAMES:
        raise TypeError(
            f"{name}: wanted one of {', '.join(str(d) for d in _NAMES)}, got {array.dtype}; "
            "cast the tensor first"
        )
    return array


def _read_header(file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """The parsed header, and where the tensors' bytes start."""
    if size < 8:
        raise CheckpointError(f"truncated: wanted at least 8 bytes, got {size}")
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"not a safetensors file: its header would have {length} bytes, more than "
            f"{MAX_HEADER_BYTES}"
        )
    if length > size - 8:
        raise CheckpointError(
            f"truncated: wanted a header of {length} bytes, got {size - 8} bytes in all"
        )
    text = file.read(length)
    if not text.startswith(b"{"):
        raise CheckpointError(f"bad header: wanted a JSON object, got {text[:16]!r}")
    try:
        header = json.loads(text.decode(), object_pairs_hook=_no_duplicates)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"bad header: wanted UTF-8 JSON, got {error}") from None
    return header, 8 + length


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise CheckpointError(f"bad header: wanted each key once, got {twice} more than once")
    return table


def _check_metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"bad header: wanted {METADATA_KEY} to map names to strings")
    return metadata


def _check_entries(header: dict[str, Any], data_bytes: int) -> None:
    """Every entry well-formed, and together they cover the data exactly once."""
    spans = []
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise CheckpointError(
                f"bad header: {name!r}: wanted dtype, shape and data_offsets, got {entry!r:.80}"
            )
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise CheckpointError(
                f"bad header: {name!r}: wanted a dtype in {', '.join(DTYPES)}, got {dtype!r}"
            )
        if not _are_sizes(shape):
            raise CheckpointError(
                f"bad header: {name!r}: wanted a shape of whole numbers, got {shape!r}"
            )
        if not _are_sizes(offsets) or len(offsets) != 2:
            raise CheckpointError(
                f"bad header: {name!r}: wanted data_offsets [begin, end], got {offsets!r}"
            )
        wanted = math.prod(shape) * DTYPES[dtype].itemsize
        if offsets[1] - offsets[0] != wanted:
            raise CheckpointError(
                f"bad header: {name!r}: wanted {wanted} bytes for {dtype} of shape {shape}, "
                f"got {offsets[1] - offsets[0]}"
            )
        spans.append((offsets[0], offsets[1], name))
    end = 0
    for begin, stop, name in sorted(spans):
        if begin != end:
            raise CheckpointError(
                f"bad header: {name!r}: wanted its bytes to begin at {end}, got {begin} "
                "(a hole or an overlap)"
            )
        end = stop
    if end != data_bytes:
        what = "truncated" if end > data_bytes else "bytes to spare"
        raise CheckpointError(f"{what}: wanted {end} bytes of tensors, got {data_bytes}")


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)


def _read_tensor(file: BinaryIO, start: int, name: str, entry: dict[str, Any]) -> Array:
    begin, end = entry["data_offsets"]
    raw = np.empty(end - begin, np.uint8)
    file.seek(start + begin)
    if file.readinto(raw.data) != raw.size:  # type: ignore[attr-defined]
        raise CheckpointError(
            f"truncated: {name!r} ended early; the file changed while it was read"
        )
    if entry["dtype"] == "BOOL" and raw.size and raw.max() > 1:
        raise CheckpointError(f"{name!r}: wanted BOOL bytes 0 or 1, got {raw.max()}")
    return raw.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
