"""Softmax and its logarithm, along an axis."""

from __future__ import annotations

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, primitive
from extensor.autograd.tensor import ExTensor
from extensor.ops.arguments import axis_with_values

__all__ = ["log_softmax", "softmax"]

_AXIS_ERRORS = (
    BadInput((np.zeros((2, 3)), 2), ValueError, "expected -2..1"),
    BadInput((np.zeros((2, 0)), 1), ValueError, "no values"),
)


def _axis_samples(rng: np.random.Generator) -> list[Sample]:
    return [Sample((rng.normal(size=(2, 3)),)), Sample((rng.normal(size=(2, 3, 2)), 1))]


@primitive(
    forward=lambda backend, x, axis: backend.softmax(x, axis),
    vjps=(lambda g, out, x, axis: out * (g - (g * out).sum(axis, keepdims=True)),),
    fused_vjp=lambda backend, g, out, inputs, needs, axis: (backend.softmax_grad(g, out, axis),),
    reads="output",
    to_float=True,
    samples=_axis_samples,
    errors=_AXIS_ERRORS,
)
def softmax(x: ExTensor, axis: int = -1) -> ExTensor:
    """The normalized exponentials, ``exp(x) / sum(exp(x))`` along an axis, without overflow.

    Args:
        x: one axis or more.
        axis: the axis along which the result sums to 1.

    Returns:
        The shape of x, values in 0..1; integers give float32.

    Raises:
        TypeError, ValueError: for a bad axis, or no values along it.

    Example:
        >>> et.softmax(et.ExTensor([0.0, 0.0, 1000.0, 1000.0])).tolist()
        [0.0, 0.0, 0.5, 0.5]
    """
    return apply("softmax", x, axis=axis_with_values("softmax", x, axis))


@primitive(
    forward=lambda backend, x, axis: backend.log_softmax(x, axis),
    vjps=(lambda g, out, x, axis: g - out.exp() * g.sum(axis, keepdims=True),),
    fused_vjp=lambda backend, g, out, inputs, needs, axis: (
        backend.log_softmax_grad(g, out, axis),
    ),
    reads="output",
    to_float=True,
    samples=_axis_samples,
    errors=_AXIS_ERRORS,
)
def log_softmax(x: ExTensor, axis: int = -1) -> ExTensor:
    """The logarithm of `softmax`, without overflow or underflow.

    Args:
        x: one axis or more.
        axis: the axis along which the probabilities sum to 1.

    Returns:
        The shape of x, values of 0 or less; integers give float32.

    Raises:
        TypeError, ValueError: for a bad axis, or no values along it.

    Example:
        >>> et.log_softmax(et.ExTensor([0.0, 1000.0])).tolist()
        [-1000.0, 0.0]
    """
    return apply("log_softmax", x, axis=axis_with_values("log_softmax", x, axis))
