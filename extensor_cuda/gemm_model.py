"""A model, bit for bit, of how Hopper's tensor core adds FP8 products. numpy only.

Each step takes 32 products and the accumulator. All terms are aligned to the largest exponent among
them, cut (toward zero) to 13 fraction bits of it, and added exactly; the sum is cut to 13 fraction
bits again. A product's exponent is the sum of its factors' exponents, not its own: 1.5 x 1.5 counts
as 2^0. Subnormals have the exponent of the smallest normal. Measured on an H100 (docs/log.md,
2026-11-21); finite codes only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["FRACTION_BITS", "STEP", "accumulate"]

STEP, FRACTION_BITS = 32, 13
_NONE = -900  # the exponent of a zero: below every other

Floats = NDArray[np.float64]


def _exponent(x: Floats, least: int) -> NDArray[np.int64]:
    return np.maximum(np.frexp(x)[1].astype(np.int64) - 1, least)


def _cut(x: Floats) -> Floats:
    mantissa, exponent = np.frexp(x)
    kept = FRACTION_BITS + 1
    return np.ldexp(np.trunc(np.ldexp(mantissa, kept)), exponent - kept)


def accumulate(a: Floats, b: Floats, least_a: int, least_b: int) -> NDArray[np.float32]:
    """The unpromoted product a b^T as wgmma gives it.

    Args:
        a: (M, K) values of FP8 codes.
        b: (N, K) values of FP8 codes.
        least_a: exponent of the smallest normal of a's format: -6 for E4M3, -14 for E5M2.
        least_b: likewise for b.

    Returns:
        (M, N) float32.
    """
    total = np.zeros((len(a), len(b)))
    for start in range(0, a.shape[1], STEP):
        x, y = a[:, None, start : start + STEP], b[None, :, start : start + STEP]
        products = x * y
        exponents = _exponent(x, least_a) + _exponent(y, least_b)
        top = np.where(products == 0, _NONE, exponents).max(-1)
        top = np.maximum(top, np.where(total == 0, _NONE, _exponent(total, _NONE)))
        unit = np.exp2(top.astype(np.float64) - FRACTION_BITS)
        cut = np.trunc(products / unit[..., None]).sum(-1) + np.trunc(total / unit)
        total = _cut(cut * unit)
    return total.astype(np.float32)
