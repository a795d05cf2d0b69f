"""Checks and conversions of operations' arguments: operands and axes."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from extensor.autograd.mode import MODE
from extensor.autograd.tensor import ExTensor, wrap
from extensor.backends.protocol import Array
from extensor.dtypes import LEVEL_HALF, DType, compute_dtype, float32, scalar_dtype
from extensor.errors import AxisError

__all__ = [
    "Axis",
    "Operand",
    "as_tensor",
    "as_tensors",
    "axis_index",
    "axis_tuple",
    "axis_with_values",
    "broadcasts",
    "non_differentiable_input",
    "tensors_only",
]

Operand = ExTensor | float | complex | np.ndarray[Any, Any]
"""What a binary operation takes beside a tensor: a tensor, a Python number, a numpy array."""

Axis = int | Sequence[int] | None
"""An axis, several, or all of them."""


def as_tensors(name: str, a: Any, b: Any) -> tuple[ExTensor, ExTensor]:
    """Two operands as tensors; a number takes the other's dtype where it can.

    Raises:
        TypeError: if neither is a tensor, or one is something else.
    """
    if isinstance(a, ExTensor):
        return a, b if isinstance(b, ExTensor) else _converted(name, b, a)
    if isinstance(b, ExTensor):
        return _converted(name, a, b), b
    raise TypeError(
        f"{name}: expected at least one ExTensor, got {type(a).__name__} and {type(b).__name__}; "
        "make one with et.ExTensor(...)"
    )


def _converted(name: str, value: Any, x: ExTensor) -> ExTensor:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (bool, int, float, complex)):
        dtype = scalar_dtype(value, x.dtype)
        # Beside a 16-bit float the number stays float32 inside, so that the result rounds once.
        stored = np.float32 if dtype.level == LEVEL_HALF else dtype.numpy
        number, xp = np.asarray(value, dtype=stored), x.backend.xp
        # Filled, on a device: a copy would wait there, and could not be captured.
        tensor = wrap(number if xp is np else xp.full((), number[()], stored), x.backend)
        tensor.dtype = dtype
        return tensor
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return wrap(x.backend.xp.asarray(value), x.backend)
    raise TypeError(
        f"{name}: expected an ExTensor, a number or an array, got {type(value).__name__}"
    )


def as_tensor(name: str, value: Any, like: ExTensor | None = None) -> ExTensor:
    """``value`` itself, or a tensor of it on the device of ``like``.

    Raises:
        TypeError: if it is neither a tensor, a number nor an array (or list of numbers).
    """
    if isinstance(value, ExTensor):
        return value
    if like is not None and not isinstance(value, (list, tuple)):
        return _converted(name, value, like)
    if isinstance(value, (int, float, complex, list, tuple, np.ndarray, np.generic)):
        return ExTensor(value, device=like.device if like is not None else None)
    raise TypeError(f"{name}: expected an ExTensor, got {type(value).__name__}")


def tensors_only(name: str, *values: Any) -> None:
    """Refuse anything that is not an ExTensor.

    Raises:
        TypeError: naming the argument's type.
    """
    for value in values:
        if not isinstance(value, ExTensor):
            raise TypeError(
                f"{name}: expected an ExTensor, got {type(value).__name__}; "
                "make one with et.ExTensor(...)"
            )


def non_differentiable_input(name: str, x: ExTensor, remedy: str) -> tuple[Array, DType]:
    """The values of x for a function without a gradient, and the inexact dtype of its result.

    The values are dequantized. Integers become float32; 16-bit floats are widened to float32.

    Raises:
        TypeError: for a tensor that requires a gradient; ``remedy`` says what to use.
    """
    if x.requires_grad and MODE.enabled:
        raise TypeError(
            f"{name}: expected a tensor that requires no gradient, for there is no rule for one; "
            f"use {remedy}"
        )
    dense = x.dequantize() if x.dtype.is_blocked else x
    requested = dense.dtype if dense.dtype.is_inexact else float32
    return dense.data.astype(compute_dtype(requested).numpy, copy=False), requested


def axis_index(name: str, axis: Any, ndim: int) -> int:
    """An axis in 0..ndim - 1.

    Raises:
        TypeError, AxisError: if it is no int, or out of range.
    """
    try:
        index = operator.index(axis)
    except TypeError:
        raise TypeError(f"{name}: axis: expected an int, got {reprlib.repr(axis)}") from None
    if not -ndim <= index < ndim:
        raise AxisError(
            f"{name}: axis: expected {-ndim}..{ndim - 1} for a tensor of {ndim} axes, got {index}"
        )
    return index % ndim


def axis_tuple(name: str, axis: Axis, ndim: int) -> tuple[int, ...]:
    """Axes in 0..ndim - 1, ascending; all of them for None.

    Raises:
        TypeError, ValueError: for no ints, out of range, or one named twice.
    """
    if axis is None:
        return tuple(range(ndim))
    if not isinstance(axis, (tuple, list)):
        return (axis_index(name, axis, ndim),)
    axes = tuple(sorted(axis_index(name, a, ndim) for a in axis))
    if len(set(axes)) < len(axes):
        raise ValueError(f"{name}: axis: expected each axis once, got {axis!r}")
    return axes


def broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether an array of ``shape`` broadcasts to ``target``."""
    lead = len(target) - len(shape)
    return lead >= 0 and all(n in (1, m) for n, m in zip(shape, target[lead:], strict=True))


def axis_with_values(name: str, x: ExTensor, axis: int) -> int:
    """An axis that a function of the values along it can take, 0 or more.

    Raises:
        TypeError, ValueError: for what is no tensor or no axis, or no values along it.
    """
    tensors_only(name, x)
    at = axis_index(name, axis, x.ndim)
    if x.shape[at] == 0:
        raise ValueError(f"{name}: no values along axis {at} of shape {x.shape}")
    return at
