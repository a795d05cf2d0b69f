"""The files that every run leaves: metrics.jsonl, checkpoints, TensorBoard events."""

from __future__ import annotations

import json
from typing import Any

from ..extras import missing
from ..records import EpochReport, StepReport
from ..rundir import BEST, LAST, METRICS
from .base import Callback, RunView

__all__ = ["JsonLines", "SaveCheckpoint", "TensorBoard"]

EVERY_STEPS = 20
"""Steps between two records in TensorBoard."""


class JsonLines(Callback):
    """Appends a line per epoch. A resumed run first drops lines its checkpoint does not know."""

    def on_start(self, run: RunView) -> None:
        lines = [json.dumps(report.as_dict()) + "\n" for report in run.history]
        (run.out / METRICS).write_text("".join(lines), encoding="utf-8")

    def on_epoch(self, run: RunView, report: EpochReport) -> None:
        with (run.out / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(report.as_dict()) + "\n")


class SaveCheckpoint(Callback):
    """Writes the last checkpoint, to resume from, and the best one, after every epoch.

    "Best" is by the task's metric on the validation data, the earliest epoch of equals. Without
    validation data there is no best one, since the test data may not choose.
    """

    def on_epoch(self, run: RunView, report: EpochReport) -> None:
        run.save(run.out / LAST)
        if run.task.validates and run.task.metric.best(run.history) is run.history[-1]:
            run.save(run.out / BEST)


class TensorBoard(Callback):
    """Writes events into the run's ``tensorboard`` folder, for `tensorboard --logdir runs`.

    Raises:
        ImportError: if tensorboardX is not installed.
    """

    def __init__(self) -> None:
        if (message := missing("the callback TensorBoard", "tensorboardX")) is not None:
            raise ImportError(message)
        import tensorboardX

        self._library = tensorboardX
        self._writer: Any = None

    def on_start(self, run: RunView) -> None:
        # purge_step hides events that an interrupted run wrote after its checkpoint
        step = run.position.step
        self._writer = self._library.SummaryWriter(
            str(run.out / "tensorboard"), purge_step=step + 1 if step else None
        )

    def on_step(self, run: RunView, report: StepReport) -> None:
        if report.step % EVERY_STEPS == 0:
            self.add("step", report.step, {"loss": report.loss, "lr": report.lr})

    def on_epoch(self, run: RunView, report: EpochReport) -> None:
        values = report.as_dict()
        del values["epoch"], values["step"]
        self.add("epoch", report.step, values)

    def on_end(self, run: RunView, result: dict[str, Any] | None) -> None:
        if self._writer is not None:
            self._writer.close()

    def add(self, group: str, step: int, values: dict[str, float | None]) -> None:
        """Scalars ``group/name`` of a step; None is left out."""
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(f"{group}/{name}", value, step)
