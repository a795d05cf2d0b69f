"""Many runs of one model: every recipe with every seed, each a process of its own.

A run that is finished is never run again and one that was interrupted is resumed, so the same
command may be given as often as needed. Each process computes with one thread: as many runs as
CPUs side by side beat one run on all of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from extensor.quant.recipes import get_recipe
from training.callbacks import LAST, METRICS
from training.config import RunConfig, Settings, check_task, write_toml
from training.report import Finished, summarize, write_report
from training.rundir import UsageError, read_config, read_result
from training.runs import RUNS
from training.tasks import TASKS, Metric

__all__ = ["CompareArgs", "compare", "outcome"]

POLL_S = 0.25
THREAD_FLAGS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "EXTENSOR_NUM_THREADS",
)
EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


@dataclass(frozen=True, kw_only=True)
class CompareArgs(Settings):
    """The flags of a comparison; the settings hold for every run."""

    model: tyro.conf.Suppress[str]
    recipes: str = "fp32,mxfp8,mxfp4,nvfp4"
    """Recipes, separated by commas; any name listed above, ablations too. The gap is measured
    against fp32 (texts: bf16), where it is among them."""
    seeds: int = 3
    """How many seeds: 0, 1, 2, ..."""
    jobs: int = 0
    """Runs side by side, one thread each; 0 is one per CPU (and 1 on a GPU)."""
    out: Path | None = None
    """Folder for the runs, the table, the plot and the JSON; by default
    runs/compare-<model>-<dataset>."""
    plot_only: bool = False
    """Run nothing; draw the table and the plot of what is finished."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for flag, value, least in (("--seeds", self.seeds, 1), ("--jobs", self.jobs, 0)):
            if value < least:
                raise ValueError(f"{flag}: wanted a whole number, {least} or more, got {value}")
        check_task(self.model, self)
        names = self.names
        if not names:
            raise ValueError("--recipes: wanted names separated by commas, got none")
        full = [get_recipe(name).name for name in names]
        if len(set(full)) < len(full):
            raise ValueError(f"--recipes: wanted each recipe once, got {self.recipes!r}")

    @property
    def names(self) -> list[str]:
        """The recipes' names as given."""
        return [name.strip() for name in self.recipes.split(",") if name.strip()]

    @property
    def folder(self) -> Path:
        """Where everything lies."""
        default = Path("runs") / f"compare-{self.model}-{self.dataset}"
        return self.out if self.out is not None else default

    @property
    def metric(self) -> Metric:
        """What the runs are compared by."""
        return TASKS[RUNS[self.model].task].metric

    def runs(self) -> list[RunConfig]:
        """One run per seed and recipe, seeds outermost: an early look shows every recipe."""
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(Settings)}
        return [
            RunConfig(**shared, model=self.model, recipe=recipe, seed=seed)
            for seed in range(self.seeds)
            for recipe in self.names
        ]


@dataclass(frozen=True)
class Job:
    """One run of the comparison and its files."""

    config: RunConfig
    root: Path

    @property
    def name(self) -> str:
        """Recipe and seed."""
        return f"{self.config.recipe}-s{self.config.seed}"

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.root / "runs" / self.name

    @property
    def log(self) -> Path:
        """What the run printed."""
        return self.root / "logs" / f"{self.name}.txt"

    def finished(self) -> Finished | None:
        """The run's result and curve, or None where it is not finished.

        Raises:
            UsageError: if the folder holds another run.
        """
        if self.folder.exists() and any(self.folder.iterdir()):
            if read_config(self.folder) != self.config:
                raise UsageError(
                    f"{self.folder}: holds a run with another configuration; the way out: another "
                    "--out, or the settings of before"
                )
            result = read_result(self.folder)
            if result is not None:
                return Finished(self.config.recipe, self.config.seed, result, self.curve())
        return None

    @property
    def metric(self) -> Metric:
        """What the run is compared by."""
        return TASKS[RUNS[self.config.model].task].metric

    def curve(self) -> list[float | None]:
        """The metric after each epoch so far; None where it is not finite."""
        path = self.folder / METRICS
        if not path.is_file():
            return []
        lines = path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line)[f"test_{self.metric.key}"] for line in lines]

    def start(self) -> subprocess.Popen[bytes]:
        """Start the run, or go on with it, in a process of its own."""
        config = self.root / "configs" / f"{self.name}.toml"
        for path in (config, self.log):
            path.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(write_toml(self.config.as_dict()), encoding="utf-8")
        command = [sys.executable, "-m", "training", self.config.model]
        command += ["--config", str(config.resolve()), "--out", str(self.folder.resolve())]
        if (self.folder / LAST).is_file():
            command.append("--resume")
        with self.log.open("ab") as log:
            # a session of its own: Ctrl-C reaches the run once, through this process
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=Path(__file__).resolve().parents[1],
                env={**os.environ, **dict.fromkeys(THREAD_FLAGS, "1")},
                start_new_session=True,
            )


def compare(args: CompareArgs, console: Console) -> int:
    """Run what is not finished, then write the report. Returns the exit code.

    Raises:
        UsageError: if a folder holds another run, or --plot-only finds nothing finished.
    """
    jobs = [Job(config, args.folder) for config in args.runs()]
    todo = [job for job in jobs if job.finished() is None]
    failed: dict[str, int] = {}
    if not args.plot_only and todo:
        if len(todo) < len(jobs):
            console.print(f"{len(jobs) - len(todo)} of {len(jobs)} runs are finished already")
        try:
            failed = _run_all(todo, args, console)
        except KeyboardInterrupt:
            console.print("interrupted; the same command goes on where it stopped", style="yellow")
            return EXIT_INTERRUPTED
    finished = [done for job in jobs if (done := job.finished()) is not None]
    for job in jobs:
        if job.name in failed:
            console.print(
                f"run {job.name} failed (exit code {failed[job.name]}): {_last_line(job.log)}\n"
                f"  all of it: {job.log}",
                style="red",
            )
    if not finished:
        if failed:
            return EXIT_FAILED
        raise UsageError(f"--plot-only: no run in {args.folder} is finished; run without it first")
    summary = summarize(
        args.metric, finished, args.names, failed=[name.rpartition("-s")[0] for name in failed]
    )
    write_report(args.folder, args, summary, finished, console)
    return EXIT_FAILED if failed else 0


def outcome(metric: Metric, result: Mapping[str, Any]) -> str:
    """A result in a few words."""
    value = result[metric.key]
    return f"{metric.key} is not finite" if value is None else metric.show(value)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "it printed nothing")


def _run_all(todo: list[Job], args: CompareArgs, console: Console) -> dict[str, int]:
    """Run jobs side by side; returns the exit codes of those that failed, by name."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = args.jobs or (cpus if args.device == "cpu" else 1)
    waiting = list(todo)
    running: dict[Job, subprocess.Popen[bytes]] = {}
    failed: dict[str, int] = {}
    with _progress(console, len(todo)) as show, _signals_interrupt():
        try:
            while waiting or running:
                while waiting and len(running) < limit:
                    job = waiting.pop(0)
                    running[job] = job.start()
                for job, process in list(running.items()):
                    code = process.poll()
                    if code is None:
                        continue
                    del running[job]
                    if code != 0 or job.finished() is None:
                        failed[job.name] = code
                    show.done(job, code)
                show.update(list(running))
                time.sleep(POLL_S)
        except BaseException:
            for process in running.values():
                process.send_signal(signal.SIGINT)
            for process in running.values():
                process.wait()
            raise
    return failed


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM is as Ctrl-C: the runs, in sessions of their own, would go on without this process.

    Ctrl-C is too where a shell that starts jobs in the background has it ignored, as in a run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    usual = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


@dataclass
class _Show:
    """A bar on a terminal, a line per finished run elsewhere."""

    console: Console
    bar: Progress
    task: TaskID
    total: int
    count: int = 0

    def done(self, job: Job, code: int) -> None:
        self.count += 1
        curve = job.curve()
        end = {job.metric.key: curve[-1]} if code == 0 and curve else None
        text = outcome(job.metric, end) if end else f"exit code {code}"
        self.console.print(f"[{self.count}/{self.total}] {job.name}: {text}")
        self.bar.advance(self.task)

    def update(self, running: list[Job]) -> None:
        parts = []
        for job in running:
            curve = job.curve()
            last = f" {outcome(job.metric, {job.metric.key: curve[-1]})}" if curve else ""
            parts.append(f"{job.name} {len(curve)}/{job.config.epochs}{last}")
        self.bar.update(self.task, description="  ".join(parts))


@contextmanager
def _progress(console: Console, total: int) -> Iterator[_Show]:
    bar = Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        yield _Show(console, bar, bar.add_task("", total=total), total)
