"""Comparison, logic and bits, elementwise with broadcasting. None has a derivative."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Declaration, Sample, primitive
from extensor.autograd.tensor import ExTensor
from extensor.ops.arguments import Operand, as_tensors, tensors_only
from extensor.ops.declare import (
    BAD_BROADCAST,
    NO_TENSOR,
    binary_samples,
    unary_samples,
    without_gradient,
)

__all__ = [
    "bitwise_and", "bitwise_invert", "bitwise_or", "bitwise_xor", "equal", "greater",
    "greater_equal", "less", "less_equal", "logical_and", "logical_not", "logical_or",
    "logical_xor", "not_equal",
]  # fmt: skip

_TRUTH = "gives truth values"


def _comparison(name: str) -> Declaration:
    samples = binary_samples(getattr(np, name))
    return without_gradient(name, _TRUTH, samples, broadcasts=True, errors=BAD_BROADCAST)


@_comparison("equal")
def equal(a: Operand, b: Operand) -> ExTensor:
    """Whether ``a == b``, elementwise; NaN equals nothing.

    Args:
        a: the left operand.
        b: the right operand; the two shapes broadcast.

    Returns:
        bool, the broadcast shape.

    Example:
        >>> et.equal(et.ExTensor([1, 2]), 2).tolist()
        [False, True]
    """
    return apply("equal", *as_tensors("equal", a, b))


@_comparison("not_equal")
def not_equal(a: Operand, b: Operand) -> ExTensor:
    """Whether ``a != b``, elementwise; NaN differs from everything.

    Args:
        a: the left operand.
        b: the right operand; the two shapes broadcast.

    Returns:
        bool, the broadcast shape.

    Example:
        >>> et.not_equal(et.ExTensor([1, 2]), 2).tolist()
        [True, False]
    """
    return apply("not_equal", *as_tensors("not_equal", a, b))


@_comparison("less")
def less(a: Operand, b: Operand) -> ExTensor:
    """Whether ``a < b``, elementwise.

    Args:
        a: the left operand.
        b: the right operand; the two shapes broadcast.

    Returns:
        bool, the broadcast shape.

    Example:
        >>> et.less(et.ExTensor([1, 2, 3]), 2).tolist()
        [True, False, False]
    """
    return apply("less", *as_tensors("less", a, b))


@_comparison("less_equal")
def less_equal(a: Operand, b: Operand) -> ExTensor:
    """Whether ``a <= b``, elementwise.

    Args:
        a: the left operand.
        b: the right operand; the two shapes broadcast.

    Returns:
        bool, the broadcast shape.

    Example:
        >>> et.less_equal(et.ExTensor([1, 2, 3]), 2).tolist()
        [True, True, False]
    """
    return apply("less_equal", *as_tensors("less_equal", a, b))


@_comparison("greater")
def greater(a: Operand, b: Operand) -> ExTensor:
    """Whether ``a > b``, elementwise.

    Args:
        a: the left operand.
        b: the right operand; the two shapes broadcast.

    Returns:
        bool, the broadcast shape.

    Example:
        >>> et.greater(et.ExTensor([1, 2, 3]), 2).tolist()
        [False, False, True]
    """
    return apply("greater", *as_tensors("greater", a, b))


@_comparison("greater_equal")
def greater_equal(a: Operand, b: Operand) -> ExTensor:
    """Whether ``a >= b``, elementwise.

    Args:
        a: the left operand.
        b: the right operand; the two shapes broadcast.

    Returns:
        bool, the broadcast shape.

    Example:
        >>> et.greater_equal(et.ExTensor([1, 2, 3]), 2).tolist()
        [False, True, True]
    """
    return apply("greater_equal", *as_tensors("greater_equal", a, b))


@_comparison("logical_and")
def logical_and(a: Operand, b: Operand) -> ExTensor:
    """Whether both values are nonzero, elementwise.

    Args:
        a: the left operand, of any dtype.
        b: the right operand; the two shapes broadcast.

    Returns:
        bool, the broadcast shape.

    Example:
        >>> et.logical_and(et.ExTensor([0, 1, 2]), et.ExTensor([1, 0, 3])).tolist()
        [False, False, True]
    """
    return apply("logical_and", *as_tensors("logical_and", a, b))


@_comparison("logical_or")
def logical_or(a: Operand, b: Operand) -> ExTensor:
    """Whether at least one of two values is nonzero, elementwise.

    Args:
        a: the left operand, of any dtype.
        b: the right operand; the two shapes broadcast.

    Returns:
        bool, the broadcast shape.

    Example:
        >>> et.logical_or(et.ExTensor([0, 1, 2]), et.ExTensor([0, 0, 3])).tolist()
        [False, True, True]
    """
    return apply("logical_or", *as_tensors("logical_or", a, b))


@_comparison("logical_xor")
def logical_xor(a: Operand, b: Operand) -> ExTensor:
    """Whether exactly one of two values is nonzero, elementwise.

    Args:
        a: the left operand, of any dtype.
        b: the right operand; the two shapes broadcast.

    Returns:
        bool, the broadcast shape.

    Example:
        >>> et.logical_xor(et.ExTensor([0, 1, 2]), et.ExTensor([0, 0, 3])).tolist()
        [False, True, False]
    """
    return apply("logical_xor", *as_tensors("logical_xor", a, b))


@without_gradient("logical_not", _TRUTH, unary_samples(np.logical_not), errors=NO_TENSOR)
def logical_not(x: ExTensor) -> ExTensor:
    """Whether each value is zero.

    Args:
        x: any shape and dtype.

    Returns:
        bool, the shape of x.

    Example:
        >>> et.logical_not(et.ExTensor([0, 1, 2])).tolist()
        [True, False, False]
    """
    tensors_only("logical_not", x)
    return apply("logical_not", x)


_NOT_BITS = (BadInput((np.zeros(3), np.zeros(3)), TypeError, "expected integers or bool"),)


def _bitwise(name: str) -> Declaration:
    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        yield Sample((rng.integers(0, 9, (3, 4)), rng.integers(0, 9, (4,))))

    return without_gradient(name, "works on bits", samples, broadcasts=True, errors=_NOT_BITS)


def _integers(name: str, a: Any, b: Any) -> tuple[ExTensor, ExTensor]:
    operands = as_tensors(name, a, b)
    for operand in operands:
        if operand.dtype.kind not in ("int", "bool"):
            raise TypeError(f"{name}: expected integers or bool, got {operand.dtype.name}")
    return operands


@_bitwise("bitwise_and")
def bitwise_and(a: Operand, b: Operand) -> ExTensor:
    """The bits that are set in both operands.

    Args:
        a: integers or bool.
        b: integers or bool; the two shapes broadcast.

    Returns:
        The promoted dtype and the broadcast shape.

    Raises:
        TypeError: for operands that are neither integers nor bool.

    Example:
        >>> et.bitwise_and(et.ExTensor([12]), 10).tolist()
        [8]
    """
    return apply("bitwise_and", *_integers("bitwise_and", a, b))


@_bitwise("bitwise_or")
def bitwise_or(a: Operand, b: Operand) -> ExTensor:
    """The bits that are set in at least one operand.

    Args:
        a: integers or bool.
        b: integers or bool; the two shapes broadcast.

    Returns:
        The promoted dtype and the broadcast shape.

    Raises:
        TypeError: for operands that are neither integers nor bool.

    Example:
        >>> et.bitwise_or(et.ExTensor([12]), 10).tolist()
        [14]
    """
    return apply("bitwise_or", *_integers("bitwise_or", a, b))


@_bitwise("bitwise_xor")
def bitwise_xor(a: Operand, b: Operand) -> ExTensor:
    """The bits that are set in exactly one operand.

    Args:
        a: integers or bool.
        b: integers or bool; the two shapes broadcast.

    Returns:
        The promoted dtype and the broadcast shape.

    Raises:
        TypeError: for operands that are neither integers nor bool.

    Example:
        >>> et.bitwise_xor(et.ExTensor([12]), 10).tolist()
        [6]
    """
    return apply("bitwise_xor", *_integers("bitwise_xor", a, b))


@primitive(
    forward=lambda backend, x: backend.xp.invert(x),
    no_vjp="works on bits",
    samples=lambda rng: [Sample((rng.integers(0, 9, (3, 4)),)), Sample((rng.random(4) > 0.5,))],
    errors=(BadInput((np.zeros(3),), TypeError, "expected integers or bool"),),
)
def bitwise_invert(x: ExTensor, /) -> ExTensor:
    """All bits flipped, of integers; the logical negation, of bool.

    Args:
        x: integers or bool, any shape.

    Returns:
        The shape and dtype of x.

    Raises:
        TypeError: for a tensor that is neither of integers nor of bool.

    Example:
        >>> et.bitwise_invert(et.ExTensor([0, 5])).tolist()
        [-1, -6]
    """
    tensors_only("bitwise_invert", x)
    if x.dtype.kind not in ("int", "bool"):
        raise TypeError(f"bitwise_invert: expected integers or bool, got {x.dtype.name}")
    return apply("bitwise_invert", x)
