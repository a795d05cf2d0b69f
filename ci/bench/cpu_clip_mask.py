"""Quantizing with a clip mask beside quantizing without: CPU time of one thread, in turns.

python ci/bench/cpu_clip_mask.py

The values fit the cache, so that waiting for memory hides nothing. The tenth percentile of the
calls is printed, in microseconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import ml_dtypes
import numpy as np

from extensor.backends.registry import get
from extensor.quant.spec import Hadamard, QuantSpec

ROUNDS = 150
SHAPE = (256, 1024)
SPECS = {
    "mxfp4 floor": QuantSpec("mxfp4"),
    "mxfp8": QuantSpec("mxfp8_e4m3"),
    "mxfp4 rceil, Hadamard-32": QuantSpec("mxfp4", scale_rule="rceil", transform=Hadamard(32)),
    "mxfp4 quest, Hadamard-32": QuantSpec("mxfp4", scale_rule="quest", transform=Hadamard(32)),
    "nvfp4": QuantSpec("nvfp4"),
    "nvfp4 four-over-six": QuantSpec("nvfp4", scale_rule="four_over_six"),
}


def microseconds(run: Callable[[], object]) -> float:
    start = time.thread_time_ns()
    run()
    return (time.thread_time_ns() - start) / 1e3


def main() -> None:
    backend = get("cpu")
    values = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    print("| spec | dtype | ways | without | with a mask | more |\n|---|---|---|---:|---:|---:|")
    for name, spec in SPECS.items():
        rows = spec.resolve(2)
        pair = (rows, spec.replace(axis=0).resolve(2))
        for x in (values, values.astype(ml_dtypes.bfloat16)):
            for ways, plain, masked in (
                (
                    "rows",
                    partial(backend.quantize, x, rows),
                    partial(backend.quantize_clipped, x, rows),
                ),
                (
                    "rows and columns",
                    partial(backend.quantize_rowwise_columnwise, x, pair),
                    partial(backend.quantize_rowwise_columnwise_clipped, x, pair),
                ),
            ):
                times = [(microseconds(plain), microseconds(masked)) for _ in range(ROUNDS)]
                a, b = (statistics.quantiles(t, n=10)[0] for t in zip(*times, strict=True))
                print(f"| {name} | {x.dtype} | {ways} | {a:.1f} | {b:.1f} | {b / a - 1:+.1%} |")


if __name__ == "__main__":
    main()
