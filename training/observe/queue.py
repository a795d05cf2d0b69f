"""A queue of runs in a folder: what is finished, what comes next, within a limit of time.

A run is a process of its own. At the limit it is interrupted, which saves its step, and the next
call goes on with it, so that an experiment of hours may be run in half hours. ``queue.json`` says
of every run whether it waits, is interrupted, finished or failed, and what it has cost.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..comparison import Finished, Job
from ..rundir import write_json
from ..runs import RUNS
from ..tasks import TASKS, Metric
from .alone import read_rates
from .cost import Cost, Meter
from .devices import Place, environment
from .entry import Entry
from .experiments import Experiment
from .forecast import expected_seconds, schedule

__all__ = ["Queue", "Running"]

QUEUE = "queue.json"
POLL_S = 0.2


class Queue:
    """The runs of an experiment in a folder.

    Args:
        experiment: what is compared.
        folder: for everything that it leaves.
        only: arms to run now; None is all of them. Trials are always run.
        seeds: how many seeds of them; 0 is all.
        first_seed: the first one to run now.
    """

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        only: Collection[str] | None = None,
        seeds: int = 0,
        first_seed: int = 0,
    ) -> None:
        self.experiment, self.folder, self.only = experiment, folder, only
        self.seeds = range(first_seed, first_seed + (seeds or experiment.seeds))
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
        """Trials, then trunks and arms as far as their learning rate is known."""
        rate = self.rate()
        flags = self.experiment.flags
        if self.experiment.telemetry:
            flags = (*flags, "--telemetry", str(self.experiment.telemetry))
        if rate is None:
            return self.trials()
        experiment, metric, first = self.experiment, self.metric, self.experiment.branch
        until, root = (*flags, "--until-epoch", str(first)), self.folder / "trunks"
        trunks = [
            Entry(Job(config, root, metric, until), "trunk", epochs=first)
            for config in experiment.trunks(rate)
        ]
        of_seed = {trunk.job.config.seed: trunk for trunk in trunks}
        arms = [
            Entry(Job(config, self.folder, metric, flags), "arm", of_seed.get(config.seed))
            for config in experiment.runs(rate)
        ]
        return [*self.trials(), *trunks, *arms]

    def next(self, running: Collection[str] = (), within: float = math.inf) -> Entry | None:
        """The first run that is open and not running: an interrupted one before others.

        Args:
            running: names of runs.
            within: seconds in which it must be finished, as far as is known.
        """
        open_ = [e for e in self._open() if e.name not in running]
        open_ = [
            e for e in open_
            if e.trunk is None or (e.trunk.state == "finished" and e.trunk.name not in running)
        ]  # fmt: skip
        if within < math.inf:
            needed = self._needed()
            open_ = [entry for entry in open_ if needed.get(entry.name, 0.0) <= within]
        return next(iter(open_), None)

    def _open(self) -> list[Entry]:
        """What is to run now, in its order."""
        found = [e for e in self.entries() if e.state != "finished" and e.name not in self.failed]
        found = [e for e in found if e.kind == "rate" or e.job.config.seed in self.seeds]
        if self.only is not None:
            found = [e for e in found if e.kind != "arm" or e.job.config.recipe in self.only]
        return sorted(found, key=lambda entry: entry.state != "interrupted")

    def _needed(self) -> dict[str, float]:
        return expected_seconds(self.entries(), read_rates(self.folder))

    def plan(self, minutes: float, places: int = 1) -> list[str]:
        """What so many minutes on so many places are for, a line each."""
        entries = self.entries()
        done = sum(entry.state == "finished" for entry in entries)
        lines = [f"{done} of {len(entries)} runs known so far are finished"]
        if self.rate() is None:
            arms = len(self.experiment.runs(self.experiment.rates[0]))
            lines.append(f"then {arms} runs at the rate that these trials find")
        needed, open_ = self._needed(), self._open()
        unknown = next((entry for entry in open_ if entry.name not in needed), None)
        if unknown is not None:
            return [*lines, f"first: {open_[0].name}; how long it takes is not known yet"]
        return lines + schedule(open_, needed, 60 * minutes, places)

    def run(
        self,
        minutes: float,
        console: Console,
        places: Sequence[Place] = (None,),
        whole_runs: bool = False,
    ) -> bool:
        """Run what is open until the time is up; returns whether everything is finished.

        A failed run is named, and does not stop the others.

        Args:
            minutes: from now.
            console: where it reports.
            places: where runs may be at once, one at each.
            whole_runs: whether a run begins only where the time that it is expected to take is
                left; a shorter one may then go first.
        """
        deadline = time.monotonic() + 60 * minutes
        running: list[Running] = []
        free = list(places)
        try:
            while True:
                while free and (left := deadline - time.monotonic()) > 0:
                    names = {one.entry.name for one in running}
                    entry = self.next(names, left if whole_runs else math.inf)
                    if entry is None:
                        break
                    running.append(self._start(entry, deadline, free.pop(0)))
                if not running:
                    break
                for one in [one for one in running if one.ended()]:
                    running.remove(one)
                    free.append(one.place)
                    console.print(f"{one.entry.name}: {self._state(one)}")
                    self.write()
                time.sleep(POLL_S)
        finally:
            for one in running:
                one.end()
        self.write()
        return self.next() is None and not self.failed

    def _start(self, entry: Entry, deadline: float, place: Place) -> Running:
        return Running(entry, deadline, place)

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
        place: the one GPU that it sees.
    """

    def __init__(self, entry: Entry, deadline: float, place: Place = None) -> None:
        self.entry, self.place, self._deadline, self.asked = entry, place, deadline, False
        entry.begin()
        self._process = entry.job.start(environment(place))
        self._meter = Meter(self._process.pid, entry.job.config.device, place)

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
