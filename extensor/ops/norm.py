"""Normalizations over the last axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, primitive
from extensor.autograd.tensor import ExTensor
from extensor.ops.arguments import tensors_only

__all__ = ["batch_norm", "layer_norm", "rms_norm"]

_SHAPES = (((2, 5), (5,)), ((2, 3, 4), (3, 4)), ((4,), (4,)))


def _layer_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, kept in _SHAPES:
        x, weight, bias = rng.normal(size=shape), rng.normal(size=kept), rng.normal(size=kept)
        axes = tuple(range(-len(kept), 0))
        rstd = 1 / np.sqrt(x.var(axis=axes, keepdims=True) + 0.1)
        expected = (x - x.mean(axis=axes, keepdims=True)) * rstd * weight + bias
        yield Sample((x, weight, bias, 0.1), expected=expected)


def _rms_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, kept in _SHAPES:
        x, weight = rng.normal(size=shape), rng.normal(size=kept)
        mean = (x * x).mean(axis=tuple(range(-len(kept), 0)), keepdims=True)
        yield Sample((x, weight, 0.1), expected=x / np.sqrt(mean + 0.1) * weight)


def _check(name: str, eps: float, x: ExTensor, weight: ExTensor, *bias: ExTensor) -> None:
    tensors_only(name, x, weight, *bias)
    shape = weight.shape
    if not shape or x.shape[-len(shape) :] != shape or any(b.shape != shape for b in bias):
        others = ", ".join(str(t.shape) for t in (weight, *bias))
        raise ValueError(
            f"{name}: expected an input whose last axes are those of the weights, got {x.shape} "
            f"and {others}"
        )
    if 0 in shape or not 0.0 < eps < math.inf:
        raise ValueError(
            f"{name}: expected values to normalize and eps above 0, got {shape}, {eps}"
        )


def _normalized(x: ExTensor, weight: ExTensor, eps: float, centred: bool) -> tuple[Any, ...]:
    """The axes, the leading axes, h = (x - mean) rstd and rstd."""
    axes = tuple(range(-weight.ndim, 0))
    h = x - x.mean(axis=axes, keepdims=True) if centred else x
    rstd = (h.square().mean(axis=axes, keepdims=True) + eps).rsqrt()
    return axes, tuple(range(x.ndim - weight.ndim)), h * rstd, rstd


def _sum_over(lead: tuple[int, ...], g: ExTensor) -> ExTensor:
    return g.sum(axis=lead) if lead else g


def _x_vjp(g: ExTensor, x: ExTensor, weight: ExTensor, eps: float, centred: bool) -> ExTensor:
    axes, _, h, rstd = _normalized(x, weight, eps, centred)
    e = g * weight
    projected = e - h * (e * h).mean(axis=axes, keepdims=True)
    return rstd * (projected - e.mean(axis=axes, keepdims=True) if centred else projected)


def _weight_vjp(g: ExTensor, x: ExTensor, weight: ExTensor, eps: float, centred: bool) -> ExTensor:
    _, lead, h, _ = _normalized(x, weight, eps, centred)
    return _sum_over(lead, g * h)


def _layer_norm(backend: Any, x: Any, weight: Any, bias: Any, eps: float, narrow: bool) -> Any:
    y, mean, rstd = backend.layer_norm(x, weight, bias, eps, narrow)
    return y, (mean, rstd)


@primitive(
    forward=_layer_norm,
    vjps=(
        lambda g, out, x, weight, bias, eps, narrow, saved: _x_vjp(g, x, weight, eps, True),
        lambda g, out, x, weight, bias, eps, narrow, saved: _weight_vjp(g, x, weight, eps, True),
        lambda g, out, x, weight, bias, eps, narrow, saved: _sum_over(
            tuple(range(x.ndim - weight.ndim)),
            g.astype(bias.dtype),  # before the sum, which rounds
        ),
    ),
    fused_vjp=lambda backend, g, out, inputs, needs, eps, narrow, saved, **adds: (
        backend.layer_norm_grad(g, *inputs[:2], *saved, **adds)
    ),
    reads="inputs",
    slots=("norm",),
    saves=True,
    to_float=True,
    samples=_layer_samples,
    errors=(
        BadInput((np.zeros((2, 3)), np.zeros(2), np.zeros(2)), ValueError, "last axes"),
        BadInput((np.zeros((2, 3)), np.zeros(3), np.zeros(1)), ValueError, "last axes"),
        BadInput((np.zeros((2, 3)), np.zeros(3), np.zeros(3), 0.0), ValueError, "eps above 0"),
        BadInput((np.zeros((2, 0)), np.zeros(0), np.zeros(0)), ValueError, "to normalize"),
    ),
)
def layer_norm(
    x: ExTensor, weight: ExTensor, bias: ExTensor, eps: float = 1e-5, narrow: bool = False
) -> ExTensor:
    """LayerNorm: ``(x - mean) / sqrt(var + eps) * weight + bias`` over the last axes.

    Args:
        x: ``(..., *shape)``.
        weight: of ``shape``, one axis or more.
        bias: of ``shape``.
        eps: above 0.
        narrow: round the result to bfloat16, for a product that reads bfloat16.

    Returns:
        The shape of x.

    Raises:
        TypeError, ValueError: for shapes that do not go together, or an eps not above 0.

    Source: Ba et al., arXiv 1607.06450, section 3.

    Example:
        >>> x = et.ExTensor([[1.0, 3.0], [2.0, 2.0]])
        >>> et.layer_norm(x, et.ones(2), et.zeros(2))
        ExTensor(shape=(2, 2), dtype=float32, device=cpu,
          [[-1.  1.]
           [ 0.  0.]])
    """
    _check("layer_norm", eps, x, weight, bias)
    return apply("layer_norm", x, weight, bias, eps=eps, narrow=narrow)


@primitive(
    forward=lambda backend, x, weight, eps, narrow: backend.rms_norm(x, weight, eps, narrow),
    vjps=(
        lambda g, out, x, weight, eps, narrow, saved: _x_vjp(g, x, weight, eps, False),
        lambda g, out, x, weight, eps, narrow, saved: _weight_vjp(g, x, weight, eps, False),
    ),
    fused_vjp=lambda backend, g, out, inputs, needs, eps, narrow, saved, **adds: (
        backend.rms_norm_grad(g, *inputs, saved, **adds)
    ),
    reads="inputs",
    slots=("norm",),
    saves=True,
    to_float=True,
    samples=_rms_samples,
    errors=(
        BadInput((np.zeros((2, 3)), np.zeros(2)), ValueError, "last axes"),
        BadInput((np.zeros((2, 3)), np.zeros(3), -1.0), ValueError, "eps above 0"),
    ),
)
def rms_norm(x: ExTensor, weight: ExTensor, eps: float = 1e-6, narrow: bool = False) -> ExTensor:
    """RMSNorm: ``x / sqrt(mean(x ** 2) + eps) * weight`` over the last axes.

    Args:
        x: ``(..., *shape)``.
        weight: of ``shape``, one axis or more.
        eps: above 0.
        narrow: round the result to bfloat16, for a product that reads bfloat16.

    Returns:
        The shape of x.

    Raises:
        TypeError, ValueError: for shapes that do not go together, or an eps not above 0.

    Source: Zhang and Sennrich, arXiv 1910.07467, equation 4.

    Example:
        >>> et.rms_norm(et.ExTensor([[3.0, 4.0]]), et.ones(2))
        ExTensor(shape=(1, 2), dtype=float32, device=cpu,
          [[0.8485 1.1314]])
    """
    _check("rms_norm", eps, x, weight)
    return apply("rms_norm", x, weight, eps=eps, narrow=narrow)


def _channels(x: ExTensor, value: ExTensor) -> ExTensor:
    """A value per channel, (C,), so that it broadcasts to x."""
    return value.reshape((1, x.shape[1], *(1,) * (x.ndim - 2)))


def _batch_normalized(x: ExTensor, eps: float) -> tuple[tuple[int, ...], ExTensor, ExTensor]:
    """The axes, h = (x - mean) rstd and rstd."""
    axes = (0, *range(2, x.ndim))
    centred = x - x.mean(axis=axes, keepdims=True)
    rstd = (centred.square().mean(axis=axes, keepdims=True) + eps).rsqrt()
    return axes, centred * rstd, rstd


def _batch_x_vjp(g: ExTensor, x: ExTensor, weight: ExTensor, eps: float) -> ExTensor:
    axes, h, rstd = _batch_normalized(x, eps)
    projected = h * (g * h).mean(axis=axes, keepdims=True)
    return rstd * _channels(x, weight) * (g - g.mean(axis=axes, keepdims=True) - projected)


def _batch_weight_vjp(g: ExTensor, x: ExTensor, eps: float) -> ExTensor:
    axes, h, _ = _batch_normalized(x, eps)
    return (g * h).sum(axis=axes)


Moments = Callable[[Any, Any], None]
"""Is given the mean and the variance of each channel, raw arrays (C,)."""


def _batch_norm(
    backend: Any, x: Any, weight: Any, bias: Any, eps: float, moments: Moments | None
) -> Any:
    y, mean, var = backend.batch_norm(x, weight, bias, eps)
    if moments is not None:
        moments(mean, var)
    return y, (mean, var)


def _batch_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in ((3, 2), (2, 3, 4), (2, 3, 2, 2)):
        x = rng.normal(size=shape)
        axes, broadcast = (0, *range(2, len(shape))), (slice(None), *(None,) * (len(shape) - 2))
        weight, bias = rng.normal(size=shape[1]), rng.normal(size=shape[1])
        scale = weight / np.sqrt(x.var(axis=axes) + 0.1)
        expected = (x - x.mean(axis=axes)[broadcast]) * scale[broadcast] + bias[broadcast]
        yield Sample((x, weight, bias, 0.1), expected=expected)


@primitive(
    forward=_batch_norm,
    vjps=(
        lambda g, out, x, weight, bias, eps, moments, saved: _batch_x_vjp(g, x, weight, eps),
        lambda g, out, x, weight, bias, eps, moments, saved: _batch_weight_vjp(g, x, eps),
        lambda g, out, x, weight, bias, eps, moments, saved: g.sum(axis=(0, *range(2, x.ndim))),
    ),
    fused_vjp=lambda backend, g, out, inputs, needs, eps, moments, saved: backend.batch_norm_grad(
        g, *inputs[:2], *saved, eps
    ),
    reads="inputs",
    slots=("norm",),
    saves=True,
    to_float=True,
    samples=_batch_samples,
    errors=(
        BadInput((np.zeros(3), np.zeros(3), np.zeros(3)), ValueError, "expected an input (N, C"),
        BadInput((np.zeros((2, 3)), np.zeros(2), np.zeros(3)), ValueError, "per channel"),
        BadInput((np.zeros((2, 3)), np.zeros(3), np.zeros(3), 0.0), ValueError, "eps above 0"),
        BadInput((np.zeros((0, 3)), np.zeros(3), np.zeros(3)), ValueError, "to normalize"),
    ),
)
def batch_norm(
    x: ExTensor,
    weight: ExTensor,
    bias: ExTensor,
    eps: float = 1e-5,
    moments: Moments | None = None,
) -> ExTensor:
    """BatchNorm: ``(x - mean) / sqrt(var + eps) * weight + bias``, moments per channel.

    Args:
        x: (N, C, ...); mean and variance (over count) of a channel are over all other axes.
        weight: (C,).
        bias: (C,).
        eps: above 0.
        moments: is called with mean and variance, raw arrays (C,): for running averages.

    Returns:
        The shape of x.

    Raises:
        TypeError, ValueError: for shapes that do not go together, or an eps not above 0.

    Source: Ioffe and Szegedy, arXiv 1502.03167, algorithm 1.

    Example:
        >>> x = et.ExTensor([[1.0, 10.0], [3.0, 30.0]])
        >>> et.batch_norm(x, et.ones(2), et.zeros(2))
        ExTensor(shape=(2, 2), dtype=float32, device=cpu,
          [[-1. -1.]
           [ 1.  1.]])
    """
    tensors_only("batch_norm", x, weight, bias)
    if x.ndim < 2 or x.size == 0:
        raise ValueError(
            f"batch_norm: expected an input (N, C, ...) with values to normalize, got {x.shape}"
        )
    if weight.shape != x.shape[1:2] or bias.shape != x.shape[1:2]:
        raise ValueError(
            f"batch_norm: expected one weight and bias per channel, ({x.shape[1]},), got "
            f"{weight.shape} and {bias.shape}"
        )
    if not 0.0 < eps < math.inf:
        raise ValueError(f"batch_norm: expected eps above 0, got {eps}")
    return apply("batch_norm", x, weight, bias, eps=eps, moments=moments)
