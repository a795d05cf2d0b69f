"""What the loop tells its callbacks: one record per step, one per epoch.

Numbers that may fail to be finite are None then, so that every record is plain JSON.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

__all__ = ["EpochReport", "StepReport", "finite", "share"]


def finite(value: float) -> float | None:
    """The number, or None where it is NaN or infinite."""
    return float(value) if math.isfinite(value) else None


def share(part: int, whole: int) -> float | None:
    """part / whole, or None of nothing."""
    return part / whole if whole else None


@dataclass(frozen=True)
class StepReport:
    """After one step.

    Attributes:
        step: optimizer steps so far, this one included.
        epoch: the epoch under way, from 1.
        batch, batches: batches done in this epoch, and all of them.
        loss: mean loss of the batch.
        epoch_loss, epoch_accuracy: over the epoch so far.
        images_per_second: over the epoch so far.
        lr: the learning rate the step used.
        loss_scale: the scaler's factor after the step.
        skipped: True if the gradients were not finite and the weights stayed as they were.
        skipped_steps: such steps so far.
        saturated, flushed: share of quantized values, since the epoch began, that hit the top of
            their grid, and that became zero; None in float32.
    """

    step: int
    epoch: int
    batch: int
    batches: int
    loss: float | None
    epoch_loss: float | None
    epoch_accuracy: float
    images_per_second: float
    lr: float
    loss_scale: float
    skipped: bool
    skipped_steps: int
    saturated: float | None
    flushed: float | None


@dataclass(frozen=True)
class EpochReport:
    """After one epoch. Accuracies and shares are in 0..1, seconds are of training alone."""

    epoch: int
    step: int
    train_loss: float | None
    train_accuracy: float
    test_loss: float | None
    test_accuracy: float
    test_top3: float
    lr: float
    loss_scale: float
    seconds: float
    images_per_second: float
    skipped_steps: int
    saturated: float | None
    flushed: float | None

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return dataclasses.asdict(self)
