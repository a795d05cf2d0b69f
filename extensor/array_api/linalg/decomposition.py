"""Decompositions of matrices: eigenvalues, QR, singular values, and what follows from them.

All refuse a tensor that requires a gradient: gradients are undefined where eigenvalues or singular
values repeat.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from extensor.array_api.linalg.matrix import decompose, matrices
from extensor.autograd.apply import wrap
from extensor.autograd.tensor import ExTensor
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
    """Eigenvalues (real, ascending) and eigenvectors of symmetric (Hermitian) (..., M, M).

    Raises:
        TypeError, ValueError: for what is no square matrix, or requires a gradient.
    """
    return EigResult(*decompose("eigh", matrices("eigh", x)))


def eigvalsh(x: ExTensor, /) -> ExTensor:
    """As `eigh`, the eigenvalues alone."""
    return decompose("eigvalsh", matrices("eigvalsh", x))[0]


def _complex(routine: str, x: ExTensor) -> list[ExTensor]:
    """Eigenvalues (and vectors), which LAPACK gives as real numbers where all are."""
    wide = matrices(routine, x).astype(compute_dtype(x.dtype))  # not rounded to 16 bits between
    return [part.astype(promote(part.dtype, complex64)) for part in decompose(routine, wide)]


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
        raise ValueError(f"qr: mode: expected 'reduced' or 'complete', got {mode!r}")
    return QRResult(*decompose("qr", x, mode=mode))


def svd(x: ExTensor, /, *, full_matrices: bool = True) -> SVDResult:
    """U, S and Vh with U diag(S) Vh = x, for (..., M, N); S descends.

    Args:
        x: the matrices.
        full_matrices: all M columns of U and N rows of Vh, or min(M, N) of both.

    Raises:
        TypeError, ValueError: for what is no matrix, or requires a gradient.
    """
    matrices("svd", x, square=False)
    return SVDResult(*decompose("svd", x, full_matrices=bool(full_matrices)))


def svdvals(x: ExTensor, /) -> ExTensor:
    """As `svd`, the singular values alone."""
    matrices("svdvals", x, square=False)
    return decompose("svd", x, "svdvals", compute_uv=False)[0]


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
    return decompose("pinv", x, rcond=limit)[0]
