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
    """The bits of x1 moved up by x2, zeros coming in; x2 >= 0.

    Raises:
        TypeError, ValueError: for operands that are no integers, or a negative shift.
    """
    return _shifted("bitwise_left_shift", x1, x2)


@primitive(**_shift("bitwise_right_shift"))
def bitwise_right_shift(x1: Operand, x2: Operand, /) -> ExTensor:
    """floor(x1 / 2**x2): the bits of x1 moved down, copies of the sign coming in; x2 >= 0.

    Raises:
        TypeError, ValueError: for operands that are no integers, or a negative shift.
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

    Raises:
        TypeError: for a tensor that is not of floats.
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

    Raises:
        TypeError: for operands that are not floats.
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
    """The number of x1's dtype next to x1 towards x2; x2 where they are equal.

    Raises:
        TypeError: for operands that are not floats.
    """
    return apply("nextafter", *_floats("nextafter", *as_tensors("nextafter", x1, x2)))
