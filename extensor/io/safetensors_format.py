"""The safetensors container: its header is checked whole before anything else is read.

The `safetensors` library writes; its numpy loader knows neither bfloat16 nor FP8. The reader
refuses what that library accepts and a checkpoint must not have: repeated keys, unknown fields,
shapes that numpy has no array for, and BOOL bytes other than 0 and 1. A file's bytes depend only on
its content.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, TypedDict

import ml_dtypes
import numpy as np
import numpy.typing as npt

from extensor.schema import FileError, SchemaError, check, parse_json

__all__ = [
    "DTYPES", "PACKED_DTYPES", "CheckpointError", "Entry", "as_array", "check_array_shape",
    "parse_header", "read", "write",
]  # fmt: skip

Array = npt.NDArray[Any]

METADATA_KEY = "__metadata__"
_MAX_HEADER = 100_000_000  # bytes, as in the safetensors library
_MAX_AXES = 64  # numpy's

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

PACKED_DTYPES = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Dtypes whose codes are packed, the first in the lowest bits, and their bits."""


class _Fields(TypedDict):
    dtype: str
    shape: list[int]
    data_offsets: list[int]


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


class CheckpointError(FileError, ValueError):
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
    from safetensors import SafetensorError, TensorSpec, serialize  # reading does without it

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
        content = np.frombuffer(file.read(), np.uint8)
    try:
        entries, metadata = parse_header(content, DTYPES)
        return {name: as_array(name, entry, content) for name, entry in entries.items()}, metadata
    except CheckpointError as error:
        raise CheckpointError(
            f"{os.fspath(path)}: {error}. Nothing was loaded; use an intact safetensors file"
        ) from None


_OTHER_KINDS = {
    b"PK": "a zip archive, as .npz files and those of torch.save are",
    b"\x80": "a pickle, as old files of torch.save are",
    b"GGUF": "a GGUF file, whose name must end in .gguf",
    b"\x93NUMPY": "a .npy file",
    b"version https://git-lfs": "a pointer of Git LFS; `git lfs pull` gets the file",
}
"""What is often taken for a safetensors file, by its first bytes."""


def parse_header(
    content: Array, dtypes: Mapping[str, Any]
) -> tuple[dict[str, Entry], dict[str, str]]:
    """Where each tensor lies, and the metadata: all that the header says, checked.

    Args:
        content: the file's bytes, uint8.
        dtypes: the names of the dtypes that are expected.

    Returns:
        Entries by name, which tile the file, and the metadata strings.

    Raises:
        CheckpointError: for any other header; the text does not name the file.
    """
    size = content.size
    if size < 8:
        raise CheckpointError(f"truncated: expected 8 bytes and a header, got {size} bytes")
    length = int.from_bytes(content[:8].tobytes(), "little")
    if length > min(size - 8, _MAX_HEADER):
        head = content[:32].tobytes()
        for start, kind in _OTHER_KINDS.items():
            if head.startswith(start):
                raise CheckpointError(f"expected a safetensors file, got {kind}")
        other = "not a safetensors file" if length > _MAX_HEADER else "truncated or damaged"
        raise CheckpointError(f"{other}: a header of {length} bytes in {size}")
    base = 8 + length
    try:
        header = check(parse_json(content[8:base].tobytes()), dict[str, Any])
        metadata = check(header.pop(METADATA_KEY, {}), dict[str, str], METADATA_KEY)
        entries = {name: _entry(name, value, base, dtypes) for name, value in header.items()}
    except SchemaError as error:
        raise CheckpointError(f"bad header: {error}") from None
    at = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != at:
            raise CheckpointError(
                f"bad header: {name!r} starts at byte {entry.start}, expected {at}: tensors "
                "overlap or leave a gap"
            )
        if entry.end > size:
            raise CheckpointError(
                f"truncated: {name!r} ends {entry.end - base} bytes after the header, the file "
                f"has {size - base}"
            )
        at = entry.end
    if at != size:
        raise CheckpointError(f"damaged: {size - at} bytes after the last tensor")
    return entries, metadata


def _entry(name: str, value: Any, base: int, dtypes: Mapping[str, Any]) -> Entry:
    fields = check(value, _Fields, repr(name))
    if fields.keys() != _Fields.__required_keys__ or len(fields["data_offsets"]) != 2:
        raise SchemaError(f"{name!r}: expected dtype, shape and data_offsets, got {fields!s:.80}")
    dtype, shape, (start, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
    if dtype not in dtypes:
        raise SchemaError(f"{name!r}: expected a dtype in {', '.join(dtypes)}, got {dtype!r:.40}")
    if min(*shape, start, end) < 0:
        raise SchemaError(f"{name!r}: expected numbers of 0 or more, got {[*shape, start, end]}")
    check_array_shape(repr(name), shape)
    bits = PACKED_DTYPES.get(dtype) or 8 * DTYPES[dtype].itemsize
    if shape and shape[-1] * bits % 8:
        raise SchemaError(f"{name!r}: expected rows of whole bytes, got {dtype} of shape {shape}")
    total = math.prod(shape) * bits
    if total % 8 or end - start != total // 8:
        raise SchemaError(
            f"{name!r}: {dtype} of shape {tuple(shape)} takes {total / 8:g} bytes, the header "
            f"gives {end - start}"
        )
    return Entry(dtype, tuple(shape), base + start, base + end)


def check_array_shape(what: str, shape: Sequence[int]) -> None:
    """Refuse a shape that numpy has no array for, even an empty one.

    Args:
        what: has the shape, for the error.
        shape: ints of 0 or more.

    Raises:
        SchemaError: for more than 64 axes, or lengths whose product does not fit 63 bits.
    """
    if len(shape) > _MAX_AXES:
        raise SchemaError(f"{what}: expected at most {_MAX_AXES} axes, got {len(shape)}")
    if 16 * math.prod(n or 1 for n in shape) >= 1 << 63:
        raise SchemaError(f"{what}: shape {tuple(shape)} is beyond any memory's addresses")


def as_array(name: str, entry: Entry, content: Array) -> Array:
    """A tensor of `DTYPES`, copied.

    Args:
        name: the tensor's.
        entry: where it lies.
        content: the file's bytes.

    Raises:
        CheckpointError: for BOOL bytes other than 0 and 1.
    """
    raw = np.array(content[entry.start : entry.end])
    if entry.dtype == "BOOL" and raw.size and raw.max() > 1:
        raise CheckpointError(f"{name!r}: expected BOOL bytes 0 or 1, got {raw.max()}")
    return raw.view(DTYPES[entry.dtype]).reshape(entry.shape)


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
