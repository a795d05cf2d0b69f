"""Data parallelism over MPI: two ranks of one thread beside one process of two threads.

    python ci/bench/distributed.py

Whole training runs take turns: one process with one micro-batch, one process with two, and two
ranks with one each, as users start them. A run's figure is its best epoch after the first, and a
row's figure the median over rounds.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from ci.bench.contest import arguments, options, shown, write

BESIDE = Path(sys.executable).parent / "mpirun"
MPIRUN = str(BESIDE) if BESIDE.exists() else shutil.which("mpirun") or "mpirun"
RUNS = {
    "GPT": ("--dataset", "python_source", "--epochs", "4", "--epoch-steps", "40"),
    "LeNet": ("--epochs", "8",),
}  # fmt: skip
WAYS = {"2 threads": (1, 2, 1), "2 threads and 2 micro-batches": (1, 2, 2),
        "2 ranks of a thread": (2, 1, 2)}  # fmt: skip
"""Ranks, threads of a rank, micro-batches."""


def epoch_seconds(run: str, ranks: int, threads: int, parts: int) -> float:
    """The best epoch of a run after the first, in seconds of training."""
    start = (MPIRUN, "--oversubscribe", "-n", str(ranks)) if ranks > 1 else ()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *start,
            sys.executable,
            "-m",
            "extensor.training",
            run.lower(),
            "--recipe",
            "mxfp4",
        ]
        command += [*RUNS[run], "--micro-batches", str(parts), "--out", f"{folder}/run"]
        env = {**os.environ, "EXTENSOR_NUM_THREADS": str(threads)}
        env |= dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        lines = Path(folder, "run", "metrics.jsonl")
        if not lines.is_file():
            raise SystemExit(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        seconds = [json.loads(line)["seconds"] for line in lines.read_text().splitlines()]
    return float(min(seconds[1:]))


def main() -> None:
    """Measure, print and write."""
    args = arguments(options(__doc__, rounds=3))
    rows = []
    for run in RUNS:
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way, numbers in WAYS.items():
                times[way].append(epoch_seconds(run, *numbers))
        found = {way: statistics.median(values) for way, values in times.items()}
        base = found[next(iter(WAYS))]
        rows += [
            {
                "model": run,
                "name": way,
                "epoch_s": round(s, 3),
                "of_one_process": round(base / s, 3),
            }
            for way, s in found.items()
        ]
    write("distributed", list(shown(rows)), "mpi", args=args, packages=("numpy", "mpi4py"))


if __name__ == "__main__":
    main()
