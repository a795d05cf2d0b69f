"""What ends a run early: a validation loss that no longer falls, or an epoch that was asked for."""

from __future__ import annotations

import math

from ..records import EpochReport
from .base import Callback, RunView

__all__ = ["EarlyStopping", "InterruptAfter"]


class EarlyStopping(Callback):
    """Stop once the validation loss has not improved for ``patience`` epochs (1 or more).

    Raises:
        ValueError: for a patience below 1; when the run starts, if nothing is held out.
    """

    def __init__(self, patience: int) -> None:
        if patience < 1:
            raise ValueError(f"patience: expected 1 or more epochs, got {patience}")
        self.patience = patience

    def on_start(self, run: RunView) -> None:
        if not run.task.validates:
            raise ValueError(
                "early stopping: expected validation data, got none; the way out: --val-share 0.1"
            )

    def on_epoch(self, run: RunView, report: EpochReport) -> None:
        losses = [math.inf if e.val_loss is None else e.val_loss for e in run.history]
        best = min(range(len(losses)), key=losses.__getitem__)
        waited = len(losses) - 1 - best
        if waited >= self.patience:
            run.stop(
                f"val_loss has not improved for {waited} epochs (the lowest: epoch "
                f"{run.history[best].epoch})"
            )


class InterruptAfter(Callback):
    """Interrupt the run after an epoch (from 1), so that its checkpoint can be gone on from."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_epoch(self, run: RunView, report: EpochReport) -> None:
        if report.epoch >= self.epoch:
            run.told_to_stop = True
