"""What a step of each arm costs while nothing else runs: labels a second, joules, bytes.

Runs of a queue may share a GPU, so their own times and joules say little. Here each arm trains
alone for some seconds after its first steps, which compile and capture. Nothing is evaluated.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from extensor import models
from extensor.backends.registry import get as get_backend

from ..batch import Batch
from ..config import RunConfig
from ..loop import Trainer
from ..rundir import write_json
from ..runs import RUNS
from ..tasks import TASKS
from .alone import RATES, read_rates, recipe_names
from .cost import Meter
from .peers import PEERS, measure_peer
from .queue import Queue

__all__ = ["measure", "measure_rates"]

FIRST, PART = 4, 16
"""Steps before the clock starts, and steps between two looks at it."""


def measure_rates(
    queue: Queue, seconds: float, deadline: float, console: Console, peers: bool = False
) -> None:
    """Measure the arms that a queue is to run, a line each, and keep them in its folder.

    What is measured already is not measured again. One arm's problem is said and kept, and does not
    stop the others.

    Args:
        queue: of an experiment.
        seconds: of each arm.
        deadline: no arm begins when `time.monotonic` is past it.
        console: where it reports.
        peers: whether torch's are measured, too: see `PEERS`.
    """
    experiment, found = queue.experiment, read_rates(queue.folder)
    queue.folder.mkdir(parents=True, exist_ok=True)
    first = experiment.runs(experiment.rates[0])[: len(experiment.arms)]
    configs = {  # a schedule's steps are those of its recipes
        name: replace(config, recipe=name)
        for config in first
        if queue.only is None or config.recipe in queue.only
        for name in recipe_names(config.recipe)
    }
    task: Any = None
    for name in (*configs, *(PEERS if peers else ())):
        if "per_second" in found.get(name, {}):
            continue
        begun = time.monotonic()
        if begun >= deadline:
            console.print("the time for rates is up; the same command goes on")
            return
        task = task or TASKS[RUNS[first[0].model].task](first[0])
        try:
            if name in configs:
                found[name] = measure(configs[name], task, queue.folder, seconds)
            else:
                shape = models.config(first[0].model, first[0].variant, **task.shapes())
                found[name] = measure_peer(name, first[0], shape, _endless(task), seconds)
        except Exception as error:
            found[name] = {"problem": f"{type(error).__name__}: {error}"[:300]}
        write_json(queue.folder / RATES, found)
        shown = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                          for k, v in found[name].items())  # fmt: skip
        console.print(
            f"rate of {name}: {shown} ({time.monotonic() - begun:.1f} s)", highlight=False
        )


def measure(config: RunConfig, task: Any, folder: Path, seconds: float) -> dict[str, Any]:
    """Train for some seconds; on a GPU in captured steps.

    Args:
        config: of the run.
        task: made from it, or from one of the same data.
        folder: where nothing is written.
        seconds: at least.
    """
    backend = get_backend(config.device)
    gc.collect()
    if hasattr(backend.xp, "get_default_memory_pool"):
        backend.xp.get_default_memory_pool().free_all_blocks()
    meter = Meter(os.getpid(), config.device)
    empty = meter.in_use()
    trainer = Trainer(config, folder, task=task, graph=config.device != "cpu")
    batches = _endless(task)
    trainer.advance(itertools.islice(batches, FIRST))
    meter.restart()
    done, loss = 0, None
    while meter.seconds < seconds:
        reports = trainer.advance(itertools.islice(batches, PART))
        done, loss = done + PART, reports[-1].loss
    labels = done * config.batch_size * max(config.context, 1)
    return meter.rate(done, labels, empty) | {"loss": loss}


def _endless(task: Any) -> Iterator[Batch]:
    for epoch in itertools.count(1):
        yield from task.training(epoch, 0)
