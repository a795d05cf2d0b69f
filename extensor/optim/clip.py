"""Gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from extensor.autograd.tensor import ExTensor
from extensor.optim.optimizer import check_range

__all__ = ["clip_grad_norm", "clip_grad_value"]

Array = Any


def grad_arrays(params: Iterable[ExTensor]) -> list[tuple[Array, Any]]:
    """(gradient data, backend) of each parameter that has a gradient."""
    if isinstance(params, ExTensor):
        params = [params]
    return [(p.grad.data, p.backend) for p in params if p.grad is not None]


def clip_grad_norm(
    params: Iterable[ExTensor],
    max_norm: float,
    nonfinite: Literal["raise", "return"] = "raise",
) -> float:
    """Scale all gradients together, in place, so that their joint 2-norm is at most ``max_norm``.

    Args:
        params: tensors; those without a gradient are passed over.
        max_norm: above 0; infinity only measures.
        nonfinite: what to do when the norm is NaN or infinite: ``"raise"``; or ``"return"`` it and
            leave the gradients alone, for a caller who looks.

    Returns:
        The norm before clipping, summed in float64.

    Raises:
        TypeError: for a ``max_norm`` that is no number.
        ValueError: for a ``max_norm`` not above 0, or no gradients at all.
        FloatingPointError: if the norm is not finite and ``nonfinite`` is ``"raise"``.
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)):
        raise TypeError(f"max_norm: wanted a number, got {max_norm!r}")
    if math.isnan(max_norm) or max_norm <= 0:
        raise ValueError(f"max_norm: wanted a number above 0, got {max_norm!r}")
    if nonfinite not in ("raise", "return"):
        raise ValueError(f"nonfinite: wanted 'raise' or 'return', got {nonfinite!r}")
    grads = _some(grad_arrays(params))
    norm = math.sqrt(sum(_square_sum(g, backend.xp) for g, backend in grads))
    if not math.isfinite(norm):
        if nonfinite == "raise":
            raise FloatingPointError(
                f"clip_grad_norm: wanted finite gradients, got a norm of {norm}; lower the "
                "learning rate or the loss scale, or pass nonfinite='return' and skip the step"
            )
        return norm
    if norm > max_norm:
        for g, backend in grads:
            backend.xp.multiply(g, max_norm / norm, out=g)
    return norm


def clip_grad_value(params: Iterable[ExTensor], max_value: float) -> None:
    """Clip every gradient value, in place, to [-max_value, max_value].

    Raises:
        ValueError: for a ``max_value`` not above 0 or not finite, or no gradients at all.
        FloatingPointError: if a gradient is NaN or infinite: clipping would make the infinity look
            like an ordinary value. No gradient is changed then.
    """
    check_range("max_value", max_value, math.ulp(0.0))
    grads = _some(grad_arrays(params))
    if not all(backend.all_finite(g) for g, backend in grads):
        raise FloatingPointError(
            "clip_grad_value: wanted finite gradients, got NaN or infinity; lower the learning "
            "rate or the loss scale, or skip the step"
        )
    for g, backend in grads:
        backend.xp.clip(g, -max_value, max_value, out=g)


def _some(grads: list[tuple[Array, Any]]) -> list[tuple[Array, Any]]:
    if not grads:
        raise ValueError("wanted gradients to clip, got none; call loss.backward() first")
    return grads


def _square_sum(grad: Array, xp: Any) -> float:
    """Sum of squares in float64: neither overflow nor a thread-dependent order."""
    flat, total = grad.reshape(-1), 0.0
    stretch = 1 << 16 if xp is np else max(flat.size, 1)
    for begin in range(0, flat.size, stretch):
        wide = flat[begin : begin + stretch].astype(xp.float64)
        wide *= wide
        total += float(wide.sum())
    return total
