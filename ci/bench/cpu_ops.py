"""Single operations, forward and backward, through the public functions, beside torch's.

    OMP_NUM_THREADS=1 python ci/bench/cpu_ops.py --only overhead
    OMP_NUM_THREADS=2 python ci/bench/cpu_ops.py --only losses

overhead  64 x 64 float32: at this size nearly all of the time is Python, checks and the tape
losses    softmax, its logarithm and cross-entropy of rows of scores: LeNet's classes, ImageNet's,
          the characters of a small GPT, GPT-2's tokens; goal: torch's speed

extensor and torch eager each have a process of their own, on the same threads (see contest.py).
Needs torch (extra ``bench``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import extensor as et
from ci.bench.contest import arguments, cpu_with_core, measure, options, shown, write
from extensor.config import num_threads

SHAPES = ((256, 10), (768, 65), (4096, 1000), (2048, 50257))
LOSSES = ("softmax", "log_softmax", "cross_entropy")
OVERHEAD: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "matmul": lambda a, b: a @ b,
    "relu": lambda a, b: a.relu(),
    "exp": lambda a, b: a.exp(),
    "sum": lambda a, b: a.sum(),
    "reshape": lambda a, b: a.reshape((32, 128)),
    "index": lambda a, b: a[3],
}
VALUES = 1 << 20
"""Smaller arrays are passed several times a call, about so many values in all."""


def work(library: str, operation: str, shape: tuple[int, int]) -> Callable[[], None]:
    """Forward and backward of one operation on leaves over the same memory."""
    rng = np.random.default_rng(0)
    arrays: list[Any] = [rng.uniform(0.5, 1, shape).astype(np.float32) for _ in range(2)]
    labels: Any = rng.integers(0, shape[1], shape[0])
    functions: Any = et
    if library == "torch":
        import torch

        torch.set_num_threads(num_threads())
        functions = torch.nn.functional
        arrays, labels = [torch.from_numpy(a) for a in arrays], torch.from_numpy(labels)
        a, b = (x.requires_grad_() for x in arrays)
    else:
        a, b = (et.ExTensor(x, requires_grad=True) for x in arrays)
        labels = et.ExTensor(labels)

    def forward() -> Any:
        if operation in OVERHEAD:
            return OVERHEAD[operation](a, b)
        run = getattr(functions, operation)
        return run(a, labels) if operation == "cross_entropy" else run(a, -1)

    out = forward().detach()
    ones = np.ones(tuple(out.shape), np.float32)
    one = torch.from_numpy(ones) if library == "torch" else et.ExTensor(ones)

    def calls() -> None:
        for _ in range(_repeats(shape)):
            a.grad = b.grad = None
            forward().backward(one)

    return calls


def _repeats(shape: tuple[int, int]) -> int:
    return max(1, VALUES // (shape[0] * shape[1]))


def timed(names: list[str], shape: tuple[int, int], rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each operation on arrays of a shape."""
    repeats = _repeats(shape)
    for name in names:
        contestants = {library: (work, (library, name, shape)) for library in ("torch", "extensor")}
        seconds = measure(contestants, rounds, 1 if repeats == 1 else 5)
        yield {
            "work": f"{shape[0]} x {shape[1]} {name}",
            "microseconds": {k: round(s / repeats * 1e6, 2) for k, s in seconds.items()},
            "speed_against_torch": round(seconds["torch"] / seconds["extensor"], 2),
        }


def main() -> None:
    """Measure, print and write."""
    parser = options(__doc__, rounds=7)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    args = arguments(parser)
    _, core = cpu_with_core()
    rows = [
        row
        for part in args.only
        for names, shape in PARTS[part]
        for row in shown(timed(names, shape, args.rounds))
    ]
    write("cpu-ops", rows, core.level(), merge="work", args=args)


PARTS = {
    "overhead": [(list(OVERHEAD), (64, 64))],
    "losses": [(list(LOSSES), shape) for shape in SHAPES],
}


if __name__ == "__main__":
    main()
