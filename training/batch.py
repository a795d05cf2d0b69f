"""Batch: what every data set gives and the loop takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["IGNORE", "Batch"]

IGNORE = -100
"""The label of a row that counts neither in the loss nor in the scores."""


@dataclass(frozen=True)
class Batch:
    """One batch.

    Attributes:
        index: its place in the epoch.
        inputs: what the model is called with: images (B, C, H, W) float32, or tokens (B, T) int64.
        labels: (B,) or (B, T), int64; `IGNORE` where there is nothing to learn.
    """

    index: int
    inputs: np.ndarray
    labels: np.ndarray

    @property
    def count(self) -> int:
        """Labels that count."""
        return int((self.labels != IGNORE).sum())
