"""Decompositions of matrices: eigenvalues, QR, singular values, and what follows from them.

All refuse a tensor that requires a gradient: gradients are undefined where eigenvalues or singular
values repeat.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from extensor.array_api.linalg.matrix import decompose, matrices
from extensor.autograd.tensor import ExTensor, wrap
from extensor.dtypes import complex64, compute_dtype, promote

__all__ = [
    "eig", "eigh", "eigvals", "eigvalsh", "matrix_rank", "pinv", "qr", "svd", "svdvals",
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
    """The eigenvalues and eigenvectors of symmetric (Hermitian) matrices.

    Args:
        x: (..., M, M), without gradient.

    Returns:
        A named tuple: ``eigenvalues`` (..., M), real and ascending, and ``eigenvectors`` in the
        columns of (..., M, M).

    Raises:
        TypeError, ValueError: for what is no square matrix, or requires a gradient.

    Example:
        >>> et.linalg.eigh(et.ExTensor([[2.0, 0.0], [0.0, 1.0]])).eigenvalues
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [1. 2.])
    """
    return EigResult(*decompose("eigh", matrices("eigh", x)))


def eigvalsh(x: ExTensor, /) -> ExTensor:
    """The eigenvalues of symmetric (Hermitian) matrices.

    Args:
        x: (..., M, M), without gradient.

    Returns:
        (..., M), real and ascending.

    Raises:
        TypeError, ValueError: for what is no square matrix, or requires a gradient.

    Example:
        >>> et.linalg.eigvalsh(et.ExTensor([[2.0, 1.0], [1.0, 2.0]]))
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [1. 3.])
    """
    return decompose("eigvalsh", matrices("eigvalsh", x))[0]


def _complex(routine: str, x: ExTensor) -> list[ExTensor]:
    """Eigenvalues (and vectors), which LAPACK gives as real numbers where all are."""
    wide = matrices(routine, x).astype(compute_dtype(x.dtype))  # not rounded to 16 bits between
    return [part.astype(promote(part.dtype, complex64)) for part in decompose(routine, wide)]


def eig(x: ExTensor, /) -> EigResult:
    """The eigenvalues and eigenvectors of square matrices.

    Args:
        x: (..., M, M), without gradient.

    Returns:
        A named tuple: ``eigenvalues`` (..., M) and ``eigenvectors`` in the columns of (..., M, M),
        both complex.

    Raises:
        TypeError, ValueError: for what is no square matrix, or requires a gradient.

    Example:
        >>> et.linalg.eig(et.ExTensor([[2.0, 0.0], [0.0, 1.0]])).eigenvalues.tolist()
        [(2+0j), (1+0j)]
    """
    return EigResult(*_complex("eig", x))


def eigvals(x: ExTensor, /) -> ExTensor:
    """The eigenvalues of square matrices.

    Args:
        x: (..., M, M), without gradient.

    Returns:
        (..., M), complex.

    Raises:
        TypeError, ValueError: for what is no square matrix, or requires a gradient.

    Example:
        >>> et.linalg.eigvals(et.ExTensor([[3.0, 0.0], [0.0, 1.0]])).tolist()
        [(3+0j), (1+0j)]
    """
    return _complex("eigvals", x)[0]


def qr(x: ExTensor, /, *, mode: str = "reduced") -> QRResult:
    """The orthonormal Q and upper triangular R with ``Q R = x``.

    Args:
        x: (..., M, N), without gradient.
        mode: "reduced" for min(M, N) columns of Q, "complete" for M.

    Returns:
        A named tuple of ``Q`` and ``R``.

    Raises:
        TypeError, ValueError: for what is no matrix or requires a gradient, or another mode.

    Example:
        >>> q, r = et.linalg.qr(et.ones((3, 2)))
        >>> q.shape, r.shape
        ((3, 2), (2, 2))
    """
    matrices("qr", x, square=False)
    if mode not in ("reduced", "complete"):
        raise ValueError(f"qr: mode: expected 'reduced' or 'complete', got {mode!r}")
    return QRResult(*decompose("qr", x, mode=mode))


def svd(x: ExTensor, /, *, full_matrices: bool = True) -> SVDResult:
    """The singular value decomposition ``U diag(S) Vh = x``.

    Args:
        x: (..., M, N), without gradient.
        full_matrices: all M columns of U and N rows of Vh, or min(M, N) of both.

    Returns:
        A named tuple of ``U``, ``S`` (descending) and ``Vh``.

    Raises:
        TypeError, ValueError: for what is no matrix, or requires a gradient.

    Example:
        >>> et.linalg.svd(et.ExTensor([[3.0, 0.0], [0.0, 4.0]])).S
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [4. 3.])
    """
    matrices("svd", x, square=False)
    return SVDResult(*decompose("svd", x, full_matrices=bool(full_matrices)))


def svdvals(x: ExTensor, /) -> ExTensor:
    """The singular values of matrices.

    Args:
        x: (..., M, N), without gradient.

    Returns:
        (..., min(M, N)), descending.

    Raises:
        TypeError, ValueError: for what is no matrix, or requires a gradient.

    Example:
        >>> et.linalg.svdvals(et.ExTensor([[3.0, 0.0], [0.0, 4.0]]))
        ExTensor(shape=(2,), dtype=float32, device=cpu,
          [4. 3.])
    """
    matrices("svdvals", x, square=False)
    return decompose("svd", x, "svdvals", compute_uv=False)[0]


def _cutoff(x: ExTensor, rtol: float | ExTensor | None) -> Any:
    if isinstance(rtol, ExTensor):
        return rtol.data
    single = compute_dtype(x.dtype).numpy in (np.float32, np.complex64) or not x.dtype.is_inexact
    epsilon = np.finfo(np.float32 if single else np.float64).eps
    return max(x.shape[-2:]) * epsilon if rtol is None else rtol


def matrix_rank(x: ExTensor, /, *, rtol: float | ExTensor | None = None) -> ExTensor:
    """How many singular values exceed the largest times ``rtol``.

    Args:
        x: (..., M, N), without gradient.
        rtol: max(M, N) times the dtype's epsilon if None.

    Returns:
        int64 (...).

    Raises:
        TypeError, ValueError: for what is no matrix, or requires a gradient.

    Example:
        >>> et.linalg.matrix_rank(et.ones((3, 2))).item()
        1
    """
    values, xp = svdvals(matrices("matrix_rank", x, square=False)).data, x.backend.xp
    limit = values[..., :1] * xp.asarray(_cutoff(x, rtol))[..., None]  # the largest comes first
    return wrap((values > limit).sum(axis=-1, dtype=np.int64), x.backend)


def pinv(x: ExTensor, /, *, rtol: float | ExTensor | None = None) -> ExTensor:
    """The Moore-Penrose inverse.

    Args:
        x: (..., M, N), without gradient.
        rtol: singular values up to the largest times this count as 0; as `matrix_rank` if None.

    Returns:
        (..., N, M).

    Raises:
        TypeError, ValueError: for what is no matrix, or requires a gradient.

    Example:
        >>> et.linalg.pinv(et.ExTensor([[2.0], [0.0]]))
        ExTensor(shape=(1, 2), dtype=float32, device=cpu,
          [[0.5 0. ]])
    """
    limit = _cutoff(matrices("pinv", x, square=False), rtol)
    return decompose("pinv", x, rcond=limit)[0]
