"""The standard's inspection functions (Python Array API 2025.12): dtypes, limits, capabilities."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np

from extensor.autograd.tensor import ExTensor
from extensor.backends import registry
from extensor.dtypes import (
    DENSE,
    DType,
    DTypeLike,
    as_dtype,
    bool_,
    complex64,
    complex128,
    float32,
    float64,
    int64,
    promote,
    scalar_dtype,
)

__all__ = [
    "__array_api_version__", "__array_namespace_info__", "asarray", "can_cast", "finfo", "iinfo",
    "isdtype", "result_type",
]  # fmt: skip

__array_api_version__ = "2025.12"


@dataclass(frozen=True)
class FloatLimits:
    """What `finfo` says: bits, and the limits as Python numbers."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType


@dataclass(frozen=True)
class IntegerLimits:
    """What `iinfo` says."""

    bits: int
    max: int
    min: int
    dtype: DType


def _dtype(type: Any) -> DType:
    return type.dtype if isinstance(type, ExTensor) else as_dtype(type)


def finfo(type: DTypeLike | ExTensor, /) -> FloatLimits:
    """The limits of a float dtype, of a complex one's parts, or of a tensor's dtype.

    Args:
        type: a dtype, its name, or a tensor.

    Returns:
        A record of ``bits``, ``eps``, ``max``, ``min``, ``smallest_normal`` and ``dtype``.

    Raises:
        TypeError: for a dtype that is not of floats.

    Example:
        >>> et.finfo(et.bfloat16).eps
        0.0078125
    """
    dtype = _dtype(type)
    if not dtype.is_inexact:
        raise TypeError(f"finfo: expected a float dtype, got {dtype.name}")
    dtype = {complex64: float32, complex128: float64}.get(dtype, dtype)
    limits: Any = ml_dtypes.finfo
    f = limits(dtype.numpy)
    eps, top, least, normal = (float(v) for v in (f.eps, f.max, f.min, f.smallest_normal))
    return FloatLimits(int(f.bits), eps, top, least, normal, dtype)


def iinfo(type: DTypeLike | ExTensor, /) -> IntegerLimits:
    """The limits of an integer dtype, or of a tensor's.

    Args:
        type: a dtype, its name, or a tensor.

    Returns:
        A record of ``bits``, ``max``, ``min`` and ``dtype``.

    Raises:
        TypeError: for a dtype that is not of integers.

    Example:
        >>> et.iinfo("int8").max
        127
    """
    dtype = _dtype(type)
    if not dtype.is_integer:
        raise TypeError(f"iinfo: expected an integer dtype, got {dtype.name}")
    i = np.iinfo(dtype.numpy)
    return IntegerLimits(i.bits, int(i.max), int(i.min), dtype)


_KINDS = {
    "bool": {"bool"},
    "signed integer": {"int8", "int16", "int32", "int64"},
    "unsigned integer": {"uint8", "uint16", "uint32", "uint64"},
    "real floating": {"float16", "bfloat16", "float32", "float64"},
    "complex floating": {"complex64", "complex128"},
}
_KINDS["integral"] = _KINDS["signed integer"] | _KINDS["unsigned integer"]
_KINDS["numeric"] = _KINDS["integral"] | _KINDS["real floating"] | _KINDS["complex floating"]


def isdtype(dtype: DTypeLike, kind: DTypeLike | tuple[DTypeLike, ...]) -> bool:
    """Whether a dtype is of a kind.

    Args:
        dtype: the dtype to ask about.
        kind: a dtype, a standard name such as "integral" or "real floating", or a tuple of them.

    Returns:
        True if the dtype is one of the kinds.

    Raises:
        ValueError: for a name that is neither a dtype nor a kind.

    Example:
        >>> et.isdtype(et.int8, "integral"), et.isdtype(et.int8, (et.int16, "bool"))
        (True, False)
    """
    if isinstance(kind, tuple):
        return any(isdtype(dtype, k) for k in kind)
    row = as_dtype(dtype)
    if isinstance(kind, str) and kind in _KINDS:
        return row.name in _KINDS[kind]
    return row is as_dtype(kind)


def result_type(*arrays_and_dtypes: Any) -> DType:
    """The dtype that an operation on the given operands returns.

    Args:
        arrays_and_dtypes: tensors, dtypes and Python numbers; numbers change the kind alone.

    Returns:
        The promoted dtype.

    Raises:
        TypeError: for uint64 with a signed integer, which have no common type.
        ValueError: without a tensor or dtype.

    Example:
        >>> et.result_type(et.int8, 1.5), et.result_type(et.float16, et.bfloat16)
        (extensor.float32, extensor.float32)
    """
    numbers = [v for v in arrays_and_dtypes if isinstance(v, (int, float, complex))]
    rows = [_dtype(v) for v in arrays_and_dtypes if not isinstance(v, (int, float, complex))]
    if not rows:
        raise ValueError("result_type: expected a tensor or dtype among the arguments, got none")
    common = reduce(promote, rows)
    return reduce(promote, (scalar_dtype(v, common) for v in numbers), common)


def can_cast(from_: DTypeLike | ExTensor, to: DTypeLike, /) -> bool:
    """Whether promotion within a kind (or to complex) leads from one dtype to another.

    Args:
        from_: a dtype, its name, or a tensor.
        to: a dtype or its name.

    Returns:
        True if no value is lost.

    Example:
        >>> et.can_cast("int8", "int16"), et.can_cast("float64", "float32")
        (True, False)
    """
    source, target = _dtype(from_), as_dtype(to)
    if source is target:
        return True
    if source.is_blocked or not (
        source.kind == target.kind or (source.is_inexact and target.is_complex)
    ):
        return False
    try:
        return promote(source, target) is target
    except TypeError:
        return False


_HOST = 1  # DLPack's kDLCPU


def asarray(
    obj: Any,
    /,
    *,
    dtype: DTypeLike | None = None,
    device: str | None = None,
    copy: bool | None = None,
) -> ExTensor:
    """Make a tensor of nested lists, a number, a tensor or another library's array.

    Args:
        obj: what to convert.
        dtype: of the result; as `ExTensor` chooses if None.
        device: of the result; a tensor's own, or the default one, if None.
        copy: True always copies, False never does, None copies only where it is needed.

    Returns:
        A tensor, of ``obj``'s memory where it is not copied.

    Raises:
        TypeError: for data or a dtype that is not understood.
        ValueError: if ``copy`` is False and there is no way without one.

    Example:
        >>> et.asarray([[1, 2], [3, 4]], dtype="float32").shape
        (2, 2)
    """
    where = registry.get(device).name
    if isinstance(obj, ExTensor):
        made, where = obj, device or obj.device
    elif isinstance(obj, np.ndarray) and copy is not True:
        made = ExTensor.from_numpy(obj, device="cpu")  # ml_dtypes' bfloat16 has no DLPack
    elif hasattr(obj, "__dlpack__") and copy is not True and not isinstance(obj, np.generic):
        on_host = obj.__dlpack_device__()[0] == _HOST
        made = ExTensor.from_dlpack(obj, device="cpu" if on_host else where, copy=copy)
    elif copy is False:
        raise ValueError(f"asarray: a {type(obj).__name__} cannot be taken without a copy")
    else:
        return ExTensor(obj, dtype, device=device)
    result = (made if dtype is None else made.astype(dtype)).to(where)
    if copy is False and result is not made:
        raise ValueError("asarray: another dtype or device cannot be had without a copy")
    return result.clone() if copy and result is obj else result


class _Info:
    """What this namespace can do: the object that ``__array_namespace_info__()`` gives."""

    def capabilities(self) -> dict[str, Any]:
        """Boolean indexing, shapes that depend on values, and axes without a limit of its own."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> str:
        """The device of new tensors."""
        return registry.get(None).name

    def devices(self) -> tuple[str, ...]:
        """The devices of this machine."""
        found = []
        for name in registry.BACKENDS:
            try:
                found.append(registry.get(name).name)
            except RuntimeError:
                continue
        return tuple(found)

    def default_dtypes(self, *, device: str | None = None) -> dict[str, DType]:
        """What Python numbers become."""
        return {
            "real floating": float32, "complex floating": complex64, "integral": int64,
            "indexing": int64,
        }  # fmt: skip

    def dtypes(
        self, *, device: str | None = None, kind: str | tuple[str, ...] | None = None
    ) -> dict[str, DType]:
        """The standard's dtypes of a kind, by name; 16-bit and blocked ones are beside them."""
        names = {"float32", "float64", *_KINDS["integral"], *_KINDS["complex floating"]}
        rows = {"bool": bool_, **{n: d for n, d in DENSE.items() if n in names}}
        return {n: d for n, d in rows.items() if kind is None or isdtype(d, kind)}


def __array_namespace_info__() -> _Info:  # noqa: N807 - the standard's name
    """Capabilities, devices and dtypes of this namespace."""
    return _Info()
