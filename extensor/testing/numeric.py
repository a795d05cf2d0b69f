"""Bitwise comparison of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["assert_bitwise_equal", "first_difference"]


def first_difference(actual: Any, expected: Any) -> str | None:
    """Where two arrays first differ in their bytes, and how.

    Dtype and shape count; -0 differs from 0, and a NaN equals only a NaN of the same bits.

    Args:
        actual: an array, a tensor or anything else that numpy converts.
        expected: likewise.

    Returns:
        One line for a message; None if the two are the same.

    >>> import numpy as np
    >>> et.testing.first_difference([0.0, 1.0], [0.0, 1.0]) is None
    True
    >>> et.testing.first_difference(np.float32([0.0]), np.float64([0.0]))
    'dtype: expected float64, got float32'
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

    Args:
        actual: an array, a tensor or anything else that numpy converts.
        expected: likewise.
        what: how the message names them.

    Raises:
        AssertionError: with the coordinate, values and bytes of the first difference.

    >>> et.testing.assert_bitwise_equal(et.zeros((2,)).numpy(), et.zeros((2,)).numpy())
    """
    difference = first_difference(actual, expected)
    if difference is not None:
        raise AssertionError(f"{what}: {difference}")
