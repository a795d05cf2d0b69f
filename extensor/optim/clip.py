"""Gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from extensor.autograd.tensor import ExTensor, wrap
from extensor.optim.params import check_range

__all__ = ["clip_grad_norm", "clip_grad_value"]

Array = Any


def grad_arrays(params: Iterable[ExTensor]) -> list[tuple[Array, Any]]:
    """The gradient's data and backend, for each parameter that has a gradient."""
    if isinstance(params, ExTensor):
        params = [params]
    return [(p.grad.data, p.backend) for p in params if p.grad is not None]


def clip_grad_norm(
    params: Iterable[ExTensor], max_norm: float, nonfinite: Literal["raise", "return"] = "raise"
) -> float | ExTensor:
    """Scale all gradients together, in place, so that their joint 2-norm is at most ``max_norm``.

    Args:
        params: tensors; those without a gradient are skipped.
        max_norm: above 0; infinity measures the norm and scales nothing.
        nonfinite: what to do when the norm is NaN or infinite: ``"raise"``; or ``"return"`` it and
            leave the gradients as they are, for a caller who checks it.

    Returns:
        The norm before clipping, summed in float64; while a step is captured (`extensor.capture`)
        a tensor of shape ().

    Raises:
        TypeError: for a ``max_norm`` that is no number.
        ValueError: for a ``max_norm`` not above 0, or no gradients at all.
        FloatingPointError: if the norm is not finite and ``nonfinite`` is ``"raise"``.

    >>> w = et.nn.Parameter([0.0, 0.0])
    >>> (w * et.ExTensor([3.0, 4.0])).sum().backward()
    >>> et.optim.clip_grad_norm([w], max_norm=1.0)
    5.0
    >>> w.grad.numpy().round(4)
    array([0.6, 0.8], dtype=float32)
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)):
        raise TypeError(f"max_norm: expected a number, got {max_norm!r}")
    if math.isnan(max_norm) or max_norm <= 0:
        raise ValueError(f"max_norm: expected a number above 0, got {max_norm!r}")
    if nonfinite not in ("raise", "return"):
        raise ValueError(f"nonfinite: expected 'raise' or 'return', got {nonfinite!r}")
    grads = _some(grad_arrays(params))
    backends = {id(backend): backend for _, backend in grads}.values()
    each = [(b, [g for g, backend in grads if backend is b]) for b in backends]
    sums = [backend.square_sum_multi_tensor(arrays) for backend, arrays in each]
    if len(each) == 1 and each[0][0].capturing is not None:
        return clip_captured(*each[0], sums[0], max_norm, nonfinite)
    norm = math.sqrt(sum(float(total) for total in sums))
    if not math.isfinite(norm):
        if nonfinite == "raise":
            raise FloatingPointError(
                f"clip_grad_norm: expected finite gradients, got a norm of {norm}; lower the "
                "learning rate or the loss scale, or pass nonfinite='return' and skip the step"
            )
        return norm
    if norm > max_norm:
        for backend, arrays in each:
            backend.scale_multi_tensor(arrays, max_norm / norm)
    return norm


def clip_captured(
    backend: Any, arrays: list[Array], total: Array, max_norm: float, nonfinite: str
) -> ExTensor:
    """Clip by the root of ``total`` without waiting: the factor stays on the device."""
    xp = backend.xp
    norm = xp.sqrt(total)
    if nonfinite == "raise":
        backend.refuse(
            ~xp.isfinite(norm),
            lambda: FloatingPointError(
                "clip_grad_norm: expected finite gradients, got a norm that is NaN or infinite; "
                "lower the learning rate or the loss scale, or pass nonfinite='return'"
            ),
        )
    clips = xp.isfinite(norm) & (norm > max_norm)
    factor = xp.where(clips, max_norm / xp.where(clips, norm, 1.0), 1.0)
    backend.scale_multi_tensor(arrays, factor.astype(xp.float32))
    return wrap(norm, backend)


def clip_grad_value(params: Iterable[ExTensor], max_value: float) -> None:
    """Clip every gradient value, in place, to [-max_value, max_value].

    Args:
        params: tensors; those without a gradient are skipped.
        max_value: above 0, finite.

    Raises:
        TypeError: for a ``max_value`` that is no number.
        ValueError: for a ``max_value`` not above 0 or not finite, or no gradients at all.
        FloatingPointError: if a gradient is NaN or infinite: clipping would make the infinity look
            like an ordinary value. No gradient is changed then.

    >>> w = et.nn.Parameter([0.0, 0.0])
    >>> (w * et.ExTensor([3.0, -0.5])).sum().backward()
    >>> et.optim.clip_grad_value([w], max_value=1.0)
    >>> w.grad.tolist()
    [1.0, -0.5]
    """
    check_range("max_value", max_value, math.ulp(0.0))
    grads = _some(grad_arrays(params))
    if not all(backend.all_finite(g) for g, backend in grads):
        raise FloatingPointError(
            "clip_grad_value: expected finite gradients, got NaN or infinity; lower the learning "
            "rate or the loss scale, or skip the step"
        )
    for g, backend in grads:
        backend.xp.clip(g, -max_value, max_value, out=g)


def _some(grads: list[tuple[Array, Any]]) -> list[tuple[Array, Any]]:
    if not grads:
        raise ValueError("expected gradients to clip, got none; call loss.backward() first")
    return grads
