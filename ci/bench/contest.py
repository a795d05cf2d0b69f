"""Contestants in turns, each in a process of its own.

Idle threads of one library (OpenBLAS, OpenMP) spin for a while and slow the next, so two libraries
timed in one process mislead. Here every contestant is a spawned process that makes its work and
times a burst of it whenever it is asked to; they take turns, with a pause between.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from extensor.config import num_threads

__all__ = ["Make", "gpu_of", "measure", "write"]

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("numpy", "torch")
GPU_PACKAGES = ("cupy-cuda13x", "cuda-core", "nvidia-cuda-nvrtc")
SETTLE_S = 0.15
"""Pause between turns, for the threads of the one before to go to sleep."""

Make = Callable[..., Callable[[], None]]
"""A module-level function that gives the work to time; called in the contestant's process."""


def _contestant(make: Make, arguments: tuple[Any, ...], pipe: Connection) -> None:
    work = make(*arguments)
    while (burst := pipe.recv()) is not None:
        for _ in range(min(3, burst)):
            work()
        start = time.perf_counter()
        for _ in range(burst):
            work()
        pipe.send((time.perf_counter() - start) / burst)


def measure(
    contestants: dict[str, tuple[Make, tuple[Any, ...]]], rounds: int, burst: int
) -> dict[str, float]:
    """Median seconds of one run of each contestant's work, in ``rounds`` turns of ``burst``."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for name, (make, arguments) in contestants.items():
        pipes[name], child = context.Pipe()
        context.Process(target=_contestant, args=(make, arguments, child), daemon=True).start()
    for turn in range(rounds + 1):
        for name, pipe in pipes.items():
            pipe.send(burst)
            value = pipe.recv()
            if turn:  # the first turn warms up
                times[name].append(value)
            time.sleep(SETTLE_S)
    for pipe in pipes.values():
        pipe.send(None)
    return {name: statistics.median(values) for name, values in times.items()}


def _has(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def gpu_of(xp: Any) -> dict[str, Any]:
    """Name and driver version of cupy's current GPU."""
    runtime = xp.cuda.runtime
    properties = runtime.getDeviceProperties(runtime.getDevice())
    return {"gpu": properties["name"].decode(), "driver": runtime.driverGetVersion()}


def write(
    name: str,
    command: str,
    rows: list[dict[str, Any]],
    level: str = "",
    load: float | None = None,
    merge: str = "",
    gpu: dict[str, Any] | None = None,
) -> None:
    """Rows with machine and versions to ``results/DATE-NAME.json``.

    Args:
        name: the file's name after the date.
        command: what was run.
        rows: one dict each.
        level: the core's instruction set.
        load: the load average before the run.
        merge: a key of every row; rows of the day's earlier runs are kept where this run has none
            of the same value.
        gpu: name and driver of the GPU that ran it, from `gpu_of`; they stand for the machine.
    """
    machine = [platform.machine(), f"{os.cpu_count()} CPUs", f"{num_threads()} threads"]
    about: dict[str, Any] = {
        "command": command,
        "date": str(date.today()),
        **(gpu or {"machine": ", ".join(machine + [level] * bool(level))}),
        "versions": {n: version(n) for n in (*PACKAGES, *GPU_PACKAGES * bool(gpu)) if _has(n)},
    }
    if load is not None:
        about["load_average_before"] = round(load, 2)
    path = RESULTS / f"{date.today()}-{name}.json"
    path.parent.mkdir(exist_ok=True)
    if merge and path.exists():
        kept = {row[merge]: row for row in json.loads(path.read_text())["rows"]}
        rows = list((kept | {row[merge]: row for row in rows}).values())
    path.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    print(f"written to {path}")
