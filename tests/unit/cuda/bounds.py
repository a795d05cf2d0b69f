"""Packed matrices on the device, and how products of them are judged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from extensor.quant.array import QuantArray

__all__ = ["check_product", "sent"]


def sent(q: QuantArray, xp: Any) -> QuantArray:
    """A packed matrix of the host, on the device."""
    return replace(q, **{part: xp.asarray(array) for part, array in q.parts.items()})


def check_product(
    got: Any, a: np.ndarray, b: np.ndarray, share: float, extra: Any = 0.0, bias: Any = 0.0
) -> None:
    """A b^T + bias within ``share`` of |a| |b|^T, and ``extra``; bfloat16 is rounded once more."""
    result, transposed = np.asarray(got.get()), b.swapaxes(-1, -2)
    expected, bound = a @ transposed + bias, share * (np.abs(a) @ np.abs(transposed)) + extra
    if result.dtype == ml_dtypes.bfloat16:
        bound = 2 * bound + 2.0**-8 * np.abs(expected)
    error = np.abs(result.astype(np.float64) - expected)
    assert result.shape == expected.shape
    assert (error <= bound).all(), (error / np.maximum(bound, 1e-300)).max()
