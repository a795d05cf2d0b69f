"""Functions of one number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import primitive
from extensor.autograd.tensor import ExTensor
from extensor.backends.generic.erf import erf_array
from extensor.ops.arguments import NO_TENSOR, quiet, tensors_only, unary_samples

__all__ = [
    "abs",
    "ceil",
    "cos",
    "erf",
    "exp",
    "expm1",
    "floor",
    "isfinite",
    "isinf",
    "isnan",
    "log",
    "log1p",
    "log2",
    "log10",
    "round",
    "rsqrt",
    "sigmoid",
    "sign",
    "sin",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "trunc",
]  # fmt: skip


@primitive(
    forward=quiet(lambda backend, x: backend.xp.exp(x)),
    vjps=(lambda g, out, x: g * out,),
    fused_vjp=lambda backend, g, out, inputs, needs: (g * out,),
    reads="output",
    to_float=True,
    samples=unary_samples(np.exp, -2, 2),
    errors=NO_TENSOR,
)
def exp(x: ExTensor) -> ExTensor:
    """The exponential function, e ** x."""
    tensors_only("exp", x)
    return apply("exp", x)


@primitive(
    forward=quiet(lambda backend, x: backend.xp.expm1(x)),
    vjps=(lambda g, out, x: g * (out + 1.0),),
    fused_vjp=lambda backend, g, out, inputs, needs: (g * (out + 1.0),),
    reads="output",
    to_float=True,
    samples=unary_samples(np.expm1, -2, 2),
    errors=NO_TENSOR,
)
def expm1(x: ExTensor) -> ExTensor:
    """The exponential less one, exp(x) - 1, exact for small x."""
    tensors_only("expm1", x)
    return apply("expm1", x)


@primitive(
    forward=quiet(lambda backend, x: backend.xp.log(x)),
    vjps=(lambda g, out, x: g / x,),
    fused_vjp=lambda backend, g, out, inputs, needs: (g / inputs[0],),
    reads="inputs",
    to_float=True,
    samples=unary_samples(np.log, 0.5, 3),
    errors=NO_TENSOR,
)
def log(x: ExTensor) -> ExTensor:
    """The natural logarithm; -inf at 0, NaN below."""
    tensors_only("log", x)
    return apply("log", x)


@primitive(
    forward=quiet(lambda backend, x: backend.xp.log1p(x)),
    vjps=(lambda g, out, x: g / (x + 1.0),),
    fused_vjp=lambda backend, g, out, inputs, needs: (g / (inputs[0] + 1.0),),
    reads="inputs",
    to_float=True,
    samples=unary_samples(np.log1p, -0.5, 3),
    errors=NO_TENSOR,
)
def log1p(x: ExTensor) -> ExTensor:
    """The logarithm of one more, log(1 + x), exact for small x."""
    tensors_only("log1p", x)
    return apply("log1p", x)


@primitive(
    forward=quiet(lambda backend, x: backend.xp.log2(x)),
    vjps=(lambda g, out, x: g / (x * math.log(2)),),
    reads="inputs",
    to_float=True,
    samples=unary_samples(np.log2, 0.5, 3),
    errors=NO_TENSOR,
)
def log2(x: ExTensor) -> ExTensor:
    """The logarithm to base 2; -inf at 0, NaN below."""
    tensors_only("log2", x)
    return apply("log2", x)


@primitive(
    forward=quiet(lambda backend, x: backend.xp.log10(x)),
    vjps=(lambda g, out, x: g / (x * math.log(10)),),
    reads="inputs",
    to_float=True,
    samples=unary_samples(np.log10, 0.5, 3),
    errors=NO_TENSOR,
)
def log10(x: ExTensor) -> ExTensor:
    """The logarithm to base 10; -inf at 0, NaN below."""
    tensors_only("log10", x)
    return apply("log10", x)


@primitive(
    forward=quiet(lambda backend, x: backend.xp.sqrt(x)),
    vjps=(lambda g, out, x: g * 0.5 / out,),
    fused_vjp=lambda backend, g, out, inputs, needs: (g * 0.5 / out,),
    reads="output",
    to_float=True,
    samples=unary_samples(np.sqrt, 0.5, 3),
    errors=NO_TENSOR,
)
def sqrt(x: ExTensor) -> ExTensor:
    """The square root; NaN below 0."""
    tensors_only("sqrt", x)
    return apply("sqrt", x)


@primitive(
    forward=quiet(lambda backend, x: 1 / backend.xp.sqrt(x)),
    vjps=(lambda g, out, x: g * -0.5 * out * out * out,),
    reads="output",
    to_float=True,
    samples=unary_samples(lambda x: 1 / np.sqrt(x), 0.5, 3),
    errors=NO_TENSOR,
)
def rsqrt(x: ExTensor) -> ExTensor:
    """1 / sqrt(x); inf at 0, NaN below."""
    tensors_only("rsqrt", x)
    return apply("rsqrt", x)


@primitive(
    forward=quiet(lambda backend, x: x * x),
    vjps=(lambda g, out, x: g * (x * 2.0),),
    fused_vjp=lambda backend, g, out, inputs, needs: (g * (inputs[0] * 2),),
    reads="inputs",
    samples=unary_samples(np.square, -2, 2),
    errors=NO_TENSOR,
)
def square(x: ExTensor) -> ExTensor:
    """The square, x * x."""
    tensors_only("square", x)
    return apply("square", x)


@primitive(
    forward=lambda backend, x: backend.xp.sin(x),
    vjps=(lambda g, out, x: g * x.cos(),),
    fused_vjp=lambda backend, g, out, inputs, needs: (g * backend.xp.cos(inputs[0]),),
    reads="inputs",
    to_float=True,
    samples=unary_samples(np.sin, -2, 2),
    errors=NO_TENSOR,
)
def sin(x: ExTensor) -> ExTensor:
    """The sine of x in radians."""
    tensors_only("sin", x)
    return apply("sin", x)


@primitive(
    forward=lambda backend, x: backend.xp.cos(x),
    vjps=(lambda g, out, x: -g * x.sin(),),
    fused_vjp=lambda backend, g, out, inputs, needs: (-g * backend.xp.sin(inputs[0]),),
    reads="inputs",
    to_float=True,
    samples=unary_samples(np.cos, -2, 2),
    errors=NO_TENSOR,
)
def cos(x: ExTensor) -> ExTensor:
    """The cosine of x in radians."""
    tensors_only("cos", x)
    return apply("cos", x)


@primitive(
    forward=quiet(lambda backend, x: backend.xp.tan(x)),
    vjps=(lambda g, out, x: g * (out * out + 1.0),),
    reads="output",
    to_float=True,
    samples=unary_samples(np.tan, -1, 1),
    errors=NO_TENSOR,
)
def tan(x: ExTensor) -> ExTensor:
    """The tangent of x in radians."""
    tensors_only("tan", x)
    return apply("tan", x)


@primitive(
    forward=lambda backend, x: backend.xp.tanh(x),
    vjps=(lambda g, out, x: g * (1.0 - out * out),),
    fused_vjp=lambda backend, g, out, inputs, needs: (g * (1 - out * out),),
    reads="output",
    to_float=True,
    samples=unary_samples(np.tanh, -2, 2),
    errors=NO_TENSOR,
)
def tanh(x: ExTensor) -> ExTensor:
    """The hyperbolic tangent."""
    tensors_only("tanh", x)
    return apply("tanh", x)


@primitive(
    forward=lambda backend, x: erf_array(backend.xp, x),
    vjps=(lambda g, out, x: g * (2 / math.sqrt(math.pi)) * (-(x * x)).exp(),),
    reads="inputs",
    to_float=True,
    samples=unary_samples(np.vectorize(math.erf, otypes=[float]), -3, 3),
    errors=NO_TENSOR,
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


@primitive(
    forward=_sigmoid,
    vjps=(lambda g, out, x: g * (out * (1.0 - out)),),
    fused_vjp=lambda backend, g, out, inputs, needs: (g * (out * (1 - out)),),
    reads="output",
    to_float=True,
    samples=unary_samples(lambda x: 1 / (1 + np.exp(-x))),
    errors=NO_TENSOR,
)
def sigmoid(x: ExTensor) -> ExTensor:
    """1 / (1 + exp(-x)), without overflow."""
    tensors_only("sigmoid", x)
    return apply("sigmoid", x)


@primitive(
    forward=lambda backend, x: backend.xp.abs(x),
    vjps=(lambda g, out, x: g * x.sign(),),
    reads="inputs",
    samples=unary_samples(np.abs, apart_from=(0.0,)),
    errors=NO_TENSOR,
)
def abs(x: ExTensor) -> ExTensor:
    """The magnitude; its gradient at 0 is 0."""
    tensors_only("abs", x)
    return apply("abs", x)


def _step(function: str) -> Any:
    def forward(backend: Any, x: Any) -> Any:
        return x if x.dtype.kind in "iub" else getattr(backend.xp, function)(x)

    reference: Callable[..., Any] = getattr(np, function)
    return {
        "forward": forward,
        "vjps": (lambda g, out, x: g * 0.0,),
        "reads": "nothing",
        "view": True,
        "samples": unary_samples(reference, apart_from=(-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5)),
        "errors": NO_TENSOR,
    }


@primitive(**_step("ceil"))
def ceil(x: ExTensor) -> ExTensor:
    """The smallest whole number not below x; the gradient is 0."""
    tensors_only("ceil", x)
    return apply("ceil", x)


@primitive(**_step("floor"))
def floor(x: ExTensor) -> ExTensor:
    """The largest whole number not above x; the gradient is 0."""
    tensors_only("floor", x)
    return apply("floor", x)


@primitive(**_step("round"))
def round(x: ExTensor) -> ExTensor:
    """The nearest whole number, halves to the even one; the gradient is 0."""
    tensors_only("round", x)
    return apply("round", x)


@primitive(**_step("trunc"))
def trunc(x: ExTensor) -> ExTensor:
    """The whole number next to x towards 0; the gradient is 0."""
    tensors_only("trunc", x)
    return apply("trunc", x)


@primitive(
    forward=lambda backend, x: backend.xp.sign(x),
    vjps=(lambda g, out, x: g * 0.0,),
    reads="nothing",
    samples=unary_samples(np.sign, apart_from=(0.0,)),
    errors=NO_TENSOR,
)
def sign(x: ExTensor) -> ExTensor:
    """-1, 0 or 1, NaN for NaN; the gradient is 0."""
    tensors_only("sign", x)
    return apply("sign", x)


def _asked(function: str) -> Any:
    return {
        "forward": lambda backend, x: getattr(backend.xp, function)(x),
        "no_vjp": "gives truth values",
        "samples": unary_samples(getattr(np, function)),
        "errors": NO_TENSOR,
    }


@primitive(**_asked("isnan"))
def isnan(x: ExTensor) -> ExTensor:
    """Whether each value is NaN."""
    tensors_only("isnan", x)
    return apply("isnan", x)


@primitive(**_asked("isinf"))
def isinf(x: ExTensor) -> ExTensor:
    """Whether each value is an infinity."""
    tensors_only("isinf", x)
    return apply("isinf", x)


@primitive(**_asked("isfinite"))
def isfinite(x: ExTensor) -> ExTensor:
    """Whether each value is neither NaN nor an infinity."""
    tensors_only("isfinite", x)
    return apply("isfinite", x)
