"""The files that every run leaves: metrics.jsonl, checkpoints, TensorBoard events."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from extensor.extras import missing

from ..checkpoints import read_checkpoint
from ..records import EpochReport, StepReport
from ..rundir import BEST, METRICS, NEXT_BEST, checkpoint_in, write_text
from .base import Callback, RunView

__all__ = ["JsonLines", "SaveCheckpoint", "TensorBoard"]

EVERY_STEPS = 20
"""Steps between two records in TensorBoard."""
FLUSH_SECONDS = 10.0
"""TensorBoard sees events this much later at most, where records follow each other."""


class JsonLines(Callback):
    """Appends a line per epoch. A resumed run first drops lines its checkpoint does not know."""

    def on_start(self, run: RunView) -> None:
        lines = [json.dumps(report.as_dict()) + "\n" for report in run.history]
        write_text(run.out / METRICS, "".join(lines))

    def on_epoch(self, run: RunView, report: EpochReport) -> None:
        with (run.out / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(report.as_dict()) + "\n")


class SaveCheckpoint(Callback):
    """Writes the last checkpoint, to resume from, and the best one, after every epoch.

    All ranks have one: where a checkpoint is a folder, each writes its file.

    "Best" is by the task's metric on the validation data, the earliest epoch of equals. Without
    validation data there is no best one, since the test data may not choose.

    The best one gets its name only when the last one is written, which says which epoch is best: at
    a death in between, the next start puts it in place, or deletes what the last one does not know.

    Args:
        every: steps between last checkpoints that are written within epochs, too; 0 for none.
    """

    def __init__(self, every: int = 0) -> None:
        self.every = every

    def sees_step(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def on_step(self, run: RunView, report: StepReport) -> None:
        if self.sees_step(report.step) and report.batch < report.batches:
            run.save(run.last)

    def on_start(self, run: RunView) -> None:
        waiting = checkpoint_in(run.out, run.config, NEXT_BEST)
        if run.ranks.rank or not waiting.exists():
            return
        known = run.task.metric.best(run.history).step if run.history else None
        try:
            found = read_checkpoint(waiting).metadata["position"]["step"]
        except FileNotFoundError:  # a folder whose first save was never complete
            found = None
        if known is not None and found == known:
            _replace(waiting, checkpoint_in(run.out, run.config, BEST))
        else:
            _remove(waiting)

    def on_epoch(self, run: RunView, report: EpochReport) -> None:
        better = run.task.validates and run.task.metric.best(run.history) is run.history[-1]
        waiting = checkpoint_in(run.out, run.config, NEXT_BEST)
        if better:
            run.save(waiting)
        run.save(run.last)
        if better and run.ranks.rank == 0:
            _replace(waiting, checkpoint_in(run.out, run.config, BEST))


def _remove(path: Path) -> None:
    """Delete a file or a folder that may be there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _replace(path: Path, by: Path) -> None:
    """Rename a file or a folder to one that may be there.

    A folder cannot be replaced at once: a death in between leaves the new one under its first name,
    where the next start finds it.
    """
    if path.is_dir():
        _remove(by)
    path.replace(by)


class TensorBoard(Callback):
    """Writes events into the run's ``tensorboard`` folder, for `tensorboard --logdir runs`.

    Events are written by the thread that trains, so that a full disk is an error of the run.

    Raises:
        ImportError: if tensorboardX is not installed.
    """

    def __init__(self) -> None:
        if (message := missing("the callback TensorBoard", "tensorboardX")) is not None:
            raise ImportError(message)
        from tensorboardX import event_file_writer, proto, summary

        self._writer_of, self._scalar = event_file_writer.EventsWriter, summary.scalar
        self._proto: Any = proto.event_pb2
        self._writer: Any = None
        self._flushed = 0.0

    def on_start(self, run: RunView) -> None:
        folder, step = run.out / "tensorboard", run.position.step
        folder.mkdir(exist_ok=True)
        self._writer = self._writer_of(str(folder / "events"))
        if step:  # hides events that an interrupted run wrote after its checkpoint
            start = self._proto.SessionLog(status=self._proto.SessionLog.START)
            self._add(step + 1, file_version="brain.Event:2")
            self._add(step + 1, session_log=start)

    def on_step(self, run: RunView, report: StepReport) -> None:
        if report.step % EVERY_STEPS == 0:
            self.add("step", report.step, {"loss": report.loss, "lr": report.lr})
            if time.monotonic() > self._flushed + FLUSH_SECONDS:
                self._flush()

    def on_epoch(self, run: RunView, report: EpochReport) -> None:
        values = report.as_dict()
        del values["epoch"], values["step"]
        self.add("epoch", report.step, values)
        self._flush()

    def on_end(self, run: RunView, result: dict[str, Any] | None) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def add(self, group: str, step: int, values: dict[str, float | None]) -> None:
        """Scalars ``group/name`` of a step; None is left out."""
        for name, value in values.items():
            if value is not None:
                self._add(step, summary=self._scalar(f"{group}/{name}", value))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._proto.Event(wall_time=time.time(), step=step, **content))

    def _flush(self) -> None:
        self._writer.flush()
        self._flushed = time.monotonic()
