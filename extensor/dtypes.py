"""Data types: dense ones, a blocked one for each format, and type promotion.

Promotion of dense dtypes follows the Python Array API standard (2025.12, "Type Promotion Rules"),
with rules of its own where the standard has none: an integer and a float give the float, float16
and bfloat16 give float32, and a Python scalar changes an array's kind but never its width (an
integer array and a float scalar give float32, a float32 array and a complex scalar complex64).
Blocked operands compute in float32. Complex tensors serve the standard's functions and have no
gradients.
"""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from extensor.errors import unknown_name
from extensor.formats import ELEMENTS, FORMATS, BlockFormat

__all__ = [
    "BLOCKED",
    "DENSE",
    "DType",
    "DTypeLike",
    "as_dtype",
    "bfloat16",
    "blocked",
    "bool_",
    "complex64",
    "complex128",
    "compute_dtype",
    "dtype_of",
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "promote",
    "scalar_dtype",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]

_BOOL, _INT, _FLOAT, _COMPLEX, _BLOCKED = "bool", "int", "float", "complex", "blocked"

# Levels of dtypes that need more work; a primitive states the level that it handles itself.
LEVEL_FLOAT, LEVEL_OTHER, LEVEL_HALF, LEVEL_BLOCKED = range(4)


@dataclass(frozen=True, eq=False)
class DType:
    """One data type. Rows are unique, so that ``==`` is identity and compares the format.

    Attributes:
        name: its name, as in ``et.float32``.
        kind: ``"bool"``, ``"int"`` (signed or not), ``"float"``, ``"complex"`` or ``"blocked"``.
        numpy: the numpy dtype of a dense array; None for a blocked one.
        format: the row of `FORMATS` of a blocked dtype; None for a dense one.
        level: 0 float32 and float64, which every op computes in; 1 integers and bool; 2 the 16-bit
            floats, computed in float32; 3 blocked. Complex numbers are at 1.

    Example:
        >>> et.bfloat16.kind, et.bfloat16.itemsize, et.mxfp4.format.element.name
        ('float', 2, 'e2m1')
    """

    name: str
    kind: str
    numpy: np.dtype[Any] | None
    format: BlockFormat | None = None
    level: int = LEVEL_OTHER

    @property
    def is_blocked(self) -> bool:
        """True if values are stored as codes and scales."""
        return self.format is not None

    @property
    def is_float(self) -> bool:
        """True for the dense floating-point types, complex ones excluded."""
        return self.kind == _FLOAT

    @property
    def is_complex(self) -> bool:
        """True for the complex types."""
        return self.kind == _COMPLEX

    @property
    def is_inexact(self) -> bool:
        """True for floats and complex numbers, the results of divisions and roots."""
        return self.kind in (_FLOAT, _COMPLEX)

    @property
    def is_integer(self) -> bool:
        """True for the integer types, bool excluded."""
        return self.kind == _INT

    @property
    def itemsize(self) -> int:
        """Bytes per element of a dense dtype.

        Raises:
            TypeError: for a blocked dtype; its size depends on the block, see
                ``dtype.format.bits_per_element()``.
        """
        if self.numpy is None:
            raise TypeError(
                f"{self.name} has no size per element; see its format.bits_per_element(tile)"
            )
        return self.numpy.itemsize

    def __repr__(self) -> str:
        return f"extensor.{self.name}"

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return as_dtype, (self.name,)


DTypeLike = DType | str | np.dtype[Any] | type
"""What `as_dtype` accepts."""


def _dense(name: str, kind: str, scalar_type: Any, level: int = LEVEL_OTHER) -> DType:
    return DType(name, kind, np.dtype(scalar_type), level=level)


bool_ = _dense("bool", _BOOL, np.bool_)
int8 = _dense("int8", _INT, np.int8)
int16 = _dense("int16", _INT, np.int16)
int32 = _dense("int32", _INT, np.int32)
int64 = _dense("int64", _INT, np.int64)
uint8 = _dense("uint8", _INT, np.uint8)
uint16 = _dense("uint16", _INT, np.uint16)
uint32 = _dense("uint32", _INT, np.uint32)
uint64 = _dense("uint64", _INT, np.uint64)
float16 = _dense("float16", _FLOAT, np.float16, LEVEL_HALF)
bfloat16 = _dense("bfloat16", _FLOAT, ml_dtypes.bfloat16, LEVEL_HALF)
float32 = _dense("float32", _FLOAT, np.float32, LEVEL_FLOAT)
float64 = _dense("float64", _FLOAT, np.float64, LEVEL_FLOAT)
complex64 = _dense("complex64", _COMPLEX, np.complex64)
complex128 = _dense("complex128", _COMPLEX, np.complex128)

_INTEGERS = (int8, int16, int32, int64, uint8, uint16, uint32, uint64)
_ROWS = (bool_, *_INTEGERS, float16, bfloat16, float32, float64, complex64, complex128)

DENSE: MappingProxyType[str, DType] = MappingProxyType({row.name: row for row in _ROWS})
"""Every dense dtype, by name."""


def _blocked(row: BlockFormat) -> DType:
    # A format named after its element (int8, int4) would hide the dense dtype of that name.
    clash = row.name == row.element.name
    return DType(f"{row.name}_blocked" if clash else row.name, _BLOCKED, None, row, LEVEL_BLOCKED)


BLOCKED: MappingProxyType[str, DType] = MappingProxyType(
    {dtype.name: dtype for dtype in map(_blocked, FORMATS.values())}
)
"""Every blocked dtype, by dtype name (``int8_blocked`` for the format ``int8``)."""

_OF_FORMAT = {dtype.format.name: dtype for dtype in BLOCKED.values() if dtype.format}
_OF_NUMPY = {dtype.numpy: dtype for dtype in DENSE.values() if dtype.numpy is not None}


def blocked(format_name: str) -> DType:
    """The blocked dtype of a row of `FORMATS`.

    Args:
        format_name: a key of the table.

    Returns:
        The dtype.

    Raises:
        ValueError: if there is no such format.

    Example:
        >>> from extensor.dtypes import blocked
        >>> blocked("int8")
        extensor.int8_blocked
    """
    if format_name not in _OF_FORMAT:
        raise ValueError(unknown_name("format", format_name, _OF_FORMAT))
    return _OF_FORMAT[format_name]


def dtype_of(data: Any) -> DType:
    """The dtype of a raw array or of a QuantArray.

    Args:
        data: an array of a device's array module, or a QuantArray.

    Returns:
        Its dtype.

    Raises:
        TypeError: if the array holds something that is no extensor dtype (strings, dates, ...).

    Example:
        >>> from extensor.dtypes import dtype_of
        >>> dtype_of(et.zeros(3).numpy())
        extensor.float32
    """
    try:
        return _OF_NUMPY[data.dtype]
    except AttributeError:
        return _OF_FORMAT[data.spec.format]
    except KeyError:
        native = data.dtype.newbyteorder("=") if data.dtype.isbuiltin != 1 else data.dtype
        if native in _OF_NUMPY and native != data.dtype:
            raise TypeError(
                f"an array of {data.dtype.str!r} is not in this machine's byte order; "
                "pass array.astype(array.dtype.newbyteorder('='))"
            ) from None
        raise TypeError(unknown_name("dtype", str(data.dtype), DENSE)) from None


def as_dtype(dtype: DTypeLike) -> DType:
    """The dtype that a name, a numpy dtype or a Python type stands for.

    Args:
        dtype: a DType, a name, a numpy dtype or a numpy or Python scalar type.

    Returns:
        The dtype.

    Raises:
        TypeError: for an element grid or a narrow float, which cannot hold a tensor without scales,
            and for anything that is no dtype.
        ValueError: for a name that is in no table.

    Example:
        >>> from extensor.dtypes import as_dtype
        >>> as_dtype("mxfp4"), as_dtype(float)
        (extensor.mxfp4, extensor.float32)
    """
    if isinstance(dtype, DType):
        return dtype
    if isinstance(dtype, str):
        name = {"bool_": "bool"}.get(dtype, dtype)
        if name in DENSE:
            return DENSE[name]
        if name in BLOCKED:
            return BLOCKED[name]
        _refuse_element(name)
        raise ValueError(unknown_name("dtype", dtype, [*DENSE, *BLOCKED]))
    python = {builtins.bool: bool_, int: int64, float: float32, complex: complex64}
    if isinstance(dtype, type) and dtype in python:
        return python[dtype]
    try:
        row = np.dtype(dtype)
    except TypeError:
        raise TypeError(
            f"dtype: expected an extensor dtype, a name or a numpy dtype, got {dtype!r}"
        ) from None
    if row in _OF_NUMPY:
        return _OF_NUMPY[row]
    _refuse_element(row.name)
    raise TypeError(unknown_name("dtype", row.name, DENSE))


def _refuse_element(name: str) -> None:
    """Refuse a bare element grid: without a scale almost every value would clamp or vanish."""
    # ml_dtypes spells an element float4_e2m1fn or float8_e4m3fn; int4 is its own name.
    spelled = name.rpartition("_")[2]
    element = next((e for e in (name, spelled, spelled.removesuffix("fn")) if e in ELEMENTS), None)
    if element is None:
        return
    rows = [d for d in BLOCKED.values() if d.format and d.format.element.name == element]
    method = rows[0].name.partition("_")[0]
    raise TypeError(
        f"{name} has no scale of its own, so a direct cast would clamp or flush most values; "
        f"use x.to_{method}() or a blocked dtype ({', '.join(f'et.{d.name}' for d in rows)}). "
        "To study the cast itself, quantize with scale_rule='one'"
    )


def _promote(a: DType, b: DType) -> DType:
    if a is b and not a.is_blocked:
        return a
    if a.is_blocked or b.is_blocked:
        other = b if a.is_blocked else a
        return other if other in (float64, complex64, complex128) else float32
    if a.is_complex or b.is_complex:
        return complex128 if {a, b} & {float64, complex128} else complex64
    if a.kind == b.kind == _FLOAT and LEVEL_HALF == a.level == b.level:
        return float32
    if a.is_float != b.is_float:
        return a if a.is_float else b
    assert a.numpy is not None and b.numpy is not None
    common = np.promote_types(a.numpy, b.numpy)
    if common not in _OF_NUMPY or (common == np.float64 and float64 not in (a, b)):
        raise TypeError(
            f"{a.name} and {b.name} have no common integer type; convert one with x.astype(...)"
        )
    return _OF_NUMPY[common]


_PROMOTION: dict[tuple[DType, DType], DType] = {}


def promote(a: DType, b: DType) -> DType:
    """The dtype that an operation on two dtypes computes in and returns; see `extensor.dtypes`.

    Args:
        a: a dtype.
        b: another.

    Returns:
        Their common dtype.

    Raises:
        TypeError: for uint64 with a signed integer, which have no common type.

    Example:
        >>> et.promote(et.int8, et.float32), et.promote(et.mxfp4, et.nvfp4)
        (extensor.float32, extensor.float32)
    """
    pair = (a, b)
    if pair not in _PROMOTION:
        _PROMOTION[pair] = _promote(a, b)
    return _PROMOTION[pair]


def scalar_dtype(scalar: object, other: DType) -> DType:
    """The dtype of a Python scalar in an operation with a tensor.

    Args:
        scalar: a bool, an int, a float or a complex number.
        other: the tensor's dtype.

    Returns:
        The dtype that the scalar takes.

    Example:
        >>> from extensor.dtypes import scalar_dtype
        >>> scalar_dtype(2, et.bfloat16), scalar_dtype(2.0, et.int8)
        (extensor.bfloat16, extensor.float32)
    """
    if isinstance(scalar, complex):
        return promote(other, complex64)
    if isinstance(scalar, builtins.bool):
        return other if not other.is_blocked else float32
    if isinstance(scalar, int):
        return int64 if other.kind == _BOOL else float32 if other.is_blocked else other
    return other if other.is_inexact else float32


def compute_dtype(dtype: DType) -> DType:
    """The dtype to compute a result in: float32 for 16-bit floats and blocked dtypes.

    Args:
        dtype: of the result.

    Returns:
        The dtype to compute in.

    Example:
        >>> from extensor.dtypes import compute_dtype
        >>> compute_dtype(et.bfloat16), compute_dtype(et.float64)
        (extensor.float32, extensor.float64)
    """
    return float32 if dtype.level >= LEVEL_HALF else dtype
