"""Inverse and hyperbolic functions, and elementwise functions of two numbers near them.

Names and domains are those of the Python Array API standard (2025.12).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import primitive
from extensor.autograd.tensor import ExTensor
from extensor.ops.arguments import (
    BAD_BROADCAST,
    NO_TENSOR,
    Operand,
    pair,
    pairs,
    quiet,
    tensors_only,
    unary_samples,
)

__all__ = [
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cosh", "hypot", "logaddexp",
    "reciprocal", "sinh",
]  # fmt: skip


def _unary(name: str, vjp: Callable[..., Any], low: float, high: float, reads: str) -> Any:
    function: Callable[..., Any] = getattr(np, name)
    return {
        "forward": quiet(lambda backend, x: getattr(backend.xp, name)(x)),
        "vjps": (vjp,),
        "reads": reads,
        "to_float": True,
        "samples": unary_samples(function, low, high),
        "errors": NO_TENSOR,
    }


@primitive(**_unary("arccos", lambda g, out, x: -g / (1.0 - x * x).sqrt(), -0.8, 0.8, "inputs"))
def acos(x: ExTensor, /) -> ExTensor:
    """The inverse cosine in radians, 0..pi; NaN outside -1..1."""
    tensors_only("acos", x)
    return apply("acos", x)


@primitive(**_unary("arcsin", lambda g, out, x: g / (1.0 - x * x).sqrt(), -0.8, 0.8, "inputs"))
def asin(x: ExTensor, /) -> ExTensor:
    """The inverse sine in radians, -pi/2..pi/2; NaN outside -1..1."""
    tensors_only("asin", x)
    return apply("asin", x)


@primitive(**_unary("arctan", lambda g, out, x: g / (x * x + 1.0), -2, 2, "inputs"))
def atan(x: ExTensor, /) -> ExTensor:
    """The inverse tangent in radians, -pi/2..pi/2."""
    tensors_only("atan", x)
    return apply("atan", x)


@primitive(**_unary("sinh", lambda g, out, x: g * apply("cosh", x), -2, 2, "inputs"))
def sinh(x: ExTensor, /) -> ExTensor:
    """The hyperbolic sine."""
    tensors_only("sinh", x)
    return apply("sinh", x)


@primitive(**_unary("cosh", lambda g, out, x: g * apply("sinh", x), -2, 2, "inputs"))
def cosh(x: ExTensor, /) -> ExTensor:
    """The hyperbolic cosine."""
    tensors_only("cosh", x)
    return apply("cosh", x)


@primitive(**_unary("arcsinh", lambda g, out, x: g / (x * x + 1.0).sqrt(), -2, 2, "inputs"))
def asinh(x: ExTensor, /) -> ExTensor:
    """The inverse hyperbolic sine."""
    tensors_only("asinh", x)
    return apply("asinh", x)


@primitive(
    **_unary(
        "arccosh", lambda g, out, x: g / ((x - 1.0).sqrt() * (x + 1.0).sqrt()), 1.5, 3, "inputs"
    )
)
def acosh(x: ExTensor, /) -> ExTensor:
    """The inverse hyperbolic cosine; NaN below 1."""
    tensors_only("acosh", x)
    return apply("acosh", x)


@primitive(**_unary("arctanh", lambda g, out, x: g / (1.0 - x * x), -0.8, 0.8, "inputs"))
def atanh(x: ExTensor, /) -> ExTensor:
    """The inverse hyperbolic tangent; infinite at -1 and 1, NaN outside."""
    tensors_only("atanh", x)
    return apply("atanh", x)


@primitive(
    forward=quiet(lambda backend, x: 1 / x),
    vjps=(lambda g, out, x: -g * out * out,),
    reads="output",
    to_float=True,
    samples=unary_samples(lambda x: 1 / x, 0.5, 2),
    errors=NO_TENSOR,
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
    samples=pairs(np.arctan2, 0.5, 2.0),
    errors=BAD_BROADCAST,
)
def atan2(x1: Operand, x2: Operand, /) -> ExTensor:
    """The angle of the point (x2, x1) in radians, -pi..pi, by the signs of both."""
    return apply("atan2", *pair("atan2", x1, x2))


@primitive(
    forward=quiet(lambda backend, a, b: backend.xp.hypot(a, b)),
    vjps=(lambda g, out, a, b: g * (a / out), lambda g, out, a, b: g * (b / out)),
    broadcasts=True,
    to_float=True,
    samples=pairs(np.hypot, 0.5, 2.0),
    errors=BAD_BROADCAST,
)
def hypot(x1: Operand, x2: Operand, /) -> ExTensor:
    """sqrt(x1**2 + x2**2) without overflow between; its gradient is not defined at the origin."""
    return apply("hypot", *pair("hypot", x1, x2))


@primitive(
    forward=quiet(lambda backend, a, b: backend.xp.logaddexp(a, b)),
    vjps=(
        lambda g, out, a, b: g * (a - b).sigmoid(),
        lambda g, out, a, b: g * (b - a).sigmoid(),
    ),
    broadcasts=True,
    to_float=True,
    reads="inputs",
    samples=pairs(np.logaddexp),
    errors=BAD_BROADCAST,
)
def logaddexp(x1: Operand, x2: Operand, /) -> ExTensor:
    """log(exp(x1) + exp(x2)) without overflow."""
    return apply("logaddexp", *pair("logaddexp", x1, x2))
