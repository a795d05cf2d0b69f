"""Memory of packed weights on a CPU: a model's weights lie together, in large pages.

A decoded token reads each weight once. Large arrays get the system's large pages (2 MB), most
weights are smaller than one. Copied one after another into a large array, they share its pages,
and reading them takes fewer address translations.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from extensor.quant.array import QuantArray

__all__ = ["in_large_pages"]

_BYTES = 1 << 24
"""Of a shared array; it is freed when no weight in it is left."""
_LEAST = 1 << 12
"""Bytes of an array that is worth moving."""
_ALIGNED = 64
"""Bytes, a cache line: each array begins with one."""


class _Shared:
    """The array that is being filled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def copy(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The array's copy, after those made before."""
        with self._lock:
            if self._left.size < array.nbytes + _ALIGNED:
                self._left = np.empty(max(_BYTES, array.nbytes + _ALIGNED), np.uint8)
            begin = -self._left.ctypes.data % _ALIGNED
            mine = self._left[begin : begin + array.nbytes]
            self._left = self._left[begin + array.nbytes :]
        copied = mine.view(array.dtype).reshape(array.shape)
        copied[...] = array
        return copied


_shared = _Shared()


def in_large_pages(stored: QuantArray) -> QuantArray:
    """The same codes and scales, in memory that other weights share.

    Args:
        stored: a weight that stays; arrays of a GPU are left where they are.

    Returns:
        The weight; only its memory differs.

    >>> from extensor.quant.pages import in_large_pages
    >>> weight = et.ones((64, 256)).to_mxfp4().data
    >>> moved = in_large_pages(weight)
    >>> moved.codes.ctypes.data % 64, bool((moved.codes == weight.codes).all())
    (0, True)
    """
    moved: dict[str, Any] = {
        name: _shared.copy(part)
        for name, part in stored.parts.items()
        if isinstance(part, np.ndarray) and part.nbytes >= _LEAST
    }
    return dataclasses.replace(stored, **moved) if moved else stored
