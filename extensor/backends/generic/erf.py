"""The error function on any array module (numpy has none).

erf(x) is x times a power series in x**2 where |x| < 1/2, and 1 - erfc(|x|)
elsewhere, with erfc(x) = t exp(-x**2) f(t), t = 2 / (2 + x). The smooth function f
is replaced by its Chebyshev polynomial on [0, 1], computed once from `math.erfc`
and, where that underflows, from the asymptotic series of Abramowitz and Stegun,
7.1.23.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

__all__ = ["erf_array"]

_SERIES = [
    2 / math.sqrt(math.pi) * (-1) ** n / (math.factorial(n) * (2 * n + 1)) for n in range(13)
]


def _scaled_erfc(t: float) -> float:
    """f(t) = erfc(x) exp(x**2) / t at x = 2 / t - 2."""
    x = 2 / t - 2
    if x < 20:
        return math.erfc(x) * math.exp(x * x) / t
    inverse = 1 / (2 * x * x)
    terms = (1, -inverse, 3 * inverse**2, -15 * inverse**3, 105 * inverse**4, -945 * inverse**5)
    return math.fsum(terms) / (x * math.sqrt(math.pi)) / t


@cache
def _polynomial(degree: int) -> tuple[float, ...]:
    """Coefficients of f on [0, 1] in powers of u = 2 t - 1, highest first."""
    fit = np.polynomial.Chebyshev.interpolate(
        lambda u: np.array([_scaled_erfc((v + 1) / 2) for v in u]), degree
    )
    return tuple(float(c) for c in fit.convert(kind=np.polynomial.Polynomial).coef[::-1])


def _horner(coefficients: Any, x: Any) -> Any:
    result = x * coefficients[0]
    for c in coefficients[1:-1]:
        result += c
        result *= x
    result += coefficients[-1]
    return result


_CHUNK = 1 << 14
"""Elements at a time on the CPU, so that the dozen intermediate arrays stay in the cache."""


def erf_array(xp: Any, x: Any) -> Any:
    """The error function of a float32 or float64 array, within 2 units in the last place of 1."""
    if xp is not np or x.size <= _CHUNK:
        return _erf(xp, x)
    flat = x.reshape(-1)
    out = np.empty_like(flat)
    for begin in range(0, flat.size, _CHUNK):
        out[begin : begin + _CHUNK] = _erf(np, flat[begin : begin + _CHUNK])
    return out.reshape(x.shape)


def _erf(xp: Any, x: Any) -> Any:
    wide = x.dtype == np.float64
    x = xp.asarray(x)
    magnitude = xp.minimum(xp.abs(x), 30)  # erf is 1 long before, and exp(-x**2) stays a number
    t = 2 / (2 + magnitude)
    small = xp.minimum(magnitude, 0.5)
    series = small * _horner(_SERIES[::-1] if wide else _SERIES[5::-1], small * small)
    tail = _horner(_polynomial(24 if wide else 11), xp.asarray(2 * t - 1))
    with np.errstate(under="ignore"):
        rest = 1 - t * xp.exp(-magnitude * magnitude) * tail
    return xp.copysign(xp.where(magnitude < 0.5, series, rest), x).astype(x.dtype, copy=False)
