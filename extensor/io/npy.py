"""numpy's .npy and .npz files, read with their headers compared with the bytes that are there."""

from __future__ import annotations

import ast
import contextlib
import math
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

import numpy as np
import numpy.typing as npt

from extensor.io.safetensors_format import CheckpointError, check_array_shape
from extensor.schema import SchemaError, check

__all__ = ["ZIP_ERRORS", "read_npy", "read_npz"]

Array = npt.NDArray[Any]

_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 10_000  # numpy's
_KINDS = "biufc"
_FREE, _RATIO = 1 << 26, 100
"""More bytes than the first must not unpack to more than so many times what they are packed in."""

ZIP_ERRORS: tuple[type[Exception], ...] = (
    zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError,
)  # fmt: skip
"""What zipfile raises for damage, encryption and unknown compression."""
with contextlib.suppress(ImportError):  # some Pythons are built without
    from lzma import LZMAError

    ZIP_ERRORS += (LZMAError,)


class _Header(TypedDict):
    descr: str
    fortran_order: bool


def read_npy(path: Path) -> Array:
    """The array of a .npy file.

    Args:
        path: the file.

    Returns:
        A fresh array.

    Raises:
        OSError: if the file cannot be read.
        CheckpointError: if it is damaged, or holds something else than numbers.

    >>> import numpy as np, pathlib, tempfile
    >>> from extensor.io.npy import read_npy
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "x.npy"
    ...     np.save(path, np.arange(3))
    ...     read_npy(path)
    array([0, 1, 2])
    """
    with path.open("rb") as file:
        try:
            return _array(file, path.stat().st_size)
        except SchemaError as error:
            raise CheckpointError(f"{path}: {error}") from None


def read_npz(path: Path) -> dict[str, Array]:
    """The arrays of a .npz file, by name.

    Args:
        path: the file.

    Returns:
        Fresh arrays.

    Raises:
        OSError: if the file cannot be read.
        CheckpointError: if it is damaged, holds something else than arrays of numbers, or unpacks
            to more than 64 MB and a hundred times its size.

    >>> import numpy as np, pathlib, tempfile
    >>> from extensor.io.npy import read_npz
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "x.npz"
    ...     np.savez(path, a=np.arange(3))
    ...     read_npz(path)
    {'a': array([0, 1, 2])}
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            total = sum(member.file_size for member in members)
            if total > max(_FREE, _RATIO * path.stat().st_size):
                raise SchemaError(
                    f"expected at most {_RATIO} times the file's size, got {total:,} bytes to "
                    "unpack; numpy.savez without compression writes a file that is read"
                )
            arrays = {}
            for member in members:
                name = member.filename.removesuffix(".npy")
                if name in arrays:
                    raise SchemaError(f"expected each name once, got {name!r} twice")
                with archive.open(member) as file:
                    arrays[name] = _array(file, member.file_size, f"{name!r}: ")
            return arrays
    except SchemaError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except ZIP_ERRORS as error:
        raise CheckpointError(f"{path}: expected a whole .npz file, got: {error}") from None


def _array(file: Any, size: int, what: str = "") -> Array:
    """The array of an open .npy file of so many bytes."""
    start = _exactly(file, 8, what)
    if start[:6] != _MAGIC or start[6] not in (1, 2, 3):
        raise SchemaError(f"{what}expected numpy's {_MAGIC!r} and version 1 to 3, got {start!r}")
    width = 2 if start[6] == 1 else 4
    length = int.from_bytes(_exactly(file, width, what), "little")
    if length > _MAX_HEADER:
        raise SchemaError(f"{what}expected a header of {_MAX_HEADER} bytes or less, got {length}")
    dtype, order, shape = _header(_exactly(file, length, what), what)
    expected, left = math.prod(shape) * dtype.itemsize, size - 8 - width - length
    if left != expected:
        raise SchemaError(
            f"{what}expected {expected:,} bytes for {dtype} of shape {shape}, got {left:,}"
        )
    raw = np.empty(expected, np.uint8)
    view, at = raw.data, 0
    while at < expected and (got := file.readinto(view[at:])):
        at += got
    if at < expected or file.read(1):
        raise SchemaError(f"{what}expected {expected:,} bytes, got {at:,}: cut off or damaged")
    return raw.view(dtype).reshape(shape, order=order)


def _header(text: bytes, what: str) -> tuple[np.dtype[Any], Any, tuple[int, ...]]:
    try:
        with warnings.catch_warnings(action="ignore"):  # of Python's parser, about odd literals
            literal = ast.literal_eval(text.decode("utf-8").strip())
        fields = check(literal, dict[str, Any])
        shape = fields.pop("shape", None)
        if type(shape) is not tuple or not all(type(n) is int and n >= 0 for n in shape):
            raise SchemaError(f"shape: expected whole numbers of 0 or more, got {shape!r:.60}")
        check(fields, _Header)
        dtype = np.dtype(fields["descr"])
        check_array_shape("shape", shape)
    # What Python's parser raises for text that is no literal, or nested too deep.
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise SchemaError(f"{what}bad header: {error or type(error).__name__}") from None
    if dtype.kind not in _KINDS or dtype.itemsize > 16:
        raise SchemaError(f"{what}expected an array of numbers, got {dtype}")
    return dtype, "F" if fields["fortran_order"] else "C", shape


def _exactly(file: BinaryIO, size: int, what: str) -> bytes:
    content = file.read(size)
    if len(content) < size:
        raise SchemaError(f"{what}expected a .npy file, got one that is cut off")
    return content
