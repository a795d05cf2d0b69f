"""TensorBoard event files, by tensorboardX: `tensorboard --logdir runs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from training.callbacks.base import Callback

if TYPE_CHECKING:
    from training.loop import Trainer
    from training.reports import EpochReport, StepReport

__all__ = ["TensorBoard"]

EVERY_STEPS = 20


class TensorBoard(Callback):
    """Writes events into the run's ``tensorboard`` folder.

    Raises:
        ImportError: if tensorboardX is not installed.
    """

    def __init__(self) -> None:
        try:
            import tensorboardX
        except ImportError as error:
            raise ImportError(
                "TensorBoard events need tensorboardX; the way out: pip install tensorboardX"
            ) from error
        self._library = tensorboardX
        self._writer: Any = None

    def on_start(self, trainer: Trainer) -> None:
        # purge_step hides events that an interrupted run wrote after its checkpoint
        step = trainer.position.step
        self._writer = self._library.SummaryWriter(
            str(trainer.out / "tensorboard"), purge_step=step + 1 if step else None
        )

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        if report.step % EVERY_STEPS == 0:
            self.add("step", report.step, {"loss": report.loss, "lr": report.lr})

    def on_epoch(self, trainer: Trainer, report: EpochReport) -> None:
        values = report.as_dict()
        del values["epoch"], values["step"]
        self.add("epoch", report.step, values)

    def on_end(self, trainer: Trainer, result: dict[str, Any] | None) -> None:
        if self._writer is not None:
            self._writer.close()

    def add(self, group: str, step: int, values: dict[str, float | None]) -> None:
        """Scalars ``group/name`` of a step; None is left out."""
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(f"{group}/{name}", value, step)
