"""Making tensors: the static methods of ExTensor that the module functions are.

Straight into a blocked dtype, values are made in float32 and quantized.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from extensor.autograd import dlpack
from extensor.backends import registry
from extensor.dtypes import (
    DType,
    DTypeLike,
    as_dtype,
    complex64,
    compute_dtype,
    dtype_of,
    float32,
    int64,
)
from extensor.quant.array import QuantArray

if TYPE_CHECKING:
    from extensor.autograd.tensor import ExTensor

__all__ = ["CreationMethods", "Seed", "ShapeLike", "as_data", "as_shape"]

ShapeLike = int | tuple[int, ...] | list[int]
Seed = int | np.random.Generator | None
"""Where random values come from: a seed, a generator that goes on, or None for fresh entropy."""


def as_shape(shape: ShapeLike, what: str = "shape") -> tuple[int, ...]:
    """A shape as a tuple of ints, 0 or more.

    Raises:
        TypeError, ValueError: for anything else.
    """
    try:
        axes = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        sizes = tuple(operator.index(n) for n in axes)
    except TypeError:
        raise TypeError(f"{what}: wanted an int or a tuple of ints, got {shape!r}") from None
    if any(n < 0 for n in sizes):
        raise ValueError(f"{what}: wanted sizes of 0 or more, got {shape!r}")
    return sizes


def as_data(data: Any, dtype: DType | None, xp: Any = np) -> Any:
    """A fresh raw array of ``xp`` from lists, numbers or arrays; a QuantArray's parts move to it.

    Raises:
        TypeError: for data that is not numbers.
        ValueError: for lists of unequal lengths.
    """
    if isinstance(data, QuantArray):
        if all(isinstance(part, xp.ndarray) for part in data.parts.values()):
            return data
        return replace(data, **{name: xp.asarray(part) for name, part in data.parts.items()})
    if not hasattr(data, "dtype") and not _holds_arrays(data):
        try:
            numbers = np.array(data).dtype.kind in "biufc"
        except ValueError:
            raise ValueError(
                f"ExTensor(data): wanted nested lists of equal lengths, got {data!r:.80}"
            ) from None
        if not numbers:
            raise TypeError(
                f"ExTensor(data): wanted numbers, nested lists of them or an array, got "
                f"{data!r:.80}"
            )
    if dtype is None and not hasattr(data, "dtype"):
        array = np.array(data)
        # Python numbers have no width of their own; numpy's choice of float64 is not ours.
        narrow = {np.dtype(np.float64): float32, np.dtype(np.complex128): complex64}
        dtype = None if _holds_arrays(data) else narrow.get(array.dtype)
        data = array
    return xp.array(data, dtype=dtype.numpy if dtype else None)


def _holds_arrays(data: Any) -> bool:
    while isinstance(data, (list, tuple)) and data:
        data = data[0]
    return hasattr(data, "dtype")


def _finish(data: Any, dtype: DType, device: str | None, requires_grad: bool) -> ExTensor:
    """A tensor around a fresh array that was made in ``compute_dtype(dtype)``, in ``dtype``."""
    from extensor.autograd.apply import wrap

    backend = registry.get(device)
    if dtype.numpy is not None and data.dtype != dtype.numpy:
        data = data.astype(dtype.numpy)
    tensor = wrap(data, backend)
    if dtype.is_blocked:
        tensor = tensor.to(dtype)
    if requires_grad:
        tensor.requires_grad = True
    return tensor


def share_writes(tensor: ExTensor) -> ExTensor:
    """Mark memory that others, who do not count, may write to: nothing made of it is kept."""
    tensor._version[1:] = [1]
    return tensor


class CreationMethods:
    """The creation functions, as static methods.

    All take ``dtype`` (float32 if not given), ``device`` (EXTENSOR_DEVICE, and the CPU
    without it) and ``requires_grad``.
    """

    __slots__ = ()

    @staticmethod
    def full(
        shape: ShapeLike,
        fill_value: Any,
        dtype: DTypeLike | None = None,
        *,
        device: str | None = None,
        requires_grad: bool = False,
    ) -> ExTensor:
        """Filled with a number or what a tensor of no axes holds.

        If not told, float32, int64, bool or complex64 for such a number, the tensor's own dtype.
        """
        number = fill_value
        if getattr(fill_value, "shape", None) == ():  # numpy's scalars, too
            number = fill_value.item()
            dtype = dtype or (None if isinstance(fill_value, np.generic) else fill_value.dtype)
        if not isinstance(number, (int, float, complex)):
            raise TypeError(f"full: wanted a number, got {fill_value!r}")
        kind = as_dtype(type(number) if dtype is None else dtype)
        xp = registry.get(device).xp
        try:
            fill = np.asarray(number, dtype=_made_in(kind))
        except (ValueError, TypeError, OverflowError):  # NaN, Inf, too large, or complex
            raise ValueError(
                f"full: wanted a number that {kind.name} can hold, got {fill_value!r}"
            ) from None
        data = xp.full(as_shape(shape), fill, dtype=fill.dtype)
        return _finish(data, kind, device, requires_grad)

    @staticmethod
    def zeros(
        shape: ShapeLike,
        dtype: DTypeLike | None = None,
        *,
        device: str | None = None,
        requires_grad: bool = False,
    ) -> ExTensor:
        """Zeros of a shape."""
        kind = as_dtype(float32 if dtype is None else dtype)
        data = registry.get(device).xp.zeros(as_shape(shape), dtype=_made_in(kind))
        return _finish(data, kind, device, requires_grad)

    @staticmethod
    def ones(
        shape: ShapeLike,
        dtype: DTypeLike | None = None,
        *,
        device: str | None = None,
        requires_grad: bool = False,
    ) -> ExTensor:
        """Ones of a shape."""
        kind = as_dtype(float32 if dtype is None else dtype)
        data = registry.get(device).xp.ones(as_shape(shape), dtype=_made_in(kind))
        return _finish(data, kind, device, requires_grad)

    @staticmethod
    def empty(
        shape: ShapeLike,
        dtype: DTypeLike | None = None,
        *,
        device: str | None = None,
        requires_grad: bool = False,
    ) -> ExTensor:
        """Memory of a shape, whatever it holds; a blocked dtype gets zeros."""
        kind = as_dtype(float32 if dtype is None else dtype)
        xp = registry.get(device).xp
        make = xp.zeros if kind.is_blocked else xp.empty
        return _finish(make(as_shape(shape), dtype=_made_in(kind)), kind, device, requires_grad)

    @staticmethod
    def eye(
        rows: int,
        columns: int | None = None,
        dtype: DTypeLike | None = None,
        *,
        k: int = 0,
        device: str | None = None,
        requires_grad: bool = False,
    ) -> ExTensor:
        """Ones on diagonal k (above the main one if positive) of a (rows, columns) matrix.

        Square if not told.
        """
        kind = as_dtype(float32 if dtype is None else dtype)
        shape = as_shape((rows, rows if columns is None else columns))
        data = registry.get(device).xp.eye(*shape, k=k, dtype=_made_in(kind))
        return _finish(data, kind, device, requires_grad)

    @staticmethod
    def arange(
        start: float,
        stop: float | None = None,
        step: float = 1,
        dtype: DTypeLike | None = None,
        *,
        device: str | None = None,
        requires_grad: bool = False,
    ) -> ExTensor:
        """start, start + step, ... up to but not including stop; 0 to start with one argument.

        int64 for integers, float32 otherwise, if not told.
        """
        if step == 0:
            raise ValueError("arange: wanted a step other than 0, got 0")
        if stop is None:
            start, stop = 0, start
        whole = all(isinstance(v, (int, np.integer)) for v in (start, stop, step))
        kind = as_dtype((int64 if whole else float32) if dtype is None else dtype)
        try:
            data = registry.get(device).xp.arange(start, stop, step, dtype=_made_in(kind))
        except (ValueError, TypeError, OverflowError) as error:
            raise type(error)(
                f"arange: wanted finite numbers that {kind.name} can hold, got {start!r}, "
                f"{stop!r}, {step!r} ({error})"
            ) from None
        return _finish(data, kind, device, requires_grad)

    @staticmethod
    def linspace(
        start: complex,
        stop: complex,
        num: int,
        dtype: DTypeLike | None = None,
        *,
        device: str | None = None,
        endpoint: bool = True,
        requires_grad: bool = False,
    ) -> ExTensor:
        """``num`` equally spaced values from start to stop, the stop left out without endpoint."""
        real = not any(isinstance(v, complex) for v in (start, stop))
        kind = as_dtype((float32 if real else complex64) if dtype is None else dtype)
        (count,) = as_shape(num, "num")
        made = _made_in(kind)
        data = registry.get(device).xp.linspace(start, stop, count, endpoint=endpoint, dtype=made)
        return _finish(data, kind, device, requires_grad)

    @staticmethod
    def randn(
        *shape: Any,
        seed: Seed = None,
        dtype: DTypeLike = float32,
        device: str | None = None,
        requires_grad: bool = False,
    ) -> ExTensor:
        """Standard normal values, the same for a seed on every device.

        ``shape`` is a tuple or separate ints.
        """
        kind = as_dtype(dtype)
        values = _generator(seed).standard_normal(_sizes(shape), _draw_type(kind))
        data = registry.get(device).xp.asarray(values)
        return _finish(data, kind, device, requires_grad)

    @staticmethod
    def rand(
        *shape: Any,
        seed: Seed = None,
        dtype: DTypeLike = float32,
        device: str | None = None,
        requires_grad: bool = False,
    ) -> ExTensor:
        """Values uniform in [0, 1), the same for a seed on every device.

        ``shape`` is a tuple or separate ints.
        """
        kind = as_dtype(dtype)
        values = _generator(seed).random(_sizes(shape), _draw_type(kind))
        data = registry.get(device).xp.asarray(values)
        return _finish(data, kind, device, requires_grad)

    @staticmethod
    def from_numpy(
        array: Any, *, device: str | None = None, requires_grad: bool = False
    ) -> ExTensor:
        """A tensor on a numpy array's memory (copied to a device other than the CPU).

        Raises:
            TypeError: if it is not an array, or holds no extensor dtype.
        """
        if not isinstance(array, np.ndarray):
            raise TypeError(
                f"from_numpy: wanted a numpy array, got {type(array).__name__}; use et.ExTensor"
            )
        from extensor.autograd.apply import wrap

        backend = registry.get(device)
        dtype_of(array)  # a GPU's copy would change the byte order
        tensor = wrap(backend.xp.asarray(array), backend)
        if tensor.data is array:
            share_writes(tensor)
        if requires_grad:
            tensor.requires_grad = True
        return tensor

    @staticmethod
    def from_dlpack(x: Any, /, *, device: str | None = None, copy: bool | None = None) -> ExTensor:
        """A tensor on the memory of another library's array, through DLPack, bfloat16 included.

        Args:
            x: anything with ``__dlpack__`` and ``__dlpack_device__``.
            device: where the tensor is to be; None is the default device.
            copy: True for memory of its own, False to refuse one, None to copy only if it must.

        Raises:
            TypeError: if the object has no ``__dlpack__`` method, or an unknown dtype.
            BufferError, ValueError: where the exporter refuses, or cannot do without a copy.
        """
        if not hasattr(x, "__dlpack__"):
            raise TypeError(
                f"from_dlpack: wanted an object with __dlpack__, got {type(x).__name__}"
            )
        from extensor.autograd.apply import wrap

        backend = registry.get(device)
        options = {} if copy is None else {"copy": copy}
        tensor = wrap(dlpack.take(x, backend.xp, **options), backend)
        return tensor if copy else share_writes(tensor)

    @staticmethod
    def zeros_like(
        x: ExTensor, dtype: DTypeLike | None = None, *, device: str | None = None
    ) -> ExTensor:
        """Zeros of another tensor's shape, device and (if not told) dtype."""
        return CreationMethods.zeros(x.shape, dtype or x.dtype, device=device or x.device)

    @staticmethod
    def ones_like(
        x: ExTensor, dtype: DTypeLike | None = None, *, device: str | None = None
    ) -> ExTensor:
        """Ones of another tensor's shape, device and (if not told) dtype."""
        return CreationMethods.ones(x.shape, dtype or x.dtype, device=device or x.device)

    @staticmethod
    def empty_like(
        x: ExTensor, dtype: DTypeLike | None = None, *, device: str | None = None
    ) -> ExTensor:
        """Memory of another tensor's shape, device and (if not told) dtype."""
        return CreationMethods.empty(x.shape, dtype or x.dtype, device=device or x.device)

    @staticmethod
    def full_like(
        x: ExTensor,
        fill_value: Any,
        dtype: DTypeLike | None = None,
        *,
        device: str | None = None,
    ) -> ExTensor:
        """``fill_value`` in another tensor's shape, device and (if not told) dtype."""
        return CreationMethods.full(
            x.shape, fill_value, dtype or x.dtype, device=device or x.device
        )

    @staticmethod
    def randn_like(x: ExTensor, dtype: DTypeLike | None = None, *, seed: Seed = None) -> ExTensor:
        """Standard normal values in another tensor's shape, device and (if not told) dtype."""
        return CreationMethods.randn(x.shape, seed=seed, dtype=dtype or x.dtype, device=x.device)

    @staticmethod
    def rand_like(x: ExTensor, dtype: DTypeLike | None = None, *, seed: Seed = None) -> ExTensor:
        """Values uniform in [0, 1) in another tensor's shape, device and (if not told) dtype."""
        return CreationMethods.rand(x.shape, seed=seed, dtype=dtype or x.dtype, device=x.device)


def _made_in(dtype: DType) -> Any:
    """The numpy dtype that values of ``dtype`` are made in before they are rounded to it."""
    return compute_dtype(dtype).numpy


def _draw_type(dtype: DType) -> Any:
    made = _made_in(dtype)
    if made not in (np.float32, np.float64):
        raise TypeError(
            f"random values: wanted a floating-point or blocked dtype, got {dtype.name}"
        )
    return made


def _generator(seed: Seed) -> np.random.Generator:
    if not (seed is None or isinstance(seed, np.random.Generator)):
        try:
            good = operator.index(seed) >= 0
        except TypeError:
            good = False
        if not good:
            raise ValueError(
                f"seed: wanted an int of 0 or more, a numpy Generator or None, got {seed!r}"
            )
    return np.random.default_rng(seed)


def _sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        return as_shape(shape[0])
    return as_shape(shape)
