"""Tensors of one value, equally spaced values and diagonals: ``zeros``, ``arange``, ``eye``."""

from __future__ import annotations

from typing import Any

import numpy as np

from extensor.autograd.creation.arguments import ShapeLike, as_shape, made_in, sizes_and_dtype
from extensor.autograd.creation.base import WrapsArrays
from extensor.autograd.node import Tensor
from extensor.backends import registry
from extensor.dtypes import DTypeLike, as_dtype, complex64, float32, int64

__all__ = ["FilledMethods"]


class FilledMethods(WrapsArrays[Tensor]):
    """Tensors whose values an expression says."""

    __slots__ = ()

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
            fill = np.asarray(number, dtype=made_in(kind))
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
        sizes, kind = sizes_and_dtype((shape, *more), dtype)
        data = registry.get(device).xp.zeros(sizes, dtype=made_in(kind))
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
        sizes, kind = sizes_and_dtype((shape, *more), dtype)
        data = registry.get(device).xp.ones(sizes, dtype=made_in(kind))
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
        sizes, kind = sizes_and_dtype((shape, *more), dtype)
        xp = registry.get(device).xp
        made = made_in(kind)
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
        data = registry.get(device).xp.eye(*shape, k=k, dtype=made_in(kind))
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
            data = registry.get(device).xp.arange(start, stop, step, dtype=made_in(kind))
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
        made = made_in(kind)
        data = registry.get(device).xp.linspace(start, stop, count, endpoint=endpoint, dtype=made)
        return cls._from_array(data, kind, device, requires_grad)
