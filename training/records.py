"""Where a run is, and what the loop tells its callbacks: a record per step and per epoch.

Numbers that may fail to be finite are None then, so that every record is plain JSON.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from extensor.schema import SchemaError, check, record

__all__ = ["EpochReport", "Position", "StepReport", "finite", "share"]


def finite(value: float) -> float | None:
    """The number, or None where it is NaN or infinite."""
    return float(value) if math.isfinite(value) else None


def share(part: int, whole: int) -> float | None:
    """Part / whole, or None where the whole is 0."""
    return part / whole if whole else None


@dataclass
class Position:
    """Where a run is. Sums are over the labels of the epoch under way."""

    epoch: int = 1
    batch: int = 0
    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    loss_sum: float = 0.0
    hits: int = 0
    count: int = 0
    epoch_seconds: float = 0.0
    epoch_waited: float = 0.0
    seconds: float = 0.0

    @property
    def per_second(self) -> float:
        """Labels in a second of the epoch so far; 0 before the first step has a time."""
        return self.count / self.epoch_seconds if self.epoch_seconds else 0.0

    def next_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch, self.batch = self.epoch + 1, 0
        self.loss_sum, self.hits, self.count = 0.0, 0, 0
        self.epoch_seconds = self.epoch_waited = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON: a sum that is not finite is None."""
        return {**dataclasses.asdict(self), "loss_sum": finite(self.loss_sum)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Position:
        """The inverse of `as_dict`.

        Raises:
            SchemaError: for another table.
        """
        unknown = check(values, dict[str, Any]).get("loss_sum", 0.0) is None
        if lost := [name for name in ("epoch", "batch", "step") if name not in values]:
            raise SchemaError(f"position: expected {', '.join(lost)}, got no such entry")
        position = record(cls, values | {"loss_sum": 0.0} if unknown else values, "position")
        return dataclasses.replace(position, loss_sum=math.nan) if unknown else position


@dataclass(frozen=True)
class StepReport:
    """What callbacks are told after a step.

    Attributes:
        step: optimizer steps so far, this one included.
        epoch: the epoch under way, from 1.
        batch, batches: batches done in this epoch, and all of them.
        loss: mean loss of the batch.
        epoch_loss, epoch_accuracy: over the epoch so far.
        per_second: images or tokens, over the epoch so far.
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
    per_second: float
    lr: float
    loss_scale: float
    skipped: bool
    skipped_steps: int
    saturated: float | None
    flushed: float | None


@dataclass(frozen=True)
class EpochReport:
    """What callbacks are told after an epoch.

    Accuracies and shares are in 0..1, seconds are of training alone.
    ``per_second`` counts images or tokens; ``waited`` is the share of the seconds in which the next
    batch was not ready yet; ``test_perplexity`` is None for images, ``val_...`` where nothing is
    held out for validation.
    """

    epoch: int
    step: int
    train_loss: float | None
    train_accuracy: float
    val_loss: float | None
    val_accuracy: float | None
    val_perplexity: float | None
    test_loss: float | None
    test_accuracy: float
    test_top3: float
    test_perplexity: float | None
    lr: float
    loss_scale: float
    seconds: float
    per_second: float
    waited: float
    skipped_steps: int
    saturated: float | None
    flushed: float | None

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return dataclasses.asdict(self)
