"""Training steps of image models: extensor against torch eager, and recipes against float32.

    python ci/bench/image_step.py                                     # LeNet-5, the C++ core
    EXTENSOR_CORE=0 python ci/bench/image_step.py                     # numpy only
    python ci/bench/image_step.py --model resnet --batches 16 --recipes mxfp8_nvidia --rounds 5

A step is forward, loss, backward and SGD with momentum, on random images, on the same number of
threads for all (see contest.py for how they take turns). Medians are reported and written, with
machine and versions, to ci/bench/results/. Needs torch (extra ``bench``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ci.bench.contest import arguments, measure, options, write
from ci.bench.torch_models import torch_lenet, torch_resnet
from ci.bench.train_step import our_step, torch_step
from extensor import models
from extensor.config import use_core
from extensor.optim import SGD

SHAPES = {"lenet": (1, 28, 28), "resnet": (3, 32, 32)}
"""The images of each model: LeNet-5, and ResNet-18 as it is trained on CIFAR-10."""
MOMENTUM: dict[str, Any] = {"lr": 0.02, "momentum": 0.9}


def contestant(model: str, name: str, batch: int) -> Callable[[], None]:
    """The step of ``name``, torch or a recipe of ours."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((batch, *SHAPES[model])).astype(np.float32)
    labels = rng.integers(0, 10, batch)
    if name != "torch":
        ours = models.build(model, models.config(model), np.random.default_rng(0))
        return our_step(ours, name, partial(SGD, **MOMENTUM), images, labels)
    import torch

    peer = {"lenet": torch_lenet, "resnet": torch_resnet}[model]()
    return torch_step(peer, partial(torch.optim.SGD, **MOMENTUM), images, labels)


def main() -> None:
    """Measure, print and write."""
    parser = options(__doc__, rounds=15)
    parser.add_argument("--model", choices=SHAPES, default="lenet")
    parser.add_argument("--recipes", default="mxfp4,mxfp8_nvidia,nvfp4_nvidia")
    parser.add_argument("--batches", default="64,256")
    args = arguments(parser)
    rows: list[dict[str, Any]] = []
    for batch in (int(n) for n in args.batches.split(",")):
        names = ["torch", "fp32", *(name for name in args.recipes.split(",") if name)]
        burst = max(1, 640 // batch) if args.model == "lenet" else 1
        seconds = measure(
            {name: (contestant, (args.model, name, batch)) for name in names}, args.rounds, burst
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
    write(f"{args.model}-step-{core}", rows, args=args)


if __name__ == "__main__":
    main()
