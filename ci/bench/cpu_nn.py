"""Softmax, its logarithm and cross-entropy, forward and backward, beside torch's.

    OMP_NUM_THREADS=2 python ci/bench/cpu_nn.py

Rows of float32 scores: LeNet's classes, ImageNet's, the characters of a small GPT, GPT-2's tokens.
Through the public functions, the tape included, extensor and torch eager each in a process of its
own on the same threads (see contest.py); goal: torch's speed. Needs torch (extra ``bench``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import extensor as et
from ci.bench.contest import arguments, cpu_with_core, measure, options, write
from extensor.config import num_threads

SHAPES = ((256, 10), (768, 65), (4096, 1000), (2048, 50257))
OPERATIONS = ("softmax", "log_softmax", "cross_entropy")
VALUES = 1 << 20
"""Smaller arrays are passed several times a turn, about so many values in all."""


def work(library: str, operation: str, shape: tuple[int, int]) -> Callable[[], None]:
    """Forward and backward of one operation on fresh leaves over the same memory."""
    rng = np.random.default_rng(0)
    scores = rng.standard_normal(shape, dtype=np.float32)
    labels = rng.integers(0, shape[1], shape[0])
    x: Any
    y: Any
    one: Any
    run: Any
    if library == "torch":
        import torch

        torch.set_num_threads(num_threads())
        x, y = torch.from_numpy(scores).requires_grad_(), torch.from_numpy(labels)
        run = getattr(torch.nn.functional, operation)
        one = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
    else:
        x, y = et.ExTensor(scores, requires_grad=True), et.ExTensor(labels)
        run = getattr(et, operation)
        one = et.ExTensor(rng.standard_normal(shape, dtype=np.float32))

    def call() -> None:
        for _ in range(max(1, VALUES // scores.size)):
            x.grad = None
            if operation == "cross_entropy":
                run(x, y).backward()
            else:
                run(x, -1).backward(one)

    return call


def main() -> None:
    """Measure, print and write."""
    parser = options(__doc__, rounds=7)
    parser.add_argument("--only", default="", help="shapes and operations with this in their name")
    args = arguments(parser)
    _, core = cpu_with_core()
    rows = []
    for shape in SHAPES:
        for operation in OPERATIONS:
            name = f"{shape[0]} x {shape[1]} {operation}"
            if args.only not in name:
                continue
            times = max(1, VALUES // (shape[0] * shape[1]))
            seconds = measure(
                {library: (work, (library, operation, shape)) for library in ("torch", "extensor")},
                args.rounds,
                1 if times == 1 else 5,
            )
            micro = {library: round(s / times * 1e6, 1) for library, s in seconds.items()}
            speed = round(seconds["torch"] / seconds["extensor"], 2)
            rows.append({"work": name, "microseconds": micro, "speed_against_torch": speed})
            print(
                f"{name:<28}{micro['extensor']:11.1f} us   torch {micro['torch']:11.1f} us   "
                f"{speed:5.2f}x torch's speed",
                flush=True,
            )
    write("cpu-nn", rows, core.level(), merge="work", args=args)


if __name__ == "__main__":
    main()
