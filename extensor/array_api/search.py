"""Sets, searches and counts of the Python Array API standard (2025.12): no gradients.

Shapes that depend on values are allowed; results live on the device of the input.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from extensor.autograd.tensor import ExTensor, wrap
from extensor.ops.arguments import Axis, Operand, as_tensors, axis_tuple, tensors_only

__all__ = [
    "count_nonzero", "isin", "nonzero", "searchsorted", "unique_all", "unique_counts",
    "unique_inverse", "unique_values",
]  # fmt: skip


class UniqueAll(NamedTuple):
    """The unique values, their first positions, the value of each element, and counts."""

    values: ExTensor
    indices: ExTensor
    inverse_indices: ExTensor
    counts: ExTensor


class UniqueCounts(NamedTuple):
    """The unique values, and how often each occurs."""

    values: ExTensor
    counts: ExTensor


class UniqueInverse(NamedTuple):
    """The unique values, and the index into them of each element."""

    values: ExTensor
    inverse_indices: ExTensor


def _dense(name: str, *tensors: Any) -> None:
    tensors_only(name, *tensors)
    for x in tensors:
        if x.dtype.is_blocked:
            raise TypeError(
                f"{name}: expected a dense tensor, got {x.dtype.name}; use x.dequantize()"
            )


def unique_all(x: ExTensor, /) -> UniqueAll:
    """The unique values of x, ascending; each NaN counts as a value of its own.

    Args:
        x: any shape, dense.

    Returns:
        A named tuple: ``values``; ``indices``, where each first occurs in ``x.ravel()``;
        ``inverse_indices``, of x's shape, which value each element is; and ``counts``.

    Raises:
        TypeError: for a blocked tensor.

    Example:
        >>> found = et.unique_all(et.ExTensor([3, 1, 3]))
        >>> found.values.tolist(), found.inverse_indices.tolist(), found.counts.tolist()
        ([1, 3], [1, 0, 1], [1, 2])
    """
    _dense("unique_all", x)
    # float32 holds every 16-bit float, and sorts where ml_dtypes' bfloat16 does not.
    narrow = x.dtype.is_float and x.dtype.itemsize == 2
    values, *places = x.backend.xp.unique(
        x.data.astype(np.float32) if narrow else x.data,
        return_index=True,
        return_inverse=True,
        return_counts=True,
        equal_nan=False,
    )
    first, inverse, counts = (wrap(p, x.backend) for p in places)
    found = wrap(values.astype(x.data.dtype, copy=False), x.backend)
    return UniqueAll(found, first, inverse.reshape(x.shape), counts)


def unique_counts(x: ExTensor, /) -> UniqueCounts:
    """The unique values of x, ascending, and how often each occurs.

    Args:
        x: any shape, dense.

    Returns:
        A named tuple of ``values`` and ``counts``.

    Raises:
        TypeError: for a blocked tensor.

    Example:
        >>> [part.tolist() for part in et.unique_counts(et.ExTensor([3, 1, 3]))]
        [[1, 3], [1, 2]]
    """
    values, _, _, counts = unique_all(x)
    return UniqueCounts(values, counts)


def unique_inverse(x: ExTensor, /) -> UniqueInverse:
    """The unique values of x, ascending, and which of them each element is.

    Args:
        x: any shape, dense.

    Returns:
        A named tuple of ``values`` and ``inverse_indices``, of x's shape.

    Raises:
        TypeError: for a blocked tensor.

    Example:
        >>> [part.tolist() for part in et.unique_inverse(et.ExTensor([3, 1, 3]))]
        [[1, 3], [1, 0, 1]]
    """
    values, _, inverse, _ = unique_all(x)
    return UniqueInverse(values, inverse)


def unique_values(x: ExTensor, /) -> ExTensor:
    """The unique values of x, ascending.

    Args:
        x: any shape, dense.

    Returns:
        A vector.

    Raises:
        TypeError: for a blocked tensor.

    Example:
        >>> et.unique_values(et.ExTensor([3, 1, 3])).tolist()
        [1, 3]
    """
    return unique_all(x).values


def nonzero(x: ExTensor, /) -> tuple[ExTensor, ...]:
    """The positions of all values that are not zero, in row-major order.

    Args:
        x: one axis or more, dense.

    Returns:
        One int64 vector per axis.

    Raises:
        TypeError, ValueError: for a blocked tensor, or one without axes.

    Example:
        >>> [part.tolist() for part in et.nonzero(et.ExTensor([[0, 5], [7, 0]]))]
        [[0, 1], [1, 0]]
    """
    _dense("nonzero", x)
    if x.ndim == 0:
        raise ValueError("nonzero: expected a tensor of one axis or more, got shape ()")
    return tuple(wrap(part, x.backend) for part in x.backend.xp.nonzero(x.data))


def count_nonzero(x: ExTensor, /, *, axis: Axis = None, keepdims: bool = False) -> ExTensor:
    """How many values over axes are not zero; NaN is not.

    Args:
        x: any shape, dense.
        axis: the axes to count over, all if None.
        keepdims: keep the reduced axes, with length 1.

    Returns:
        int64, the shape of x without the reduced axes.

    Raises:
        TypeError, ValueError: for a blocked tensor, or a bad axis.

    Example:
        >>> et.count_nonzero(et.ExTensor([[0, 5], [7, 8]]), axis=1).tolist()
        [1, 2]
    """
    _dense("count_nonzero", x)
    axes = axis_tuple("count_nonzero", axis, x.ndim)
    counts = (x.data != 0).sum(axis=axes, keepdims=keepdims, dtype=np.int64)
    return wrap(counts, x.backend)


def isin(x1: Operand, x2: Operand, /, *, invert: bool = False) -> ExTensor:
    """Whether each value of x1 is among the values of x2; NaN equals nothing.

    Args:
        x1: the values to look up.
        x2: the values to look among.
        invert: give the negated answer.

    Returns:
        bool, the shape of x1.

    Raises:
        TypeError: for blocked tensors, or two operands without a tensor.

    Example:
        >>> et.isin(et.ExTensor([1, 2, 3]), et.ExTensor([2, 9])).tolist()
        [False, True, False]
    """
    a, b = as_tensors("isin", x1, x2)
    _dense("isin", a, b)
    return wrap(a.backend.xp.isin(a.data, b.data, invert=invert), a.backend)


def searchsorted(
    x1: ExTensor, x2: Operand, /, *, side: str = "left", sorter: ExTensor | None = None
) -> ExTensor:
    """Where values belong in an ascending vector.

    Args:
        x1: the vector, (N,).
        x2: the values to place, any shape.
        side: "left" for the place before equal values, "right" for the one after them.
        sorter: the positions that sort x1, if it is not ascending.

    Returns:
        int64 in 0..N, the shape of x2.

    Raises:
        TypeError, ValueError: for blocked tensors, x1 that is no vector, or another side.

    Example:
        >>> et.searchsorted(et.ExTensor([1, 3, 5]), et.ExTensor([3, 6])).tolist()
        [1, 3]
    """
    a, b = as_tensors("searchsorted", x1, x2)
    _dense("searchsorted", a, b)
    if a.ndim != 1 or side not in ("left", "right"):
        raise ValueError(
            f"searchsorted: expected a vector and side 'left' or 'right', got {a.shape}, {side!r}"
        )
    order = None if sorter is None else sorter.data
    return wrap(a.backend.xp.searchsorted(a.data, b.data, side=side, sorter=order), a.backend)
