"""Norms of matrices and vectors. Those that need singular values have no gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from extensor.array_api.complex import imag, real
from extensor.array_api.linalg.decomposition import svdvals
from extensor.array_api.linalg.matrix import NO_MATRIX, matrices
from extensor.autograd.primitive import BadInput, Sample, composite
from extensor.autograd.tensor import ExTensor
from extensor.dtypes import DType, compute_dtype, float32
from extensor.ops.arguments import axis_tuple, tensors_only
from extensor.ops.arithmetic import where
from extensor.ops.elementwise import abs as magnitude
from extensor.ops.reduce import max as largest
from extensor.ops.reduce import min as smallest
from extensor.ops.reduce import sum as total
from extensor.ops.shape import reshape

__all__ = ["matrix_norm", "vector_norm"]


def _squares(x: ExTensor) -> ExTensor:
    if not x.dtype.is_complex:
        return x * x
    return real(x) * real(x) + imag(x) * imag(x)


def _wide(name: str, x: ExTensor) -> tuple[ExTensor, DType | None]:
    """X in the dtype that its norm is computed in, and the dtype to round the norm to, if any."""
    tensors_only(name, x)
    if x.dtype.is_blocked:
        return x, None
    requested = x.dtype if x.dtype.is_inexact else float32
    compute = compute_dtype(requested)
    return x.astype(compute), None if compute is requested else requested


def _root(squares: ExTensor) -> ExTensor:
    """The root; at 0, where it has no derivative, its gradient is 0, a subgradient of the norm."""
    zero = squares == 0
    return where(zero, 0.0, where(zero, 1.0, squares).sqrt())


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(2, 3)),), {"ord": order}) for order in ("fro", 1, -1, math.inf)
    ],
    errors=(
        *NO_MATRIX,
        BadInput((np.eye(2),), ValueError, "ord: expected", {"ord": 3}),
    ),
)
def matrix_norm(
    x: ExTensor, /, *, keepdims: bool = False, ord: float | str | None = "fro"
) -> ExTensor:
    """The norm of matrices.

    Args:
        x: (..., M, N).
        keepdims: keep the two axes, with length 1.
        ord: "fro" (or None): the root of the sum of squares; 1 or inf: the largest sum of
            magnitudes of a column or row, -1 or -inf the smallest; 2, -2, "nuc": the largest,
            smallest or sum of singular values (without a gradient).

    Returns:
        (...).

    Raises:
        TypeError, ValueError: for what is no matrix, or another ``ord``.

    Example:
        >>> et.linalg.matrix_norm(et.ExTensor([[3.0, 0.0], [0.0, 4.0]])).item()
        5.0
    """
    x, rounded = _wide("matrix_norm", matrices("matrix_norm", x, square=False))
    norms: dict[Any, Callable[[], ExTensor]] = {
        "fro": lambda: _root(total(_squares(x), (-2, -1))),
        "nuc": lambda: total(svdvals(x), -1),
        1: lambda: largest(total(magnitude(x), -2), -1),
        -1: lambda: smallest(total(magnitude(x), -2), -1),
        2: lambda: largest(svdvals(x), -1),
        -2: lambda: smallest(svdvals(x), -1),
        math.inf: lambda: largest(total(magnitude(x), -1), -1),
        -math.inf: lambda: smallest(total(magnitude(x), -1), -1),
    }
    requested = "fro" if ord is None else ord
    if requested not in norms:
        raise ValueError(f"matrix_norm: ord: expected one of {list(norms)}, got {ord!r}")
    norm = norms[requested]()
    norm = norm if rounded is None else norm.astype(rounded)
    return reshape(norm, (*norm.shape, 1, 1)) if keepdims else norm


@composite(
    samples=lambda rng: (
        [Sample((rng.normal(size=(2, 3)),), {"ord": order, "axis": 1}) for order in (2, 1, 3, -1)]
        + [Sample((rng.normal(size=(2, 3)),))]
    ),
    errors=(BadInput((np.zeros(3),), ValueError, "expected -1..0", {"axis": 1}),),
)
def vector_norm(
    x: ExTensor,
    /,
    *,
    axis: int | tuple[int, ...] | None = None,
    keepdims: bool = False,
    ord: float = 2,
) -> ExTensor:
    """The norm ``sum(abs(x) ** ord) ** (1 / ord)`` over axes.

    Args:
        x: any shape.
        axis: the axes to reduce, all if None.
        keepdims: keep the reduced axes, with length 1.
        ord: any number but for: inf the largest and -inf the smallest magnitude, 0 how many values
            are not zero.

    Returns:
        The shape of x without the reduced axes.

    Raises:
        TypeError, ValueError: for an axis out of range.

    Example:
        >>> et.linalg.vector_norm(et.ExTensor([3.0, 4.0])).item()
        5.0
    """
    x, rounded = _wide("vector_norm", x)
    norm = _vector_norm(x, axis_tuple("vector_norm", axis, x.ndim), keepdims, ord)
    return norm if rounded is None else norm.astype(rounded)


def _vector_norm(x: ExTensor, axes: tuple[int, ...], keepdims: bool, ord: float) -> ExTensor:
    if ord == 2:
        return _root(total(_squares(x), axes, keepdims))
    sizes = magnitude(x)
    if ord == math.inf:
        return largest(sizes, axes, keepdims)
    if ord == -math.inf:
        return smallest(sizes, axes, keepdims)
    if ord == 0:
        return total((sizes != 0).astype(sizes.dtype), axes, keepdims)
    return total(sizes if ord == 1 else sizes**ord, axes, keepdims) ** (1 / ord)
