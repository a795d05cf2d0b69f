"""What the standard's `linalg` has beside products: inverses, factorizations and norms.

The array module's LAPACK does the arithmetic. `inv`, `solve`, `det`, `slogdet`, `cholesky` and
what is written in them have gradients (M. Giles, "Collected matrix derivative results", 2008);
the others refuse a tensor that requires one, since theirs are undefined where eigenvalues or
singular values repeat. Integers become float32; stacks of matrices are in the leading axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from extensor.autograd.apply import apply, wrap
from extensor.autograd.mode import MODE
from extensor.autograd.primitive import BadInput, Sample, composite, primitive
from extensor.autograd.tensor import ExTensor
from extensor.dtypes import DTypeLike, compute_dtype, float32
from extensor.ops.arguments import axis_tuple, tensors_only
from extensor.ops.creation import tril
from extensor.ops.elementwise import abs as magnitude
from extensor.ops.linalg import matmul
from extensor.ops.parts import conj, imag, real
from extensor.ops.reduce import max as largest
from extensor.ops.reduce import min as smallest
from extensor.ops.reduce import sum as total
from extensor.ops.shape import broadcast_to, reshape, stack, swapaxes
from extensor.ops.standard import moveaxis

__all__ = [
    "cholesky", "cross", "det", "diagonal", "eig", "eigh", "eigvals", "eigvalsh", "inv",
    "matrix_norm", "matrix_power", "matrix_rank", "pinv", "qr", "slogdet", "solve", "svd",
    "svdvals", "trace", "vector_norm",
]  # fmt: skip


class EigResult(NamedTuple):
    """Eigenvalues (..., M), and eigenvectors in the columns of (..., M, M)."""

    eigenvalues: ExTensor
    eigenvectors: ExTensor


class QRResult(NamedTuple):
    """Orthonormal columns Q, and R upper triangular."""

    Q: ExTensor
    R: ExTensor


class SlogdetResult(NamedTuple):
    """A determinant's sign (or phase), and the logarithm of its magnitude."""

    sign: ExTensor
    logabsdet: ExTensor


class SVDResult(NamedTuple):
    """Left singular vectors, singular values, descending, and right ones, conjugated, in rows."""

    U: ExTensor
    S: ExTensor
    Vh: ExTensor


_NO_MATRIX = (BadInput((np.zeros(3),), ValueError, "wanted matrices"),)
_NOT_SQUARE = (*_NO_MATRIX, BadInput((np.zeros((2, 3)),), ValueError, "wanted square matrices"))


def _matrices(name: str, x: ExTensor, square: bool = True) -> ExTensor:
    tensors_only(name, x)
    if x.ndim < 2:
        raise ValueError(f"{name}: wanted matrices (two axes or more), got shape {x.shape}")
    if square and x.shape[-1] != x.shape[-2]:
        raise ValueError(f"{name}: wanted square matrices, got shape {x.shape}")
    return x


def _solved(name: str, *arrays: Any, **options: Any) -> Any:
    """LAPACK's answer; what it refuses is a ValueError that names the function."""
    xp = options.pop("xp")
    try:
        return getattr(xp.linalg, name)(*arrays, **options)
    except np.linalg.LinAlgError as error:
        raise np.linalg.LinAlgError(f"{name}: {error}") from None


def _good(rng: np.random.Generator, *shape: int) -> Any:
    """Square matrices far from singular."""
    return rng.normal(size=shape) + 4 * np.eye(shape[-1])


def _t(x: ExTensor) -> ExTensor:
    return swapaxes(x, -1, -2)


@primitive(
    forward=lambda backend, x: _solved("inv", x, xp=backend.xp),
    vjps=(lambda g, out, x: -matmul(matmul(_t(out), g), _t(out)),),
    reads="output",
    to_float=True,
    samples=lambda rng: [Sample((_good(rng, 3, 3),)), Sample((_good(rng, 2, 2, 2),))],
    errors=(*_NOT_SQUARE, BadInput((np.zeros((2, 2)),), ValueError, "inv: Singular")),
)
def inv(x: ExTensor, /) -> ExTensor:
    """The inverse of (..., M, M).

    Raises:
        TypeError, ValueError: for what is no square matrix, or a singular one.
    """
    return apply("inv", _matrices("inv", x))


@primitive(
    forward=lambda backend, x: _solved("det", x, xp=backend.xp),
    vjps=(lambda g, out, x: reshape(g * out, (*g.shape, 1, 1)) * _t(inv(x)),),
    to_float=True,
    samples=lambda rng: [Sample((_good(rng, 3, 3),)), Sample((_good(rng, 2, 2, 2),))],
    errors=_NOT_SQUARE,
)
def det(x: ExTensor, /) -> ExTensor:
    """The determinant of (..., M, M): (...); its gradient needs the inverse.

    Raises:
        TypeError, ValueError: for what is no square matrix.
    """
    return apply("det", _matrices("det", x))


@primitive(
    name="logabsdet",
    forward=lambda backend, x: _solved("slogdet", x, xp=backend.xp)[1],
    vjps=(lambda g, out, x: reshape(g, (*g.shape, 1, 1)) * _t(inv(x)),),
    reads="inputs",
    to_float=True,
    samples=lambda rng: [Sample((_good(rng, 3, 3),)), Sample((_good(rng, 2, 2, 2),))],
)
def _logabsdet(x: ExTensor) -> ExTensor:
    """The logarithm of a determinant's magnitude."""
    return apply("logabsdet", x)


def slogdet(x: ExTensor, /) -> SlogdetResult:
    """The determinant of (..., M, M) in two parts: sign, and log of its magnitude (-inf for 0).

    The logarithm has a gradient where there is an inverse; the sign has none.

    Raises:
        TypeError, ValueError: for what is no square matrix.
    """
    _matrices("slogdet", x)
    (sign,) = _plain("slogdet", lambda xp, a: _solved("slogdet", a, xp=xp)[:1], x.detach())
    return SlogdetResult(sign, _logabsdet(x))


def _solve_left_vjp(g: ExTensor, out: ExTensor, a: ExTensor, b: ExTensor) -> ExTensor:
    return -matmul(apply("solve", _t(a), g), _t(out))


@primitive(
    forward=lambda backend, a, b: _solved("solve", a, b, xp=backend.xp),
    vjps=(_solve_left_vjp, lambda g, out, a, b: apply("solve", _t(a), g)),
    broadcasts=True,
    to_float=True,
    samples=lambda rng: [
        Sample((_good(rng, 3, 3), rng.normal(size=(3, 2)))),
        Sample((_good(rng, 2, 2, 2), rng.normal(size=(2,)))),
        Sample((_good(rng, 2, 2), rng.normal(size=(3, 2, 1)))),
    ],
    errors=(
        BadInput((np.zeros((2, 3)), np.zeros(2)), ValueError, "wanted square matrices"),
        BadInput((np.eye(2), np.zeros(3)), ValueError, "wanted 2 rows on the right"),
        BadInput((np.zeros((2, 2)), np.zeros(2)), ValueError, "Singular"),
    ),
)
def solve(x1: ExTensor, x2: ExTensor, /) -> ExTensor:
    """What x1 (..., M, M) takes to x2: (..., M, K), leading axes broadcasting, or a vector (M,).

    Raises:
        TypeError, ValueError: for what is no square matrix, a singular one, or other lengths.
    """
    _matrices("solve", x1)
    tensors_only("solve", x2)
    vector = x2.ndim == 1
    rows = x2.shape[0 if vector else -2] if x2.ndim else None
    if rows != x1.shape[-1]:
        raise ValueError(
            f"solve: wanted {x1.shape[-1]} rows on the right for shape {x1.shape}, got {x2.shape}"
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
    return _solved("cholesky", whole.astype(x.dtype, copy=False), xp=backend.xp)


def _definite(rng: np.random.Generator, *shape: int) -> Any:
    x = rng.normal(size=shape)
    return x @ x.swapaxes(-1, -2) + np.eye(shape[-1])


@primitive(
    forward=_cholesky,
    vjps=(_cholesky_vjp,),
    reads="output",
    to_float=True,
    samples=lambda rng: [
        Sample((_definite(rng, 3, 3),)),
        Sample((_definite(rng, 2, 2, 2),)),
    ],
    errors=(*_NOT_SQUARE, BadInput((-np.eye(2),), ValueError, "cholesky: Matrix is not positive")),
)
def cholesky(x: ExTensor, /, *, upper: bool = False) -> ExTensor:
    """The triangular L with L L^H = x, for symmetric (Hermitian) positive-definite (..., M, M).

    Args:
        x: of its Hermitian part, (x + x^H) / 2, if it is not symmetric.
        upper: give U = L^H instead.

    Raises:
        TypeError, ValueError: for what is no square matrix, or not positive definite.
    """
    lower = apply("cholesky", _matrices("cholesky", x))
    return conj(_t(lower)) if upper else lower


@composite(
    samples=lambda rng: [Sample((_good(rng, 2, 2), n)) for n in (0, 3, -2)],
    errors=(*(BadInput((b.args[0], 2), b.error, b.match) for b in _NOT_SQUARE),),
)
def matrix_power(x: ExTensor, n: int, /) -> ExTensor:
    """(..., M, M) times itself, n factors; of the inverse if n is negative.

    Raises:
        TypeError, ValueError: for what is no square matrix, or a singular one and n < 0.
    """
    _matrices("matrix_power", x)
    base = inv(x) if n < 0 else x
    result = None
    for bit in f"{n if n >= 0 else -n:b}" if n else "":
        result = None if result is None else matmul(result, result)
        if bit == "1":
            result = base if result is None else matmul(result, base)
    if result is not None:
        return result
    one = ExTensor.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return broadcast_to(one, x.shape) + x * 0 if x.requires_grad else broadcast_to(one, x.shape)


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(2, 3, 4)),)),
        Sample((rng.normal(size=(3, 3)),), {"offset": -1}),
    ],
    errors=_NO_MATRIX,
)
def diagonal(x: ExTensor, /, *, offset: int = 0) -> ExTensor:
    """Diagonal ``offset`` (above the main one if positive) of (..., M, N): (..., its length).

    Raises:
        TypeError, ValueError: for what is no matrix.
    """
    rows, columns = _matrices("diagonal", x, square=False).shape[-2:]
    first, second = (0, offset) if offset >= 0 else (-offset, 0)
    places = np.arange(max(min(rows - first, columns - second), 0))
    return x[..., places + first, places + second]


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(2, 3, 4)),)),
        Sample((rng.normal(size=(3, 3)),), {"offset": 1}),
    ],
    errors=_NO_MATRIX,
)
def trace(x: ExTensor, /, *, offset: int = 0, dtype: DTypeLike | None = None) -> ExTensor:
    """The sum of `diagonal`; ``dtype`` as of `sum`.

    Raises:
        TypeError, ValueError: for what is no matrix.
    """
    return total(diagonal(_matrices("trace", x, square=False), offset=offset), -1, dtype=dtype)


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(2, 3)), rng.normal(size=(3,)))),
        Sample((rng.normal(size=(3, 2)), rng.normal(size=(3, 2))), {"axis": -2}),
    ],
    errors=(
        BadInput((np.zeros((2, 3)), np.zeros(2)), ValueError, "wanted 3 values"),
        BadInput((np.zeros(3), np.zeros(3)), ValueError, "wanted a negative one", {"axis": 0}),
    ),
)
def cross(x1: ExTensor, x2: ExTensor, /, *, axis: int = -1) -> ExTensor:
    """The cross product of vectors of 3 along ``axis`` (counted from the last), broadcasting.

    Raises:
        TypeError, ValueError: for vectors of other lengths, or an axis that is not negative.
    """
    tensors_only("cross", x1, x2)
    if axis >= 0:
        raise ValueError(f"cross: axis: wanted a negative one, got {axis}")
    if any(-axis > x.ndim or x.shape[axis] != 3 for x in (x1, x2)):
        raise ValueError(f"cross: wanted 3 values along {axis}, got {x1.shape} and {x2.shape}")
    a, b = (moveaxis(x, axis, -1) for x in (x1, x2))
    parts = [a[..., i] * b[..., j] - a[..., j] * b[..., i] for i, j in ((1, 2), (2, 0), (0, 1))]
    return moveaxis(stack(parts, -1), -1, axis)


# --- without gradients ---------------------------------------------------------------------------


def _plain(name: str, function: Callable[..., Any], x: ExTensor) -> list[ExTensor]:
    """Results of ``function(xp, array)`` on dense inexact values, 16-bit floats by float32.

    Raises:
        TypeError: for a tensor that requires a gradient.
    """
    tensors_only(name, x)
    if x.requires_grad and MODE.enabled:
        raise TypeError(
            f"{name}: wanted a tensor that requires no gradient, for there is no rule for one; use "
            "x.detach(), or det, inv, solve or cholesky, which have theirs"
        )
    dense = x.dequantize() if x.dtype.is_blocked else x
    asked = dense.dtype if dense.dtype.is_inexact else float32
    array = dense.data.astype(compute_dtype(asked).numpy, copy=False)
    found = [wrap(part, dense.backend) for part in function(dense.backend.xp, array)]
    return [p.astype(asked) if p.dtype is compute_dtype(asked) else p for p in found]


def eigh(x: ExTensor, /) -> EigResult:
    """Eigenvalues (real, ascending) and eigenvectors of symmetric (Hermitian) (..., M, M).

    Raises:
        TypeError, ValueError: for what is no square matrix, or requires a gradient.
    """
    _matrices("eigh", x)
    return EigResult(*_plain("eigh", lambda xp, a: _solved("eigh", a, xp=xp), x))


def eigvalsh(x: ExTensor, /) -> ExTensor:
    """As `eigh`, the eigenvalues alone."""
    _matrices("eigvalsh", x)
    return _plain("eigvalsh", lambda xp, a: [_solved("eigvalsh", a, xp=xp)], x)[0]


def _complex(array: Any) -> Any:
    """Of LAPACK's eigenvalues, which are real where all are."""
    wide = np.complex64 if array.dtype in (np.float32, np.complex64) else np.complex128
    return array.astype(wide, copy=False)


def eig(x: ExTensor, /) -> EigResult:
    """Eigenvalues and eigenvectors of any (..., M, M), both complex.

    Raises:
        TypeError, ValueError: for what is no square matrix, or requires a gradient.
    """
    _matrices("eig", x)
    return EigResult(*_plain("eig", lambda xp, a: map(_complex, _solved("eig", a, xp=xp)), x))


def eigvals(x: ExTensor, /) -> ExTensor:
    """As `eig`, the eigenvalues alone."""
    _matrices("eigvals", x)
    return _plain("eigvals", lambda xp, a: [_complex(_solved("eigvals", a, xp=xp))], x)[0]


def qr(x: ExTensor, /, *, mode: str = "reduced") -> QRResult:
    """Orthonormal Q and upper triangular R with Q R = x, for (..., M, N).

    Args:
        x: the matrices.
        mode: "reduced" for min(M, N) columns of Q, "complete" for M.

    Raises:
        TypeError, ValueError: for what is no matrix or requires a gradient, or another mode.
    """
    _matrices("qr", x, square=False)
    if mode not in ("reduced", "complete"):
        raise ValueError(f"qr: mode: wanted 'reduced' or 'complete', got {mode!r}")
    return QRResult(*_plain("qr", lambda xp, a: _solved("qr", a, mode=mode, xp=xp), x))


def svd(x: ExTensor, /, *, full_matrices: bool = True) -> SVDResult:
    """U, S and Vh with U diag(S) Vh = x, for (..., M, N); S descends.

    Args:
        x: the matrices.
        full_matrices: all M columns of U and N rows of Vh, or min(M, N) of both.

    Raises:
        TypeError, ValueError: for what is no matrix, or requires a gradient.
    """
    _matrices("svd", x, square=False)
    full = bool(full_matrices)
    return SVDResult(*_plain("svd", lambda xp, a: _solved("svd", a, full_matrices=full, xp=xp), x))


def svdvals(x: ExTensor, /) -> ExTensor:
    """As `svd`, the singular values alone."""
    _matrices("svdvals", x, square=False)
    return _plain("svdvals", lambda xp, a: [_solved("svd", a, compute_uv=False, xp=xp)], x)[0]


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
    values = svdvals(_matrices("matrix_rank", x, square=False)).data
    top = values.max(axis=-1, keepdims=True, initial=0)
    limit = top * np.asarray(_cutoff(x, rtol))[..., None]
    return wrap((values > limit).sum(axis=-1, dtype=np.int64), x.backend)


def pinv(x: ExTensor, /, *, rtol: float | ExTensor | None = None) -> ExTensor:
    """The Moore-Penrose inverse of (..., M, N): (..., N, M).

    Args:
        x: the matrices.
        rtol: singular values up to the largest times this count as 0; as `matrix_rank` if None.

    Raises:
        TypeError, ValueError: for what is no matrix, or requires a gradient.
    """
    limit = _cutoff(_matrices("pinv", x, square=False), rtol)
    return _plain("pinv", lambda xp, a: [_solved("pinv", a, rtol=limit, xp=xp)], x)[0]


# --- norms ---------------------------------------------------------------------------------------


def _squares(x: ExTensor) -> ExTensor:
    if not x.dtype.is_complex:
        return x * x
    return real(x) * real(x) + imag(x) * imag(x)


def _float(name: str, x: ExTensor) -> ExTensor:
    tensors_only(name, x)
    return x if x.dtype.is_inexact or x.dtype.is_blocked else x.astype(float32)


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(2, 3)),), {"ord": order}) for order in ("fro", 1, -1, math.inf)
    ],
    errors=(
        *_NO_MATRIX,
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
    x = _float("matrix_norm", _matrices("matrix_norm", x, square=False))
    norms: dict[Any, Callable[[], ExTensor]] = {
        "fro": lambda: total(_squares(x), (-2, -1)).sqrt(),
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
    """The norm sum(|x|**ord)**(1/ord) over ``axis``, all axes if None.

    Args:
        x: any shape.
        axis: the axes to reduce.
        keepdims: keep the reduced axes, with length 1.
        ord: any number but for: inf the largest and -inf the smallest magnitude, 0 how many
            values are not zero.

    Raises:
        TypeError, ValueError: for an axis out of range.
    """
    x = _float("vector_norm", x)
    axes = axis_tuple("vector_norm", axis, x.ndim)
    if ord == 2:
        return total(_squares(x), axes, keepdims).sqrt()
    sizes = magnitude(x)
    if ord == math.inf:
        return largest(sizes, axes, keepdims)
    if ord == -math.inf:
        return smallest(sizes, axes, keepdims)
    if ord == 0:
        return total((sizes != 0).astype(sizes.dtype), axes, keepdims)
    return total(sizes if ord == 1 else sizes**ord, axes, keepdims) ** (1 / ord)
