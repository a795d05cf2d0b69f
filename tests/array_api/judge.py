"""How near a result must be to the judge's: three classes of functions, each in one table.

EXACT: what selects, compares, makes, moves, indexes or rounds once is compared bit for bit; the
sign of zero counts, NaN is NaN whatever its payload.
ELEMENTARY: within `ULPS` times eps of the result, relative, however small: arguments are the same
bits, so also near a zero of a function (sin near pi). A complex result may be off by that share of
its magnitude, for its parts cancel.
SUMMED: within (n + `ULPS`) eps magnitude of each other, where n is the number of terms and the
magnitude what the terms would give without cancelling, both computed from the arguments. Two sums
of n terms in any order are each off by at most (n - 1) eps/2 times that (Higham, Accuracy and
Stability of Numerical Algorithms, section 4.2), and (n + 1) eps/2 for products of pairs (3.1). For
`linalg` the magnitude is first-order perturbation theory's, for backward stable algorithms.
`FACTORED` decompositions are not unique: their parts are judged by what they must be. So are the
indices that `PLACES` give.

eps is the result's dtype's, 2**-23 or 2**-52.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
ULPS = 16


def _names(text: str) -> set[str]:
    return set(text.split())


EXACT = _names("""
    abs add all any arange argmax argmin argsort asarray astype bitwise_and bitwise_invert
    bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor broadcast_arrays
    broadcast_shapes broadcast_to can_cast ceil clip concat conj copysign count_nonzero diff
    divide equal expand_dims eye fft.fftshift fft.ifftshift finfo flip floor floor_divide full
    full_like greater greater_equal iinfo imag isdtype isfinite isin isinf isnan less less_equal
    linalg.diagonal linalg.matrix_rank linalg.matrix_transpose linalg.outer logical_and
    logical_not logical_or logical_xor matrix_transpose max maximum meshgrid min minimum moveaxis
    multiply negative nextafter nonzero not_equal ones ones_like permute_dims positive real
    reciprocal remainder repeat reshape result_type roll round searchsorted sign signbit sort sqrt
    square squeeze stack subtract take take_along_axis tile tril triu trunc
    unique_counts unique_values unstack where zeros zeros_like
""")

COMPLEX_ROUNDED = {"abs", "divide", "linalg.outer", "multiply", "reciprocal", "sqrt", "square"}
"""EXACT for real numbers; several operations, so ELEMENTARY, for complex ones."""

EITHER_ZERO = _names("clip max maximum min minimum unique_counts unique_values")
"""The standard leaves open which of 0 and -0 is larger, and which stands for both."""

ELEMENTARY = _names("""
    acos acosh asin asinh atan atan2 atanh cos cosh exp expm1 fft.fftfreq fft.rfftfreq hypot log
    log10 log1p log2 pow sin sinh tan tanh
""")


def _sizes(x: Any) -> Array:
    return np.abs(np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64))


def _frobenius(x: Any) -> Array:
    return np.sqrt((_sizes(x) ** 2).sum((-2, -1)))


def _condition(x: Any) -> Array:
    wide = np.asarray(x, np.complex128)
    return np.asarray(np.linalg.cond(wide)) if wide.size else np.ones(wide.shape[:-2])


Bound = tuple[float, Any]
"""A number of terms, and magnitudes that broadcast to the result."""


def _mean_of(x: Any, axis: Any, keepdims: bool) -> tuple[float, Array, Array]:
    """The number of terms; the sum of magnitudes, and that of what is left without the mean."""
    sizes = _sizes(x)
    total = sizes.sum(axis, keepdims=True)
    count = sizes.size / max(total.size, 1)
    spread = ((sizes + total / count) ** 2).sum(axis, keepdims=keepdims)
    return count, sizes.sum(axis, keepdims=keepdims), spread


def _sum(expected: Any, x: Any, axis: Any = None, keepdims: bool = False, **_: Any) -> Bound:
    count, total, _ = _mean_of(x, axis, keepdims)
    return count, total


def _prod(expected: Any, x: Any, axis: Any = None, keepdims: bool = False, **_: Any) -> Bound:
    return np.size(x), np.prod(_sizes(x), axis, keepdims=keepdims)


def _mean(expected: Any, x: Any, axis: Any = None, keepdims: bool = False) -> Bound:
    count, total, _ = _mean_of(x, axis, keepdims)
    return count, total / count


def _var(
    expected: Any, x: Any, axis: Any = None, keepdims: bool = False, correction: float = 0
) -> Bound:
    count, _, spread = _mean_of(x, axis, keepdims)
    return 2 * count, spread / (count - correction)  # deviations, of a mean; then their squares


def _std(expected: Any, x: Any, **kwargs: Any) -> Bound:
    """|sqrt a - sqrt b| = |a - b| / (sqrt a + sqrt b), and at most sqrt |a - b|."""
    n, spread = _var(expected, x, **kwargs)
    most = (n + ULPS) * np.finfo(expected.dtype).eps * spread
    return n, expected + spread / np.maximum(np.maximum(expected, np.sqrt(most)), 1e-300)


def _running(function: Any) -> Callable[..., Bound]:
    def bound(
        expected: Any, x: Any, axis: Any = None, include_initial: bool = False, **_: Any
    ) -> Bound:
        axis = 0 if axis is None else axis
        made = function(_sizes(x), axis=axis)
        if include_initial:  # the first is exact
            made = np.concatenate([np.zeros_like(np.take(expected, [0], axis), float), made], axis)
        return np.shape(x)[axis], made

    return bound


def _matmul(expected: Any, a: Any, b: Any) -> Bound:
    return a.shape[-1], _sizes(a) @ _sizes(b)


def _tensordot(expected: Any, a: Any, b: Any, axes: Any = 2) -> Bound:
    contracted = (
        a.shape[a.ndim - axes :] if isinstance(axes, int) else [a.shape[i] for i in axes[0]]
    )
    return math.prod(contracted), np.tensordot(_sizes(a), _sizes(b), axes)


def _vecdot(expected: Any, a: Any, b: Any) -> Bound:
    return a.shape[-1], (_sizes(a) * _sizes(b)).sum(-1)


def _cross(expected: Any, a: Any, b: Any) -> Bound:
    return 2, _sizes(a).sum(-1, keepdims=True) * _sizes(b).sum(-1, keepdims=True)


def _trace(expected: Any, x: Any, offset: int = 0) -> Bound:
    return min(x.shape[-2:]), np.trace(_sizes(x), offset, -2, -1)


def _vector_norm(expected: Any, x: Any, **_: Any) -> Bound:
    return x.size, expected  # no term is negative


def _matrix_norm(expected: Any, x: Any, ord: Any = "fro", keepdims: bool = False) -> Bound:
    if ord not in ("nuc", 2, -2):
        return x.size, expected
    most = _frobenius(x)  # singular values move by no more than the matrix (Weyl)
    return x.shape[-2] * x.shape[-1], most[..., None, None] if keepdims else most


def _values(expected: Any, x: Any) -> Bound:
    return max(x.shape[-2:]), _frobenius(x)[..., None]


def _slogdet(expected: Any, x: Any) -> Bound:
    return x.shape[-1], _condition(x) * (1 + np.abs(np.asarray(expected[1])))


def _inverse(expected: Any, x: Any, rtol: Any = None) -> Bound:
    """First order in the backward error: the inverse's norm twice, and the matrix's."""
    return max(x.shape[-2:]), (_frobenius(x) * _frobenius(expected) ** 2)[..., None, None]


def _solve(expected: Any, a: Any, b: Any) -> Bound:
    n, far = a.shape[-1], _condition(a)
    if b.ndim == 1:
        return n, far[..., None] * np.sqrt((_sizes(expected) ** 2).sum(-1, keepdims=True))
    return n, (far * _frobenius(expected))[..., None, None]


def _matrix_power(expected: Any, x: Any, power: int) -> Bound:
    base = _frobenius(np.linalg.inv(np.asarray(x, np.complex128)) if power < 0 else x)
    far = _condition(x) if power < 0 else 1
    return x.shape[-1] * abs(power), (far * base ** abs(power))[..., None, None]


def _logaddexp(expected: Any, a: Any, b: Any) -> Bound:
    """Give max + log1p(exp(-difference)), which is at most log 2 and cancels a negative max."""
    return 1, 1 + np.abs(np.fmax(a, b))


def _linspace(expected: Any, start: float, stop: float, num: int, **_: Any) -> Bound:
    return 1, abs(start) + abs(stop)


def _fourier(expected: Any, x: Any, **kwargs: Any) -> Bound:
    axes = kwargs.get("axis", kwargs.get("axes"))
    terms = _sizes(x).sum(tuple(axes) if isinstance(axes, (tuple, range)) else axes, keepdims=True)
    # Half a spectrum stands for twice its values; the scale is what an impulse's transform shows.
    return expected.size, 2 * terms * kwargs["scale"]


FOURIER = {
    f"fft.{n}"
    for n in ["fft", "ifft", "fftn", "ifftn", "rfft", "irfft", "rfftn", "irfftn", "hfft", "ihfft"]
}
SUMMED: dict[str, Callable[..., Bound]] = {
    "cumulative_prod": _running(np.cumprod),
    "cumulative_sum": _running(np.cumsum),
    **dict.fromkeys(FOURIER, _fourier),
    "linalg.cholesky": lambda w, x, **_: (
        x.shape[-1], (_condition(x) * _frobenius(w))[..., None, None]),
    "linalg.cross": _cross,
    "linalg.det": lambda w, x: (x.shape[-1], _condition(x) * np.abs(w)),
    **dict.fromkeys(("linalg.eigvalsh", "linalg.svdvals"), _values),
    **dict.fromkeys(("linalg.inv", "linalg.pinv"), _inverse),
    **dict.fromkeys(("linalg.matmul", "matmul"), _matmul),
    "linalg.matrix_norm": _matrix_norm,
    "linalg.matrix_power": _matrix_power,
    "linalg.slogdet": _slogdet,
    "linalg.solve": _solve,
    **dict.fromkeys(("linalg.tensordot", "tensordot"), _tensordot),
    "linalg.trace": lambda w, x, **kwargs: _trace(w, x, kwargs.get("offset", 0)),
    **dict.fromkeys(("linalg.vecdot", "vecdot"), _vecdot),
    "linalg.vector_norm": _vector_norm,
    "linspace": _linspace,
    "logaddexp": _logaddexp,
    "mean": _mean,
    "prod": _prod,
    "std": _std,
    "sum": _sum,
    "var": _var,
}  # fmt: skip

FACTORED = {"linalg.eig", "linalg.eigh", "linalg.eigvals", "linalg.qr", "linalg.svd"}
PLACES = {"unique_all", "unique_inverse"}


# --- the three comparisons ------------------------------------------------------------------------


def _real(x: Array) -> Array:
    """Complex numbers as pairs, in a last axis."""
    parts = np.float32 if x.dtype == np.complex64 else np.float64
    return np.ascontiguousarray(x).view(parts).reshape(*x.shape, 2)


def _fail(where: Array, g: Array, w: Array, what: str) -> None:
    if np.any(where):
        place = tuple(int(i[0]) for i in np.nonzero(where))
        raise AssertionError(
            f"{what}\n{np.count_nonzero(where)} of {where.size} differ, first at {place}: got "
            f"{g[place]!r}, expected {w[place]!r}"
        )


def exact(g: Array, w: Array, what: str, either_zero: bool = False) -> None:
    """Bit for bit, but NaN, and the sign of zero where it is left open."""
    if w.dtype.kind == "c":
        g, w = _real(g), _real(w)
    if w.dtype.kind != "f":
        _fail(np.asarray(g != w), g, w, what)
        return
    same = (g == w) & (either_zero | (np.signbit(g) == np.signbit(w)))
    _fail(~(same | (np.isnan(g) & np.isnan(w))), g, w, what)


def within(g: Array, w: Array, bound: Any, what: str) -> None:
    """Finite numbers by ``bound`` on their distance, others exactly."""
    finite = np.isfinite(w)
    off = np.abs(np.where(finite, g, 0) - np.where(finite, w, 0))
    _fail(finite & ~(off <= bound), g, w, what)
    g, w = np.where(finite, 0, g), np.where(finite, 0, w)
    if w.dtype.kind == "c":  # a part beside an infinity, by itself
        g, w = _real(g), _real(w)
        finite = np.isfinite(w)
        most = ULPS * np.finfo(w.dtype).eps * np.abs(np.where(finite, w, 0))
        _fail(
            finite & ~(np.abs(np.where(finite, g, 0) - np.where(finite, w, 0)) <= most), g, w, what
        )
        g, w = np.where(finite, 0, g), np.where(finite, 0, w)
    exact(g, w, what)


def near(g: Array, w: Array, what: str) -> None:
    """Within `ULPS` of the magnitude; zeros exactly, with their sign where numbers are real."""
    within(g, w, ULPS * np.finfo(w.dtype).eps * np.abs(w), what)
    if w.dtype.kind == "f":
        _fail((w == 0) & (np.signbit(g) != np.signbit(w)), g, w, what)


def compare(name: str, args: Any, kwargs: Any, whole: Any, g: Array, w: Array, what: str) -> None:
    """Judge one array ``g`` of what ``name`` gave, by ``w`` of what it should have, ``whole``."""
    rounded = name in COMPLEX_ROUNDED and any(np.iscomplexobj(a) for a in args)
    if w.dtype.kind not in "fc":
        exact(g, w, what)
    elif name in SUMMED:
        n, magnitude = SUMMED[name](whole, *args, **kwargs) if w.size else (0, 0)
        within(g, w, (n + ULPS) * np.finfo(w.dtype).eps * magnitude, what)
    elif name in ELEMENTARY or rounded:
        near(g, w, what)
    else:
        exact(g, w, what, name in EITHER_ZERO)


# --- decompositions -------------------------------------------------------------------------------


def factored(name: str, x: Array, parts: list[Array], what: str) -> None:
    """A decomposition of x: its product is x, its factors are what they are called.

    Each residual is within 8 n eps of the norms in it, n the larger side: LAPACK's own tests take
    30 n eps for these ratios (LAPACK Working Note 41, section 5).
    """
    if not x.size:
        return
    n, eps = max(x.shape[-2:]), np.finfo(x.dtype).eps
    size = 8 * n * eps * _frobenius(x)[..., None, None]
    wide = [np.asarray(p, np.complex128) for p in parts]

    def unitary(q: Array) -> None:
        small = q if q.shape[-2] >= q.shape[-1] else q.conj().swapaxes(-1, -2)
        product = small.conj().swapaxes(-1, -2) @ small
        within(product, np.broadcast_to(np.eye(product.shape[-1]) + 0j, product.shape),
               8 * n * eps, f"{what}: unitary")  # fmt: skip

    if name == "linalg.qr":
        unitary(wide[0])
        exact(np.tril(wide[1], -1), np.zeros_like(wide[1]), f"{what}: triangular", True)
        within(wide[0] @ wide[1], x + 0j, size, what)
    elif name == "linalg.svd":
        u, s, vh = wide[0], parts[1], wide[2]
        unitary(u)
        unitary(vh)
        assert (s >= 0).all() and (np.diff(s) <= 0).all(), f"{what}: descending"
        k = s.shape[-1]
        within((u[..., :k] * s[..., None, :]) @ vh[..., :k, :], x + 0j, size, what)
    else:
        values, vectors = wide
        if name == "linalg.eigh":
            unitary(vectors)
            assert (np.diff(parts[0]) >= 0).all(), f"{what}: ascending"
        lengths = np.sqrt((np.abs(vectors) ** 2).sum(-2))
        within(lengths, np.ones_like(lengths), 8 * n * eps, f"{what}: of length one")
        within((x + 0j) @ vectors, vectors * values[..., None, :], size, what)


def unique(x: Array, parts: dict[str, Array], expected: dict[str, Array], what: str) -> None:
    """Unique values beside the judge's; places by what stands there, for NaNs have no order."""
    for name in ("values", "counts"):
        if name in expected:
            exact(parts[name], expected[name], f"{what}.{name}", True)
    values = parts["values"]
    exact(values[parts["inverse_indices"]], x, f"{what}.inverse_indices", True)
    if "indices" in expected:
        exact(x.reshape(-1)[parts["indices"]], values, f"{what}.indices", True)


def spectrum(x: Array, g: Array, w: Array, what: str) -> None:
    """Eigenvalues in any order, by Bauer and Fike: the vectors' condition times the change of x."""
    if not x.size:
        return
    n = x.shape[-1]
    far = _condition(np.linalg.eig(np.asarray(x, np.complex128)).eigenvectors)
    bound = 8 * n * np.finfo(x.dtype).eps * far * _frobenius(x)
    orders = [np.abs(g[..., list(p)] - w).max(-1) for p in itertools.permutations(range(n))]
    _fail(np.asarray(~(np.min(orders, axis=0) <= bound)), g, w, what)
