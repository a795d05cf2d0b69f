"""Checks that layers make of their arguments and inputs."""

from __future__ import annotations

import math

from extensor.autograd.tensor import ExTensor
from extensor.dtypes import float64
from extensor.ops.arguments import tensors_only

__all__ = [
    "check_eps", "check_images", "check_last_axes", "check_probability", "check_size", "check_width"
]  # fmt: skip


def check_size(name: str, value: object, minimum: int = 1) -> int:
    """An int of at least ``minimum``.

    Raises:
        TypeError, ValueError: for anything else.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name}: expected {minimum} or more, got {value}")
    return value


def check_probability(name: str, value: object) -> float:
    """A number in [0, 1).

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0.0 <= value < 1.0:
        return float(value)
    raise ValueError(f"{name}: expected a number in [0, 1), got {value!r}")


def check_eps(layer: str, eps: float) -> float:
    """A finite number above 0.

    Raises:
        ValueError: for anything else.
    """
    if not 0.0 < eps < math.inf:
        raise ValueError(f"{layer}: expected eps above 0, got {eps!r}")
    return eps


def check_width(layer: str, x: ExTensor, weight: ExTensor) -> None:
    """Refuse a float64 input beside narrower weights: all that follows would be float64.

    Raises:
        TypeError: for such an input.
    """
    if x.dtype is float64 and weight.dtype is not float64:
        raise TypeError(
            f"{layer}: expected an input as wide as the {weight.dtype.name} weights, got float64, "
            "which numpy makes by default; pass x.float()"
        )


def check_images(layer: str, x: ExTensor, channels: int | None = None) -> None:
    """Refuse an input that is not (N, C, H, W).

    Raises:
        TypeError: for what is no tensor.
        ValueError: for another number of axes or channels.
    """
    tensors_only(layer, x)
    if x.ndim != 4 or channels not in (None, x.shape[1]):
        raise ValueError(
            f"{layer}: expected an input of shape (N, {channels or 'C'}, H, W), got {x.shape}"
        )


def check_last_axes(layer: str, x: ExTensor, *lengths: int) -> None:
    """Refuse an input whose last axes have other lengths.

    Raises:
        TypeError: for what is no tensor.
        ValueError: for other lengths, or too few axes.
    """
    tensors_only(layer, x)
    if x.shape[-len(lengths) :] != lengths:
        expected = ", ".join(map(str, lengths))
        raise ValueError(f"{layer}: expected an input of shape (..., {expected}), got {x.shape}")
