"""Trigonometric and hyperbolic functions and their inverses; hypotenuses and `logaddexp`.

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
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "hypot", "logaddexp",
    "sin", "sinh", "tan", "tanh",
]  # fmt: skip


@unary_primitive(
    lambda backend, x: backend.xp.sin(x),
    lambda g, out, x: g * x.cos(),
    unary_samples(np.sin),
    reads="inputs",
    fused=lambda xp, g, out, x: g * xp.cos(x),
)
def sin(x: ExTensor) -> ExTensor:
    """The sine.

    Args:
        x: angles in radians, any shape.

    Returns:
        The shape of x, values in -1..1; integers give float32.

    Example:
        >>> et.sin(et.ExTensor([0.0, et.pi / 6]))
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [0.  0.5])
    """
    tensors_only("sin", x)
    return apply("sin", x)


@unary_primitive(
    lambda backend, x: backend.xp.cos(x),
    lambda g, out, x: -g * x.sin(),
    unary_samples(np.cos),
    reads="inputs",
    fused=lambda xp, g, out, x: -g * xp.sin(x),
)
def cos(x: ExTensor) -> ExTensor:
    """The cosine.

    Args:
        x: angles in radians, any shape.

    Returns:
        The shape of x, values in -1..1; integers give float32.

    Example:
        >>> et.cos(et.ExTensor([0.0, et.pi / 3]))
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [1.  0.5])
    """
    tensors_only("cos", x)
    return apply("cos", x)


@unary_primitive("tan", lambda g, out, x: g * (out * out + 1.0), (-1, 1), reads="output")
def tan(x: ExTensor) -> ExTensor:
    """The tangent.

    Args:
        x: angles in radians, any shape.

    Returns:
        The shape of x; integers give float32.

    Example:
        >>> et.tan(et.ExTensor([0.0, et.pi / 4]))
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [0. 1.])
    """
    tensors_only("tan", x)
    return apply("tan", x)


@unary_primitive("arccos", lambda g, out, x: -g / (1.0 - x * x).sqrt(), (-0.8, 0.8), reads="inputs")
def acos(x: ExTensor, /) -> ExTensor:
    """The inverse cosine.

    Args:
        x: any shape; values outside -1..1 give NaN.

    Returns:
        Angles in radians, 0..pi, in the shape of x; integers give float32.

    Example:
        >>> et.acos(et.ExTensor([1.0, 0.0]))
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [0.     1.5708])
    """
    tensors_only("acos", x)
    return apply("acos", x)


@unary_primitive("arcsin", lambda g, out, x: g / (1.0 - x * x).sqrt(), (-0.8, 0.8), reads="inputs")
def asin(x: ExTensor, /) -> ExTensor:
    """The inverse sine.

    Args:
        x: any shape; values outside -1..1 give NaN.

    Returns:
        Angles in radians, -pi/2..pi/2, in the shape of x; integers give float32.

    Example:
        >>> et.asin(et.ExTensor([0.0, 1.0]))
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [0.     1.5708])
    """
    tensors_only("asin", x)
    return apply("asin", x)


@unary_primitive("arctan", lambda g, out, x: g / (x * x + 1.0), (-2, 2), reads="inputs")
def atan(x: ExTensor, /) -> ExTensor:
    """The inverse tangent.

    Args:
        x: any shape.

    Returns:
        Angles in radians, -pi/2..pi/2, in the shape of x; integers give float32.

    Example:
        >>> et.atan(et.ExTensor([0.0, 1.0]))
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [0.     0.7854])
    """
    tensors_only("atan", x)
    return apply("atan", x)


@unary_primitive("sinh", lambda g, out, x: g * apply("cosh", x), (-2, 2), reads="inputs")
def sinh(x: ExTensor, /) -> ExTensor:
    """The hyperbolic sine, ``(exp(x) - exp(-x)) / 2``.

    Args:
        x: any shape.

    Returns:
        The shape of x; integers give float32.

    Example:
        >>> et.sinh(et.ExTensor([0.0, 1.0]))
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [0.     1.1752])
    """
    tensors_only("sinh", x)
    return apply("sinh", x)


@unary_primitive("cosh", lambda g, out, x: g * apply("sinh", x), (-2, 2), reads="inputs")
def cosh(x: ExTensor, /) -> ExTensor:
    """The hyperbolic cosine, ``(exp(x) + exp(-x)) / 2``.

    Args:
        x: any shape.

    Returns:
        The shape of x; integers give float32.

    Example:
        >>> et.cosh(et.ExTensor([0.0, 1.0]))
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [1.     1.5431])
    """
    tensors_only("cosh", x)
    return apply("cosh", x)


@unary_primitive(
    lambda backend, x: backend.xp.tanh(x),
    lambda g, out, x: g * (1.0 - out * out),
    unary_samples(np.tanh),
    reads="output",
    out_slot="activation",
    fused=True,
)
def tanh(x: ExTensor) -> ExTensor:
    """The hyperbolic tangent, ``(exp(x) - exp(-x)) / (exp(x) + exp(-x))``, without overflow.

    Args:
        x: any shape.

    Returns:
        The shape of x, values in -1..1; integers give float32.

    Example:
        >>> et.tanh(et.ExTensor([0.0, 1.0, 1000.0]))
        ExTensor(shape=(3,), dtype=float32, device=cpu,
          [0.     0.7616 1.    ])
    """
    tensors_only("tanh", x)
    return apply("tanh", x)


@unary_primitive("arcsinh", lambda g, out, x: g / (x * x + 1.0).sqrt(), (-2, 2), reads="inputs")
def asinh(x: ExTensor, /) -> ExTensor:
    """The inverse hyperbolic sine, ``log(x + sqrt(x ** 2 + 1))``.

    Args:
        x: any shape.

    Returns:
        The shape of x; integers give float32.

    Example:
        >>> et.asinh(et.ExTensor([0.0, 1.0]))
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [0.     0.8814])
    """
    tensors_only("asinh", x)
    return apply("asinh", x)


@unary_primitive(
    "arccosh", lambda g, out, x: g / ((x - 1.0).sqrt() * (x + 1.0).sqrt()), (1.5, 3), reads="inputs"
)
def acosh(x: ExTensor, /) -> ExTensor:
    """The inverse hyperbolic cosine, ``log(x + sqrt(x ** 2 - 1))``.

    Args:
        x: any shape; values below 1 give NaN.

    Returns:
        Values of 0 or more in the shape of x; integers give float32.

    Example:
        >>> et.acosh(et.ExTensor([1.0, 2.0]))
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [0.    1.317])
    """
    tensors_only("acosh", x)
    return apply("acosh", x)


@unary_primitive("arctanh", lambda g, out, x: g / (1.0 - x * x), (-0.8, 0.8), reads="inputs")
def atanh(x: ExTensor, /) -> ExTensor:
    """The inverse hyperbolic tangent, ``log((1 + x) / (1 - x)) / 2``.

    Args:
        x: any shape; -1 and 1 give infinities, values beyond them NaN.

    Returns:
        The shape of x; integers give float32.

    Example:
        >>> et.atanh(et.ExTensor([0.0, 0.5, 1.0]))
        ExTensor(shape=(3,), dtype=float32, device=cpu,
          [0.     0.5493    inf])
    """
    tensors_only("atanh", x)
    return apply("atanh", x)


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
    """The angle of the point (x2, x1) from the positive axis of x2; the signs give the quadrant.

    Args:
        x1: the second coordinate of the point.
        x2: the first coordinate; the two shapes broadcast.

    Returns:
        Angles in radians, -pi..pi; integers give float32.

    Example:
        >>> et.atan2(et.ExTensor([1.0, -1.0]), et.ExTensor([-1.0, -1.0]))
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [ 2.3562 -2.3562])
    """
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
    """The length of the hypotenuse, ``sqrt(x1 ** 2 + x2 ** 2)``, without overflow of the squares.

    The gradient is not defined where both are 0.

    Args:
        x1: one side.
        x2: the other side; the two shapes broadcast.

    Returns:
        The broadcast shape; integers give float32.

    Example:
        >>> et.hypot(et.ExTensor([3.0, 3e30]), et.ExTensor([4.0, 4e30]))
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [5.e+00 5.e+30])
    """
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
    """The logarithm of a sum of exponentials, ``log(exp(x1) + exp(x2))``, without overflow.

    Args:
        x1: the first exponent.
        x2: the second; the two shapes broadcast.

    Returns:
        The broadcast shape; integers give float32.

    Example:
        >>> et.logaddexp(et.ExTensor(1000.0), et.ExTensor(1000.0))
        ExTensor(shape=(), dtype=float32, device=cpu,
          1000.6932)
    """
    return apply("logaddexp", *as_tensors("logaddexp", x1, x2))
