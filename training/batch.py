"""Batch: what every data set gives and the loop takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Batch"]


@dataclass(frozen=True)
class Batch:
    """One batch.

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
        """How many labels."""
        return int((self.labels >= 0).sum())
