"""Sorting, and statistics of sorted values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, composite, primitive
from extensor.autograd.tensor import ExTensor
from extensor.ops.arguments import Axis, axis_index, axis_tuple, tensors_only
from extensor.ops.arithmetic import where
from extensor.ops.elementwise import isfinite, isnan
from extensor.ops.indexing import gather

__all__ = ["argsort", "median", "percentile", "sort", "topk"]


def _samples(rng: np.random.Generator) -> list[Sample]:
    x = rng.permutation(12).reshape(3, 4).astype(np.float64)
    return [Sample((x,)), Sample((x, 0)), Sample((x, 0, True, False))]


_ERRORS = (BadInput((np.zeros((2, 3)), 2), ValueError, "expected -2..1"),)


def _argsort(backend: Any, x: Any, axis: int, descending: bool) -> Any:
    if not descending:
        return backend.xp.argsort(x, axis=axis, kind="stable")
    # Sorting the reversed axis and reversing the order keeps equal values in place.
    flipped = backend.xp.argsort(backend.xp.flip(x, axis), axis=axis, kind="stable")
    return x.shape[axis] - 1 - backend.xp.flip(flipped, axis)


@primitive(
    forward=_argsort,
    no_vjp="gives positions",
    samples=_samples,
    errors=_ERRORS,
)
def argsort(x: ExTensor, axis: int = -1, descending: bool = False, stable: bool = True) -> ExTensor:
    """The positions that sort x along an axis; equal values stay in order.

    NaN is last, and first if ``descending``.

    Args:
        x: one axis or more.
        axis: the axis to sort along.
        descending: the largest value first.
        stable: accepted for the array standard; the order is stable even if False.

    Returns:
        int64, the shape of x.

    Raises:
        TypeError, ValueError: for an axis that is no int or out of range.

    Example:
        >>> et.argsort(et.ExTensor([3.0, 1.0, 2.0])).tolist()
        [1, 2, 0]
    """
    tensors_only("argsort", x)
    at = axis_index("argsort", axis, x.ndim)
    return apply("argsort", x, axis=at, descending=bool(descending))


@composite(samples=_samples, errors=_ERRORS)
def sort(x: ExTensor, axis: int = -1, descending: bool = False, stable: bool = True) -> ExTensor:
    """The values of x in order along an axis; NaN is last, and first if ``descending``.

    Args:
        x: one axis or more.
        axis: the axis to sort along.
        descending: the largest value first.
        stable: accepted for the array standard; the order is stable even if False.

    Returns:
        The shape and dtype of x.

    Raises:
        TypeError, ValueError: for an axis that is no int or out of range.

    Example:
        >>> et.sort(et.ExTensor([3.0, 1.0, 2.0]), descending=True).tolist()
        [3.0, 2.0, 1.0]
    """
    return gather(x, argsort(x, axis, descending), axis)


@composite(
    samples=lambda rng: [
        Sample((rng.permutation(12).reshape(3, 4).astype(float), 2)),
        Sample((rng.permutation(12).reshape(3, 4).astype(float), 2, 0, False)),
    ],
    errors=(BadInput((np.zeros((2, 3)), 4), ValueError, "expected 0..3"),),
)
def topk(x: ExTensor, k: int, axis: int = -1, largest: bool = True) -> tuple[ExTensor, ExTensor]:
    """The k largest (or smallest) values along an axis, best first, and their positions.

    Args:
        x: one axis or more.
        k: how many values.
        axis: the axis to search.
        largest: False gives the smallest values.

    Returns:
        The values and their positions (int64), both with ``axis`` of length k.

    Raises:
        TypeError, ValueError: for a bad axis, or fewer than k values along it.

    Example:
        >>> values, positions = et.topk(et.ExTensor([3.0, 9.0, 5.0]), 2)
        >>> values.tolist(), positions.tolist()
        ([9.0, 5.0], [1, 2])
    """
    tensors_only("topk", x)
    at = axis_index("topk", axis, x.ndim)
    if not 0 <= k <= x.shape[at]:
        raise ValueError(f"topk: k: expected 0..{x.shape[at]} along axis {at}, got {k}")
    order = argsort(x, at, descending=largest)[(*(slice(None),) * at, slice(0, k))]
    return gather(x, order, at), order


@composite(
    samples=lambda rng: [
        Sample((rng.permutation(12).reshape(3, 4).astype(float), q, axis, keepdims))
        for q, axis, keepdims in ((30.0, None, False), (75.0, 1, False), (100.0, 0, True))
    ],
    errors=(BadInput((np.zeros(3), 101.0), ValueError, "expected 0..100"),),
)
def percentile(x: ExTensor, q: float, axis: Axis = None, keepdims: bool = False) -> ExTensor:
    """The q-th percentile over axes, linear between the two nearest values.

    Args:
        x: any shape.
        q: 0..100.
        axis: the axes to reduce, all if None.
        keepdims: keep the reduced axes, with length 1.

    Returns:
        The shape of x without the reduced axes; NaN where there is one, and between the two
        infinities; an infinity between one and another value.

    Raises:
        TypeError, ValueError: for q outside 0..100, a bad axis, or no values along it.

    Example:
        >>> et.percentile(et.ExTensor([1.0, 2.0, 3.0, 4.0]), 50).item()
        2.5
    """
    tensors_only("percentile", x)
    if not 0 <= q <= 100:
        raise ValueError(f"percentile: q: expected 0..100, got {q!r}")
    axes = axis_tuple("percentile", axis, x.ndim)
    kept = [a for a in range(x.ndim) if a not in axes]
    count = math.prod(x.shape[a] for a in axes)
    if count == 0:
        raise ValueError(f"percentile: no values along axes {axes} of shape {x.shape}")
    flat = x.permute((*kept, *axes)).reshape((*(x.shape[a] for a in kept), count))
    ranked = sort(flat)
    place = (count - 1) * q / 100
    low = math.floor(place)
    result = ranked[..., low]
    if place > low:
        above, share = ranked[..., low + 1], place - low
        finite = isfinite(result) & isfinite(above)  # the difference of infinities is NaN
        infinite = where(finite, 0.0, result) * (1 - share) + where(finite, 0.0, above) * share
        result, above = where(finite, result, 0.0), where(finite, above, 0.0)
        result = result + (above - result) * share + infinite
    top = ranked[..., -1].detach()
    result = where(isnan(top), top, result)  # NaN sorts last and must show
    shape = tuple(1 if a in axes else n for a, n in enumerate(x.shape))
    return result.reshape(shape) if keepdims else result


@composite(
    samples=lambda rng: [
        Sample((rng.permutation(12).reshape(3, 4).astype(float),)),
        Sample((rng.permutation(9).reshape(3, 3).astype(float), 1)),
        Sample((rng.permutation(9).reshape(3, 3).astype(float), 0, True)),
    ],
    errors=_ERRORS,
)
def median(x: ExTensor, axis: Axis = None, keepdims: bool = False) -> ExTensor:
    """The middle value over axes; the mean of the middle two of an even number of values.

    Args:
        x: any shape.
        axis: the axes to reduce, all if None.
        keepdims: keep the reduced axes, with length 1.

    Returns:
        The shape of x without the reduced axes; NaN where there is one.

    Raises:
        TypeError, ValueError: for a bad axis, or no values along it.

    Example:
        >>> et.median(et.ExTensor([[5.0, 1.0, 2.0], [4.0, 8.0, 6.0]]), axis=1).tolist()
        [2.0, 6.0]
    """
    return percentile(x, 50.0, axis, keepdims)
