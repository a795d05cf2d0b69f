"""Comparison, logic and bits, elementwise with broadcasting. None has a derivative."""

from __future__ import annotations

from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, primitive
from extensor.autograd.tensor import ExTensor
from extensor.ops.arguments import (
    BAD_BROADCAST,
    NO_TENSOR,
    Operand,
    pair,
    pairs,
    tensors_only,
    unary_samples,
)

__all__ = [
    "bitwise_and", "bitwise_invert", "bitwise_or", "bitwise_xor", "equal", "greater",
    "greater_equal", "less", "less_equal", "logical_and", "logical_not", "logical_or",
    "logical_xor", "not_equal",
]  # fmt: skip

_TRUTH = "gives truth values"


def _compared(name: str) -> Any:
    return {
        "forward": lambda backend, a, b: getattr(backend.xp, name)(a, b),
        "no_vjp": _TRUTH,
        "broadcasts": True,
        "samples": pairs(getattr(np, name)),
        "errors": BAD_BROADCAST,
    }


@primitive(**_compared("equal"))
def equal(a: Operand, b: Operand) -> ExTensor:
    """Whether a == b, elementwise."""
    return apply("equal", *pair("equal", a, b))


@primitive(**_compared("not_equal"))
def not_equal(a: Operand, b: Operand) -> ExTensor:
    """Whether a != b, elementwise."""
    return apply("not_equal", *pair("not_equal", a, b))


@primitive(**_compared("less"))
def less(a: Operand, b: Operand) -> ExTensor:
    """Whether a < b, elementwise."""
    return apply("less", *pair("less", a, b))


@primitive(**_compared("less_equal"))
def less_equal(a: Operand, b: Operand) -> ExTensor:
    """Whether a <= b, elementwise."""
    return apply("less_equal", *pair("less_equal", a, b))


@primitive(**_compared("greater"))
def greater(a: Operand, b: Operand) -> ExTensor:
    """Whether a > b, elementwise."""
    return apply("greater", *pair("greater", a, b))


@primitive(**_compared("greater_equal"))
def greater_equal(a: Operand, b: Operand) -> ExTensor:
    """Whether a >= b, elementwise."""
    return apply("greater_equal", *pair("greater_equal", a, b))


@primitive(**_compared("logical_and"))
def logical_and(a: Operand, b: Operand) -> ExTensor:
    """Whether both are nonzero, elementwise."""
    return apply("logical_and", *pair("logical_and", a, b))


@primitive(**_compared("logical_or"))
def logical_or(a: Operand, b: Operand) -> ExTensor:
    """Whether one or both are nonzero, elementwise."""
    return apply("logical_or", *pair("logical_or", a, b))


@primitive(**_compared("logical_xor"))
def logical_xor(a: Operand, b: Operand) -> ExTensor:
    """Whether exactly one is nonzero, elementwise."""
    return apply("logical_xor", *pair("logical_xor", a, b))


@primitive(
    forward=lambda backend, x: backend.xp.logical_not(x),
    no_vjp=_TRUTH,
    samples=unary_samples(np.logical_not),
    errors=NO_TENSOR,
)
def logical_not(x: ExTensor) -> ExTensor:
    """Whether x is zero, elementwise."""
    tensors_only("logical_not", x)
    return apply("logical_not", x)


def _integers(rng: np.random.Generator) -> list[Sample]:
    return [Sample((rng.integers(0, 9, (3, 4)), rng.integers(0, 9, (4,))))]


_NOT_BITS = (BadInput((np.zeros(3), np.zeros(3)), TypeError, "wanted integers or bool"),)


def _bits(name: str) -> Any:
    return {
        "forward": lambda backend, a, b: getattr(backend.xp, name)(a, b),
        "no_vjp": "works on bits",
        "broadcasts": True,
        "samples": _integers,
        "errors": _NOT_BITS,
    }


def _bit_pair(name: str, a: Any, b: Any) -> tuple[ExTensor, ExTensor]:
    operands = pair(name, a, b)
    for operand in operands:
        if operand.dtype.kind not in ("int", "bool"):
            raise TypeError(f"{name}: wanted integers or bool, got {operand.dtype.name}")
    return operands


@primitive(**_bits("bitwise_and"))
def bitwise_and(a: Operand, b: Operand) -> ExTensor:
    """The bits set in both, of integers or bool."""
    return apply("bitwise_and", *_bit_pair("bitwise_and", a, b))


@primitive(**_bits("bitwise_or"))
def bitwise_or(a: Operand, b: Operand) -> ExTensor:
    """The bits set in either, of integers or bool."""
    return apply("bitwise_or", *_bit_pair("bitwise_or", a, b))


@primitive(**_bits("bitwise_xor"))
def bitwise_xor(a: Operand, b: Operand) -> ExTensor:
    """The bits set in exactly one, of integers or bool."""
    return apply("bitwise_xor", *_bit_pair("bitwise_xor", a, b))


@primitive(
    forward=lambda backend, x: backend.xp.invert(x),
    no_vjp="works on bits",
    samples=lambda rng: [Sample((rng.integers(0, 9, (3, 4)),)), Sample((rng.random(4) > 0.5,))],
    errors=(BadInput((np.zeros(3),), TypeError, "wanted integers or bool"),),
)
def bitwise_invert(x: ExTensor, /) -> ExTensor:
    """Every bit flipped, of integers; not x, of bool."""
    tensors_only("bitwise_invert", x)
    if x.dtype.kind not in ("int", "bool"):
        raise TypeError(f"bitwise_invert: wanted integers or bool, got {x.dtype.name}")
    return apply("bitwise_invert", x)
