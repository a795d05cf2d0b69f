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
    "abs", "ceil", "erf", "exp", "expm1", "floor", "isfinite", "isinf", "isnan", "log", "log1p",
    "log2", "log10", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sqrt", "square", "trunc",
]  # fmt: skip


@unary_primitive("exp", lambda g, out, x: g * out, (-2, 2), reads="output", fused=True)
def exp(x: ExTensor) -> ExTensor:
    """The exponential function, ``e ** x``.

    Args:
        x: any shape.

    Returns:
        The shape of x; integers give float32.

    Example:
        >>> et.exp(et.ExTensor([0.0, 1.0]))
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [1.     2.7183])
    """
    tensors_only("exp", x)
    return apply("exp", x)


def _expm1(backend: Any, x: Any) -> Any:
    out = backend.xp.expm1(x)
    if x.dtype.kind != "c":
        return out  # numpy multiplies the infinities of complex numbers by sines of 0
    return backend.xp.where(backend.xp.isfinite(x), out, backend.xp.exp(x) - 1)


@unary_primitive(
    quiet(_expm1),
    lambda g, out, x: g * (out + 1.0),
    unary_samples(np.expm1),
    reads="output",
    fused=True,
)
def expm1(x: ExTensor) -> ExTensor:
    """The exponential less one, ``exp(x) - 1``, without loss of digits for small x.

    Args:
        x: any shape.

    Returns:
        The shape of x; integers give float32.

    Example:
        >>> et.expm1(et.ExTensor(1e-10)).item()
        1.000000013351432e-10
    """
    tensors_only("expm1", x)
    return apply("expm1", x)


@unary_primitive("log", lambda g, out, x: g / x, (0.5, 3), reads="inputs", fused=True)
def log(x: ExTensor) -> ExTensor:
    """The natural logarithm.

    Args:
        x: any shape; 0 gives -inf, values below 0 give NaN.

    Returns:
        The shape of x; integers give float32.

    Example:
        >>> et.log(et.ExTensor([1.0, 0.0, -1.0])).tolist()
        [0.0, -inf, nan]
    """
    tensors_only("log", x)
    return apply("log", x)


@unary_primitive("log1p", lambda g, out, x: g / (x + 1.0), (-0.5, 3), reads="inputs", fused=True)
def log1p(x: ExTensor) -> ExTensor:
    """The natural logarithm of ``1 + x``, without loss of digits for small x.

    Args:
        x: any shape; -1 gives -inf, values below -1 give NaN.

    Returns:
        The shape of x; integers give float32.

    Example:
        >>> et.log1p(et.ExTensor(1e-10)).item()
        1.000000013351432e-10
    """
    tensors_only("log1p", x)
    return apply("log1p", x)


@unary_primitive("log2", lambda g, out, x: g / (x * math.log(2)), (0.5, 3), reads="inputs")
def log2(x: ExTensor) -> ExTensor:
    """The logarithm to base 2.

    Args:
        x: any shape; 0 gives -inf, values below 0 give NaN.

    Returns:
        The shape of x; integers give float32.

    Example:
        >>> et.log2(et.ExTensor([1.0, 8.0, 0.5])).tolist()
        [0.0, 3.0, -1.0]
    """
    tensors_only("log2", x)
    return apply("log2", x)


@unary_primitive("log10", lambda g, out, x: g / (x * math.log(10)), (0.5, 3), reads="inputs")
def log10(x: ExTensor) -> ExTensor:
    """The logarithm to base 10.

    Args:
        x: any shape; 0 gives -inf, values below 0 give NaN.

    Returns:
        The shape of x; integers give float32.

    Example:
        >>> et.log10(et.ExTensor([1.0, 100.0]))
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [0. 2.])
    """
    tensors_only("log10", x)
    return apply("log10", x)


@unary_primitive("sqrt", lambda g, out, x: g * 0.5 / out, (0.5, 3), reads="output", fused=True)
def sqrt(x: ExTensor) -> ExTensor:
    """The square root.

    Args:
        x: any shape; values below 0 give NaN.

    Returns:
        The shape of x; integers give float32.

    Example:
        >>> et.sqrt(et.ExTensor([4, 9])).tolist()
        [2.0, 3.0]
    """
    tensors_only("sqrt", x)
    return apply("sqrt", x)


@unary_primitive(
    quiet(lambda backend, x: 1 / backend.xp.sqrt(x)),
    lambda g, out, x: g * -0.5 * out * out * out,
    unary_samples(lambda x: 1 / np.sqrt(x), 0.5, 3),
    reads="output",
)
def rsqrt(x: ExTensor) -> ExTensor:
    """The reciprocal of the square root, ``1 / sqrt(x)``.

    Args:
        x: any shape; 0 gives inf, values below 0 give NaN.

    Returns:
        The shape of x; integers give float32.

    Example:
        >>> et.rsqrt(et.ExTensor([4.0, 0.0])).tolist()
        [0.5, inf]
    """
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
    """The square, ``x * x``.

    Args:
        x: any shape.

    Returns:
        The shape and dtype of x.

    Example:
        >>> et.square(et.ExTensor([-3, 2])).tolist()
        [9, 4]
    """
    tensors_only("square", x)
    return apply("square", x)


@unary_primitive(
    quiet(lambda backend, x: 1 / x),
    lambda g, out, x: -g * out * out,
    unary_samples(lambda x: 1 / x, 0.5, 2),
    reads="output",
)
def reciprocal(x: ExTensor, /) -> ExTensor:
    """The reciprocal, ``1 / x``.

    Args:
        x: any shape; 0 gives an infinity with the sign of the zero.

    Returns:
        The shape of x; integers give float32.

    Example:
        >>> et.reciprocal(et.ExTensor([2.0, -0.0])).tolist()
        [0.5, -inf]
    """
    tensors_only("reciprocal", x)
    return apply("reciprocal", x)


@unary_primitive(
    lambda backend, x: erf_array(backend.xp, x),
    lambda g, out, x: g * (2 / math.sqrt(math.pi)) * (-(x * x)).exp(),
    unary_samples(np.vectorize(math.erf, otypes=[float]), -3, 3),
    reads="inputs",
)
def erf(x: ExTensor) -> ExTensor:
    """The error function, ``2 / sqrt(pi)`` times the integral of ``exp(-t ** 2)`` from 0 to x.

    Args:
        x: any shape.

    Returns:
        The shape of x, to the precision of its dtype; integers give float32.

    Example:
        >>> et.erf(et.ExTensor([0.0, 1.0]))
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [0.     0.8427])
    """
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
    out_slot="activation",
    fused=True,
)
def sigmoid(x: ExTensor) -> ExTensor:
    """The logistic function, ``1 / (1 + exp(-x))``, without overflow.

    Args:
        x: any shape.

    Returns:
        The shape of x, values in 0..1; integers give float32.

    Example:
        >>> et.sigmoid(et.ExTensor([-1000.0, 0.0, 1.0]))
        ExTensor(shape=(3,), dtype=float32, device=cpu,
          [0.     0.5    0.7311])
    """
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
    """The absolute value; of a complex number the modulus.

    The gradient at 0 is 0.

    Args:
        x: any shape.

    Returns:
        The shape and dtype of x; of complex numbers the real dtype of their parts.

    Example:
        >>> et.abs(et.ExTensor([-2, 3])).tolist()
        [2, 3]
    """
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
    """Round up, to the smallest whole number not below x; the gradient is 0.

    Args:
        x: any shape; integers are returned as they are.

    Returns:
        The shape and dtype of x.

    Example:
        >>> et.ceil(et.ExTensor([1.2, -1.2])).tolist()
        [2.0, -1.0]
    """
    tensors_only("ceil", x)
    return apply("ceil", x)


@_rounding("floor")
def floor(x: ExTensor) -> ExTensor:
    """Round down, to the largest whole number not above x; the gradient is 0.

    Args:
        x: any shape; integers are returned as they are.

    Returns:
        The shape and dtype of x.

    Example:
        >>> et.floor(et.ExTensor([1.2, -1.2])).tolist()
        [1.0, -2.0]
    """
    tensors_only("floor", x)
    return apply("floor", x)


@_rounding("round")
def round(x: ExTensor) -> ExTensor:
    """Round to the nearest whole number, halves to the even one; the gradient is 0.

    Args:
        x: any shape; integers are returned as they are.

    Returns:
        The shape and dtype of x.

    Example:
        >>> et.round(et.ExTensor([0.5, 1.5, 2.4])).tolist()
        [0.0, 2.0, 2.0]
    """
    tensors_only("round", x)
    return apply("round", x)


@_rounding("trunc")
def trunc(x: ExTensor) -> ExTensor:
    """Round towards 0, dropping the fraction; the gradient is 0.

    Args:
        x: any shape; integers are returned as they are.

    Returns:
        The shape and dtype of x.

    Example:
        >>> et.trunc(et.ExTensor([1.7, -1.7])).tolist()
        [1.0, -1.0]
    """
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
    """The sign of each value: -1, 0 or 1; the gradient is 0.

    Args:
        x: any shape; NaN stays NaN.

    Returns:
        The shape and dtype of x.

    Example:
        >>> et.sign(et.ExTensor([-5, 0, 2])).tolist()
        [-1, 0, 1]
    """
    tensors_only("sign", x)
    return apply("sign", x)


def _truth(name: str) -> Declaration:
    samples = unary_samples(getattr(np, name))
    return without_gradient(name, "gives truth values", samples, errors=NO_TENSOR)


@_truth("isnan")
def isnan(x: ExTensor) -> ExTensor:
    """Whether each value is NaN.

    Args:
        x: any shape.

    Returns:
        bool, the shape of x.

    Example:
        >>> et.isnan(et.ExTensor([1.0, et.nan])).tolist()
        [False, True]
    """
    tensors_only("isnan", x)
    return apply("isnan", x)


@_truth("isinf")
def isinf(x: ExTensor) -> ExTensor:
    """Whether each value is an infinity, of either sign.

    Args:
        x: any shape.

    Returns:
        bool, the shape of x.

    Example:
        >>> et.isinf(et.ExTensor([1.0, -et.inf, et.nan])).tolist()
        [False, True, False]
    """
    tensors_only("isinf", x)
    return apply("isinf", x)


@_truth("isfinite")
def isfinite(x: ExTensor) -> ExTensor:
    """Whether each value is neither NaN nor an infinity.

    Args:
        x: any shape.

    Returns:
        bool, the shape of x.

    Example:
        >>> et.isfinite(et.ExTensor([1.0, et.inf, et.nan])).tolist()
        [True, False, False]
    """
    tensors_only("isfinite", x)
    return apply("isfinite", x)
