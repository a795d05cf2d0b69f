"""`Batch`: inputs and labels of one step, as every data set gives them and the loop takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

__all__ = ["Batch", "Rows", "Whole"]

Rows = Callable[[int], slice]
"""Of so many rows of a batch, those that a rank computes."""


@dataclass(frozen=True)
class Whole:
    """What a rank knows of a batch of which it has some rows.

    Attributes:
        first: the number of the first row that it has.
        rows: how many rows the batch has.
        count: how many labels the batch has.
    """

    first: int
    rows: int
    count: int


@dataclass(frozen=True)
class Batch:
    """Inputs and labels of one step, or of the rows of them that one rank computes.

    Attributes:
        index: its place in the epoch.
        inputs: what the model is called with: images (B, C, H, W) float32, or tokens (B, T) int64.
        labels: (B,) or (B, T), int64; below 0 where there is no label.
        whole: the batch that these rows are of; None if they are all of it.
    """

    index: int
    inputs: np.ndarray
    labels: np.ndarray
    whole: Whole | None = None

    @property
    def count(self) -> int:
        """The number of labels."""
        return int((self.labels >= 0).sum())

    def only(self, rows: slice) -> Batch:
        """Some neighbouring rows of a whole batch."""
        inputs, labels = self.inputs[rows], self.labels[rows]
        return Batch(self.index, inputs, labels, Whole(rows.start, len(self.inputs), self.count))
