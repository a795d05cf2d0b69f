"""The C++ core's convolutions and poolings against torch's (quantizers: cpu_quantize.py).

    python ci/bench/cpu_conv_pool.py

LeNet's convolutions and poolings at two batch sizes, beside torch's on the same threads, in turns:
lower quartiles of single calls, the contestants taking turns in bursts; written with machine and
versions to ci/bench/results/.

On a busy machine threads that wait for a descheduled partner (torch's most of all) take many times
their own time. Needs torch (extra ``bench``) and the core.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ci.bench.contest import arguments, cpu_with_core, options, take_turns, write
from extensor.backends.protocol import Window
from extensor.config import num_threads

LAYERS = {
    "conv1": ((1, 28, 28), 6, Window((5, 5), padding=(2, 2))),
    "conv2": ((6, 14, 14), 16, Window((5, 5))),
}
POOL = Window((2, 2), stride=(2, 2))
BURST = 10


def lower_quartile(times: list[float]) -> float:
    return statistics.quantiles(times)[0]


def contestants(
    backend: Any, x: np.ndarray, w: np.ndarray, window: Window
) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Each kernel of one layer (convolution, then 2x2 pooling): ours and torch's."""
    rng = np.random.default_rng(1)
    y = backend.conv2d(x, w, window, 1)
    g = rng.standard_normal(y.shape, dtype=np.float32)
    maxima, index = backend.max_pool2d(y, POOL)
    pool_g = rng.standard_normal(maxima.shape, dtype=np.float32)
    aten = torch.ops.aten
    tx, tw, ty, tg, tpool_g = (torch.from_numpy(a) for a in (x, w, y, g, pool_g))
    _, tindex = aten.max_pool2d_with_indices(ty, [2, 2], [2, 2])
    padding = list(window.padding)

    def backward(mask: list[bool]) -> Any:
        rest = ([1, 1], padding, [1, 1], False, [0, 0], 1, mask)
        return aten.convolution_backward(tg, tx, tw, None, *rest)

    return {
        "conv2d": (
            lambda: backend.conv2d(x, w, window, 1),
            lambda: torch.conv2d(tx, tw, None, 1, padding),
        ),
        "conv2d_grad_x": (
            lambda: backend.conv2d_grad_x(g, w, x.shape, window, 1),
            lambda: backward([True, False, False]),
        ),
        "conv2d_grad_w": (
            lambda: backend.conv2d_grad_w(g, x, w.shape, window, 1),
            lambda: backward([False, True, False]),
        ),
        "max_pool2d": (
            lambda: backend.max_pool2d(y, POOL),
            lambda: aten.max_pool2d_with_indices(ty, [2, 2], [2, 2]),
        ),
        "max_pool2d_grad": (
            lambda: backend.max_pool2d_grad(pool_g, index, y.shape),
            lambda: aten.max_pool2d_with_indices_backward(
                tpool_g, ty, [2, 2], [2, 2], [0, 0], [1, 1], False, tindex
            ),
        ),
    }


def window_row(batch: int, layer: str, kernel: str, ours: float, theirs: float) -> dict[str, Any]:
    """One line of the table, printed; times in microseconds."""
    speed = theirs / ours
    print(
        f"batch {batch:>4} {layer:<6}{kernel:<24}{ours:9.1f} us   torch {theirs:9.1f} us   "
        f"{speed:5.2f}x torch's speed"
    )
    row: dict[str, Any] = {"batch": batch, "layer": layer, "kernel": kernel}
    return row | {
        "us": round(ours, 1),
        "torch_us": round(theirs, 1),
        "speed_against_torch": round(speed, 2),
    }


def window_rows(backend: Any, batch: int, rounds: int) -> list[dict[str, Any]]:
    """Convolution and pooling kernels of one batch size beside torch's."""
    rng = np.random.default_rng(0)
    rows, total = [], np.zeros(2)
    for layer, (shape, outputs, window) in LAYERS.items():
        x = rng.standard_normal((batch, *shape), dtype=np.float32)
        w = rng.standard_normal((outputs, shape[0], *window.kernel), dtype=np.float32)
        for kernel, (ours, theirs) in contestants(backend, x, w, window).items():
            if (layer, kernel) == ("conv1", "conv2d_grad_x"):
                continue  # a training step needs no gradient in the images
            calls = {"ours": ours, "torch": theirs}
            seconds = take_turns(calls, rounds, BURST, middle=lower_quartile)
            us = seconds["ours"] * 1e6, seconds["torch"] * 1e6
            rows.append(window_row(batch, layer, kernel, *us))
            total += us
    rows.append(window_row(batch, "both", "one training step", float(total[0]), float(total[1])))
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = options(__doc__, rounds=15)
    parser.add_argument("--batches", default="64,256")
    args = arguments(parser)
    backend, core = cpu_with_core()
    torch.set_num_threads(num_threads())
    windows = []
    for batch in (int(n) for n in args.batches.split(",")):
        windows += window_rows(backend, batch, args.rounds)
    write("cpu-conv-pool", windows, core.level(), args=args)


if __name__ == "__main__":
    main()
