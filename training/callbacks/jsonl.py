"""metrics.jsonl: one JSON object per epoch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from training.callbacks.base import Callback

if TYPE_CHECKING:
    from training.loop import Trainer
    from training.reports import EpochReport

__all__ = ["METRICS", "JsonLines"]

METRICS = "metrics.jsonl"


class JsonLines(Callback):
    """Appends a line per epoch; a resumed run first drops lines its checkpoint does not know."""

    def on_start(self, trainer: Trainer) -> None:
        lines = [json.dumps(report.as_dict()) + "\n" for report in trainer.history]
        (trainer.out / METRICS).write_text("".join(lines), encoding="utf-8")

    def on_epoch(self, trainer: Trainer, report: EpochReport) -> None:
        with (trainer.out / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(report.as_dict()) + "\n")
