"""Gated units: one half of the values, through an activation, multiplies the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, composite, primitive
from extensor.autograd.tensor import ExTensor
from extensor.ops.arguments import axis_with_values, tensors_only
from extensor.ops.arithmetic import clip, where
from extensor.ops.elementwise import sigmoid
from extensor.ops.joining import split

__all__ = ["gated_silu", "swiglu"]


@composite(
    samples=lambda rng: [Sample((rng.normal(size=(2, 6)),)), Sample((rng.normal(size=(4, 3)), 0))],
    errors=(BadInput((np.zeros((2, 5)),), ValueError, "even length"),),
)
def swiglu(x: ExTensor, axis: int = -1) -> ExTensor:
    """The gated unit ``silu(a) * b``, where a and b are the halves of x along an axis.

    Args:
        x: an even length along ``axis``.
        axis: the axis to halve.

    Returns:
        The shape of x, ``axis`` half as long; integers give float32.

    Raises:
        TypeError, ValueError: for a bad axis, or one of odd length or without values.

    Source: Shazeer, arXiv 2002.05202, section 2.

    Example:
        >>> et.swiglu(et.ExTensor([1.0, 2.0, 3.0, 4.0]))
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [2.1932 7.0464])
    """
    at = axis_with_values("swiglu", x, axis)
    if x.shape[at] % 2:
        raise ValueError(f"swiglu: expected an axis of even length, got axis {at} of {x.shape}")
    gate, value = split(x, 2, at)
    return gated_silu(gate, value)


def _gated_reference(gate: Any, up: Any, alpha: float = 1.0, limit: float | None = None) -> Any:
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
    return gate / (1 + np.exp(-alpha * gate)) * up


def _gated_samples(rng: np.random.Generator) -> list[Sample]:
    options: list[dict[str, Any]] = [{}, {"alpha": 1.702, "limit": 0.7}]
    pairs = [[rng.uniform(-2, 2, shape) for _ in range(2)] for shape in ((3, 4), (2, 0))]
    for pair in pairs:
        for x in pair:  # apart from the limits, where it is not smooth
            x[np.abs(np.abs(x) - 0.7) < 0.05] = 0.5
    return [
        Sample(tuple(pair), chosen, expected=_gated_reference(pair[0], pair[1], **chosen))
        for pair in pairs
        for chosen in options
    ]


def _gated_vjp(
    index: int,
    g: ExTensor,
    out: ExTensor,
    gate: ExTensor,
    up: ExTensor,
    alpha: float,
    limit: float | None,
) -> ExTensor:
    """As `gated_silu_grad` of the backends, in operations."""
    a = gate if limit is None else clip(gate, None, limit)
    s = sigmoid(a * alpha)
    if index:
        grad = g * (a * s)
        return grad if limit is None else where(abs(up) > limit, 0.0, grad)
    u = up if limit is None else clip(up, -limit, limit) + 1.0
    grad = g * u * (s + alpha * a * s * (1.0 - s))
    return grad if limit is None else where(gate > limit, 0.0, grad)


@primitive(
    forward=lambda backend, gate, up, alpha, limit: backend.gated_silu(gate, up, alpha, limit),
    vjp_at=_gated_vjp,
    fused_vjp=lambda backend, g, out, inputs, needs, alpha, limit: backend.gated_silu_grad(
        g, *inputs, alpha, limit
    ),
    reads="inputs",
    slots=("gate", "up"),
    to_float=True,
    samples=_gated_samples,
    errors=(
        BadInput((np.zeros((2, 3)), np.zeros(3)), ValueError, "of one shape"),
        BadInput((np.zeros(3), np.zeros(3)), ValueError, "limit: expected", {"limit": -1.0}),
    ),
)
def gated_silu(
    gate: ExTensor, up: ExTensor, *, alpha: float = 1.0, limit: float | None = None
) -> ExTensor:
    """The gated unit ``silu(gate) * up``, in one step; or gpt-oss's clipped form of it.

    The same as `swiglu` of both side by side, for a gate and a value that two layers gave.

    Args:
        gate: any shape.
        up: the value, of the same shape.
        alpha: the factor within the sigmoid, ``gate * sigmoid(alpha * gate)``.
        limit: None, or above 0: gate is cut above it, up is cut to +-limit, and 1 is added to up.
            gpt-oss has alpha 1.702 and limit 7. Gradients are 0 beyond the limit.

    Returns:
        The shape of both; integers give float32.

    Raises:
        TypeError, ValueError: for two shapes, or a limit not above 0.

    Source: Shazeer, arXiv 2002.05202, section 2; the clipped form: gpt-oss, arXiv 2508.10925.

    Example:
        >>> et.gated_silu(et.ExTensor([1.0, 2.0]), et.ExTensor([3.0, 4.0]))
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [2.1932 7.0464])
    """
    tensors_only("gated_silu", gate, up)
    if gate.shape != up.shape:
        raise ValueError(f"gated_silu: expected two of one shape, got {gate.shape} and {up.shape}")
    if limit is not None and not limit > 0:
        raise ValueError(f"gated_silu: limit: expected a number above 0, got {limit!r}")
    return apply("gated_silu", gate, up, alpha=alpha, limit=limit)
