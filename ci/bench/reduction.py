"""Gradient reduction over MPI: time and bytes of each ``--grad-comm`` beside MPI_Allreduce.

    mpirun --oversubscribe -n 2 python ci/bench/reduction.py

Every rank has a gradient of 100 MB in buckets of 4 MiB, as training has them. All ways take turns,
and a figure is the median over rounds of the slowest rank. Rank 0 also times each way on one rank
alone: the cost of its integers without any bytes. Written to ci/bench/results/ with the number of
ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ci.bench.contest import arguments, options, write
from extensor.distributed import GRAD_COMM, LocalCommunicator, connect, make_reduction

VALUES, BUCKET = 25 << 20, 1 << 20


def run(reductions: list[Any], grad: np.ndarray, out: np.ndarray, ranks: int) -> None:
    """Sum all buckets, each collective started in turn, as training does."""
    works = []
    for number, reduction in enumerate(reductions):
        part = slice(number * BUCKET, (number + 1) * BUCKET)
        reduction.add(grad[part])
        works.append(reduction.all_reduce(out[part], ranks))
    while works:
        works = [work for work in works if not work.advance()]


def allreduce(ranks: Any, grad: np.ndarray, out: np.ndarray) -> None:
    """MPI's own sum of the same buckets."""
    out[:] = grad
    works = [ranks.all_reduce(out[at : at + BUCKET]) for at in range(0, VALUES, BUCKET)]
    for work in works:
        work.wait()


def main() -> None:
    """Measure, print and write."""
    args = arguments(options(__doc__, rounds=7))
    ranks = connect()
    grad = np.random.default_rng(ranks.rank).standard_normal(VALUES, dtype=np.float32)
    out = np.empty_like(grad)
    calls: dict[str, Callable[[], None]] = {
        "MPI_Allreduce float32": partial(allreduce, ranks, grad, out)
    }
    sent = {"MPI_Allreduce float32": 8 * VALUES * (ranks.size - 1) / ranks.size}
    alone: dict[str, list[Any]] = {}
    for name in GRAD_COMM:
        made = [make_reduction(name, BUCKET, ranks) for _ in range(VALUES // BUCKET)]
        calls[name] = partial(run, made, grad, out, ranks.size)
        sent[name] = sum(reduction.wire_bytes() for reduction in made)
        one = LocalCommunicator()
        alone[name] = [make_reduction(name, BUCKET, one) for _ in range(VALUES // BUCKET)]
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    codec: dict[str, list[float]] = {name: [] for name in alone}
    for turn in range(args.rounds + 1):
        for name, call in calls.items():
            ranks.barrier()
            began = time.perf_counter()
            call()
            took = np.array([time.perf_counter() - began])
            ranks.all_reduce(took, "max").wait()
            if turn:
                seconds[name].append(float(took[0]))
        for name, reductions in alone.items():
            ranks.barrier()
            began = time.perf_counter()
            run(reductions, grad, out, 1)
            if turn:
                codec[name].append(time.perf_counter() - began)
    rows = []
    base = float(np.median(seconds["MPI_Allreduce float32"]))
    for name, times in seconds.items():
        median = float(np.median(times))
        row = {
            "ranks": ranks.size, "name": name, "ms": round(median * 1e3, 1),
            "megabytes_sent": round(sent[name] / 1e6, 1), "of_allreduce": round(base / median, 2),
            "alone_ms": round(float(np.median(codec[name])) * 1e3, 1) if name in codec else None,
        }  # fmt: skip
        rows.append(row)
        if ranks.rank == 0:
            print(row, flush=True)
    if ranks.rank == 0:
        write(f"reduction-{ranks.size}-ranks", rows, "mpi", args=args)
    ranks.barrier()


if __name__ == "__main__":
    main()
