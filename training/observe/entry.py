"""One run of an experiment, and its state."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from extensor.io.atomic import replacing

from ..checkpoints import read_position
from ..comparison import Job
from ..rundir import claim, find_checkpoint
from .cost import Cost

__all__ = ["Entry"]


_FINISHED: set[Job] = set()
"""Runs that were seen to be finished: a queue of many asks often, and a result stays."""


@dataclass(frozen=True)
class Entry:
    """One run of an experiment.

    Attributes:
        job: its configuration and files.
        kind: "rate", a trial of a learning rate; "arm", with a seed; or "trunk", the first epochs
            of a seed's arms.
        trunk: the first epochs of this arm, where it has them in common with others.
        epochs: how many epochs a trunk has.
    """

    job: Job
    kind: str
    trunk: Entry | None = None
    epochs: int = 0

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
    def cost(self) -> Cost:
        """Of all its epochs: an arm's has the trunk's in it. Joules are None if a part's are."""
        own = Cost.read(self.cost_file)
        if self.trunk is None:
            return own
        first = self.trunk.cost
        known = own.joules is not None and first.joules is not None
        return own + first if known else replace(own + first, joules=None)

    @property
    def state(self) -> str:
        """One of finished, interrupted and waiting."""
        if self.job in _FINISHED:
            return "finished"
        if self.job.finished() is not None:
            _FINISHED.add(self.job)
            return "finished"
        found = find_checkpoint(self.job.folder)
        if found is None:
            return "waiting"
        # Its arms go on from the checkpoint, which may be an epoch behind metrics.jsonl.
        if self.kind == "trunk" and read_position(found).epoch > self.epochs:
            _FINISHED.add(self.job)
            return "finished"
        return "interrupted"

    def begin(self) -> None:
        """Go on from the trunk's checkpoint, where there is one and this run has not begun."""
        trunk, folder = self.trunk, self.job.folder
        if trunk is None or self.state != "waiting":
            return
        found = find_checkpoint(trunk.job.folder)
        if found is not None:
            claim(folder, self.job.config, resume=False)
            with found.open("rb") as file, replacing(folder / found.name) as copy:
                shutil.copyfileobj(file, copy)
