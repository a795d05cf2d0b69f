"""The standard's extension `linalg`: matrix products, factorizations, inverses and norms."""

from __future__ import annotations

from extensor.ops.factor import (
    eig,
    eigh,
    eigvals,
    eigvalsh,
    matrix_norm,
    matrix_rank,
    pinv,
    qr,
    svd,
    svdvals,
    vector_norm,
)
from extensor.ops.linalg import matmul, outer, tensordot
from extensor.ops.matrix import (
    cholesky,
    cross,
    det,
    diagonal,
    inv,
    matrix_power,
    slogdet,
    solve,
    trace,
)
from extensor.ops.standard import matrix_transpose, vecdot

__all__ = [
    "cholesky", "cross", "det", "diagonal", "eig", "eigh", "eigvals", "eigvalsh", "inv", "matmul",
    "matrix_norm", "matrix_power", "matrix_rank", "matrix_transpose", "outer", "pinv", "qr",
    "slogdet", "solve", "svd", "svdvals", "tensordot", "trace", "vecdot", "vector_norm",
]  # fmt: skip
