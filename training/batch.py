"""`Batch`: inputs and labels of one step, as every data set gives them and the loop takes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Batch"]


@dataclass(frozen=True)
class Batch:
    """Inputs and labels of one step.

    Attributes:
        index: its place in the epoch.
        inputs: what the model is called with: images (B, C, H, W) float32, or tokens (B, T) int64.
        labels: (B,) or (B, T), int64; below 0 where there is no label.
    """

    index: int
    inputs: np.ndarray
    labels: np.ndarray

    @property
    def count(self) -> int:
        """The number of labels."""
        return int((self.labels >= 0).sum())
