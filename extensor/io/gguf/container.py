"""The GGUF container, version 2 and 3: metadata, and tensors on the file's pages.

Every count and offset is checked against the file's length before anything is allocated. The `gguf`
package's reader does not check them, and would be a dependency of every user who reads a file; so
the container, 200 lines, is read and written here, and tests compare it with that package.

Source: ggml's docs/gguf.md.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np
import numpy.typing as npt

from extensor.io.gguf.types import GGUF_TYPES, UNREADABLE_GGUF_TYPES, GgufType
from extensor.io.pages import FilePages
from extensor.io.safetensors_format import CheckpointError, check_array_shape
from extensor.quant.array import QuantArray
from extensor.schema import SchemaError

__all__ = ["GgufFile", "GgufTensor", "Texts", "Typed", "write_gguf"]

Array = npt.NDArray[Any]

_MAGIC = b"GGUF"
_NUMBERS = {  # number of a value type: struct code, numpy's dtype
    0: ("B", "u1"), 1: ("b", "i1"), 2: ("H", "<u2"), 3: ("h", "<i2"), 4: ("I", "<u4"),
    5: ("i", "<i4"), 6: ("f", "<f4"), 7: ("?", "?"), 10: ("Q", "<u8"), 11: ("q", "<i8"),
    12: ("d", "<f8"),
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
_OF_NUMBER = {row.number: row for row in GGUF_TYPES.values()}
_MAX_AXES, _MAX_DEPTH = 4, 4


@dataclass(frozen=True)
class Typed:
    """A metadata value with the type that it has in a file, as ggml's readers want some of them.

    Attributes:
        kind: GGUF's number of the value's type, or of an array's elements.
        value: the value.
    """

    kind: int
    value: Any


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies.

    Attributes:
        type: its row; None where there is none.
        type_name: ggml's name of the type.
        shape: rows along the last axis.
        start: its first byte in the file.
    """

    type: GgufType | None
    type_name: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file; 0 for a type without a row."""
        return 0 if self.type is None else self.type.nbytes(self.shape)


class Texts(Sequence[str]):
    r"""An array of strings of a file: its bytes, each decoded when it is asked for.

    A vocabulary of 49,152 tokens takes 1.1 MB; as a list of Python's strings it takes 4.

    Args:
        content: each string's length in 8 bytes, then the string in UTF-8.
        starts: where each string begins, after its length.

    >>> from extensor.io.gguf import Texts
    >>> import numpy as np
    >>> Texts(b"\x01" + bytes(7) + b"a", np.array([8])) == ["a"]
    True
    """

    def __init__(self, content: bytes, starts: npt.NDArray[np.int64]) -> None:
        self._content, self._starts = content, starts

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._text(start) for start in self._starts[index].tolist()]
        return self._text(int(self._starts[index]))

    def __iter__(self) -> Iterator[str]:
        return map(self._text, self._starts.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Texts, list, tuple)) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def _text(self, start: int) -> str:
        (length,) = struct.unpack_from("<Q", self._content, start - 8)
        return self._content[start : start + length].decode("utf-8")


class GgufFile:
    """A GGUF file: metadata and tensors by name.

    Args:
        path: the file.

    Attributes:
        path: the file.
        metadata: values by key: numbers, strings, `Texts`, and numpy arrays of numbers.
        kinds: GGUF's number of the type of each value, of an array's elements.
        tensors: where each tensor lies, by name, in the file's order.

    Raises:
        FileNotFoundError: if there is no such file.
        CheckpointError: if the file is truncated or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._size = self.path.stat().st_size
        with open(self.path, "rb") as file:
            start = file.read(4)
        if start != _MAGIC:
            raise self._error(f"not a GGUF file: expected it to start with GGUF, got {start!r}")
        if self._size < 24:
            raise self._cut(f"expected 24 bytes or more, got {self._size}")
        self._pages = FilePages(self.path)
        self._content: Array = self._pages.bytes
        self._at = 4
        version, tensors, values = self._number(4), self._number(10), self._number(10)
        if version not in (2, 3):
            raise self._error(
                f"expected version 2 or 3, little-endian, got {version}; convert it with llama.cpp"
            )
        # A tensor takes 24 bytes of header or more, a value 13.
        if 24 * tensors + 13 * values > self._size:
            raise self._cut(f"{tensors} tensors and {values} values in {self._size} bytes")
        self.metadata: dict[str, Any] = {}
        self.kinds: dict[str, int] = {}
        for _ in range(values):
            self._read_value()
        self.tensors = self._read_tensors(tensors)

    def read(self, name: str, index: int | None = None) -> Array | QuantArray:
        """One tensor, copied from the file.

        Args:
            name: the tensor's.
            index: of a slice along the first axis, which alone is copied; None for the tensor.

        Raises:
            CheckpointError: for a type without a row, and for content that cannot be stored.
        """
        tensor = self.tensors[name]
        if tensor.type is None:
            raise self._error(
                f"{name!r} is of type {tensor.type_name}, which is not supported; requantize it "
                f"to one of {', '.join(GGUF_TYPES)}"
            )
        start, shape = tensor.start, tensor.shape
        if index is not None:
            if len(shape) < 2 or not 0 <= index < shape[0]:
                raise IndexError(f"{name}: expected an index of a stack of shape {shape}: {index}")
            shape = shape[1:]
            start += index * tensor.type.nbytes(shape)
        content = self._content[start : start + tensor.type.nbytes(shape)]
        try:
            return tensor.type.read(content, shape)
        except ValueError as error:
            raise self._error(f"{name!r}: {error}") from None
        finally:
            self._pages.let_go()  # a model's tensors and their file would take twice its size

    def _error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {text}")

    def _cut(self, text: str) -> CheckpointError:
        return self._error(f"truncated or damaged: {text}. Nothing was loaded; use an intact file")

    def _take(self, size: int) -> bytes:
        if size > self._size - self._at:
            raise self._cut(f"{size} bytes expected at byte {self._at} of {self._size}")
        self._at += size
        return self._content[self._at - size : self._at].tobytes()

    def _number(self, kind: int) -> Any:
        code = "<" + _NUMBERS[kind][0]
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def _text(self) -> str:
        try:
            return self._take(self._number(10)).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._error(f"damaged: {error}") from None

    def _read_value(self) -> None:
        key, kind = self._text(), self._number(4)
        if key in self.metadata:
            raise self._error(f"damaged: the key {key!r} twice")
        if kind == _ARRAY:
            kind, self.metadata[key] = self._array()
        else:
            self.metadata[key] = self._value(kind)
        self.kinds[key] = kind

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind not in _NUMBERS:
            raise self._error(f"damaged: a value of type {kind} before byte {self._at}")
        return self._number(kind)

    def _array(self, depth: int = 0) -> tuple[int, Any]:
        kind, count = self._number(4), self._number(10)
        if kind in _NUMBERS:
            dtype = np.dtype(_NUMBERS[kind][1])
            return kind, np.frombuffer(self._take(count * dtype.itemsize), dtype)
        if depth > _MAX_DEPTH or 8 * count > self._size - self._at:
            raise self._error(f"damaged: an array of {count} values before byte {self._at}")
        if kind == _ARRAY:
            return kind, [self._array(depth + 1)[1] for _ in range(count)]
        if kind != _STRING:
            raise self._error(f"damaged: a value of type {kind} before byte {self._at}")
        begin, starts = self._at, np.empty(count, np.int64)
        for number in range(count):
            length = len(self._take(self._number(10)))
            starts[number] = self._at - length - begin
        texts = Texts(self._content[begin : self._at].tobytes(), starts)
        try:
            for _ in texts:
                pass
        except UnicodeDecodeError as error:
            raise self._error(f"damaged: {error}") from None
        return kind, texts

    def _read_tensors(self, count: int) -> dict[str, GgufTensor]:
        found = []
        for _ in range(count):
            name, axes = self._text(), self._number(4)
            if axes > _MAX_AXES:
                raise self._error(f"damaged: {name!r} with {axes} axes")
            shape = tuple(self._number(10) for _ in range(axes))[::-1]
            try:
                check_array_shape(repr(name), shape)
            except SchemaError as error:
                raise self._error(f"damaged: {error}") from None
            found.append((name, shape, self._number(4), self._number(10)))
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._error(f"damaged: general.alignment of {alignment!r}")
        base = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, number, offset in found:
            row = _OF_NUMBER.get(number)
            text = row.name if row else UNREADABLE_GGUF_TYPES.get(number, f"number {number}")
            tensor = GgufTensor(row, text, shape, base + offset)
            try:
                end = tensor.start + tensor.nbytes
            except ValueError as error:
                raise self._error(f"damaged: {name!r}: {error}") from None
            if name in tensors or end > self._size or tensor.start % alignment:
                why = "is there twice" if name in tensors else f"ends at byte {end} of {self._size}"
                if tensor.start % alignment:
                    why = f"begins at byte {tensor.start}, expected a multiple of {alignment}"
                raise self._cut(f"{name!r}, {text} of shape {shape}, {why}")
            tensors[name] = tensor
        return tensors


def write_gguf(
    file: BinaryIO,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[GgufType, tuple[int, ...]]],
    contents: Iterable[tuple[str, Array]],
) -> None:
    """Write a GGUF file of version 3, one tensor in memory at a time.

    Args:
        file: open for writing, at its start.
        metadata: numbers, strings, and lists or arrays of one kind; `Typed` where the type matters.
        tensors: type and shape by name, in the order of the file.
        contents: name and bytes (uint8) of each tensor, in that order.

    Raises:
        TypeError, ValueError: for a value that has no type, or bytes that are not the tensor's.
    """
    head = bytearray(_MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        head += _string(key) + _encoded(key, value)
    alignment, offset = 32, 0
    for name, (row, shape) in tensors.items():
        head += _string(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", row.number, offset)
        offset += -(-row.nbytes(shape) // alignment) * alignment
    file.write(head + bytes(-len(head) % alignment))
    expected = iter(tensors.items())
    for name, content in contents:
        planned, (row, shape) = next(expected)
        if planned != name or content.nbytes != row.nbytes(shape):
            raise ValueError(f"{name}: expected {row.nbytes(shape)} bytes of {planned}")
        file.write(np.ascontiguousarray(content).data)
        file.write(bytes(-content.nbytes % alignment))
    if (left := next(expected, None)) is not None:
        raise ValueError(f"{left[0]}: expected its bytes, got none")


def _string(text: str) -> bytes:
    content = text.encode("utf-8")
    return struct.pack("<Q", len(content)) + content


def _encoded(key: str, value: Any) -> bytes:
    """The type and the bytes of a value."""
    kind, value = (value.kind, value.value) if isinstance(value, Typed) else (None, value)
    if isinstance(value, (list, tuple, Texts, np.ndarray)):
        kind = _kind(key, value[0] if len(value) else "") if kind is None else kind
        if isinstance(value, np.ndarray):
            content = np.ascontiguousarray(value, _NUMBERS[kind][1]).tobytes()
        else:
            content = b"".join(_plain(key, kind, item) for item in value)
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + content
    kind = _kind(key, value) if kind is None else kind
    return struct.pack("<I", kind) + _plain(key, kind, value)


def _plain(key: str, kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return _string(value)
    if kind not in _NUMBERS:
        raise TypeError(f"{key}: nested arrays cannot be written")
    return struct.pack("<" + _NUMBERS[kind][0], value)


def _kind(key: str, value: Any) -> int:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, str):
        return _STRING
    if isinstance(value, float):
        return 6
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        if value < 0:
            return 5 if value >= -(2**31) else 11
        return 4 if value < 2**32 else 10
    raise TypeError(f"{key}: expected a number, a string or a list of them, got {value!r:.60}")
