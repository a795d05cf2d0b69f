"""Matrices: inverses, solving, determinants, Cholesky and diagonals, of the standard's `linalg`.

The array module's LAPACK does the arithmetic. All have gradients, to any order (M. Giles,
"Collected matrix derivative results", 2008). Integers become float32, 16-bit floats compute in it;
stacks of matrices are in the leading axes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from extensor.array_api.complex import conj
from extensor.array_api.manipulation import moveaxis
from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, composite, primitive
from extensor.autograd.tensor import ExTensor, wrap
from extensor.backends.protocol import Backend
from extensor.dtypes import DTypeLike, compute_dtype
from extensor.ops.arguments import non_differentiable_input, tensors_only
from extensor.ops.creation import tril
from extensor.ops.joining import stack
from extensor.ops.matmul import matmul
from extensor.ops.reduce import sum as total
from extensor.ops.shape import broadcast_to, reshape, swapaxes

__all__ = [
    "cholesky", "cross", "det", "diagonal", "inv", "matrix_power", "slogdet", "solve", "trace",
]  # fmt: skip


class SlogdetResult(NamedTuple):
    """A determinant's sign (or phase), and the logarithm of its magnitude."""

    sign: ExTensor
    logabsdet: ExTensor


NO_MATRIX = (BadInput((np.zeros(3),), ValueError, "expected matrices"),)
_NOT_SQUARE = (*NO_MATRIX, BadInput((np.zeros((2, 3)),), ValueError, "expected square matrices"))


def matrices(name: str, x: ExTensor, square: bool = True) -> ExTensor:
    """Give x back if it is a tensor of (square) matrices.

    Raises:
        TypeError, ValueError: otherwise.
    """
    tensors_only(name, x)
    if x.ndim < 2:
        raise ValueError(f"{name}: expected matrices (two axes or more), got shape {x.shape}")
    if square and x.shape[-1] != x.shape[-2]:
        raise ValueError(f"{name}: expected square matrices, got shape {x.shape}")
    return x


_REFUSED = {
    **dict.fromkeys(("inv", "solve"), "Singular matrix"),
    "cholesky": "Matrix is not positive definite",
}
"""What LAPACK says of a matrix in numpy's words; cupy's are the name of a routine and a number."""


def _lapack(name: str, backend: Backend, *arrays: Any, **options: Any) -> Any:
    """The result of a LAPACK routine; its errors are ValueErrors that name the function."""
    routine = getattr(backend.xp.linalg, name, None)
    if routine is None:
        raise TypeError(f"{name}: {backend.xp.__name__} has no such routine; use x.to('cpu')")
    try:
        with backend.raising():
            return routine(*arrays, **options)
    except np.linalg.LinAlgError as error:
        raise np.linalg.LinAlgError(f"{name}: {_REFUSED.get(name, error)}") from None


def _well_conditioned(rng: np.random.Generator, *shape: int) -> Any:
    """Square matrices far from singular."""
    return rng.normal(size=shape) + 4 * np.eye(shape[-1])


def _t(x: ExTensor) -> ExTensor:
    return swapaxes(x, -1, -2)


@primitive(
    forward=lambda backend, x: _lapack("inv", backend, x),
    vjps=(lambda g, out, x: -matmul(matmul(_t(out), g), _t(out)),),
    reads="output",
    to_float=True,
    samples=lambda rng: [
        Sample((_well_conditioned(rng, 3, 3),)),
        Sample((_well_conditioned(rng, 2, 2, 2),)),
    ],
    errors=(*_NOT_SQUARE, BadInput((np.zeros((2, 2)),), ValueError, "inv: Singular")),
)
def inv(x: ExTensor, /) -> ExTensor:
    """The inverse of square matrices.

    Args:
        x: (..., M, M).

    Returns:
        (..., M, M); integers give float32.

    Raises:
        TypeError, ValueError: for what is no square matrix, or a singular one.

    Example:
        >>> et.linalg.inv(et.ExTensor([[2.0, 0.0], [0.0, 4.0]])).tolist()
        [[0.5, 0.0], [0.0, 0.25]]
    """
    return apply("inv", matrices("inv", x))


@primitive(
    forward=lambda backend, x: _lapack("det", backend, x),
    vjps=(lambda g, out, x: reshape(g * out, (*g.shape, 1, 1)) * _t(inv(x)),),
    to_float=True,
    samples=lambda rng: [
        Sample((_well_conditioned(rng, 3, 3),)),
        Sample((_well_conditioned(rng, 2, 2, 2),)),
    ],
    errors=_NOT_SQUARE,
)
def det(x: ExTensor, /) -> ExTensor:
    """The determinant of square matrices; its gradient needs the inverse.

    Args:
        x: (..., M, M).

    Returns:
        (...); integers give float32.

    Raises:
        TypeError, ValueError: for what is no square matrix.

    Example:
        >>> et.linalg.det(et.ExTensor([[2.0, 0.0], [0.0, 4.0]])).item()
        8.0
    """
    return apply("det", matrices("det", x))


@primitive(
    name="logabsdet",
    forward=lambda backend, x: _lapack("slogdet", backend, x)[1],
    vjps=(lambda g, out, x: reshape(g, (*g.shape, 1, 1)) * _t(inv(x)),),
    reads="inputs",
    to_float=True,
    samples=lambda rng: [
        Sample((_well_conditioned(rng, 3, 3),)),
        Sample((_well_conditioned(rng, 2, 2, 2),)),
    ],
)
def _logabsdet(x: ExTensor) -> ExTensor:
    """The logarithm of a determinant's magnitude."""
    return apply("logabsdet", x)


def decompose(routine: str, x: ExTensor, name: str | None = None, **options: Any) -> list[ExTensor]:
    """The results of a LAPACK routine without a gradient for x, dequantized and of a float dtype.

    Raises:
        TypeError: for a tensor that requires a gradient.
    """
    remedy = "x.detach(), or det, inv, solve or cholesky, which have theirs"
    array, requested = non_differentiable_input(name or routine, x, remedy)
    found = _lapack(routine, x.backend, array, **options)
    parts = [wrap(p, x.backend) for p in (found if isinstance(found, tuple) else (found,))]
    return [
        part.astype(requested) if part.dtype is compute_dtype(requested) else part for part in parts
    ]


def slogdet(x: ExTensor, /) -> SlogdetResult:
    """The sign and the logarithm of the magnitude of a determinant, -inf for 0.

    The logarithm has a gradient where there is an inverse; the sign has none.

    Args:
        x: (..., M, M).

    Returns:
        A named tuple of ``sign`` and ``logabsdet``, both (...).

    Raises:
        TypeError, ValueError: for what is no square matrix.

    Example:
        >>> sign, logarithm = et.linalg.slogdet(et.ExTensor([[0.0, 1.0], [1.0, 0.0]]))
        >>> sign.item(), logarithm.item()
        (-1.0, 0.0)
    """
    sign, logarithm = decompose("slogdet", matrices("slogdet", x).detach())
    return SlogdetResult(sign, _logabsdet(x) if x.requires_grad else logarithm)


def _solve(backend: Backend, a: Any, b: Any) -> Any:
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # cupy's routine wants them equal
    whole = (backend.xp.broadcast_to(x, lead + x.shape[-2:]) for x in (a, b))
    return _lapack("solve", backend, *whole)


def _solve_left_vjp(g: ExTensor, out: ExTensor, a: ExTensor, b: ExTensor) -> ExTensor:
    return -matmul(apply("solve", _t(a), g), _t(out))


@primitive(
    forward=_solve,
    vjps=(_solve_left_vjp, lambda g, out, a, b: apply("solve", _t(a), g)),
    broadcasts=True,
    to_float=True,
    samples=lambda rng: [
        Sample((_well_conditioned(rng, 3, 3), rng.normal(size=(3, 2)))),
        Sample((_well_conditioned(rng, 2, 2, 2), rng.normal(size=(2,)))),
        Sample((_well_conditioned(rng, 2, 2), rng.normal(size=(3, 2, 1)))),
    ],
    errors=(
        BadInput((np.zeros((2, 3)), np.zeros(2)), ValueError, "expected square matrices"),
        BadInput((np.eye(2), np.zeros(3)), ValueError, "expected 2 rows on the right"),
        BadInput((np.zeros((2, 2)), np.zeros(2)), ValueError, "Singular"),
    ),
)
def solve(x1: ExTensor, x2: ExTensor, /) -> ExTensor:
    """The solution of ``x1 @ y = x2`` for y.

    Args:
        x1: (..., M, M).
        x2: (..., M, K), leading axes broadcasting, or a vector (M,).

    Returns:
        (..., M, K), or (..., M) for a vector.

    Raises:
        TypeError, ValueError: for what is no square matrix, a singular one, or other lengths.

    Example:
        >>> et.linalg.solve(et.ExTensor([[2.0, 0.0], [0.0, 4.0]]), et.ExTensor([2.0, 2.0])).tolist()
        [1.0, 0.5]
    """
    matrices("solve", x1)
    tensors_only("solve", x2)
    vector = x2.ndim == 1
    rows = x2.shape[0 if vector else -2] if x2.ndim else None
    if rows != x1.shape[-1]:
        raise ValueError(
            f"solve: expected {x1.shape[-1]} rows on the right for shape {x1.shape}, got {x2.shape}"
        )
    right = reshape(x2, (*x2.shape, 1)) if vector else x2
    found = apply("solve", x1, right)
    return reshape(found, found.shape[:-1]) if vector else found


def _cholesky_vjp(g: ExTensor, out: ExTensor, x: ExTensor) -> ExTensor:
    """S = L^-T P(L^T g) L^-1, made symmetric; P keeps the lower triangle, its diagonal halved."""
    lower = tril(matmul(_t(out), g))
    halved = lower - diagonal(lower).expand_dims(-1) * 0.5 * ExTensor.eye(
        out.shape[-1], dtype=out.dtype, device=out.device
    )
    back = inv(out)
    part = matmul(matmul(_t(back), halved), back)
    return (part + _t(part)) * 0.5


def _cholesky(backend: Any, x: Any) -> Any:
    whole = (x + x.conj().swapaxes(-1, -2)) / 2  # both triangles count, as in the gradient
    return _lapack("cholesky", backend, whole.astype(x.dtype, copy=False))


def _positive_definite(rng: np.random.Generator, *shape: int) -> Any:
    x = rng.normal(size=shape)
    return x @ x.swapaxes(-1, -2) + np.eye(shape[-1])


@primitive(
    forward=_cholesky,
    vjps=(_cholesky_vjp,),
    reads="output",
    to_float=True,
    samples=lambda rng: [
        Sample((_positive_definite(rng, 3, 3),)),
        Sample((_positive_definite(rng, 2, 2, 2),)),
    ],
    errors=(*_NOT_SQUARE, BadInput((-np.eye(2),), ValueError, "cholesky: Matrix is not positive")),
)
def cholesky(x: ExTensor, /, *, upper: bool = False) -> ExTensor:
    """The triangular L with ``L L^H = x``, for symmetric (Hermitian) positive-definite matrices.

    Args:
        x: (..., M, M); its Hermitian part, (x + x^H) / 2, if it is not symmetric.
        upper: give U = L^H instead.

    Returns:
        (..., M, M), triangular.

    Raises:
        TypeError, ValueError: for what is no square matrix, or not positive definite.

    Example:
        >>> et.linalg.cholesky(et.ExTensor([[4.0, 2.0], [2.0, 10.0]])).tolist()
        [[2.0, 0.0], [1.0, 3.0]]
    """
    lower = apply("cholesky", matrices("cholesky", x))
    return conj(_t(lower)) if upper else lower


@composite(
    samples=lambda rng: [Sample((_well_conditioned(rng, 2, 2), n)) for n in (3, -2)],
    errors=(*(BadInput((b.args[0], 2), b.error, b.match) for b in _NOT_SQUARE),),
)
def matrix_power(x: ExTensor, n: int, /) -> ExTensor:
    """The product of n factors of a square matrix; of its inverse if n is negative.

    Args:
        x: (..., M, M).
        n: the exponent; 0 gives the identity, without a gradient.

    Returns:
        (..., M, M).

    Raises:
        TypeError, ValueError: for what is no square matrix, or a singular one and n < 0.

    Example:
        >>> et.linalg.matrix_power(et.ExTensor([[1, 1], [0, 1]]), 5).tolist()
        [[1, 5], [0, 1]]
    """
    matrices("matrix_power", x)
    base = inv(x) if n < 0 else x
    result = None
    for bit in f"{n if n >= 0 else -n:b}" if n else "":
        result = None if result is None else matmul(result, result)
        if bit == "1":
            result = base if result is None else matmul(result, base)
    if result is not None:
        return result
    return broadcast_to(ExTensor.eye(x.shape[-1], dtype=x.dtype, device=x.device), x.shape)


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(2, 3, 4)),)),
        Sample((rng.normal(size=(3, 3)),), {"offset": -1}),
    ],
    errors=NO_MATRIX,
)
def diagonal(x: ExTensor, /, *, offset: int = 0) -> ExTensor:
    """A diagonal of matrices.

    Args:
        x: (..., M, N).
        offset: which diagonal; 0 is the main one, positive ones are above it.

    Returns:
        (..., its length).

    Raises:
        TypeError, ValueError: for what is no matrix.

    Example:
        >>> et.linalg.diagonal(et.ExTensor([[1, 2], [3, 4]])).tolist()
        [1, 4]
    """
    rows, columns = matrices("diagonal", x, square=False).shape[-2:]
    first, second = (0, offset) if offset >= 0 else (-offset, 0)
    places = np.arange(max(min(rows - first, columns - second), 0))
    return x[..., places + first, places + second]


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(2, 3, 4)),)),
        Sample((rng.normal(size=(3, 3)),), {"offset": 1}),
    ],
    errors=NO_MATRIX,
)
def trace(x: ExTensor, /, *, offset: int = 0, dtype: DTypeLike | None = None) -> ExTensor:
    """The sum of a diagonal.

    Args:
        x: (..., M, N).
        offset: which diagonal; 0 is the main one, positive ones are above it.
        dtype: the dtype to compute in, as of `sum`.

    Returns:
        (...).

    Raises:
        TypeError, ValueError: for what is no matrix.

    Example:
        >>> et.linalg.trace(et.ExTensor([[1, 2], [3, 4]])).item()
        5
    """
    return total(diagonal(matrices("trace", x, square=False), offset=offset), -1, dtype=dtype)


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(2, 3)), rng.normal(size=(3,)))),
        Sample((rng.normal(size=(3, 2)), rng.normal(size=(3, 2))), {"axis": -2}),
    ],
    errors=(
        BadInput((np.zeros((2, 3)), np.zeros(2)), ValueError, "expected 3 values"),
        BadInput((np.zeros(3), np.zeros(3)), ValueError, "expected a negative one", {"axis": 0}),
    ),
)
def cross(x1: ExTensor, x2: ExTensor, /, *, axis: int = -1) -> ExTensor:
    """The cross product of vectors of three values.

    Args:
        x1: vectors of 3 along ``axis``.
        x2: likewise; the other axes broadcast.
        axis: counted from the last, so negative.

    Returns:
        The broadcast shape.

    Raises:
        TypeError, ValueError: for vectors of other lengths, or an axis that is not negative.

    Example:
        >>> et.linalg.cross(et.ExTensor([1, 0, 0]), et.ExTensor([0, 1, 0])).tolist()
        [0, 0, 1]
    """
    tensors_only("cross", x1, x2)
    if axis >= 0:
        raise ValueError(f"cross: axis: expected a negative one, got {axis}")
    if any(-axis > x.ndim or x.shape[axis] != 3 for x in (x1, x2)):
        raise ValueError(f"cross: expected 3 values along {axis}, got {x1.shape} and {x2.shape}")
    a, b = (moveaxis(x, axis, -1) for x in (x1, x2))
    parts = [a[..., i] * b[..., j] - a[..., j] * b[..., i] for i, j in ((1, 2), (2, 0), (0, 1))]
    return moveaxis(stack(parts, -1), -1, axis)
