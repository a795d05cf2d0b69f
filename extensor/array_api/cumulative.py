"""Running sums and products, and differences of neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, composite, primitive
from extensor.autograd.tensor import ExTensor
from extensor.dtypes import DTypeLike
from extensor.ops.arguments import axis_index, tensors_only
from extensor.ops.arithmetic import subtract
from extensor.ops.joining import concatenate, stack
from extensor.ops.reduce import cumsum, in_dtype

__all__ = ["cumulative_prod", "cumulative_sum", "diff"]


def _running(
    name: str,
    function: Callable[[ExTensor, int], ExTensor],
    first: int,
    x: ExTensor,
    axis: int | None,
    dtype: DTypeLike | None,
    include_initial: bool,
) -> ExTensor:
    """``function`` along the axis in ``dtype``, after ``first`` if ``include_initial``."""
    tensors_only(name, x)
    if axis is None and x.ndim != 1:
        raise ValueError(f"{name}: expected an axis for a tensor of {x.ndim} axes, got None")
    at = axis_index(name, 0 if axis is None else axis, x.ndim)
    total = in_dtype(x, dtype, lambda t: function(t, at))
    if not include_initial:
        return total
    shape = (*x.shape[:at], 1, *x.shape[at + 1 :])
    return concatenate([ExTensor.full(shape, first, total.dtype, device=x.device), total], at)


_RUNNING: dict[str, Any] = {
    "samples": lambda rng: [
        Sample((rng.normal(size=(4,)),)),
        Sample((rng.normal(size=(3, 4)),), {"axis": 0, "include_initial": True}),
    ],
    "errors": (
        BadInput((np.zeros((2, 3)),), ValueError, "expected an axis"),
        BadInput((np.zeros((2, 3)),), ValueError, "expected -2..1", {"axis": 2}),
    ),
}


@composite(**_RUNNING)
def cumulative_sum(
    x: ExTensor,
    /,
    *,
    axis: int | None = None,
    dtype: DTypeLike | None = None,
    include_initial: bool = False,
) -> ExTensor:
    """Running sums along an axis.

    Args:
        x: one axis or more.
        axis: the axis to sum along; may be None for a vector.
        dtype: the dtype to compute in.
        include_initial: begin with a 0, so that the axis is one longer.

    Returns:
        The shape of x but for ``include_initial``.

    Raises:
        TypeError, ValueError: for no axis where there are several, or one out of range.

    Example:
        >>> et.cumulative_sum(et.ExTensor([1, 2, 3]), include_initial=True).tolist()
        [0, 1, 3, 6]
    """
    return _running("cumulative_sum", cumsum, 0, x, axis, dtype, include_initial)


def _slices(x: ExTensor, axis: int) -> list[ExTensor]:
    before = (slice(None),) * axis
    return [x[(*before, i)] for i in range(x.shape[axis])]


def _cumprod_vjp(g: ExTensor, out: ExTensor, x: ExTensor, axis: int) -> ExTensor:
    """before[j] * (g[j] + x[j+1] * (g[j+1] + ...)): no division, so right where x is zero."""
    factors, parts = _slices(x, axis), _slices(g, axis)
    if not factors:
        return g
    before = [ExTensor.ones_like(factors[0])]
    for factor in factors[:-1]:
        before.append(before[-1] * factor)
    after = [parts[-1]]
    for part, factor in zip(parts[-2::-1], factors[:0:-1], strict=True):
        after.append(part + factor * after[-1])
    each = [b * a for b, a in zip(before, reversed(after), strict=True)]
    return stack(each, axis)


@primitive(
    forward=lambda backend, x, axis: backend.xp.cumprod(x, axis=axis),
    vjps=(_cumprod_vjp,),
    reads="inputs",
    samples=lambda rng: [Sample((np.array([[1.5, 0.0, -2.0], [0.5, 3.0, 1.0]]), 1))],
    errors=(BadInput((np.zeros((2, 3)), 2), ValueError, "expected -2..1"),),
)
def _cumprod(x: ExTensor, axis: int) -> ExTensor:
    """Running products along ``axis``."""
    tensors_only("cumprod", x)
    return apply("cumprod", x, axis=axis_index("cumprod", axis, x.ndim))


@composite(**_RUNNING)
def cumulative_prod(
    x: ExTensor,
    /,
    *,
    axis: int | None = None,
    dtype: DTypeLike | None = None,
    include_initial: bool = False,
) -> ExTensor:
    """Running products along an axis.

    Args:
        x: one axis or more.
        axis: the axis to multiply along; may be None for a vector.
        dtype: the dtype to compute in.
        include_initial: begin with a 1, so that the axis is one longer.

    Returns:
        The shape of x but for ``include_initial``.

    Raises:
        TypeError, ValueError: for no axis where there are several, or one out of range.

    Example:
        >>> et.cumulative_prod(et.ExTensor([2, 3, 4])).tolist()
        [2, 6, 24]
    """
    return _running("cumulative_prod", _cumprod, 1, x, axis, dtype, include_initial)


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(3, 4)),), {"n": 2}),
        Sample((rng.normal(size=(3, 4)),), {"axis": 0}),
    ],
    errors=(BadInput((np.zeros(3),), ValueError, "0 or more", {"n": -1}),),
)
def diff(
    x: ExTensor,
    /,
    *,
    axis: int = -1,
    n: int = 1,
    prepend: ExTensor | None = None,
    append: ExTensor | None = None,
) -> ExTensor:
    """The n-th differences of neighbouring values along an axis.

    Args:
        x: one axis or more.
        axis: the axis of the neighbours.
        n: how often to take differences; 0 gives x itself.
        prepend: values to put before x along the axis.
        append: values to put after x along the axis.

    Returns:
        The joined values' shape, the axis n shorter.

    Raises:
        TypeError, ValueError: for a negative n, a bad axis, or parts that do not fit together.

    Example:
        >>> et.diff(et.ExTensor([1, 4, 9])).tolist()
        [3, 5]
    """
    tensors_only("diff", x)
    at = axis_index("diff", axis, x.ndim)
    if n < 0:
        raise ValueError(f"diff: n: expected 0 or more, got {n}")
    if n == 0:
        return x
    parts = [part for part in (prepend, x, append) if part is not None]
    whole = concatenate(parts, at) if len(parts) > 1 else x
    before = (slice(None),) * at
    for _ in range(n):
        whole = subtract(whole[(*before, slice(1, None))], whole[(*before, slice(None, -1))])
    return whole
