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

    "Best" is by the task's metric, the earliest epoch of equals. It is for use, not for reporting:
    the result is the last epoch's, which the test data had no part in choosing.
    """

    def on_epoch(self, trainer: Trainer, report: EpochReport) -> None:
        trainer.save(trainer.out / LAST)
        if trainer.task.metric.best(trainer.history) is trainer.history[-1]:
            trainer.save(trainer.out / BEST)
