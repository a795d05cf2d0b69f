"""Data parallelism over MPI: two ranks of one thread beside one process of two threads.

    python ci/bench/distributed.py [--models LeNet] [--rounds 7]

Whole training runs take turns, as users start them: one process with one micro-batch, two ranks
with one each, and one process with two. Every second round goes the other way round. A run's figure
is the median of its epochs after the first. A row's is the median over rounds, and so is its
`of_one_process`, the first way's figure of the same round divided by its own; `rounds` says those
ratios in order, from the least.
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
    "LeNet": ("--epochs", "16",),
}  # fmt: skip
WAYS = {"2 threads": (1, 2, 1), "2 ranks of a thread": (2, 1, 2),
        "2 threads and 2 micro-batches": (1, 2, 2)}  # fmt: skip
"""Ranks, threads of a rank, micro-batches."""


def epoch_seconds(run: str, ranks: int, threads: int, parts: int) -> float:
    """The median epoch of a run after the first, in seconds of training."""
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
    return float(statistics.median(seconds[1:]))


def main() -> None:
    """Measure, print and write."""
    parser = options(__doc__, rounds=5)
    parser.add_argument("--models", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    args = arguments(parser)
    rows = []
    for run in args.models:
        times: dict[str, list[float]] = {way: [] for way in args.ways}
        for number in range(args.rounds):
            for way in args.ways[:: -1 if number % 2 else 1]:
                times[way].append(epoch_seconds(run, *WAYS[way]))
            print(run, {way: round(s[-1], 4) for way, s in times.items()}, flush=True)
        for way, seconds in times.items():
            ratios = [a / b for a, b in zip(times[args.ways[0]], seconds, strict=True)]
            rows.append(
                {
                    "model": run,
                    "name": way,
                    "epoch_s": round(statistics.median(seconds), 3),
                    "of_one_process": round(statistics.median(ratios), 3),
                    "rounds": " ".join(f"{ratio:.2f}" for ratio in sorted(ratios)),
                }
            )
    write("distributed", list(shown(rows)), "mpi", args=args, packages=("numpy", "mpi4py"))


if __name__ == "__main__":
    main()
