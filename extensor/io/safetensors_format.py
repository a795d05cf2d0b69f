"""The safetensors container: read and written by the `safetensors` library, and checked further.

The library is used on raw bytes, since its numpy loader supports neither bfloat16 nor FP8. It
checks offsets, sizes and types. This module also refuses what the library accepts and a checkpoint
must not have: repeated keys, unknown fields, and BOOL bytes other than 0 and 1. A file's bytes
depend only on its content.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, TensorSpec, deserialize, serialize

__all__ = ["DTYPES", "METADATA_KEY", "CheckpointError", "other_kind", "read", "write"]

Array = npt.NDArray[Any]

METADATA_KEY = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}

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
    "C64": np.dtype("<c8"),
    "BOOL": np.dtype("?"),
}
"""The container's dtype names, and their numpy dtypes."""


class CheckpointError(ValueError):
    """A file that is damaged, or not the expected one. Nothing was loaded.

    >>> issubclass(et.io.CheckpointError, ValueError)
    True
    """


def write(file: BinaryIO, tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write a container to an open binary file.

    Args:
        file: open for writing, at its start.
        tensors: arrays of a dtype in `DTYPES`, of any shape, memory order and byte order.
        metadata: strings by name. (The library orders several names at random.)

    Raises:
        TypeError: for a dtype the container cannot hold.
        ValueError: for an empty or reserved name, or a header that is too long.
    """
    # The library gets addresses: `plain` keeps the arrays alive until it has read them.
    plain = {name: _little_endian(name, array) for name, array in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=array.dtype.name,
            shape=array.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in plain.items()
    }
    try:
        content = serialize(specs, dict(metadata) or None)
    except SafetensorError as error:
        raise ValueError(
            f"safetensors: expected what fits its header, got: {error}; put large values in "
            "tensors, not in metadata"
        ) from None
    file.write(content)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Array], dict[str, str]]:
    """Read a container: (tensors by name, metadata strings). The arrays are fresh and writable.

    Raises:
        FileNotFoundError: if there is no such file.
        CheckpointError: if the file is truncated, has bytes to spare, or its header is not a valid
            one. The message names the file and what is wrong with it.
    """
    with open(path, "rb") as file:
        content = file.read()
    try:
        return _decode(content)
    except (CheckpointError, SafetensorError) as error:
        what = other_kind(content) or f"truncated or damaged: {error}"
        what = str(error) if isinstance(error, CheckpointError) else what
        raise CheckpointError(
            f"{os.fspath(path)}: {what}. Nothing was loaded; use an intact safetensors file"
        ) from None


_OTHER_KINDS = {
    b"PK": "a zip archive, as .npz files and those of torch.save are",
    b"\x80": "a pickle, as old files of torch.save are",
    b"GGUF": "a GGUF file, whose name must end in .gguf",
    b"\x93NUMPY": "a .npy file",
    b"version https://git-lfs": "a pointer of Git LFS; `git lfs pull` gets the file",
}
"""What is often taken for a safetensors file, by its first bytes."""


def other_kind(head: bytes) -> str | None:
    """What a file is instead of a safetensors file, by its first bytes; None if not known."""
    kinds = (kind for start, kind in _OTHER_KINDS.items() if head.startswith(start))
    return next((f"expected a safetensors file, got {kind}" for kind in kinds), None)


def _little_endian(name: str, array: Array) -> Array:
    if not name or name == METADATA_KEY:
        raise ValueError(
            f"tensor name: expected a non-empty name other than {METADATA_KEY!r}, got {name!r}"
        )
    # ascontiguousarray would turn a scalar into a vector.
    array = np.asarray(array, order="C")
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype not in DTYPES.values():
        raise TypeError(
            f"{name}: expected one of {', '.join(str(d) for d in DTYPES.values())}, "
            f"got {array.dtype}; cast the tensor first"
        )
    return array


def _decode(content: bytes) -> tuple[dict[str, Array], dict[str, str]]:
    # What passes has a well-formed header, whose tensors tile the file.
    entries = dict(deserialize(content))  # type: ignore[no-untyped-call]
    header = _strict_header(content)
    metadata: dict[str, str] = header.pop(METADATA_KEY, {})
    return {name: _to_array(name, entries[name]) for name in header}, metadata


def _strict_header(content: bytes) -> dict[str, Any]:
    """The header of a container that the library accepts, without what it overlooks."""
    length = int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8 : 8 + length], object_pairs_hook=_no_duplicates)
    for name, entry in header.items():
        if name != METADATA_KEY and set(entry) != _FIELDS:
            raise CheckpointError(
                f"bad header: {name!r}: expected dtype, shape and data_offsets, got {entry!r:.80}"
            )
    return header


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise CheckpointError(f"bad header: expected each key once, got {twice} more than once")
    return table


def _to_array(name: str, entry: dict[str, Any]) -> Array:
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(
            f"bad header: {name!r}: expected a dtype in {', '.join(DTYPES)}, got {entry['dtype']!r}"
        )
    raw = np.frombuffer(entry["data"], np.uint8)  # of a bytearray that is ours: writable
    if entry["dtype"] == "BOOL" and raw.size and raw.max() > 1:
        raise CheckpointError(f"{name!r}: expected BOOL bytes 0 or 1, got {raw.max()}")
    return raw.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
