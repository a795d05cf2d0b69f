"""Quantizing with a clip mask beside quantizing without: seconds, in turns, medians.

python ci/bench/cpu_clip_mask.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from extensor.backends.registry import get
from extensor.quant.spec import Hadamard, QuantSpec

ROUNDS = 41
SHAPE = (2048, 4096)
SPECS = {
    "mxfp4 floor": QuantSpec("mxfp4"),
    "mxfp4 rceil, Hadamard-32": QuantSpec("mxfp4", scale_rule="rceil", transform=Hadamard(32)),
    "mxfp4 quest, Hadamard-32": QuantSpec("mxfp4", scale_rule="quest", transform=Hadamard(32)),
    "nvfp4 four-over-six": QuantSpec("nvfp4", scale_rule="four_over_six"),
}


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    backend = get("cpu")
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    print("| spec | ways | ms without | ms with a mask | more |\n| --- | --- | --- | --- | --- |")
    for name, spec in SPECS.items():
        rows = spec.resolve(2)
        pair = (rows, spec.replace(axis=0).resolve(2))
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
            times = [(seconds(plain), seconds(masked)) for _ in range(ROUNDS)]
            without, with_mask = (statistics.median(t) * 1e3 for t in zip(*times, strict=True))
            more = statistics.median(b / a for a, b in times) - 1
            print(f"| {name} | {ways} | {without:.2f} | {with_mask:.2f} | {more:+.1%} |")


if __name__ == "__main__":
    main()
