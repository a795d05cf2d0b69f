"""What the benchmarks share: contestants that take turns, options, the record of a run.

Idle threads of one library (OpenBLAS, OpenMP) spin for a while and slow the next, so two libraries
timed in one process mislead. In `measure` every contestant is a spawned process that makes its work
and times a burst of it whenever it is asked to; they take turns, with a pause between.

`take_turns` times calls in one process instead, where all of them are of one library or none spins.

A benchmark makes its parser with `options`, parses with `arguments` and leaves its rows with
`write`: on a busy machine nothing is written, because the ratios would mean nothing.
`ci.bench.gpu` has what the GPU benchmarks share.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from extensor.backends.cpu import CpuBackend, make_backend
from extensor.config import num_threads

__all__ = [
    "GPU_PACKAGES", "RESULTS", "ROOT", "Make", "arguments", "command", "cpu_with_core", "gpu_of",
    "measure", "options", "shown", "take_turns", "write", "write_gpu",
]  # fmt: skip

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
GPU_PACKAGES = ("numpy", "torch", "cupy-cuda13x", "cuda-core", "nvidia-cuda-nvrtc")
VARIABLES = ("OMP_NUM_THREADS", "EXTENSOR_NUM_THREADS", "EXTENSOR_CORE")
"""Environment variables that a record's command repeats."""
SETTLE_S = 0.15
"""Pause between turns, for the threads of the one before to go to sleep."""

Make = Callable[..., Callable[[], None]]
"""A module-level function that gives the work to time; called in the contestant's process."""


def _contestant(
    make: Make, arguments: tuple[Any, ...], pipe: Connection, clock: Callable[[], float]
) -> None:
    work = make(*arguments)
    while (burst := pipe.recv()) is not None:
        for _ in range(min(3, burst)):
            work()
        start = clock()
        for _ in range(burst):
            work()
        pipe.send((clock() - start) / burst)


def measure(
    contestants: dict[str, tuple[Make, tuple[Any, ...]]],
    rounds: int,
    burst: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of one run of each contestant's work, in ``rounds`` turns of ``burst``.

    ``clock``: `time.process_time` counts the work of all threads, and of none that waits for a CPU.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for name, (make, arguments) in contestants.items():
        pipes[name], child = context.Pipe()
        call = (make, arguments, child, clock)
        context.Process(target=_contestant, args=call, daemon=True).start()
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


def take_turns(
    calls: dict[str, Callable[[], Any]],
    rounds: int,
    burst: int = 1,
    before: int = 1,
    pause: float = 0.0,
    middle: Callable[[list[float]], float] = statistics.median,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Seconds of each call, the contestants taking turns in this process.

    Args:
        calls: the contestants.
        rounds: turns of each, after one that warms up.
        burst: timed calls of a turn.
        before: calls before those: they take the caches and the CPUs back from the others.
        pause: seconds between turns.
        middle: what stands for all times of a contestant.
        clock: as for `measure`.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            time.sleep(pause)
            for _ in range(before):
                call()
            for _ in range(burst if turn else 0):
                start = clock()
                call()
                times[name].append(clock() - start)
    return {name: middle(values) for name, values in times.items()}


def shown(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows, each printed as soon as it is there."""
    found = []
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        found.append(row)
    return found


def options(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """A parser with ``--rounds``; the first line of ``doc`` describes it."""
    parser = argparse.ArgumentParser(description=str(doc).partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=rounds, help="turns of each contestant")
    return parser


def cpu_with_core() -> tuple[CpuBackend, Any]:
    """The CPU backend and its C++ core, which the benchmarks of kernels need."""
    backend = make_backend()
    if backend.core is None:
        raise SystemExit(f"expected the C++ core, but {backend.core_missing}")
    return backend, backend.core


def arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, with the options that benchmarks share; ``load`` is that before the run."""
    parser.add_argument(
        "--max-load", type=float, default=0.5, help="load average of an idle machine"
    )
    parser.add_argument(
        "--force",
        dest="max_load",
        action="store_const",
        const=math.inf,
        help="write although the load is higher",
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    return argparse.Namespace(**vars(parser.parse_args()), load=os.getloadavg()[0])


def command() -> str:
    """What runs: the variables that are set, the script and its arguments."""
    variables = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    script = Path(sys.argv[0]).resolve().relative_to(ROOT)
    return shlex.join([*variables, "python", script.as_posix(), *sys.argv[1:]])


def gpu_of(xp: Any) -> dict[str, Any]:
    """Name and driver version of cupy's current GPU."""
    runtime = xp.cuda.runtime
    properties = runtime.getDeviceProperties(runtime.getDevice())
    return {"gpu": properties["name"].decode(), "driver": runtime.driverGetVersion()}


def write(
    name: str,
    rows: list[dict[str, Any]],
    level: str = "",
    merge: str = "",
    *,
    args: argparse.Namespace | None = None,
    about: Mapping[str, Any] | None = None,
    packages: Iterable[str] = ("numpy", "torch"),
    ran: str = "",
) -> None:
    """Rows with machine and versions to ``DATE-NAME.json``, unless the machine was busy.

    Args:
        name: the file's name after the date.
        rows: one dict each.
        level: the core's instruction set.
        merge: a key of every row; rows of the day's earlier runs are kept where this run has none
            of the same value, and the commands of those runs are recorded.
        args: from `arguments`: the load before the run, the highest one allowed, the folder.
        about: what else the run depends on, such as the GPU and its driver.
        packages: those whose versions are recorded, where they are installed.
        ran: the command, if not as `command` says.
    """
    if args is not None and args.load > args.max_load:
        print(f"not written: the load average was {args.load:.2f} before; use an idle machine")
        return
    facts: dict[str, Any] = {
        "command": ran or command(),
        "date": str(date.today()),
        "machine": ", ".join(
            [platform.machine(), f"{os.cpu_count()} CPUs", f"{num_threads()} threads"]
            + [level] * bool(level)
        ),
        "versions": {"python": platform.python_version()}
        | {package: found for package in packages if (found := _version(package))},
    }
    if args is not None:
        facts["load_average_before"] = round(args.load, 2)
    path = (args.output if args else RESULTS) / f"{date.today()}-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if merge and path.exists():
        earlier = json.loads(path.read_text())
        rows = _merged(merge, earlier["rows"], rows)
        before = [*earlier["about"].get("earlier_commands", []), earlier["about"]["command"]]
        if others := [text for text in dict.fromkeys(before) if text != facts["command"]]:
            facts["earlier_commands"] = others
    record = {"about": facts | dict(about or {}), "rows": rows}
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path}")


def _merged(key: str, earlier: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[Any]:
    """The rows of both runs, those of the later one where both have rows of one value of a key."""
    groups: dict[Any, list[Any]] = {}
    for run in (earlier, rows):
        found: dict[Any, list[Any]] = {}
        for row in run:
            found.setdefault(row[key], []).append(row)
        groups |= found
    return [row for group in groups.values() for row in group]


def write_gpu(
    name: str,
    rows: list[dict[str, Any]],
    xp: Any,
    merge: str = "",
    *,
    by_kind: bool = True,
    more: Sequence[str] = (),
) -> None:
    """What ran on cupy's current GPU; see `write`.

    Args:
        name: of the file, after the date.
        rows: one dict each.
        xp: cupy.
        merge: as in `write`.
        by_kind: a file for each kind of GPU, such as "NVIDIA H200".
        more: packages whose versions are recorded, too.
    """
    about = gpu_of(xp)
    if by_kind:
        kind = re.sub(r"\W+", "-", about["gpu"].removeprefix("NVIDIA ").lower())
        name = f"{name}-{kind}"
    write(name, rows, merge=merge, about=about, packages=(*GPU_PACKAGES, *more))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
