"""Sparse gradients of an embedding: the rows looked up, not an array as large as the table.

The gradient of an embedding is zero but for the rows that a batch names. It stays in this form
until something needs the whole array; an update inside backward reads the sums of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from extensor.backends.row_sums import RowSums

__all__ = ["RowGradient"]

Array = Any


@dataclass(frozen=True, eq=False)
class RowGradient:
    """A gradient of shape (N, *rest) as terms of its rows, which are not added up yet.

    Attributes:
        index: whole numbers in -N..N - 1, of any shape; they may repeat.
        terms: (*index.shape, *rest).
        shape: (N, *rest).
    """

    index: Array
    terms: Array
    shape: tuple[int, ...]

    @property
    def dtype(self) -> Any:
        """The numpy dtype of the gradient."""
        return self.terms.dtype

    def _wide_terms(self, backend: Any) -> Array:
        """The terms as they are added up: 16-bit floats in float32."""
        return backend.cast(self.terms, np.dtype(np.float32)) if self._narrow else self.terms

    @property
    def _narrow(self) -> bool:
        return bool(self.dtype.itemsize == 2)

    def dense(self, backend: Any) -> Array:
        """The whole array."""
        terms = self._wide_terms(backend)
        out = backend.xp.zeros(self.shape, dtype=terms.dtype)
        backend.add_rows(out, self.index, terms)
        return backend.cast(out, self.dtype) if self._narrow else out

    def summed(self, backend: Any) -> RowSums:
        """The sum of each row, as in `dense`."""
        terms = self._wide_terms(backend).reshape(self.index.size, math.prod(self.shape[1:]))
        slots, sums = backend.sum_rows(self.index, terms, self.shape[0])
        values = backend.cast(sums, self.dtype) if self._narrow else sums
        return RowSums(slots, values, (self.shape[0], sums.shape[1]))

    def added_to(self, whole: Array, backend: Any) -> Array:
        """A new array: ``whole`` plus the sum of each row, whose zeros are not made."""
        if not self._narrow:
            out = whole.copy()
            backend.add_rows(out, self.index, self.terms)
            return out
        sums = self.summed(backend)
        out = whole.copy().reshape(sums.shape)
        at = self.index.reshape(-1) % self.shape[0]
        # A row that repeats is written several times, with the same values.
        out[at] = backend.add(out[at], sums.values[sums.slots[at]])
        return out.reshape(self.shape)
