"""Functions of one number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import Declaration
from extensor.autograd.tensor import ExTensor
from extensor.backends.generic.erf import erf_array
from extensor.ops.arguments import tensors_only
from extensor.ops.declare import (
    NO_TENSOR,
    quiet,
    unary_primitive,
    unary_samples,
    without_gradient,
)

__all__ = [
    "abs", "ceil", "cos", "erf", "exp", "expm1", "floor", "isfinite", "isinf", "isnan", "log",
    "log1p", "log2", "log10", "round", "rsqrt", "sigmoid", "sign", "sin", "sqrt", "square", "tan",
    "tanh", "trunc",
]  # fmt: skip


@unary_primitive("exp", lambda g, out, x: g * out, (-2, 2), reads="output", fused=True)
def exp(x: ExTensor) -> ExTensor:
    """The exponential function, e ** x."""
    tensors_only("exp", x)
    return apply("exp", x)


@unary_primitive("expm1", lambda g, out, x: g * (out + 1.0), (-2, 2), reads="output", fused=True)
def expm1(x: ExTensor) -> ExTensor:
    """The exponential less one, exp(x) - 1, exact for small x."""
    tensors_only("expm1", x)
    return apply("expm1", x)


@unary_primitive("log", lambda g, out, x: g / x, (0.5, 3), reads="inputs", fused=True)
def log(x: ExTensor) -> ExTensor:
    """The natural logarithm; -inf at 0, NaN below."""
    tensors_only("log", x)
    return apply("log", x)


@unary_primitive("log1p", lambda g, out, x: g / (x + 1.0), (-0.5, 3), reads="inputs", fused=True)
def log1p(x: ExTensor) -> ExTensor:
    """The logarithm of one more, log(1 + x), exact for small x."""
    tensors_only("log1p", x)
    return apply("log1p", x)


@unary_primitive("log2", lambda g, out, x: g / (x * math.log(2)), (0.5, 3), reads="inputs")
def log2(x: ExTensor) -> ExTensor:
    """The logarithm to base 2; -inf at 0, NaN below."""
    tensors_only("log2", x)
    return apply("log2", x)


@unary_primitive("log10", lambda g, out, x: g / (x * math.log(10)), (0.5, 3), reads="inputs")
def log10(x: ExTensor) -> ExTensor:
    """The logarithm to base 10; -inf at 0, NaN below."""
    tensors_only("log10", x)
    return apply("log10", x)


@unary_primitive("sqrt", lambda g, out, x: g * 0.5 / out, (0.5, 3), reads="output", fused=True)
def sqrt(x: ExTensor) -> ExTensor:
    """The square root; NaN below 0."""
    tensors_only("sqrt", x)
    return apply("sqrt", x)


@unary_primitive(
    quiet(lambda backend, x: 1 / backend.xp.sqrt(x)),
    lambda g, out, x: g * -0.5 * out * out * out,
    unary_samples(lambda x: 1 / np.sqrt(x), 0.5, 3),
    reads="output",
)
def rsqrt(x: ExTensor) -> ExTensor:
    """1 / sqrt(x); inf at 0, NaN below."""
    tensors_only("rsqrt", x)
    return apply("rsqrt", x)


@unary_primitive(
    quiet(lambda backend, x: x * x),
    lambda g, out, x: g * (x * 2.0),
    unary_samples(np.square),
    reads="inputs",
    fused=True,
    to_float=False,
)
def square(x: ExTensor) -> ExTensor:
    """The square, x * x."""
    tensors_only("square", x)
    return apply("square", x)


@unary_primitive(
    lambda backend, x: backend.xp.sin(x),
    lambda g, out, x: g * x.cos(),
    unary_samples(np.sin),
    reads="inputs",
    fused=lambda xp, g, out, x: g * xp.cos(x),
)
def sin(x: ExTensor) -> ExTensor:
    """The sine of x in radians."""
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
    """The cosine of x in radians."""
    tensors_only("cos", x)
    return apply("cos", x)


@unary_primitive("tan", lambda g, out, x: g * (out * out + 1.0), (-1, 1), reads="output")
def tan(x: ExTensor) -> ExTensor:
    """The tangent of x in radians."""
    tensors_only("tan", x)
    return apply("tan", x)


@unary_primitive(
    lambda backend, x: backend.xp.tanh(x),
    lambda g, out, x: g * (1.0 - out * out),
    unary_samples(np.tanh),
    reads="output",
    fused=True,
)
def tanh(x: ExTensor) -> ExTensor:
    """The hyperbolic tangent."""
    tensors_only("tanh", x)
    return apply("tanh", x)


@unary_primitive(
    lambda backend, x: erf_array(backend.xp, x),
    lambda g, out, x: g * (2 / math.sqrt(math.pi)) * (-(x * x)).exp(),
    unary_samples(np.vectorize(math.erf, otypes=[float]), -3, 3),
    reads="inputs",
)
def erf(x: ExTensor) -> ExTensor:
    """The error function, to the precision of the dtype."""
    tensors_only("erf", x)
    return apply("erf", x)


def _sigmoid(backend: Any, x: Any) -> Any:
    # Through tanh: no exponential that could overflow.
    out = backend.xp.tanh(x * 0.5)
    out = out * 0.5 + 0.5
    return out


@unary_primitive(
    _sigmoid,
    lambda g, out, x: g * (out * (1.0 - out)),
    unary_samples(lambda x: 1 / (1 + np.exp(-x))),
    reads="output",
    fused=True,
)
def sigmoid(x: ExTensor) -> ExTensor:
    """1 / (1 + exp(-x)), without overflow."""
    tensors_only("sigmoid", x)
    return apply("sigmoid", x)


@unary_primitive(
    lambda backend, x: backend.xp.abs(x),
    lambda g, out, x: g * x.sign(),
    unary_samples(np.abs, apart_from=(0.0,)),
    reads="inputs",
    to_float=False,
)
def abs(x: ExTensor) -> ExTensor:
    """The magnitude; its gradient at 0 is 0."""
    tensors_only("abs", x)
    return apply("abs", x)


def _rounding(name: str) -> Declaration:
    """The declaration of a step function; integers are given back as they are."""

    def forward(backend: Any, x: Any) -> Any:
        return x if x.dtype.kind in "iub" else getattr(backend.xp, name)(x)

    steps = (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5)
    samples = unary_samples(getattr(np, name), apart_from=steps)
    vjp = lambda g, out, x: g * 0.0  # noqa: E731
    return unary_primitive(forward, vjp, samples, reads="nothing", view=True, to_float=False)


@_rounding("ceil")
def ceil(x: ExTensor) -> ExTensor:
    """The smallest whole number not below x; the gradient is 0."""
    tensors_only("ceil", x)
    return apply("ceil", x)


@_rounding("floor")
def floor(x: ExTensor) -> ExTensor:
    """The largest whole number not above x; the gradient is 0."""
    tensors_only("floor", x)
    return apply("floor", x)


@_rounding("round")
def round(x: ExTensor) -> ExTensor:
    """The nearest whole number, halves to the even one; the gradient is 0."""
    tensors_only("round", x)
    return apply("round", x)


@_rounding("trunc")
def trunc(x: ExTensor) -> ExTensor:
    """The whole number next to x towards 0; the gradient is 0."""
    tensors_only("trunc", x)
    return apply("trunc", x)


@unary_primitive(
    lambda backend, x: backend.xp.sign(x),
    lambda g, out, x: g * 0.0,
    unary_samples(np.sign, apart_from=(0.0,)),
    reads="nothing",
    to_float=False,
)
def sign(x: ExTensor) -> ExTensor:
    """-1, 0 or 1, NaN for NaN; the gradient is 0."""
    tensors_only("sign", x)
    return apply("sign", x)


def _truth(name: str) -> Declaration:
    samples = unary_samples(getattr(np, name))
    return without_gradient(name, "gives truth values", samples, errors=NO_TENSOR)


@_truth("isnan")
def isnan(x: ExTensor) -> ExTensor:
    """Whether each value is NaN."""
    tensors_only("isnan", x)
    return apply("isnan", x)


@_truth("isinf")
def isinf(x: ExTensor) -> ExTensor:
    """Whether each value is an infinity."""
    tensors_only("isinf", x)
    return apply("isinf", x)


@_truth("isfinite")
def isfinite(x: ExTensor) -> ExTensor:
    """Whether each value is neither NaN nor an infinity."""
    tensors_only("isfinite", x)
    return apply("isfinite", x)
