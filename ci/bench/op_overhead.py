"""What one small operation costs with its gradient: 64 x 64 float32, forward and backward.

    OMP_NUM_THREADS=1 python ci/bench/op_overhead.py

At this size nearly all of the time is overhead: Python, checks, the tape. One thread, extensor and
torch eager each in a process of its own (see contest.py). Needs torch (extra ``bench``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import extensor as et
from ci.bench.contest import arguments, measure, options, write

CALLS = 200
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
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


def work(library: str, name: str) -> Callable[[], None]:
    """``CALLS`` forward and backward passes of one operation."""
    rng = np.random.default_rng(0)
    arrays = [rng.uniform(0.5, 1, (64, 64)).astype(np.float32) for _ in range(2)]
    function = OPERATIONS[name]
    a: Any
    b: Any
    one: Any
    if library == "torch":
        import torch

        torch.set_num_threads(1)
        a, b = (torch.from_numpy(x).requires_grad_() for x in arrays)
        one = torch.ones_like(function(a, b).detach())
    else:
        a, b = (et.ExTensor(x, requires_grad=True) for x in arrays)
        one = et.ones_like(function(a, b).detach())

    def calls() -> None:
        for _ in range(CALLS):
            a.grad = b.grad = None
            function(a, b).backward(one)

    return calls


def main() -> None:
    """Measure, print and write."""
    args = arguments(options(__doc__, rounds=5))
    rows = []
    for name in OPERATIONS:
        seconds = measure(
            {library: (work, (library, name)) for library in ("torch", "extensor")},
            args.rounds,
            5,
        )
        micro = {library: round(s / CALLS * 1e6, 2) for library, s in seconds.items()}
        ratio = round(seconds["extensor"] / seconds["torch"], 3)
        rows.append({"operation": name, "microseconds": micro, "time_against_torch": ratio})
        print(f"{name:<10} {micro['extensor']:7.2f} us  {ratio:5.2f}x torch's time")
    write("op-overhead", rows, args=args)


if __name__ == "__main__":
    main()
