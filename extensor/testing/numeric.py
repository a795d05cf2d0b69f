"""Bitwise comparison of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["assert_bitwise_equal", "first_difference"]


def first_difference(actual: Any, expected: Any) -> str | None:
    """Where two arrays first differ in their bytes, and how; None if they are the same.

    Dtype and shape count; -0 differs from 0, and a NaN equals only a NaN of the same bits.
    Takes arrays, tensors and anything else that numpy converts.
    """
    a, b = np.ascontiguousarray(actual), np.ascontiguousarray(expected)
    if np.shape(actual) != np.shape(expected):
        return f"shape: expected {np.shape(expected)}, got {np.shape(actual)}"
    if a.dtype != b.dtype:
        return f"dtype: expected {b.dtype}, got {a.dtype}"
    size = a.dtype.itemsize
    left = a.reshape(-1).view(np.uint8).reshape(-1, size)
    right = b.reshape(-1).view(np.uint8).reshape(-1, size)
    different = np.flatnonzero((left != right).any(axis=1))
    if not different.size:
        return None
    at = int(different[0])
    place = tuple(int(i) for i in np.unravel_index(at, np.shape(actual))) if np.ndim(actual) else ()
    return (
        f"{different.size} of {a.size} elements differ, the first at {place}: expected "
        f"{b.reshape(-1)[at]} (bytes {right[at].tobytes().hex(' ')}), got "
        f"{a.reshape(-1)[at]} (bytes {left[at].tobytes().hex(' ')}), low byte first"
    )


def assert_bitwise_equal(actual: Any, expected: Any, what: str = "arrays") -> None:
    """Fail unless two arrays have the same dtype, shape and bytes.

    Raises:
        AssertionError: with the coordinate, values and bytes of the first difference.
    """
    difference = first_difference(actual, expected)
    if difference is not None:
        raise AssertionError(f"{what}: {difference}")
