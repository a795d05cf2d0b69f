"""The command `observe`: run an experiment as far as the time goes, and write its page."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from extensor.errors import unknown_name

from ..rundir import write_json
from .devices import places
from .experiments import EXPERIMENTS
from .gather import gather
from .page import write_page
from .queue import QUEUE, Queue
from .rates import measure_rates

__all__ = ["ObserveArgs", "observe"]


@dataclass(frozen=True)
class ObserveArgs:
    """An experiment, and how long to work on it now."""

    experiment: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="EXPERIMENT")]
    """Which one (listed above)."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder for the runs, queue.json, results.json and index.html; by default
    runs/observe-<experiment>."""
    minutes: float = 25.0
    """Stop after so many minutes: the run under way is interrupted and saved; the same command goes
    on. 0 runs nothing and gathers what is finished."""
    arms: tuple[str, ...] = ()
    """Only these arms now, as `--arms bf16 mxfp4 mxfp4,bf16@90%`; none are all."""
    seeds: int = 0
    """Only so many seeds of each arm now; 0 is all."""
    first_seed: int = 0
    """Begin with this seed, to leave those before it to another machine."""
    gpus: int = 1
    """GPUs to use, of those that this process sees (CUDA_VISIBLE_DEVICES); each run has one."""
    jobs: int = 1
    """Runs side by side on each GPU, or on a CPU. Their times are not those of a run alone: see
    --rates."""
    whole_runs: bool = False
    """Begin only runs that are expected to end within --minutes: for machines that do not keep the
    checkpoint of an interrupted run."""
    rates: float = 0.0
    """Before the runs, train each arm alone for so many seconds and note labels a second, joules
    and bytes; what is in rates.json already is not measured again."""

    peers: bool = False
    """With --rates: also torch.compile in bfloat16 and torchao's float8 on the same model and
    batches, for texts."""

    def __post_init__(self) -> None:
        if self.experiment not in EXPERIMENTS:
            raise ValueError(unknown_name("experiment", self.experiment, EXPERIMENTS))
        for flag, value in (("--minutes", self.minutes), ("--rates", self.rates)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{flag}: expected a number, 0 or more, got {value}")
        for flag, count in (("--seeds", self.seeds), ("--first-seed", self.first_seed)):
            if count < 0:
                raise ValueError(f"{flag}: expected a whole number, 0 or more, got {count}")
        if self.first_seed >= (seeds := EXPERIMENTS[self.experiment].seeds):
            raise ValueError(f"--first-seed: expected one below {seeds}, got {self.first_seed}")
        for flag, number in (("--gpus", self.gpus), ("--jobs", self.jobs)):
            if number < 1:
                raise ValueError(f"{flag}: expected a whole number, 1 or more, got {number}")
        for arm in self.arms:
            if arm not in EXPERIMENTS[self.experiment].arms:
                raise ValueError(unknown_name("arm", arm, EXPERIMENTS[self.experiment].arms))


def observe(args: ObserveArgs, console: Console) -> int:
    """Say what is planned, run, gather, write. Returns 0 if everything is finished, else 1.

    Raises:
        UsageError: if a folder holds another run, or there are fewer GPUs.
    """
    folder = args.out or Path("runs") / f"observe-{args.experiment}"
    experiment = EXPERIMENTS[args.experiment]
    queue = Queue(experiment, folder, args.arms or None, args.seeds, args.first_seed)
    where = places(args.gpus, args.jobs, experiment.settings.get("device", "cpu"))
    start = time.monotonic()
    if args.rates:
        end = start + 60 * args.minutes if args.minutes else float("inf")
        measure_rates(queue, args.rates, end, console, args.peers)
    if args.minutes:
        for line in queue.plan(args.minutes, len(where)):
            console.print(f"plan: {line}", highlight=False)
    left = args.minutes - (time.monotonic() - start) / 60
    done = queue.run(max(left, 0.0), console, where, args.whole_runs)
    results = gather(queue)
    write_json(folder / "results.json", results)
    write_page(results, folder / "index.html")
    entries = queue.entries()
    finished = sum(entry.state == "finished" for entry in entries)
    following = queue.next()
    console.print(f"{finished} of {len(entries)} runs known so far are finished; {folder / QUEUE}")
    if following is not None:
        console.print(f"next: {following.name}; the same command goes on")
    console.print(str(folder / "index.html"))
    return 0 if done else 1
