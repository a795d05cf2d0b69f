"""Checkpoints after every epoch: the last one, to resume from, and the best one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.callbacks.base import Callback

if TYPE_CHECKING:
    from training.loop import Trainer
    from training.reports import EpochReport

__all__ = ["BEST", "LAST", "SaveCheckpoint"]

LAST = "checkpoint.safetensors"
BEST = "checkpoint-best.safetensors"


class SaveCheckpoint(Callback):
    """Writes both files atomically into the run's folder.

    "Best" is by the task's metric on the validation data, the earliest epoch of equals; without
    validation data there is no best one, since the test data may not choose.
    """

    def on_epoch(self, trainer: Trainer, report: EpochReport) -> None:
        trainer.save(trainer.out / LAST)
        if not trainer.task.validates:
            return
        if trainer.task.metric.best(trainer.history) is trainer.history[-1]:
            trainer.save(trainer.out / BEST)
