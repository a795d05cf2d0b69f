"""What a comparison is: one model, several recipes, several seeds; each run and its files."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from extensor.quant.recipes import get_recipe

from .config import RunConfig
from .rundir import UsageError, another_run, find_checkpoint, read_config, read_epochs, read_result
from .runs import RUNS
from .settings import Settings
from .tasks import TASKS, Metric
from .toml import write_toml

__all__ = ["CompareArgs", "CompareFlags", "Finished", "Job"]

THREAD_FLAGS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "EXTENSOR_NUM_THREADS",
)


@dataclass(frozen=True, kw_only=True)
class CompareFlags:
    """The flags of a comparison that are not settings of its runs."""

    recipes: str = "fp32,mxfp8,mxfp4,nvfp4"
    """Recipes, separated by commas; any name listed above, ablations too. The gap is measured
    against fp32 (texts: bf16), where it is among them."""
    seeds: int = 3
    """How many seeds: 0, 1, 2, ..."""
    jobs: int = 0
    """Runs side by side, one thread each; 0 is one per CPU (and 1 on a GPU)."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder for the runs, the table, the plot and the JSON; by default
    runs/compare-<model>-<dataset>."""
    plot_only: bool = False
    """Run nothing; draw the table and the plot of what is finished."""


@dataclass(frozen=True, kw_only=True)
class CompareArgs(CompareFlags, Settings):
    """A comparison; the settings hold for every run."""

    model: str

    def __post_init__(self) -> None:
        super().__post_init__()
        for flag, value, least in (("--seeds", self.seeds, 1), ("--jobs", self.jobs, 0)):
            if value < least:
                raise ValueError(f"{flag}: expected a whole number, {least} or more, got {value}")
        self.check_model(self.model)
        if not self.names:
            raise ValueError("--recipes: expected names separated by commas, got none")
        full = {get_recipe(name).name for name in self.names}
        if len(full) < len(self.names):
            raise ValueError(
                f"--recipes: expected each recipe once, got {self.recipes!r}; of two files with "
                "the same name, let one say another inside, as in name = 'mine'"
            )

    @property
    def names(self) -> list[str]:
        """The recipes' names as given."""
        return [name.strip() for name in self.recipes.split(",") if name.strip()]

    @property
    def folder(self) -> Path:
        """Folder of the comparison."""
        return self.out or Path("runs") / f"compare-{self.model}-{self.dataset}"

    @property
    def metric(self) -> Metric:
        """What the runs are compared by."""
        metric: Metric = TASKS[RUNS[self.model].task].metric
        return metric

    @property
    def title(self) -> str:
        """Short description of the comparison."""
        length = f"{self.epochs} epoch{'s' if self.epochs > 1 else ''}"
        if self.epoch_steps:
            length = f"{self.epochs * self.epoch_steps:,} steps"
        return f"{self.model} on {self.dataset}, {length}, {self.seeds} seeds"

    def runs(self) -> list[RunConfig]:
        """One run per seed and recipe; all recipes of a seed come before the next seed."""
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(Settings)}
        return [
            RunConfig(**shared, model=self.model, recipe=recipe, seed=seed)
            for seed in range(self.seeds)
            for recipe in self.names
        ]


@dataclass(frozen=True)
class Finished:
    """One finished run: its result.json, and the metric after each epoch (None: not finite)."""

    recipe: str
    seed: int
    result: dict[str, Any]
    curve: list[float | None]


@dataclass(frozen=True)
class Job:
    """One run of the comparison and its files; ``flags`` are of `train`, beside its settings."""

    config: RunConfig
    root: Path
    metric: Metric
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Recipe and seed."""
        return f"{self.config.recipe_label}-s{self.config.seed}"

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
        if not self.folder.exists() or not any(self.folder.iterdir()):
            return None
        if (saved := read_config(self.folder)) != self.config:
            raise UsageError(
                f"{another_run(self.folder, saved, self.config)}; the way out: another --out, or "
                "the settings of before"
            )
        result = read_result(self.folder)
        if result is None:
            return None
        return Finished(self.config.recipe, self.config.seed, result, self.curve())

    def curve(self) -> list[float | None]:
        """The metric after each epoch so far; None where it is not finite."""
        key = f"test_{self.metric.key}"
        return [getattr(report, key) for report in read_epochs(self.folder)]

    def start(self, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start the run, or go on with it, in a process of its own.

        Args:
            environment: variables beside this process's.
        """
        config = self.root / "configs" / f"{self.name}.toml"
        for path in (config, self.log):
            path.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(write_toml(self.config.as_dict()), encoding="utf-8")
        # What this process imports, in its order, and nothing from the folder it stands in (-P).
        imports = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-P", "-m", "extensor.training", self.config.model]
        command += ["--config", str(config.resolve()), "--out", str(self.folder.resolve())]
        command += self.flags
        if find_checkpoint(self.folder) is not None:
            command.append("--resume")
        with self.log.open("ab") as log, interruptible():
            # a session of its own: Ctrl-C reaches the run once, through this process
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    **imports,
                    **dict.fromkeys(THREAD_FLAGS, "1"),
                    **(environment or {}),
                },
                start_new_session=True,
            )

    def last_line(self) -> str:
        """The last thing that the run printed."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.strip()), "it printed nothing")


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Processes started inside take SIGINT, also where a shell told this one to ignore it."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if not ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
