"""LeNet-5 training steps: extensor against torch eager, and the MXFP4 recipe against float32.

    python ci/bench/lenet_step.py                    # the C++ core
    EXTENSOR_CORE=0 python ci/bench/lenet_step.py    # numpy only

A step is forward, loss, backward and SGD with momentum, on random images, on the same number of
threads for all (see contest.py for how they take turns). Medians are reported and written, with
machine and versions, to ci/bench/results/. Needs torch (extra ``bench``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

import extensor as et
from ci.bench.contest import measure, write
from extensor.config import num_threads, use_core
from extensor.nn.quantize import apply_recipe
from extensor.optim import SGD
from models.lenet.configs import LeNetConfig
from models.lenet.model import build


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


def contestant(name: str, batch: int) -> Callable[[], None]:
    """The step of ``name``, torch or a recipe of ours."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((batch, 1, 28, 28)).astype(np.float32)
    labels = rng.integers(0, 10, batch)
    return theirs(images, labels) if name == "torch" else ours(name, images, labels)


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
        seconds = measure(
            {name: (contestant, (name, batch)) for name in names}, args.rounds, max(1, 640 // batch)
        )
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
    write(
        f"lenet-step-{core}", f"EXTENSOR_CORE={int(use_core())} python ci/bench/lenet_step.py", rows
    )


if __name__ == "__main__":
    main()
