"""What the creation functions take: shapes, data, dtypes and seeds, checked."""

from __future__ import annotations

import operator
import reprlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ForwardRef, Union

import numpy as np

from extensor.dtypes import DType, DTypeLike, as_dtype, complex64, compute_dtype, float32
from extensor.quant.array import QuantArray

__all__ = [
    "Seed", "ShapeLike", "as_data", "as_shape", "as_sizes", "draw_dtype", "made_in",
    "random_generator", "sizes_and_dtype",
]  # fmt: skip

ShapeLike = int | tuple[int, ...] | list[int]
if TYPE_CHECKING:
    Seed = int | np.random.Generator | None
    """The source of random values: a seed, a generator to continue, or None for fresh entropy."""
else:  # numpy's generators and the cryptography behind them take 6 MB, and inference none
    Seed = Union[int, ForwardRef("np.random.Generator", module=__name__), None]  # noqa: UP007


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
    floats = dtype is None or dtype.is_inexact or dtype.is_blocked
    # An overflow of floats is Inf, as of astype; integers that cannot hold a float are warned of.
    with np.errstate(over="ignore", invalid="ignore" if floats else None):
        return xp.array(data, dtype=dtype.numpy if dtype else None)


def _holds_arrays(data: Any) -> bool:
    while isinstance(data, (list, tuple)) and data:
        data = data[0]
    return hasattr(data, "dtype")


def made_in(dtype: DType) -> Any:
    """The numpy dtype that values of ``dtype`` are made in before they are rounded to it."""
    return compute_dtype(dtype).numpy


def draw_dtype(dtype: DType) -> Any:
    """The numpy dtype that random values are drawn in: float32, or float64.

    Raises:
        TypeError: for a dtype that is not of floats.
    """
    made = made_in(dtype)
    if made not in (np.float32, np.float64):
        raise TypeError(
            f"random values: expected a floating-point or blocked dtype, got {dtype.name}"
        )
    return made


def random_generator(seed: Seed) -> np.random.Generator:
    """The generator that a seed stands for.

    Raises:
        ValueError: for what is no seed.
    """
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


def as_sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    """A shape that was given as one tuple or as separate ints.

    Raises:
        TypeError, ValueError: as `as_shape`.
    """
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        return as_shape(shape[0])
    return as_shape(shape)


def sizes_and_dtype(
    given: tuple[Any, ...], dtype: DTypeLike | None
) -> tuple[tuple[int, ...], DType]:
    """A shape as `as_sizes` takes it, and the dtype, by name or after the shape."""
    if len(given) > 1 and not isinstance(given[-1], (int, np.integer)):
        if dtype is not None:
            raise TypeError(
                f"shape: expected a tuple or separate ints, got {given!r} beside dtype={dtype!r}"
            )
        given, dtype = given[:-1], given[-1]
    return as_sizes(given), as_dtype(float32 if dtype is None else dtype)
