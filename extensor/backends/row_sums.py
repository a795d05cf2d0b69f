"""Sparse gradients by rows: how an optimizer's update reads an embedding's gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["RowSums"]

Array = Any


@dataclass(frozen=True, eq=False)
class RowSums:
    """A gradient by row, each row's terms added up.

    Attributes:
        slots: int32 (N,): where a row's sum is in ``values``; -1: the row is zero.
        values: (M, width), each row rounded once to the gradient's dtype.
        shape: (N, width), of the whole gradient.
    """

    slots: Array
    values: Array
    shape: tuple[int, ...]

    @property
    def dtype(self) -> Any:
        """The numpy dtype of the gradient."""
        return self.values.dtype

    def segment(self, begin: int, end: int, dtype: Any) -> Array:
        """Values ``begin`` to ``end`` of the whole gradient in memory order; on the CPU."""
        width = self.shape[1]
        first, last = begin // width, -(-end // width)
        slots = self.slots[first:last]
        out, met = np.zeros((last - first, width), dtype), slots >= 0
        out[met] = self.values[slots[met]]
        return out.reshape(-1)[begin - first * width : end - first * width]
