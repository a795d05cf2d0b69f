"""Rounding float32 arrays to an element grid in int64: the judge of the float32 steps.

No floating-point operation is used, so that nothing depends on a rounding mode, on fused
multiply-adds or on flushing to zero. `tests.oracle.grid` is slower and shares nothing with this.
"""

from __future__ import annotations

import numpy as np

from extensor.formats import ElementFormat


def magnitude_codes(
    x: np.ndarray, element: ElementFormat, words: np.ndarray | None = None, ties: str = "even"
) -> np.ndarray:
    """The codes of |x|, int64, on the grid continued without an upper end; x holds no NaN.

    With ``words`` (uint32) rounding is stochastic: up exactly when frac * 2**32 > word.
    """
    bits = x.view(np.uint32).astype(np.int64) & 0x7FFFFFFF
    exponent = np.maximum(bits >> 23, 1)  # |x| = mantissa * 2**(exponent - 150)
    mantissa = (bits & 0x7FFFFF) | ((bits >> 23 > 0).astype(np.int64) << 23)
    lowest = 127 + element.min_exponent
    binade = np.maximum(exponent - lowest, 0) if element.is_float else np.zeros_like(bits)
    # Bits below the grid's last place; at 60 no value can round up any more.
    shift = np.clip(element.grid_exponent + binade - (exponent - 150), 0, 60)
    quotient, rest = mantissa >> shift, mantissa & ((np.int64(1) << shift) - 1)
    half = np.int64(1) << np.maximum(shift - 1, 0)
    if words is not None:  # word < ceil(rest * 2**(32 - shift))
        left, right = np.maximum(32 - shift, 0), np.maximum(shift - 32, 0)
        threshold = (rest << left) + (np.int64(1) << right) - 1 >> right
        up = words.astype(np.int64) < threshold
    elif ties == "even":
        up = (rest > half) | ((rest == half) & (quotient % 2 == 1))
    else:
        up = rest >= half if ties == "away" else rest > half
    return (binade << element.mantissa_bits) + quotient + (up & (shift > 0))
