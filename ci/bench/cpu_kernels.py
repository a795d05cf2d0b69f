"""The C++ core's kernels: convolution and pooling against torch, quantizers against memory.

    python ci/bench/cpu_kernels.py

LeNet's convolutions and poolings at two batch sizes, beside torch's on the same threads, in turns.
Then, for each format, rounding and direction of blocks: values quantized per second, beside the
rate of a plain copy of the same float32 matrix (one read, one write), measured in the same run:
the ceiling for anything that reads float32 and writes float32. Lower quartiles of single calls,
the contestants taking turns in bursts; written with machine and versions to ci/bench/results/.

On a busy machine nothing is written: threads that wait for a descheduled partner (torch's most of
all) then take many times their own time, and the ratios mean nothing. Needs torch (extra
``bench``) and the core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from extensor.backends.cpu import make_backend
from extensor.backends.protocol import Window
from extensor.config import num_threads
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream

RESULTS = Path(__file__).parent / "results"
LAYERS = {
    "conv1": ((1, 28, 28), 6, Window((5, 5), padding=(2, 2))),
    "conv2": ((6, 14, 14), 16, Window((5, 5))),
}
POOL = Window((2, 2), stride=(2, 2))
BURST = 10
# Operands of LeNet's low-precision GEMMs at batch 64, and one that no cache holds.
MATRICES = ((6400, 150), (50176, 25), (6400, 16), (64, 400), (16384, 4096))
FORMATS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mxfp4", {"scale_rule": "rceil"}),
    ("mxfp8_e4m3", {"scale_rule": "rceil"}),
    ("mxfp6_e2m3", {}),
    ("mxint8", {}),
    ("nvfp4", {}),
    ("nvfp4", {"tile": (16, 16)}),
    ("fp8_e4m3", {"tile": (1, 128)}),
    ("mxfp4", {"transform": Hadamard(16)}),
)


def quartiles(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Lower quartile of each call's seconds, the contestants taking turns in bursts."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()  # takes the caches and the CPUs back from the others
            for _ in range(BURST):
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.quantiles(values)[0] for name, values in times.items()}


def contenders(
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
        for kernel, (ours, theirs) in contenders(backend, x, w, window).items():
            if (layer, kernel) == ("conv1", "conv2d_grad_x"):
                continue  # a training step needs no gradient in the images
            seconds = quartiles({"ours": ours, "torch": theirs}, rounds)
            us = seconds["ours"] * 1e6, seconds["torch"] * 1e6
            rows.append(window_row(batch, layer, kernel, *us))
            total += us
    rows.append(window_row(batch, "both", "one training step", float(total[0]), float(total[1])))
    return rows


def quantizer_rows(backend: Any, shape: tuple[int, int], rounds: int) -> list[dict[str, Any]]:
    """Quantizers on one matrix beside a copy of it."""
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    copied = np.empty_like(x)
    rows = []
    for name, options in FORMATS:
        for axis in (1, 0):
            for rounding in ("nearest_even", "stochastic"):
                spec = QuantSpec(name, axis=axis, rounding=rounding, **options).resolve(2)
                stream = Stream(1, column=axis == 0) if rounding == "stochastic" else None
                calls: dict[str, Callable[[], Any]] = {
                    "operand": partial(backend.operand, x, spec, stream),
                    "quantize": partial(backend.quantize, x, spec, stream),
                    "copy": partial(np.copyto, copied, x),
                }
                seconds = quartiles(calls, rounds)
                rows.append(
                    {
                        "shape": list(shape),
                        "format": name,
                        "options": {key: str(value) for key, value in options.items()},
                        "blocks": "rows" if axis else "columns",
                        "rounding": rounding,
                        "path": backend.path("operand", x, spec, stream),
                        "operand_M_per_s": round(x.size / seconds["operand"] / 1e6),
                        "quantize_M_per_s": round(x.size / seconds["quantize"] / 1e6),
                        "copy_M_per_s": round(x.size / seconds["copy"] / 1e6),
                        "operand_of_copy": round(seconds["copy"] / seconds["operand"], 3),
                    }
                )
                print(
                    "{shape!s:>14} {format:<11}{blocks:<8}{rounding:<13}"
                    "operand {operand_M_per_s:>6} M/s  quantize {quantize_M_per_s:>6} M/s  "
                    "copy {copy_M_per_s:>6} M/s  {options}".format(**rows[-1])
                )
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", default="64,256")
    parser.add_argument(
        "--max-load", type=float, default=0.5, help="load average of an idle CPU set"
    )
    args = parser.parse_args()
    backend = make_backend()
    if backend.core is None:
        raise SystemExit(f"cpu_kernels: wanted the C++ core, but {backend.core_missing}")
    load = os.getloadavg()[0]
    torch.set_num_threads(num_threads())
    windows, quantizers = [], []
    for batch in (int(n) for n in args.batches.split(",")):
        windows += window_rows(backend, batch, args.rounds)
    for shape in MATRICES:
        quantizers += quantizer_rows(backend, shape, max(1, args.rounds // 5))
    about = {
        "command": "python ci/bench/cpu_kernels.py",
        "date": str(date.today()),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {num_threads()} threads, "
        f"{backend.core.level()}",
        "load_average_before": round(load, 2),
        "versions": {"numpy": np.__version__, "torch": torch.__version__},
    }
    if load > args.max_load:
        print(
            f"not written: the load average was {load:.2f} before the run; run on an idle machine"
        )
        return
    path = RESULTS / f"{date.today()}-cpu-kernels.json"
    path.parent.mkdir(exist_ok=True)
    result = {"about": about, "windows": windows, "quantizers": quantizers}
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
