"""A bit-exact model of how Hopper's tensor cores add FP8 products, and a GEMM its sums.

numpy only.

Each step takes 32 products and the accumulator. All terms are aligned to the largest exponent among
them, cut (toward zero) to 13 fraction bits of it, and added exactly; the sum is cut to 13 fraction
bits again. A product's exponent is the sum of its factors' exponents, not its own: 1.5 x 1.5 counts
as 2^0. Subnormals have the exponent of the smallest normal. Measured on an H100
(docs/log/products-on-a-gpu.md); finite codes only.

The GEMM adds such sums, of 512 elements or of 128 along K, in float32 (`promoted`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["FRACTION_BITS", "STEP", "accumulate", "promoted"]

STEP, FRACTION_BITS = 32, 13
_NONE = -900  # the exponent of a zero: below every other

Floats = NDArray[np.float64]
Float32s = NDArray[np.float32]


def _exponent(x: Floats, least: int) -> NDArray[np.int64]:
    return np.maximum(np.frexp(x)[1].astype(np.int64) - 1, least)


def _cut(x: Floats) -> Floats:
    mantissa, exponent = np.frexp(x)
    kept = FRACTION_BITS + 1
    return np.ldexp(np.trunc(np.ldexp(mantissa, kept)), exponent - kept)


def accumulate(a: Floats, b: Floats, least_a: int, least_b: int) -> Float32s:
    """The unpromoted product a b^T as wgmma gives it, float32 (M, N).

    a and b are values of FP8 codes, (M, K) and (N, K); the least exponents are those of the
    smallest normals of their formats: -6 for E4M3, -14 for E5M2.
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


def _fused(x: Float32s, y: Float32s, z: Float32s) -> Float32s:
    """The float32 next to x y + z, rounded once.

    In float64 the product is exact. The sum is rounded to odd: where bits were lost its last bit is
    1, so that no value lies halfway between two float32 that did not before.
    """
    product, wide = x.astype(np.float64) * y, z.astype(np.float64)
    total = product + wide
    back = total - product
    lost = (product - (total - back)) + (wide - back)
    even = total.view(np.int64) % 2 == 0
    other = np.nextafter(total, np.copysign(np.inf, lost))
    return np.where((lost != 0) & even, other, total).astype(np.float32)


def promoted(
    a: Floats,
    b: Floats,
    least_a: int,
    least_b: int,
    every: int,
    scales: tuple[Float32s, Float32s] | None = None,
) -> Float32s:
    """The product a b^T as the GEMM's float32 sums give it.

    From 0 on, the sum of each ``every`` elements along K is added in order, rounded to nearest.
    Under scales, (M, parts of K) and (N, parts of K), the one of its row times the one of its
    column, in float32, multiplies it, and product and addition are rounded once. Other arguments
    are `accumulate`'s.

    Raises:
        ValueError: if additions are not whole steps of the tensor core apart.
    """
    if every < STEP or every % STEP:
        raise ValueError(f"promoted: expected a multiple of {STEP} elements, got {every}")
    total = np.zeros((len(a), len(b)), dtype=np.float32)
    for i, start in enumerate(range(0, a.shape[1], every)):
        part = slice(start, start + every)
        sums = accumulate(a[:, part], b[:, part], least_a, least_b)
        if scales is None:
            total = total + sums
        else:
            both = scales[0][:, i, None] * scales[1][None, :, i]
            total = _fused(sums, both, total)
    return total
