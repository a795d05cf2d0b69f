"""Normalizations over the last axes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, primitive
from extensor.autograd.tensor import ExTensor
from extensor.ops.arguments import tensors_only

__all__ = ["layer_norm", "rms_norm"]

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
            f"{name}: wanted an input whose last axes are those of the weights, got {x.shape} and "
            f"{others}"
        )
    if 0 in shape or not 0.0 < eps < math.inf:
        raise ValueError(f"{name}: wanted values to normalize and eps above 0, got {shape}, {eps}")


def _parts(x: ExTensor, weight: ExTensor, eps: float, centred: bool) -> tuple[Any, ...]:
    """The axes, the leading axes, h = (x - mean) rstd and rstd."""
    axes = tuple(range(-weight.ndim, 0))
    h = x - x.mean(axis=axes, keepdims=True) if centred else x
    rstd = (h.square().mean(axis=axes, keepdims=True) + eps).rsqrt()
    return axes, tuple(range(x.ndim - weight.ndim)), h * rstd, rstd


def _over(lead: tuple[int, ...], g: ExTensor) -> ExTensor:
    return g.sum(axis=lead) if lead else g


def _x_vjp(g: ExTensor, x: ExTensor, weight: ExTensor, eps: float, centred: bool) -> ExTensor:
    axes, _, h, rstd = _parts(x, weight, eps, centred)
    e = g * weight
    along = e - h * (e * h).mean(axis=axes, keepdims=True)
    return rstd * (along - e.mean(axis=axes, keepdims=True) if centred else along)


def _weight_vjp(g: ExTensor, x: ExTensor, weight: ExTensor, eps: float, centred: bool) -> ExTensor:
    _, lead, h, _ = _parts(x, weight, eps, centred)
    return _over(lead, g * h)


def _layer_norm(backend: Any, x: Any, weight: Any, bias: Any, eps: float) -> Any:
    y, mean, rstd = backend.layer_norm(x, weight, bias, eps)
    return y, (mean, rstd)


@primitive(
    forward=_layer_norm,
    vjps=(
        lambda g, out, x, weight, bias, eps, saved: _x_vjp(g, x, weight, eps, True),
        lambda g, out, x, weight, bias, eps, saved: _weight_vjp(g, x, weight, eps, True),
        lambda g, out, x, weight, bias, eps, saved: _over(tuple(range(x.ndim - weight.ndim)), g),
    ),
    fused_vjp=lambda backend, g, out, inputs, needs, eps, saved: backend.layer_norm_grad(
        g, *inputs[:2], *saved
    ),
    reads="inputs",
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
def layer_norm(x: ExTensor, weight: ExTensor, bias: ExTensor, eps: float = 1e-5) -> ExTensor:
    """LayerNorm: (x - mean) / sqrt(var + eps) weight + bias over the last axes.

    Args:
        x: ``(..., *shape)``.
        weight: of ``shape``, one axis or more.
        bias: of ``shape``.
        eps: above 0.

    Returns:
        The shape of x.

    Raises:
        TypeError, ValueError: for shapes that do not go together, or an eps not above 0.

    Source: Ba et al., arXiv 1607.06450.
    """
    _check("layer_norm", eps, x, weight, bias)
    return apply("layer_norm", x, weight, bias, eps=eps)


@primitive(
    forward=lambda backend, x, weight, eps: backend.rms_norm(x, weight, eps),
    vjps=(
        lambda g, out, x, weight, eps, saved: _x_vjp(g, x, weight, eps, False),
        lambda g, out, x, weight, eps, saved: _weight_vjp(g, x, weight, eps, False),
    ),
    fused_vjp=lambda backend, g, out, inputs, needs, eps, saved: backend.rms_norm_grad(
        g, *inputs, saved
    ),
    reads="inputs",
    saves=True,
    to_float=True,
    samples=_rms_samples,
    errors=(
        BadInput((np.zeros((2, 3)), np.zeros(2)), ValueError, "last axes"),
        BadInput((np.zeros((2, 3)), np.zeros(3), -1.0), ValueError, "eps above 0"),
    ),
)
def rms_norm(x: ExTensor, weight: ExTensor, eps: float = 1e-6) -> ExTensor:
    """RMSNorm: x / sqrt(mean(x^2) + eps) weight over the last axes (arXiv 1910.07467).

    Args:
        x: ``(..., *shape)``.
        weight: of ``shape``, one axis or more.
        eps: above 0.

    Returns:
        The shape of x.

    Raises:
        TypeError, ValueError: for shapes that do not go together, or an eps not above 0.
    """
    _check("rms_norm", eps, x, weight)
    return apply("rms_norm", x, weight, eps=eps)
