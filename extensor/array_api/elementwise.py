"""Elementwise operations of the standard alone: shifts, signs and neighbours of floats."""

from __future__ import annotations

from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, primitive
from extensor.autograd.tensor import ExTensor
from extensor.ops.arguments import Operand, as_tensors, tensors_only
from extensor.ops.arithmetic import clone, power, where
from extensor.ops.declare import BAD_BROADCAST, NO_TENSOR, unary_samples

__all__ = [
    "bitwise_left_shift",
    "bitwise_right_shift",
    "copysign",
    "nextafter",
    "positive",
    "pow",
    "signbit",
]

positive = clone
pow = power


def _shift(name: str) -> Any:
    return {
        "forward": lambda backend, a, b: getattr(backend.xp, name.removeprefix("bitwise_"))(a, b),
        "no_vjp": "works on bits",
        "broadcasts": True,
        "samples": lambda rng: [Sample((rng.integers(0, 9, (3, 4)), rng.integers(0, 9, (4,))))],
        "errors": (
            BadInput((np.zeros(3), np.zeros(3)), TypeError, "expected integers"),
            BadInput((np.ones(2, int), np.array([1, -1])), ValueError, "0 or more"),
        ),
    }


def _shifted(name: str, a: Any, b: Any) -> ExTensor:
    operands = as_tensors(name, a, b)
    for operand in operands:
        if not operand.dtype.is_integer:
            raise TypeError(f"{name}: expected integers, got {operand.dtype.name}")
    by = operands[1].data
    if by.size and int(by.min()) < 0:
        raise ValueError(f"{name}: expected shifts of 0 or more, got {int(by.min())}")
    return apply(name, *operands)


@primitive(**_shift("bitwise_left_shift"))
def bitwise_left_shift(x1: Operand, x2: Operand, /) -> ExTensor:
    """The bits of x1 moved up by x2 places, zeros coming in.

    Args:
        x1: integers.
        x2: integers of 0 or more; the two shapes broadcast.

    Returns:
        The promoted dtype and the broadcast shape.

    Raises:
        TypeError, ValueError: for operands that are no integers, or a negative shift.

    Example:
        >>> et.bitwise_left_shift(et.ExTensor([1, 3]), 2).tolist()
        [4, 12]
    """
    return _shifted("bitwise_left_shift", x1, x2)


@primitive(**_shift("bitwise_right_shift"))
def bitwise_right_shift(x1: Operand, x2: Operand, /) -> ExTensor:
    """The bits of x1 moved down by x2 places: ``floor(x1 / 2 ** x2)``.

    Args:
        x1: integers; the sign is kept.
        x2: integers of 0 or more; the two shapes broadcast.

    Returns:
        The promoted dtype and the broadcast shape.

    Raises:
        TypeError, ValueError: for operands that are no integers, or a negative shift.

    Example:
        >>> et.bitwise_right_shift(et.ExTensor([13, -13]), 2).tolist()
        [3, -4]
    """
    return _shifted("bitwise_right_shift", x1, x2)


def _floats(name: str, *operands: ExTensor) -> tuple[ExTensor, ...]:
    for operand in operands:
        if not operand.dtype.is_float:
            raise TypeError(
                f"{name}: expected floats, got {operand.dtype.name}; convert with "
                "x.astype('float32')"
            )
    return operands


_NO_FLOATS = BadInput((np.ones(3, int), np.ones(3, int)), TypeError, "expected floats")


@primitive(
    forward=lambda backend, x: backend.xp.signbit(x),
    no_vjp="gives truth values",
    samples=unary_samples(np.signbit),
    errors=(*NO_TENSOR, BadInput((np.ones(3, int),), TypeError, "expected floats")),
)
def signbit(x: ExTensor, /) -> ExTensor:
    """Whether the sign bit is set: true for -0.0 and for a NaN with a sign.

    Args:
        x: floats, any shape.

    Returns:
        bool, the shape of x.

    Raises:
        TypeError: for a tensor that is not of floats.

    Example:
        >>> et.signbit(et.ExTensor([-0.0, 0.0, -3.0])).tolist()
        [True, False, True]
    """
    tensors_only("signbit", x)
    return apply("signbit", *_floats("signbit", x))


def _signed_samples(rng: np.random.Generator) -> list[Sample]:
    a, b = rng.uniform(0.5, 2, (3, 4)), rng.uniform(0.5, 2, (4,))
    a[0], b[1] = -a[0], -b[1]
    return [Sample((a, b), expected=np.copysign(a, b))]


@primitive(
    forward=lambda backend, a, b: backend.xp.copysign(a, b),
    vjps=(
        lambda g, out, a, b: where(signbit(a) == signbit(out), g, -g),
        lambda g, out, a, b: ExTensor.zeros_like(g),
    ),
    broadcasts=True,
    samples=_signed_samples,
    errors=(*BAD_BROADCAST, _NO_FLOATS),
)
def copysign(x1: Operand, x2: Operand, /) -> ExTensor:
    """The magnitude of x1 with the sign of x2, zeros and NaN included.

    Args:
        x1: floats.
        x2: floats; the two shapes broadcast.

    Returns:
        The promoted dtype and the broadcast shape.

    Raises:
        TypeError: for operands that are not floats.

    Example:
        >>> et.copysign(et.ExTensor([3.0, -2.0]), -0.0).tolist()
        [-3.0, -2.0]
    """
    return apply("copysign", *_floats("copysign", *as_tensors("copysign", x1, x2)))


@primitive(
    forward=lambda backend, a, b: backend.xp.nextafter(a, b),
    no_vjp="a step from one number of the dtype to the next",
    broadcasts=True,
    moves=True,  # 16-bit floats have neighbours of their own
    samples=lambda rng: [Sample((rng.normal(size=(3, 4)), rng.normal(size=(4,))))],
    errors=(*BAD_BROADCAST, _NO_FLOATS),
)
def nextafter(x1: Operand, x2: Operand, /) -> ExTensor:
    """The next number of x1's dtype towards x2; x2 where the two are equal.

    Args:
        x1: floats, where to start.
        x2: floats, the direction; the two shapes broadcast.

    Returns:
        The promoted dtype and the broadcast shape.

    Raises:
        TypeError: for operands that are not floats.

    Example:
        >>> et.nextafter(et.ExTensor(1.0), et.ExTensor(2.0)).item() - 1.0
        1.1920928955078125e-07
    """
    return apply("nextafter", *_floats("nextafter", *as_tensors("nextafter", x1, x2)))
