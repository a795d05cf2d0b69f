"""Factorizations of matrices, what follows from them, and norms: the rest of `linalg`.

Factorizations refuse a tensor that requires a gradient: theirs are undefined where eigenvalues or
singular values repeat. Norms have one where they are not written in singular values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from extensor.autograd.apply import wrap
from extensor.autograd.primitive import BadInput, Sample, composite
from extensor.autograd.tensor import ExTensor
from extensor.dtypes import DType, complex64, compute_dtype, float32, promote
from extensor.ops.arguments import axis_tuple, tensors_only
from extensor.ops.arithmetic import where
from extensor.ops.elementwise import abs as magnitude
from extensor.ops.matrix import NO_MATRIX, factored, matrices
from extensor.ops.parts import imag, real
from extensor.ops.reduce import max as largest
from extensor.ops.reduce import min as smallest
from extensor.ops.reduce import sum as total
from extensor.ops.shape import reshape

__all__ = [
    "eig", "eigh", "eigvals", "eigvalsh", "matrix_norm", "matrix_rank", "pinv", "qr", "svd",
    "svdvals", "vector_norm",
]  # fmt: skip


class EigResult(NamedTuple):
    """Eigenvalues (..., M), and eigenvectors in the columns of (..., M, M)."""

    eigenvalues: ExTensor
    eigenvectors: ExTensor


class QRResult(NamedTuple):
    """Orthonormal columns Q, and R upper triangular."""

    Q: ExTensor
    R: ExTensor


class SVDResult(NamedTuple):
    """Left singular vectors, singular values, descending, and right ones, conjugated, in rows."""

    U: ExTensor
    S: ExTensor
    Vh: ExTensor


def eigh(x: ExTensor, /) -> EigResult:
    """Eigenvalues (real, ascending) and eigenvectors of symmetric (Hermitian) (..., M, M).

    Raises:
        TypeError, ValueError: for what is no square matrix, or requires a gradient.
    """
    return EigResult(*factored("eigh", matrices("eigh", x)))


def eigvalsh(x: ExTensor, /) -> ExTensor:
    """As `eigh`, the eigenvalues alone."""
    return factored("eigvalsh", matrices("eigvalsh", x))[0]


def _complex(routine: str, x: ExTensor) -> list[ExTensor]:
    """Eigenvalues (and vectors), which LAPACK gives as real numbers where all are."""
    wide = matrices(routine, x).astype(compute_dtype(x.dtype))  # not rounded to 16 bits between
    return [part.astype(promote(part.dtype, complex64)) for part in factored(routine, wide)]


def eig(x: ExTensor, /) -> EigResult:
    """Eigenvalues and eigenvectors of any (..., M, M), both complex.

    Raises:
        TypeError, ValueError: for what is no square matrix, or requires a gradient.
    """
    return EigResult(*_complex("eig", x))


def eigvals(x: ExTensor, /) -> ExTensor:
    """As `eig`, the eigenvalues alone."""
    return _complex("eigvals", x)[0]


def qr(x: ExTensor, /, *, mode: str = "reduced") -> QRResult:
    """Orthonormal Q and upper triangular R with Q R = x, for (..., M, N).

    Args:
        x: the matrices.
        mode: "reduced" for min(M, N) columns of Q, "complete" for M.

    Raises:
        TypeError, ValueError: for what is no matrix or requires a gradient, or another mode.
    """
    matrices("qr", x, square=False)
    if mode not in ("reduced", "complete"):
        raise ValueError(f"qr: mode: wanted 'reduced' or 'complete', got {mode!r}")
    return QRResult(*factored("qr", x, mode=mode))


def svd(x: ExTensor, /, *, full_matrices: bool = True) -> SVDResult:
    """U, S and Vh with U diag(S) Vh = x, for (..., M, N); S descends.

    Args:
        x: the matrices.
        full_matrices: all M columns of U and N rows of Vh, or min(M, N) of both.

    Raises:
        TypeError, ValueError: for what is no matrix, or requires a gradient.
    """
    matrices("svd", x, square=False)
    return SVDResult(*factored("svd", x, full_matrices=bool(full_matrices)))


def svdvals(x: ExTensor, /) -> ExTensor:
    """As `svd`, the singular values alone."""
    matrices("svdvals", x, square=False)
    return factored("svd", x, "svdvals", compute_uv=False)[0]


def _cutoff(x: ExTensor, rtol: float | ExTensor | None) -> Any:
    if isinstance(rtol, ExTensor):
        return rtol.data
    single = compute_dtype(x.dtype).numpy in (np.float32, np.complex64) or not x.dtype.is_inexact
    epsilon = np.finfo(np.float32 if single else np.float64).eps
    return max(x.shape[-2:]) * epsilon if rtol is None else rtol


def matrix_rank(x: ExTensor, /, *, rtol: float | ExTensor | None = None) -> ExTensor:
    """How many singular values exceed the largest times ``rtol`` (int64), for (..., M, N): (...).

    Args:
        x: the matrices.
        rtol: max(M, N) times the dtype's epsilon if None.

    Raises:
        TypeError, ValueError: for what is no matrix, or requires a gradient.
    """
    values, xp = svdvals(matrices("matrix_rank", x, square=False)).data, x.backend.xp
    limit = values[..., :1] * xp.asarray(_cutoff(x, rtol))[..., None]  # the largest comes first
    return wrap((values > limit).sum(axis=-1, dtype=np.int64), x.backend)


def pinv(x: ExTensor, /, *, rtol: float | ExTensor | None = None) -> ExTensor:
    """The Moore-Penrose inverse of (..., M, N): (..., N, M).

    Args:
        x: the matrices.
        rtol: singular values up to the largest times this count as 0; as `matrix_rank` if None.

    Raises:
        TypeError, ValueError: for what is no matrix, or requires a gradient.
    """
    limit = _cutoff(matrices("pinv", x, square=False), rtol)
    return factored("pinv", x, rcond=limit)[0]


# --- norms ---------------------------------------------------------------------------------------


def _squares(x: ExTensor) -> ExTensor:
    if not x.dtype.is_complex:
        return x * x
    return real(x) * real(x) + imag(x) * imag(x)


def _wide(name: str, x: ExTensor) -> tuple[ExTensor, DType | None]:
    """X in the dtype that its norm is computed in, and the dtype to round the norm to, if any."""
    tensors_only(name, x)
    if x.dtype.is_blocked:
        return x, None
    asked = x.dtype if x.dtype.is_inexact else float32
    compute = compute_dtype(asked)
    return x.astype(compute), None if compute is asked else asked


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
        BadInput((np.eye(2),), ValueError, "ord: wanted", {"ord": 3}),
    ),
)
def matrix_norm(
    x: ExTensor, /, *, keepdims: bool = False, ord: float | str | None = "fro"
) -> ExTensor:
    """The norm of (..., M, N): (...).

    Args:
        x: the matrices.
        keepdims: keep the two axes, with length 1.
        ord: "fro" (or None): the root of the sum of squares; 1 or inf: the largest sum of
            magnitudes of a column or row, -1 or -inf the smallest; 2, -2, "nuc": the largest,
            smallest or sum of singular values (without a gradient).

    Raises:
        TypeError, ValueError: for what is no matrix, or another ``ord``.
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
    asked = "fro" if ord is None else ord
    if asked not in norms:
        raise ValueError(f"matrix_norm: ord: wanted one of {list(norms)}, got {ord!r}")
    norm = norms[asked]()
    norm = norm if rounded is None else norm.astype(rounded)
    return reshape(norm, (*norm.shape, 1, 1)) if keepdims else norm


@composite(
    samples=lambda rng: (
        [Sample((rng.normal(size=(2, 3)),), {"ord": order, "axis": 1}) for order in (2, 1, 3, -1)]
        + [Sample((rng.normal(size=(2, 3)),))]
    ),
    errors=(BadInput((np.zeros(3),), ValueError, "wanted -1..0", {"axis": 1}),),
)
def vector_norm(
    x: ExTensor,
    /,
    *,
    axis: int | tuple[int, ...] | None = None,
    keepdims: bool = False,
    ord: float = 2,
) -> ExTensor:
    """The norm ``sum(abs(x)**ord)**(1/ord)`` over ``axis``, all axes if None.

    Args:
        x: any shape.
        axis: the axes to reduce.
        keepdims: keep the reduced axes, with length 1.
        ord: any number but for: inf the largest and -inf the smallest magnitude, 0 how many
            values are not zero.

    Raises:
        TypeError, ValueError: for an axis out of range.
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
