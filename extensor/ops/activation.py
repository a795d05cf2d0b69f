"""Activation functions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, composite, primitive
from extensor.autograd.tensor import ExTensor
from extensor.ops.arguments import axis_index, tensors_only
from extensor.ops.arithmetic import clip, where
from extensor.ops.declare import NO_TENSOR, unary_samples
from extensor.ops.elementwise import erf, sigmoid, tanh
from extensor.ops.shape import split

__all__ = [
    "elu", "gelu", "hard_sigmoid", "hard_swish", "hard_tanh", "leaky_relu", "log_softmax", "mish",
    "prelu", "relu", "relu6", "selu", "silu", "softmax", "softplus", "swiglu",
]  # fmt: skip


@primitive(
    forward=lambda backend, x: backend.relu(x),
    vjps=(lambda g, out, x: where(out > 0, g, 0.0),),
    fused_vjp=lambda backend, g, out, inputs, needs: (backend.relu_grad(g, out),),
    reads="output",
    samples=unary_samples(lambda x: np.maximum(x, 0), apart_from=(0.0,)),
    errors=NO_TENSOR,
)
def relu(x: ExTensor) -> ExTensor:
    """max(x, 0), NaN for NaN; the gradient at 0 is 0."""
    tensors_only("relu", x)
    return apply("relu", x)


@composite(
    samples=unary_samples(lambda x: np.clip(x, 0, 6), -2, 8, apart_from=(0.0, 6.0)),
    errors=NO_TENSOR,
)
def relu6(x: ExTensor) -> ExTensor:
    """min(max(x, 0), 6)."""
    return clip(x, 0.0, 6.0)


@composite(
    samples=lambda rng: [
        *unary_samples(lambda x: np.where(x > 0, x, 0.01 * x), apart_from=(0.0,))(rng),
        Sample((np.array([-2.0, 3.0]), 0.3), expected=np.array([-0.6, 3.0])),
    ],
    errors=NO_TENSOR,
)
def leaky_relu(x: ExTensor, slope: float = 0.01) -> ExTensor:
    """X where positive, ``slope`` * x elsewhere."""
    tensors_only("leaky_relu", x)
    return where(x > 0, x, x * slope)


@composite(
    samples=lambda rng: [
        Sample((np.array([[-1.0, 2.0, -0.5], [0.3, -2.0, 1.0]]), np.array([0.1, 0.2, 0.3])))
    ],
    errors=(BadInput((np.zeros((2, 3)), np.zeros(2)), ValueError, "that broadcast"),),
)
def prelu(x: ExTensor, slope: ExTensor) -> ExTensor:
    """X where positive, ``slope`` * x elsewhere; the slope is a tensor that broadcasts to x."""
    tensors_only("prelu", x, slope)
    return where(x > 0, x, x * slope)


def _axis(name: str, x: ExTensor, axis: int) -> int:
    tensors_only(name, x)
    at = axis_index(name, axis, x.ndim)
    if x.shape[at] == 0:
        raise ValueError(f"{name}: no values along axis {at} of shape {x.shape}")
    return at


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
    """exp(x) over its sum along ``axis``, without overflow.

    Raises:
        TypeError, ValueError: for a bad axis, or no values along it.
    """
    return apply("softmax", x, axis=_axis("softmax", x, axis))


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
    """The logarithm of `softmax`, without overflow or underflow."""
    return apply("log_softmax", x, axis=_axis("log_softmax", x, axis))


@primitive(
    forward=lambda backend, x: backend.xp.logaddexp(x, x.dtype.type(0)),
    vjps=(lambda g, out, x: g * x.sigmoid(),),
    reads="inputs",
    to_float=True,
    samples=unary_samples(lambda x: np.log1p(np.exp(x))),
    errors=NO_TENSOR,
)
def softplus(x: ExTensor) -> ExTensor:
    """log(1 + exp(x)), without overflow."""
    tensors_only("softplus", x)
    return apply("softplus", x)


def _gelu_vjp(g: ExTensor, out: None, x: ExTensor, saved: Any) -> ExTensor:
    phi = (erf(x * math.sqrt(0.5)) + 1.0) * 0.5
    return g * (phi + x * (x * x * -0.5).exp() * (1 / math.sqrt(2 * math.pi)))


@primitive(
    name="gelu_exact",
    forward=lambda backend, x: backend.gelu(x),
    vjps=(_gelu_vjp,),
    fused_vjp=lambda backend, g, out, inputs, needs, saved: (
        backend.gelu_grad(g, inputs[0], saved),
    ),
    reads="inputs",
    saves=True,
    to_float=True,
    samples=unary_samples(
        lambda x: x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))) / 2
    ),
    errors=NO_TENSOR,
)
def _gelu_exact(x: ExTensor) -> ExTensor:
    """X times the normal distribution function of x."""
    tensors_only("gelu_exact", x)
    return apply("gelu_exact", x)


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(2, 3)),)), Sample((rng.normal(size=(2, 3)), "tanh"))
    ],
    errors=(BadInput((np.zeros(3), "cubic"), ValueError, "'none' or 'tanh'"),),
)  # fmt: skip
def gelu(x: ExTensor, approximate: str = "none") -> ExTensor:
    """X times the normal distribution function of x, or its tanh approximation.

    Source: Hendrycks and Gimpel, arXiv 1606.08415.

    Raises:
        ValueError: for an approximation other than ``"none"`` and ``"tanh"``.
    """
    tensors_only("gelu", x)
    if approximate == "none":
        return _gelu_exact(x)
    if approximate != "tanh":
        raise ValueError(f"gelu: approximate: expected 'none' or 'tanh', got {approximate!r}")
    inside = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
    return x * 0.5 * (tanh(inside) + 1.0)


@composite(samples=unary_samples(lambda x: x / (1 + np.exp(-x))), errors=NO_TENSOR)
def silu(x: ExTensor) -> ExTensor:
    """X * sigmoid(x)."""
    return x * sigmoid(x)


@composite(
    samples=lambda rng: [Sample((rng.normal(size=(2, 6)),)), Sample((rng.normal(size=(4, 3)), 0))],
    errors=(BadInput((np.zeros((2, 5)),), ValueError, "even length"),),
)
def swiglu(x: ExTensor, axis: int = -1) -> ExTensor:
    """silu(first half of x along ``axis``) * second half.

    Source: Shazeer, arXiv 2002.05202.

    Raises:
        ValueError: if the axis has an odd length.
    """
    at = _axis("swiglu", x, axis)
    if x.shape[at] % 2:
        raise ValueError(f"swiglu: expected an axis of even length, got axis {at} of {x.shape}")
    gate, value = split(x, 2, at)
    return silu(gate) * value


@composite(samples=unary_samples(lambda x: x * np.tanh(np.log1p(np.exp(x)))), errors=NO_TENSOR)
def mish(x: ExTensor) -> ExTensor:
    """X * tanh(softplus(x)). Source: Misra, arXiv 1908.08681."""
    return x * tanh(softplus(x))


@composite(
    samples=lambda rng: [
        *unary_samples(lambda x: np.where(x > 0, x, np.expm1(x)), apart_from=(0.0,))(rng),
        Sample((np.array([-2.0, 3.0]), 0.5), expected=np.array([0.5 * np.expm1(-2.0), 3.0])),
    ],
    errors=NO_TENSOR,
)
def elu(x: ExTensor, alpha: float = 1.0) -> ExTensor:
    """X where positive, alpha * (exp(x) - 1) elsewhere. Source: arXiv 1511.07289."""
    tensors_only("elu", x)
    return where(x > 0, x, clip(x, max=0.0).expm1() * alpha)  # clipped, so as not to overflow


@composite(samples=unary_samples(apart_from=(0.0,)), errors=NO_TENSOR)
def selu(x: ExTensor) -> ExTensor:
    """1.0507... * elu(x, 1.6733...), which keeps mean 0 and variance 1. Source: 1706.02515."""
    return elu(x, 1.6732632423543772) * 1.0507009873554805


@composite(
    samples=unary_samples(lambda x: np.clip(x / 6 + 0.5, 0, 1), -4, 4, apart_from=(-3.0, 3.0)),
    errors=NO_TENSOR,
)
def hard_sigmoid(x: ExTensor) -> ExTensor:
    """X / 6 + 1/2, clipped to 0..1."""
    tensors_only("hard_sigmoid", x)
    return clip(x * (1 / 6) + 0.5, 0.0, 1.0)


@composite(
    samples=unary_samples(lambda x: x * np.clip(x / 6 + 0.5, 0, 1), -4, 4, (-3.0, 3.0)),
    errors=NO_TENSOR,
)
def hard_swish(x: ExTensor) -> ExTensor:
    """X * hard_sigmoid(x)."""
    return x * hard_sigmoid(x)


@composite(
    samples=unary_samples(lambda x: np.clip(x, -1, 1), apart_from=(-1.0, 1.0)), errors=NO_TENSOR
)
def hard_tanh(x: ExTensor) -> ExTensor:
    """X clipped to -1..1."""
    return clip(x, -1.0, 1.0)
