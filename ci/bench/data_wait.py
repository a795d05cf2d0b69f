"""Does LeNet-5 wait for its data? Shares of an epoch's seconds in which no batch was ready.

    python ci/bench/data_wait.py
    python ci/bench/data_wait.py --batches 64 --augment none,strong

A run of `python -m training lenet` on so many images: what its loop measures as ``waited``, with
batches made ahead by a thread, beside the milliseconds that making one batch takes by itself and
that a step takes in all. Written to ci/bench/results/. The goal: at most 5% waited.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from ci.bench.contest import arguments, write
from extensor.training.config import RunConfig
from extensor.training.data import AUGMENTATIONS, DATASETS
from extensor.training.loop import Trainer
from extensor.training.runs import defaults

GOAL = 0.05


def measured(dataset: str, augment: str, batch: int, images: int, recipe: str) -> dict[str, Any]:
    """One epoch of LeNet-5."""
    settings = {"epochs": 2, "batch_size": batch, "train_limit": images, "test_limit": batch}
    extra = {"augment": augment, "recipe": recipe, "warmup_epochs": 0.0}
    config = RunConfig(**{**defaults("lenet", dataset), **settings, **extra})
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, Path(folder))
        trainer.fit()
    clock = time.perf_counter()
    steps = sum(1 for _ in trainer.task.training(1, 0))
    alone = time.perf_counter() - clock
    last = trainer.history[-1]  # the first epoch also warms up
    return {
        "dataset": dataset,
        "augment": augment,
        "recipe": recipe,
        "batch": batch,
        "step_ms": round(1e3 * last.seconds / steps, 3),
        "making_a_batch_ms": round(1e3 * alone / steps, 3),
        "waited": round(last.waited, 4),
        "met": last.waited <= GOAL,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="digits", choices=list(DATASETS))
    parser.add_argument("--batches", default="64,256")
    parser.add_argument("--augment", default=",".join(AUGMENTATIONS))
    parser.add_argument("--recipes", default="fp32,mxfp4")
    parser.add_argument("--images", type=int, default=1024)
    args = arguments(parser)
    rows = []
    for recipe in args.recipes.split(","):
        for batch in (int(n) for n in args.batches.split(",")):
            for augment in args.augment.split(","):
                rows.append(measured(args.dataset, augment, batch, args.images, recipe))
                print(
                    "{recipe:<8} batch {batch:>4}  {augment:<7} {step_ms:8.2f} ms a step, "
                    "{making_a_batch_ms:6.2f} ms a batch by itself, waited {waited:.1%}".format(
                        **rows[-1]
                    )
                )
    write("data-wait", rows, args=args)


if __name__ == "__main__":
    main()
