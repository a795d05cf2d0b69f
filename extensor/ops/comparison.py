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
    """Whether a == b, elementwise."""
    return apply("equal", *as_tensors("equal", a, b))


@_comparison("not_equal")
def not_equal(a: Operand, b: Operand) -> ExTensor:
    """Whether a != b, elementwise."""
    return apply("not_equal", *as_tensors("not_equal", a, b))


@_comparison("less")
def less(a: Operand, b: Operand) -> ExTensor:
    """Whether a < b, elementwise."""
    return apply("less", *as_tensors("less", a, b))


@_comparison("less_equal")
def less_equal(a: Operand, b: Operand) -> ExTensor:
    """Whether a <= b, elementwise."""
    return apply("less_equal", *as_tensors("less_equal", a, b))


@_comparison("greater")
def greater(a: Operand, b: Operand) -> ExTensor:
    """Whether a > b, elementwise."""
    return apply("greater", *as_tensors("greater", a, b))


@_comparison("greater_equal")
def greater_equal(a: Operand, b: Operand) -> ExTensor:
    """Whether a >= b, elementwise."""
    return apply("greater_equal", *as_tensors("greater_equal", a, b))


@_comparison("logical_and")
def logical_and(a: Operand, b: Operand) -> ExTensor:
    """Whether both are nonzero, elementwise."""
    return apply("logical_and", *as_tensors("logical_and", a, b))


@_comparison("logical_or")
def logical_or(a: Operand, b: Operand) -> ExTensor:
    """Whether one or both are nonzero, elementwise."""
    return apply("logical_or", *as_tensors("logical_or", a, b))


@_comparison("logical_xor")
def logical_xor(a: Operand, b: Operand) -> ExTensor:
    """Whether exactly one is nonzero, elementwise."""
    return apply("logical_xor", *as_tensors("logical_xor", a, b))


@without_gradient("logical_not", _TRUTH, unary_samples(np.logical_not), errors=NO_TENSOR)
def logical_not(x: ExTensor) -> ExTensor:
    """Whether x is zero, elementwise."""
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
    """The bits set in both, of integers or bool."""
    return apply("bitwise_and", *_integers("bitwise_and", a, b))


@_bitwise("bitwise_or")
def bitwise_or(a: Operand, b: Operand) -> ExTensor:
    """The bits set in either, of integers or bool."""
    return apply("bitwise_or", *_integers("bitwise_or", a, b))


@_bitwise("bitwise_xor")
def bitwise_xor(a: Operand, b: Operand) -> ExTensor:
    """The bits set in exactly one, of integers or bool."""
    return apply("bitwise_xor", *_integers("bitwise_xor", a, b))


@primitive(
    forward=lambda backend, x: backend.xp.invert(x),
    no_vjp="works on bits",
    samples=lambda rng: [Sample((rng.integers(0, 9, (3, 4)),)), Sample((rng.random(4) > 0.5,))],
    errors=(BadInput((np.zeros(3),), TypeError, "expected integers or bool"),),
)
def bitwise_invert(x: ExTensor, /) -> ExTensor:
    """Every bit flipped, of integers; not x, of bool."""
    tensors_only("bitwise_invert", x)
    if x.dtype.kind not in ("int", "bool"):
        raise TypeError(f"bitwise_invert: expected integers or bool, got {x.dtype.name}")
    return apply("bitwise_invert", x)
