"""One run of an experiment, and its state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..comparison import Job
from ..rundir import find_checkpoint

__all__ = ["Entry"]


@dataclass(frozen=True)
class Entry:
    """One run of an experiment: a trial of a learning rate, or an arm with a seed."""

    job: Job
    kind: str

    @property
    def name(self) -> str:
        """Unique in the experiment."""
        rate = f"-{self.job.config.lr:g}" if self.kind == "rate" else ""
        return f"{self.kind}{rate}-{self.job.name}"

    @property
    def cost_file(self) -> Path:
        """Seconds, joules and bytes so far."""
        return self.job.root / "costs" / f"{self.job.name}.json"

    @property
    def state(self) -> str:
        """One of finished, interrupted and waiting."""
        if self.job.finished() is not None:
            return "finished"
        return "interrupted" if find_checkpoint(self.job.folder) is not None else "waiting"
