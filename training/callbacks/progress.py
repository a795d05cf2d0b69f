"""Progress for people: a live bar on a terminal, one plain line per epoch elsewhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..records import EpochReport, StepReport
from .base import Callback, RunView

__all__ = ["ShowProgress", "epoch_line", "percent"]


def percent(value: float | None, digits: int = 2) -> str:
    """A share as per cent; a dash for None."""
    return "-" if value is None else f"{100 * value:.{digits}f}%"


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def epoch_line(report: EpochReport, epochs: int, unit: str) -> str:
    """One line that says how the epoch went; ``unit`` is what the task counts."""
    quantized = (
        ""
        if report.saturated is None
        else f"  saturated {percent(report.saturated)}  flushed {percent(report.flushed)}"
    )
    validation = (
        ""
        if report.val_accuracy is None
        else f"val loss {_loss(report.val_loss)} acc {percent(report.val_accuracy)}  "
    )
    skipped = f"  skipped steps {report.skipped_steps}" if report.skipped_steps else ""
    return (
        f"epoch {report.epoch:>{len(str(epochs))}}/{epochs}  "
        f"train loss {_loss(report.train_loss)} acc {percent(report.train_accuracy)}  "
        f"{validation}test loss {_loss(report.test_loss)} acc {percent(report.test_accuracy)}  "
        f"{report.per_second:,.0f} {unit}/s{quantized}{skipped}"
    )


WIDE = 115
"""Columns that everything takes; a narrower terminal gets a shorter bar and no time left."""


class ShowProgress(Callback):
    """Shows the bar while an epoch runs, and a line after it."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar: Progress | None = None

    def on_start(self, run: RunView) -> None:
        if not self.console.is_terminal:
            return
        wide = self.console.width >= WIDE
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=24 if wide else 8),
            *([MofNCompleteColumn()] if wide else []),
            TextColumn("{task.fields[numbers]}"),
            *([TimeRemainingColumn(compact=True)] if wide else []),
            console=self.console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=run.batches, epoch="", numbers="")
        self._bar.start()

    def on_step(self, run: RunView, report: StepReport) -> None:
        if self._bar is None:
            return
        numbers = [
            f"loss {_loss(report.epoch_loss)}",
            f"acc {percent(report.epoch_accuracy)}",
            f"{report.per_second:,.0f} {run.task.unit}/s",
        ]
        if report.saturated is not None:
            numbers += [f"sat {percent(report.saturated)}", f"flush {percent(report.flushed)}"]
        if report.skipped_steps:
            numbers += [f"skipped {report.skipped_steps}"]
        self._bar.update(
            self._task,
            completed=report.batch,
            epoch=f"{report.epoch}/{run.config.epochs}",
            numbers=("  " if self.console.width >= WIDE else " ").join(numbers),
        )

    def on_epoch(self, run: RunView, report: EpochReport) -> None:
        self.console.print(epoch_line(report, run.config.epochs, run.task.unit))

    def on_end(self, run: RunView, result: dict[str, Any] | None) -> None:
        if self._bar is not None:
            self._bar.stop()
