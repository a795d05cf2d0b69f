"""The protocol: five moments, each a method that does nothing unless overridden.

Callbacks hold no state that a resumed run would miss: what they need of the past they read from
`trainer.history`, which the checkpoint carries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.batch import Batch
    from training.loop import Trainer
    from training.reports import EpochReport, StepReport

__all__ = ["Callback"]


class Callback:
    """Watches a run. Override what is needed; `trainer.stop(reason)` ends it after the epoch."""

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step; `trainer.history` is not empty if the run is resumed."""

    def on_gradients(self, trainer: Trainer, batch: Batch) -> None:
        """In every step, when its gradients are there, before clipping and the update."""

    def on_step(self, trainer: Trainer, report: StepReport) -> None:
        """After every step."""

    def on_epoch(self, trainer: Trainer, report: EpochReport) -> None:
        """After every epoch and its evaluation; ``report`` is the last of `trainer.history`."""

    def on_end(self, trainer: Trainer, result: dict[str, Any] | None) -> None:
        """At the end, come what may; ``result`` is None after an interrupt or an error."""
