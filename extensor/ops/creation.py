"""Creation functions: those of ExTensor under their names, triangles and grids."""

from __future__ import annotations

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, primitive
from extensor.autograd.tensor import ExTensor, wrap
from extensor.ops.arguments import tensors_only

__all__ = [
    "arange", "empty", "empty_like", "eye", "from_dlpack", "from_numpy", "full", "full_like",
    "linspace", "meshgrid", "ones", "ones_like", "rand", "rand_like", "randn", "randn_like",
    "tril", "triu", "zeros", "zeros_like",
]  # fmt: skip

arange = ExTensor.arange
empty = ExTensor.empty
empty_like = ExTensor.empty_like
eye = ExTensor.eye
from_dlpack = ExTensor.from_dlpack
from_numpy = ExTensor.from_numpy
full = ExTensor.full
full_like = ExTensor.full_like
linspace = ExTensor.linspace
ones = ExTensor.ones
ones_like = ExTensor.ones_like
rand = ExTensor.rand
rand_like = ExTensor.rand_like
randn = ExTensor.randn
randn_like = ExTensor.randn_like
zeros = ExTensor.zeros
zeros_like = ExTensor.zeros_like

_NO_MATRIX = (BadInput((np.zeros(3),), ValueError, "two axes or more"),)


def _matrix(name: str, x: ExTensor, k: int) -> ExTensor:
    tensors_only(name, x)
    if x.ndim < 2:
        raise ValueError(f"{name}: expected a tensor of two axes or more, got shape {x.shape}")
    reach = max(x.shape[-2:])  # diagonals further out are all alike, and may not fit 64 bits
    return apply(name, x, k=min(max(k, -reach), reach))


@primitive(
    forward=lambda backend, x, k: backend.xp.tril(x, k).astype(x.dtype, copy=False),
    vjps=(lambda g, out, x, k: apply("tril", g, k=k),),
    reads="nothing",
    moves=True,
    samples=lambda rng: [Sample((rng.normal(size=(2, 3, 4)), 1))],
    errors=_NO_MATRIX,
)
def tril(x: ExTensor, k: int = 0) -> ExTensor:
    """The lower triangle of matrices, zeros above it.

    Args:
        x: (..., M, N).
        k: the last diagonal to keep; 0 is the main one, positive ones are above it.

    Returns:
        The shape and dtype of x.

    Raises:
        TypeError, ValueError: for fewer than two axes.

    Example:
        >>> et.tril(et.ones((2, 3))).tolist()
        [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    """
    return _matrix("tril", x, k)


@primitive(
    forward=lambda backend, x, k: backend.xp.triu(x, k).astype(x.dtype, copy=False),
    vjps=(lambda g, out, x, k: apply("triu", g, k=k),),
    reads="nothing",
    moves=True,
    samples=lambda rng: [Sample((rng.normal(size=(2, 3, 4)), -1))],
    errors=_NO_MATRIX,
)
def triu(x: ExTensor, k: int = 0) -> ExTensor:
    """The upper triangle of matrices, zeros below it.

    Args:
        x: (..., M, N).
        k: the first diagonal to keep; 0 is the main one, positive ones are above it.

    Returns:
        The shape and dtype of x.

    Raises:
        TypeError, ValueError: for fewer than two axes.

    Example:
        >>> et.triu(et.ones((2, 3))).tolist()
        [[1.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
    """
    return _matrix("triu", x, k)


def meshgrid(*vectors: ExTensor, indexing: str = "xy") -> tuple[ExTensor, ...]:
    """The coordinates of a grid's points.

    Args:
        vectors: the coordinates along each axis of the grid.
        indexing: "ij" for one axis per vector in order, "xy" with the first two axes exchanged.

    Returns:
        One tensor per vector, each of the grid's shape.

    Raises:
        TypeError, ValueError: for a tensor that is no vector, or another indexing.

    Example:
        >>> rows, columns = et.meshgrid(et.arange(2), et.arange(3), indexing="ij")
        >>> rows.tolist(), columns.tolist()
        ([[0, 0, 0], [1, 1, 1]], [[0, 1, 2], [0, 1, 2]])
    """
    tensors_only("meshgrid", *vectors)
    if indexing not in ("xy", "ij") or any(v.ndim != 1 for v in vectors):
        raise ValueError(
            f"meshgrid: expected vectors and indexing 'xy' or 'ij', got shapes "
            f"{[v.shape for v in vectors]} and {indexing!r}"
        )
    if not vectors:
        return ()
    backend = vectors[0].backend
    grids = backend.xp.meshgrid(*(v.data for v in vectors), indexing=indexing)
    return tuple(wrap(grid, backend) for grid in grids)
