"""The creation functions: ``et.zeros`` is ``ExTensor.zeros``.

For a blocked dtype the values are made in float32 and then quantized.
"""

from __future__ import annotations

import operator
import reprlib
from abc import abstractmethod
from dataclasses import replace
from typing import Any, Generic

import numpy as np

from extensor.autograd import dlpack
from extensor.autograd.node import Tensor
from extensor.backends import registry
from extensor.backends.protocol import Backend
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

__all__ = ["CreationMethods", "Seed", "ShapeLike", "as_data", "as_shape"]

ShapeLike = int | tuple[int, ...] | list[int]
Seed = int | np.random.Generator | None
"""The source of random values: a seed, a generator to continue, or None for fresh entropy."""


def as_shape(shape: ShapeLike, what: str = "shape") -> tuple[int, ...]:
    """A shape as a tuple of ints, 0 or more.

    Raises:
        TypeError, ValueError: for anything else.
    """
    try:
        axes = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        sizes = tuple(operator.index(n) for n in axes)
    except TypeError:
        raise TypeError(
            f"{what}: expected an int or a tuple of ints, got {reprlib.repr(shape)}"
        ) from None
    if any(n < 0 for n in sizes):
        raise ValueError(f"{what}: expected sizes of 0 or more, got {shape!r}")
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
                f"ExTensor(data): expected nested lists of equal lengths, got {reprlib.repr(data)}"
            ) from None
        if not numbers:
            raise TypeError(
                f"ExTensor(data): expected numbers, nested lists of them or an array, got "
                f"{reprlib.repr(data)}"
            )
    if dtype is None and not hasattr(data, "dtype"):
        array = np.array(data)
        # Python numbers have no width of their own; numpy's choice of float64 is not ours.
        narrow = {np.dtype(np.float64): float32, np.dtype(np.complex128): complex64}
        dtype = None if _holds_arrays(data) else narrow.get(array.dtype)
        data = array
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow is Inf, as of astype
        return xp.array(data, dtype=dtype.numpy if dtype else None)


def _holds_arrays(data: Any) -> bool:
    while isinstance(data, (list, tuple)) and data:
        data = data[0]
    return hasattr(data, "dtype")


def share_writes(tensor: Tensor) -> Tensor:
    """Mark memory that another library may write to: no result that was made of it is kept."""
    tensor._version[1:] = [1]
    return tensor


class CreationMethods(Generic[Tensor]):
    """The creation functions, as class methods.

    All take ``dtype`` (float32 if not given), ``device`` (EXTENSOR_DEVICE, and the CPU
    without it) and ``requires_grad``.
    """

    __slots__ = ()

    @staticmethod
    @abstractmethod
    def _wrap(data: Any, backend: Backend) -> Tensor:
        """A tensor around a raw array; ExTensor, which stands above this class, says how."""

    @classmethod
    def _from_array(
        cls, data: Any, dtype: DType, device: str | None, requires_grad: bool = False
    ) -> Tensor:
        """A tensor of ``dtype`` around a fresh array that was made in ``compute_dtype(dtype)``."""
        if dtype.numpy is not None and data.dtype != dtype.numpy:
            with np.errstate(over="ignore", invalid="ignore"):  # as of astype
                data = data.astype(dtype.numpy)
        tensor: Any = cls._wrap(data, registry.get(device))
        if dtype.is_blocked:
            tensor = tensor.to(dtype)
        if requires_grad:
            tensor.requires_grad = True
        return tensor

    @classmethod
    def full(
        cls,
        shape: ShapeLike,
        fill_value: Any,
        dtype: DTypeLike | None = None,
        *,
        device: str | None = None,
        requires_grad: bool = False,
    ) -> Tensor:
        """A tensor filled with one value.

        Args:
            shape: an int or ints.
            fill_value: a number, or a tensor without axes.
            dtype: that of a tensor, and float32, int64, bool or complex64 of a number, if None.
            device: EXTENSOR_DEVICE, and the CPU without it, if None.
            requires_grad: whether ``backward`` collects a gradient for it.

        Returns:
            A new tensor.

        Raises:
            TypeError: for a value that is no number.
            ValueError: for a value that the dtype cannot hold.

        Example:
            >>> et.full((2, 2), 7).tolist()
            [[7, 7], [7, 7]]
        """
        number = fill_value
        if getattr(fill_value, "shape", None) == ():  # numpy's scalars, too
            number = fill_value.item()
            dtype = dtype or (None if isinstance(fill_value, np.generic) else fill_value.dtype)
        if not isinstance(number, (int, float, complex)):
            raise TypeError(f"full: expected a number, got {fill_value!r}")
        kind = as_dtype(type(number) if dtype is None else dtype)
        xp = registry.get(device).xp
        try:
            fill = np.asarray(number, dtype=_made_in(kind))
        except (ValueError, TypeError, OverflowError):  # NaN, Inf, too large, or complex
            raise ValueError(
                f"full: expected a number that {kind.name} can hold, got {fill_value!r}"
            ) from None
        data = xp.full(as_shape(shape), fill, dtype=fill.dtype)
        return cls._from_array(data, kind, device, requires_grad)

    @classmethod
    def zeros(
        cls,
        shape: ShapeLike,
        *more: Any,
        dtype: DTypeLike | None = None,
        device: str | None = None,
        requires_grad: bool = False,
    ) -> Tensor:
        """A tensor of zeros.

        Args:
            shape: a tuple, or the first of separate ints.
            more: the other ints; then the dtype, where it is not given by name.
            dtype: float32 if None; a blocked one quantizes.
            device: EXTENSOR_DEVICE, and the CPU without it, if None.
            requires_grad: whether ``backward`` collects a gradient for it.

        Returns:
            A new tensor.

        Raises:
            TypeError, ValueError: for a bad shape or dtype.

        Example:
            >>> et.zeros((2, 2)).tolist() == et.zeros(2, 2).tolist()
            True
        """
        sizes, kind = _sizes_and_dtype((shape, *more), dtype)
        data = registry.get(device).xp.zeros(sizes, dtype=_made_in(kind))
        return cls._from_array(data, kind, device, requires_grad)

    @classmethod
    def ones(
        cls,
        shape: ShapeLike,
        *more: Any,
        dtype: DTypeLike | None = None,
        device: str | None = None,
        requires_grad: bool = False,
    ) -> Tensor:
        """A tensor of ones.

        Args:
            shape: a tuple, or the first of separate ints.
            more: the other ints; then the dtype, where it is not given by name.
            dtype: float32 if None; a blocked one quantizes.
            device: EXTENSOR_DEVICE, and the CPU without it, if None.
            requires_grad: whether ``backward`` collects a gradient for it.

        Returns:
            A new tensor.

        Raises:
            TypeError, ValueError: for a bad shape or dtype.

        Example:
            >>> et.ones(3, dtype="int32").tolist()
            [1, 1, 1]
        """
        sizes, kind = _sizes_and_dtype((shape, *more), dtype)
        data = registry.get(device).xp.ones(sizes, dtype=_made_in(kind))
        return cls._from_array(data, kind, device, requires_grad)

    @classmethod
    def empty(
        cls,
        shape: ShapeLike,
        *more: Any,
        dtype: DTypeLike | None = None,
        device: str | None = None,
        requires_grad: bool = False,
    ) -> Tensor:
        """A tensor of uninitialized memory; zeros for a blocked dtype and for 16-bit floats.

        Args:
            shape: a tuple, or the first of separate ints.
            more: the other ints; then the dtype, where it is not given by name.
            dtype: float32 if None.
            device: EXTENSOR_DEVICE, and the CPU without it, if None.
            requires_grad: whether ``backward`` collects a gradient for it.

        Returns:
            A new tensor.

        Raises:
            TypeError, ValueError: for a bad shape or dtype.

        Example:
            >>> et.empty((2, 3)).shape
            (2, 3)
        """
        sizes, kind = _sizes_and_dtype((shape, *more), dtype)
        xp = registry.get(device).xp
        made = _made_in(kind)
        make = xp.empty if made == kind.numpy else xp.zeros  # a cast of any bits may overflow
        return cls._from_array(make(sizes, dtype=made), kind, device, requires_grad)

    @classmethod
    def eye(
        cls,
        rows: int,
        columns: int | None = None,
        dtype: DTypeLike | None = None,
        *,
        k: int = 0,
        device: str | None = None,
        requires_grad: bool = False,
    ) -> Tensor:
        """A matrix with ones on a diagonal and zeros elsewhere.

        Args:
            rows: the number of rows.
            columns: the number of columns; as many as rows if None.
            dtype: float32 if None.
            k: the diagonal of ones; 0 is the main one, positive ones are above it.
            device: EXTENSOR_DEVICE, and the CPU without it, if None.
            requires_grad: whether ``backward`` collects a gradient for it.

        Returns:
            (rows, columns).

        Raises:
            TypeError, ValueError: for a bad shape or dtype.

        Example:
            >>> et.eye(2, 3).tolist()
            [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
        """
        kind = as_dtype(float32 if dtype is None else dtype)
        shape = as_shape((rows, rows if columns is None else columns))
        data = registry.get(device).xp.eye(*shape, k=k, dtype=_made_in(kind))
        return cls._from_array(data, kind, device, requires_grad)

    @classmethod
    def arange(
        cls,
        start: float,
        stop: float | None = None,
        step: float = 1,
        dtype: DTypeLike | None = None,
        *,
        device: str | None = None,
        requires_grad: bool = False,
    ) -> Tensor:
        """Equally spaced values from ``start`` up to but not including ``stop``.

        Args:
            start: the first value; with one argument the stop, and the first value is 0.
            stop: the end.
            step: the distance, not 0.
            dtype: int64 for integers, else float32, if None.
            device: EXTENSOR_DEVICE, and the CPU without it, if None.
            requires_grad: whether ``backward`` collects a gradient for it.

        Returns:
            A vector.

        Raises:
            TypeError, ValueError, OverflowError: for a step of 0, or values that the dtype cannot
                hold.

        Example:
            >>> et.arange(1, 10, 3).tolist()
            [1, 4, 7]
        """
        if step == 0:
            raise ValueError("arange: expected a step other than 0, got 0")
        if stop is None:
            start, stop = 0, start
        whole = all(isinstance(v, (int, np.integer)) for v in (start, stop, step))
        kind = as_dtype((int64 if whole else float32) if dtype is None else dtype)
        try:
            data = registry.get(device).xp.arange(start, stop, step, dtype=_made_in(kind))
        except (ValueError, TypeError, OverflowError) as error:
            raise type(error)(
                f"arange: expected finite numbers that {kind.name} can hold, got {start!r}, "
                f"{stop!r}, {step!r} ({error})"
            ) from None
        return cls._from_array(data, kind, device, requires_grad)

    @classmethod
    def linspace(
        cls,
        start: complex,
        stop: complex,
        num: int,
        dtype: DTypeLike | None = None,
        *,
        device: str | None = None,
        endpoint: bool = True,
        requires_grad: bool = False,
    ) -> Tensor:
        """Equally spaced values from ``start`` to ``stop``.

        Args:
            start: the first value.
            stop: the last value.
            num: how many values.
            dtype: float32, or complex64 for complex numbers, if None.
            device: EXTENSOR_DEVICE, and the CPU without it, if None.
            endpoint: False leaves the stop out.
            requires_grad: whether ``backward`` collects a gradient for it.

        Returns:
            (num,).

        Raises:
            TypeError, ValueError: for a bad number or dtype.

        Example:
            >>> et.linspace(0, 1, 5).tolist()
            [0.0, 0.25, 0.5, 0.75, 1.0]
        """
        real = not any(isinstance(v, complex) for v in (start, stop))
        kind = as_dtype((float32 if real else complex64) if dtype is None else dtype)
        (count,) = as_shape(num, "num")
        made = _made_in(kind)
        data = registry.get(device).xp.linspace(start, stop, count, endpoint=endpoint, dtype=made)
        return cls._from_array(data, kind, device, requires_grad)

    @classmethod
    def randn(
        cls,
        *shape: Any,
        seed: Seed = None,
        dtype: DTypeLike = float32,
        device: str | None = None,
        requires_grad: bool = False,
    ) -> Tensor:
        """Standard normal values, the same for a seed on every device.

        Args:
            shape: a tuple or separate ints.
            seed: an int, a numpy Generator to continue, or None for fresh entropy.
            dtype: of floats, or blocked.
            device: EXTENSOR_DEVICE, and the CPU without it, if None.
            requires_grad: whether ``backward`` collects a gradient for it.

        Returns:
            A new tensor.

        Raises:
            TypeError, ValueError: for a bad shape, seed or dtype.

        Example:
            >>> bool((et.randn(2, 3, seed=0) == et.randn((2, 3), seed=0)).all())
            True
        """
        kind = as_dtype(dtype)
        values = _generator(seed).standard_normal(_sizes(shape), _draw_type(kind))
        data = registry.get(device).xp.asarray(values)
        return cls._from_array(data, kind, device, requires_grad)

    @classmethod
    def rand(
        cls,
        *shape: Any,
        seed: Seed = None,
        dtype: DTypeLike = float32,
        device: str | None = None,
        requires_grad: bool = False,
    ) -> Tensor:
        """Values uniform in [0, 1), the same for a seed on every device.

        Args:
            shape: a tuple or separate ints.
            seed: an int, a numpy Generator to continue, or None for fresh entropy.
            dtype: of floats, or blocked.
            device: EXTENSOR_DEVICE, and the CPU without it, if None.
            requires_grad: whether ``backward`` collects a gradient for it.

        Returns:
            A new tensor.

        Raises:
            TypeError, ValueError: for a bad shape, seed or dtype.

        Example:
            >>> x = et.rand(100, seed=0)
            >>> bool(((x >= 0) & (x < 1)).all())
            True
        """
        kind = as_dtype(dtype)
        values = _generator(seed).random(_sizes(shape), _draw_type(kind))
        data = registry.get(device).xp.asarray(values)
        return cls._from_array(data, kind, device, requires_grad)

    @classmethod
    def from_numpy(
        cls, array: Any, *, device: str | None = None, requires_grad: bool = False
    ) -> Tensor:
        """A tensor on a numpy array's memory (copied to a device other than the CPU).

        Args:
            array: the array; writes to it show in the tensor.
            device: EXTENSOR_DEVICE, and the CPU without it, if None.
            requires_grad: whether ``backward`` collects a gradient for it.

        Returns:
            A tensor of the array's shape and dtype.

        Raises:
            TypeError: if it is not an array, or holds no extensor dtype.

        Example:
            >>> import numpy as np
            >>> et.from_numpy(np.arange(3)).tolist()
            [0, 1, 2]
        """
        if not isinstance(array, np.ndarray):
            raise TypeError(
                f"from_numpy: expected a numpy array, got {type(array).__name__}; use et.ExTensor"
            )
        backend = registry.get(device)
        dtype_of(array)  # a GPU's copy would change the byte order
        tensor = cls._wrap(backend.xp.asarray(array), backend)
        if tensor.data is array:
            share_writes(tensor)
        if requires_grad:
            tensor.requires_grad = True
        return tensor

    @classmethod
    def from_dlpack(
        cls, x: Any, /, *, device: str | None = None, copy: bool | None = None
    ) -> Tensor:
        """A tensor on the memory of another library's array, through DLPack, bfloat16 included.

        Args:
            x: anything with ``__dlpack__`` and ``__dlpack_device__``.
            device: where the tensor is to be; None is the default device.
            copy: True always copies, False never does, None copies only where it is needed.

        Returns:
            A tensor of the array's shape and dtype.

        Raises:
            TypeError: if the object has no ``__dlpack__`` method, or an unknown dtype.
            BufferError, ValueError: where the exporter refuses, or cannot do without a copy.

        Example:
            >>> import numpy as np
            >>> et.from_dlpack(np.arange(3)).tolist()
            [0, 1, 2]
        """
        if not hasattr(x, "__dlpack__"):
            raise TypeError(
                f"from_dlpack: expected an object with __dlpack__, got {type(x).__name__}"
            )
        backend = registry.get(device)
        options = {} if copy is None else {"copy": copy}
        tensor = cls._wrap(dlpack.from_exporter(x, backend.xp, **options), backend)
        return tensor if copy else share_writes(tensor)

    @classmethod
    def zeros_like(
        cls, x: Tensor, dtype: DTypeLike | None = None, *, device: str | None = None
    ) -> Tensor:
        """Zeros of another tensor's shape.

        Args:
            x: the tensor to follow.
            dtype: that of x if None.
            device: that of x if None.

        Returns:
            A new tensor.

        Example:
            >>> et.zeros_like(et.ExTensor([1, 2])).tolist()
            [0, 0]
        """
        return cls.zeros(x.shape, dtype or x.dtype, device=device or x.device)

    @classmethod
    def ones_like(
        cls, x: Tensor, dtype: DTypeLike | None = None, *, device: str | None = None
    ) -> Tensor:
        """Ones of another tensor's shape.

        Args:
            x: the tensor to follow.
            dtype: that of x if None.
            device: that of x if None.

        Returns:
            A new tensor.

        Example:
            >>> et.ones_like(et.ExTensor([5, 6])).tolist()
            [1, 1]
        """
        return cls.ones(x.shape, dtype or x.dtype, device=device or x.device)

    @classmethod
    def empty_like(
        cls, x: Tensor, dtype: DTypeLike | None = None, *, device: str | None = None
    ) -> Tensor:
        """Uninitialized memory of another tensor's shape; zeros for a blocked dtype.

        Args:
            x: the tensor to follow.
            dtype: that of x if None.
            device: that of x if None.

        Returns:
            A new tensor.

        Example:
            >>> et.empty_like(et.zeros((2, 3))).shape
            (2, 3)
        """
        return cls.empty(x.shape, dtype or x.dtype, device=device or x.device)

    @classmethod
    def full_like(
        cls,
        x: Tensor,
        fill_value: Any,
        dtype: DTypeLike | None = None,
        *,
        device: str | None = None,
    ) -> Tensor:
        """One value in another tensor's shape.

        Args:
            x: the tensor to follow.
            fill_value: a number, or a tensor without axes.
            dtype: that of x if None.
            device: that of x if None.

        Returns:
            A new tensor.

        Raises:
            TypeError, ValueError: as `full`.

        Example:
            >>> et.full_like(et.zeros(2), 7).tolist()
            [7.0, 7.0]
        """
        return cls.full(x.shape, fill_value, dtype or x.dtype, device=device or x.device)

    @classmethod
    def randn_like(cls, x: Tensor, dtype: DTypeLike | None = None, *, seed: Seed = None) -> Tensor:
        """Standard normal values in another tensor's shape, on its device.

        Args:
            x: the tensor to follow.
            dtype: that of x if None.
            seed: as of `randn`.

        Returns:
            A new tensor.

        Raises:
            TypeError, ValueError: for a bad seed, or a dtype that is not of floats.

        Example:
            >>> et.randn_like(et.zeros((2, 3)), seed=0).shape
            (2, 3)
        """
        return cls.randn(x.shape, seed=seed, dtype=dtype or x.dtype, device=x.device)

    @classmethod
    def rand_like(cls, x: Tensor, dtype: DTypeLike | None = None, *, seed: Seed = None) -> Tensor:
        """Values uniform in [0, 1) in another tensor's shape, on its device.

        Args:
            x: the tensor to follow.
            dtype: that of x if None.
            seed: as of `rand`.

        Returns:
            A new tensor.

        Raises:
            TypeError, ValueError: for a bad seed, or a dtype that is not of floats.

        Example:
            >>> et.rand_like(et.zeros((2, 3)), seed=0).shape
            (2, 3)
        """
        return cls.rand(x.shape, seed=seed, dtype=dtype or x.dtype, device=x.device)


def _made_in(dtype: DType) -> Any:
    """The numpy dtype that values of ``dtype`` are made in before they are rounded to it."""
    return compute_dtype(dtype).numpy


def _draw_type(dtype: DType) -> Any:
    made = _made_in(dtype)
    if made not in (np.float32, np.float64):
        raise TypeError(
            f"random values: expected a floating-point or blocked dtype, got {dtype.name}"
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
                f"seed: expected an int of 0 or more, a numpy Generator or None, got {seed!r}"
            )
    return np.random.default_rng(seed)


def _sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        return as_shape(shape[0])
    return as_shape(shape)


def _sizes_and_dtype(
    given: tuple[Any, ...], dtype: DTypeLike | None
) -> tuple[tuple[int, ...], DType]:
    """A shape as `_sizes` takes it, and the dtype, by name or after the shape."""
    if len(given) > 1 and not isinstance(given[-1], (int, np.integer)):
        if dtype is not None:
            raise TypeError(
                f"shape: expected a tuple or separate ints, got {given!r} beside dtype={dtype!r}"
            )
        given, dtype = given[:-1], given[-1]
    return _sizes(given), as_dtype(float32 if dtype is None else dtype)
