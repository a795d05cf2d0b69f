"""The standard's transposed matrices and products of vectors."""

from __future__ import annotations

import numpy as np

from extensor.array_api.complex import conj
from extensor.autograd.primitive import BadInput, Sample, composite
from extensor.autograd.tensor import ExTensor
from extensor.ops.arguments import axis_index, tensors_only
from extensor.ops.arithmetic import multiply
from extensor.ops.reduce import sum
from extensor.ops.shape import swapaxes

__all__ = ["matrix_transpose", "vecdot"]


@composite(
    samples=lambda rng: [Sample((rng.normal(size=(2, 3, 4)),))],
    errors=(BadInput((np.zeros(3),), ValueError, "two axes or more"),),
)
def matrix_transpose(x: ExTensor, /) -> ExTensor:
    """Exchange the last two axes.

    Args:
        x: (..., M, N).

    Returns:
        (..., N, M), a view of x.

    Raises:
        TypeError, ValueError: for fewer than two axes.

    Example:
        >>> et.linalg.matrix_transpose(et.ExTensor([[1, 2], [3, 4]])).tolist()
        [[1, 3], [2, 4]]
    """
    tensors_only("matrix_transpose", x)
    if x.ndim < 2:
        raise ValueError(f"matrix_transpose: expected two axes or more, got shape {x.shape}")
    return swapaxes(x, -2, -1)


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(3, 4)), rng.normal(size=(4,)))),
        Sample((rng.normal(size=(3, 4)), rng.normal(size=(3, 1))), {"axis": -2}),
    ],
    errors=(
        BadInput((np.zeros((2, 3)), np.zeros(2)), ValueError, "equal lengths"),
        BadInput((np.zeros(3), np.zeros(3)), ValueError, "negative", {"axis": 0}),
    ),
)
def vecdot(x1: ExTensor, x2: ExTensor, /, *, axis: int = -1) -> ExTensor:
    """The dot products of vectors along an axis, of complex ones with the conjugate of x1.

    Args:
        x1: vectors along ``axis``.
        x2: vectors of the same length; the other axes broadcast.
        axis: counted from the last, so negative.

    Returns:
        The broadcast shape without the axis.

    Raises:
        TypeError, ValueError: for vectors of two lengths, or an axis not negative or out of range.

    Example:
        >>> et.linalg.vecdot(et.ExTensor([[1, 2], [3, 4]]), et.ExTensor([1, 10])).tolist()
        [21, 43]
    """
    tensors_only("vecdot", x1, x2)
    if axis >= 0:
        raise ValueError(f"vecdot: axis: expected a negative one, got {axis}")
    first, second = (axis_index("vecdot", axis, x.ndim) for x in (x1, x2))
    if x1.shape[first] != x2.shape[second]:
        raise ValueError(f"vecdot: expected equal lengths along {axis}, got {x1.shape}, {x2.shape}")
    left = conj(x1) if x1.dtype.is_complex else x1
    products = multiply(left, x2)
    return sum(products, axis, dtype=products.dtype)
