"""Inverse and hyperbolic functions, and elementwise functions of two numbers near them.

Names and domains are those of the Python Array API standard (2025.12).
"""

from __future__ import annotations

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import primitive
from extensor.autograd.tensor import ExTensor
from extensor.ops.arguments import Operand, as_tensors, tensors_only
from extensor.ops.declare import (
    BAD_BROADCAST,
    binary_samples,
    quiet,
    unary_primitive,
    unary_samples,
)

__all__ = [
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cosh", "hypot", "logaddexp",
    "reciprocal", "sinh",
]  # fmt: skip


@unary_primitive("arccos", lambda g, out, x: -g / (1.0 - x * x).sqrt(), (-0.8, 0.8), reads="inputs")
def acos(x: ExTensor, /) -> ExTensor:
    """The inverse cosine in radians, 0..pi; NaN outside -1..1."""
    tensors_only("acos", x)
    return apply("acos", x)


@unary_primitive("arcsin", lambda g, out, x: g / (1.0 - x * x).sqrt(), (-0.8, 0.8), reads="inputs")
def asin(x: ExTensor, /) -> ExTensor:
    """The inverse sine in radians, -pi/2..pi/2; NaN outside -1..1."""
    tensors_only("asin", x)
    return apply("asin", x)


@unary_primitive("arctan", lambda g, out, x: g / (x * x + 1.0), (-2, 2), reads="inputs")
def atan(x: ExTensor, /) -> ExTensor:
    """The inverse tangent in radians, -pi/2..pi/2."""
    tensors_only("atan", x)
    return apply("atan", x)


@unary_primitive("sinh", lambda g, out, x: g * apply("cosh", x), (-2, 2), reads="inputs")
def sinh(x: ExTensor, /) -> ExTensor:
    """The hyperbolic sine."""
    tensors_only("sinh", x)
    return apply("sinh", x)


@unary_primitive("cosh", lambda g, out, x: g * apply("sinh", x), (-2, 2), reads="inputs")
def cosh(x: ExTensor, /) -> ExTensor:
    """The hyperbolic cosine."""
    tensors_only("cosh", x)
    return apply("cosh", x)


@unary_primitive("arcsinh", lambda g, out, x: g / (x * x + 1.0).sqrt(), (-2, 2), reads="inputs")
def asinh(x: ExTensor, /) -> ExTensor:
    """The inverse hyperbolic sine."""
    tensors_only("asinh", x)
    return apply("asinh", x)


@unary_primitive(
    "arccosh", lambda g, out, x: g / ((x - 1.0).sqrt() * (x + 1.0).sqrt()), (1.5, 3), reads="inputs"
)
def acosh(x: ExTensor, /) -> ExTensor:
    """The inverse hyperbolic cosine; NaN below 1."""
    tensors_only("acosh", x)
    return apply("acosh", x)


@unary_primitive("arctanh", lambda g, out, x: g / (1.0 - x * x), (-0.8, 0.8), reads="inputs")
def atanh(x: ExTensor, /) -> ExTensor:
    """The inverse hyperbolic tangent; infinite at -1 and 1, NaN outside."""
    tensors_only("atanh", x)
    return apply("atanh", x)


@unary_primitive(
    quiet(lambda backend, x: 1 / x),
    lambda g, out, x: -g * out * out,
    unary_samples(lambda x: 1 / x, 0.5, 2),
    reads="output",
)
def reciprocal(x: ExTensor, /) -> ExTensor:
    """1 / x; an infinity of x's sign at zero."""
    tensors_only("reciprocal", x)
    return apply("reciprocal", x)


@primitive(
    forward=lambda backend, a, b: backend.xp.arctan2(a, b),
    vjps=(
        lambda g, out, a, b: g * b / (a * a + b * b),
        lambda g, out, a, b: -g * a / (a * a + b * b),
    ),
    broadcasts=True,
    to_float=True,
    reads="inputs",
    samples=binary_samples(np.arctan2, 0.5, 2.0),
    errors=BAD_BROADCAST,
)
def atan2(x1: Operand, x2: Operand, /) -> ExTensor:
    """The angle of the point (x2, x1) in radians, -pi..pi, by the signs of both."""
    return apply("atan2", *as_tensors("atan2", x1, x2))


@primitive(
    forward=quiet(lambda backend, a, b: backend.xp.hypot(a, b)),
    vjps=(lambda g, out, a, b: g * (a / out), lambda g, out, a, b: g * (b / out)),
    broadcasts=True,
    to_float=True,
    samples=binary_samples(np.hypot, 0.5, 2.0),
    errors=BAD_BROADCAST,
)
def hypot(x1: Operand, x2: Operand, /) -> ExTensor:
    """sqrt(x1**2 + x2**2) without overflow between; its gradient is not defined at the origin."""
    return apply("hypot", *as_tensors("hypot", x1, x2))


@primitive(
    forward=quiet(lambda backend, a, b: backend.xp.logaddexp(a, b)),
    vjps=(
        lambda g, out, a, b: g * (a - b).sigmoid(),
        lambda g, out, a, b: g * (b - a).sigmoid(),
    ),
    broadcasts=True,
    to_float=True,
    reads="inputs",
    samples=binary_samples(np.logaddexp),
    errors=BAD_BROADCAST,
)
def logaddexp(x1: Operand, x2: Operand, /) -> ExTensor:
    """log(exp(x1) + exp(x2)) without overflow."""
    return apply("logaddexp", *as_tensors("logaddexp", x1, x2))
