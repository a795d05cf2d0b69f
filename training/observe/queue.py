"""A queue of runs in a folder: what is finished, what comes next, within a limit of time.

A run is a process of its own. At the limit it is interrupted, which saves its step, and the next
call goes on with it, so that an experiment of hours may be run in half hours. ``queue.json`` says
of every run whether it waits, is interrupted, finished or failed, and what it has cost.
"""

from __future__ import annotations

import math
import signal
import statistics
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ..comparison import Finished, Job
from ..rundir import find_checkpoint, write_json
from ..runs import RUNS
from ..tasks import TASKS, Metric
from .cost import Cost, Meter
from .experiments import Experiment

__all__ = ["Entry", "Queue", "Running"]

QUEUE = "queue.json"
POLL_S = 0.2


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


class Queue:
    """The runs of an experiment in a folder.

    Args:
        experiment: what is compared.
        folder: for everything that it leaves.
        only: arms to run now; None is all of them. Trials are always run.
    """

    def __init__(
        self, experiment: Experiment, folder: Path, only: Collection[str] | None = None
    ) -> None:
        self.experiment, self.folder, self.only = experiment, folder, only
        self.failed: dict[str, str] = {}

    @property
    def metric(self) -> Metric:
        """What the runs are compared by."""
        metric: Metric = TASKS[RUNS[self.experiment.model].task].metric
        return metric

    def trials(self) -> list[Entry]:
        """The baseline at each learning rate, in folders of their own."""
        return [
            Entry(
                Job(
                    config,
                    self.folder / "rates" / f"{config.lr:g}",
                    self.metric,
                    self.experiment.flags,
                ),
                "rate",
            )
            for config in self.experiment.trials()
        ]

    def rate(self) -> float | None:
        """The learning rate of the best trial; None until all are finished."""
        trials = self.trials()
        if not trials:
            return self.experiment.rates[0]
        done = [(entry, entry.job.finished()) for entry in trials]
        if any(finished is None for _, finished in done):
            return None
        sign = -1.0 if self.metric.higher_is_better else 1.0

        def worth(finished: Finished | None) -> float:
            value = None if finished is None else finished.result[self.metric.key]
            return math.inf if value is None else sign * float(value)

        return min(done, key=lambda pair: worth(pair[1]))[0].job.config.lr

    def entries(self) -> list[Entry]:
        """Trials, then arms as far as their learning rate is known."""
        rate = self.rate()
        flags = self.experiment.flags
        if self.experiment.telemetry:
            flags = ("--telemetry", str(self.experiment.telemetry))
        runs = [] if rate is None else self.experiment.runs(rate)
        return self.trials() + [
            Entry(Job(config, self.folder, self.metric, flags), "arm") for config in runs
        ]

    def next(self, running: Collection[str] = ()) -> Entry | None:
        """The first run that is open and not running: an interrupted one before others."""
        open_ = [
            e
            for e in self.entries()
            if e.state != "finished" and e.name not in self.failed and e.name not in running
        ]
        if self.only is not None:
            open_ = [e for e in open_ if e.kind == "rate" or e.job.config.recipe in self.only]
        begun = [entry for entry in open_ if entry.state == "interrupted"]
        return next(iter(begun or open_), None)

    def plan(self, minutes: float) -> list[str]:
        """What so many minutes are for, a line each: by the median time of finished runs."""
        entries = self.entries()
        left = [e for e in entries if e.state != "finished"]
        lines = [f"{len(entries) - len(left)} of {len(entries)} runs known so far are finished"]
        if self.rate() is None:
            arms = len(self.experiment.runs(self.experiment.rates[0]))
            lines.append(f"then {arms} runs at the rate that these trials find")
        seconds = self._usual_seconds(entries)
        if not left:
            return lines
        if not seconds:
            return [*lines, f"first: {left[0].name}; how long it takes is not known yet"]
        begun = [e for e in left if e.state == "interrupted"]
        following = begun + [e for e in left if e not in begun]
        budget, start = 60 * minutes, 0.0
        for entry in following:
            if start >= budget:
                break
            whole = seconds.get(entry.kind, max(seconds.values()))
            need = max(whole - Cost.read(entry.cost_file).seconds, 0.0)
            end = "" if start + need <= budget else ", which the time ends"
            lines.append(
                f"from minute {start / 60:.1f}: {entry.name}, {need / 60:.1f} minutes{end}"
            )
            start += need
        return lines

    def _usual_seconds(self, entries: list[Entry]) -> dict[str, float]:
        """Median wall-clock seconds of finished runs, by kind."""
        found: dict[str, list[float]] = {}
        for entry in entries:
            if entry.state == "finished" and (cost := Cost.read(entry.cost_file)).seconds:
                found.setdefault(entry.kind, []).append(cost.seconds)
        return {kind: statistics.median(values) for kind, values in found.items()}

    def run(
        self, minutes: float, console: Console, jobs: int = 1, whole_runs: bool = False
    ) -> bool:
        """Run what is open until the time is up; returns whether everything is finished.

        A failed run is named, and does not stop the others.

        Args:
            minutes: from now.
            console: where it reports.
            jobs: runs side by side.
            whole_runs: whether no run begins that the usual time of its kind does not let finish.
        """
        deadline = time.monotonic() + 60 * minutes
        running: list[Running] = []
        try:
            while True:
                while len(running) < jobs and time.monotonic() < deadline:
                    entry = self.next({one.entry.name for one in running})
                    if entry is None or (whole_runs and not self._fits(entry, deadline)):
                        break
                    running.append(self._start(entry, deadline))
                if not running:
                    break
                for one in [one for one in running if one.ended()]:
                    running.remove(one)
                    console.print(f"{one.entry.name}: {self._state(one)}")
                    self.write()
                time.sleep(POLL_S)
        finally:
            for one in running:
                one.end()
        self.write()
        return self.next() is None and not self.failed

    def _fits(self, entry: Entry, deadline: float) -> bool:
        """Whether a run is finished in time, if it takes as long as those of its kind did."""
        seconds = self._usual_seconds(self.entries()).get(entry.kind, 0.0)
        left = max(seconds - Cost.read(entry.cost_file).seconds, 0.0)
        return time.monotonic() + left <= deadline

    def _start(self, entry: Entry, deadline: float) -> Running:
        return Running(entry, deadline)

    def _state(self, one: Running) -> str:
        """What became of a run."""
        entry = one.entry
        if entry.state == "finished":
            return "finished"
        if one.asked:  # perhaps before its first checkpoint: then it begins anew
            return "interrupted"
        self.failed[entry.name] = f"exit code {one.code}: {entry.job.last_line()}"
        return f"failed, {self.failed[entry.name]}; all of it: {entry.job.log}"

    def write(self) -> None:
        """Write queue.json."""
        rows: list[dict[str, Any]] = []
        for entry in self.entries():
            row: dict[str, Any] = {"name": entry.name, "state": entry.state}
            if entry.name in self.failed:
                row |= {"state": "failed", "problem": self.failed[entry.name]}
            rows.append({**row, **Cost.read(entry.cost_file).as_dict()})
        follow = self.next()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(
            self.folder / QUEUE,
            {"learning_rate": self.rate(), "next": follow and follow.name, "runs": rows},
        )


class Running:
    """The process of a run, watched.

    Args:
        entry: the run.
        deadline: when it is interrupted, which saves its step.
    """

    def __init__(self, entry: Entry, deadline: float) -> None:
        self.entry, self._deadline, self.asked = entry, deadline, False
        self._process = entry.job.start()
        self._meter = Meter(self._process.pid, entry.job.config.device)

    @property
    def code(self) -> int | None:
        """The exit code."""
        return self._process.returncode

    def ended(self) -> bool:
        """Whether the process is gone; its cost is written then. Interrupts it at the deadline."""
        if self._process.poll() is None:
            self._meter.look()
            if not self.asked and time.monotonic() >= self._deadline:
                self._process.send_signal(signal.SIGINT)
                self.asked = True
            return False
        self._write()
        return True

    def end(self) -> None:
        """Interrupt the run, and wait."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()
        self._write()

    def _write(self) -> None:
        file = self.entry.cost_file
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, (Cost.read(file) + self._meter.cost()).as_dict())
