"""LeNet-5 training steps: extensor against torch eager, and the MXFP4 recipe against float32.

    python ci/bench/lenet_step.py                    # the C++ core
    EXTENSOR_CORE=0 python ci/bench/lenet_step.py    # numpy only

A step is forward, loss, backward and SGD with momentum, on random images. Each contestant has a
process of its own, because idle threads of one library (OpenBLAS, OpenMP) spin for a while and
slow the next; they take turns, all on the same number of threads. Medians are reported and written,
with machine and versions, to ci/bench/results/. Needs torch (extra ``bench``).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import extensor as et
from extensor.config import num_threads, use_core
from extensor.nn.quantize import apply_recipe
from extensor.optim import SGD
from models.lenet.configs import LeNetConfig
from models.lenet.model import build

RESULTS = Path(__file__).parent / "results"
SETTLE_S = 0.15
"""Pause between turns, for the threads of the one before to go to sleep."""


def ours(recipe: str, images: np.ndarray, labels: np.ndarray) -> Callable[[], None]:
    """One step of our LeNet under a recipe."""
    model = build(LeNetConfig(), np.random.default_rng(0))
    state = apply_recipe(model, recipe)
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    x, y = et.from_numpy(images), et.from_numpy(labels)

    def step() -> None:
        state.step += 1
        optimizer.zero_grad()
        et.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def theirs(images: np.ndarray, labels: np.ndarray) -> Callable[[], None]:
    """One step of torch's."""
    import torch

    torch.set_num_threads(num_threads())
    nn = torch.nn
    model = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    x, y = torch.from_numpy(images), torch.from_numpy(labels)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def contestant(name: str, batch: int, pipe: Connection) -> None:
    """A process: makes its step, then times a burst of steps whenever it is asked to."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((batch, 1, 28, 28)).astype(np.float32)
    labels = rng.integers(0, 10, batch)
    step = theirs(images, labels) if name == "torch" else ours(name, images, labels)
    while (burst := pipe.recv()) is not None:
        for _ in range(3):
            step()
        start = time.perf_counter()
        for _ in range(burst):
            step()
        pipe.send((time.perf_counter() - start) / burst)


def measure(names: list[str], batch: int, rounds: int, burst: int) -> dict[str, float]:
    """Median seconds per step, in turns of ``burst`` steps."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    times: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        pipes[name], child = context.Pipe()
        context.Process(target=contestant, args=(name, batch, child), daemon=True).start()
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


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", default="mxfp4,mxfp8_nvidia,nvfp4_nvidia")
    parser.add_argument("--batches", default="64,256")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for batch in (int(n) for n in args.batches.split(",")):
        names = ["torch", "fp32", *(name for name in args.recipes.split(",") if name)]
        seconds = measure(names, batch, args.rounds, max(1, 640 // batch))
        for name, value in seconds.items():
            rows.append(
                {
                    "batch": batch,
                    "step": name,
                    "ms": round(value * 1e3, 3),
                    "images_per_s": round(batch / value),
                    "speed_against_torch": round(seconds["torch"] / value, 3),
                    "time_against_fp32": round(value / seconds["fp32"], 3),
                }
            )
            print(
                "batch {batch:>4}  {step:<14} {ms:8.2f} ms  {images_per_s:>7} images/s  "
                "{speed_against_torch:5.2f}x torch's speed  "
                "{time_against_fp32:5.2f}x our float32 time".format(**rows[-1])
            )
    core = "core" if use_core() else "numpy"
    path = RESULTS / f"{date.today()}-lenet-step-{core}.json"
    path.parent.mkdir(exist_ok=True)
    about = {
        "command": f"EXTENSOR_CORE={int(use_core())} python ci/bench/lenet_step.py",
        "date": str(date.today()),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {num_threads()} threads",
        "versions": {"numpy": np.__version__, "torch": version("torch")},
    }
    path.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
