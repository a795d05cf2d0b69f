"""Products of blocked matrices beside numpy's float32 product of the same shape.

    python ci/bench/cpu_gemm.py

Square products of two blocked matrices, then one to sixteen float32 rows times blocked weights.
Numpy multiplies the dequantized matrices (OpenBLAS, the same number of threads). All contestants
take turns: a pause, a call that wakes the other core, timed calls. Every ratio is of medians within
the run; written with machine and versions to ci/bench/results/.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ci.bench.contest import arguments, cpu_with_core, options, take_turns, write
from extensor.backends.cpu import CpuBackend
from extensor.quant.spec import QuantSpec

SQUARE, WEIGHTS = 2048, 8192
PRODUCTS = ("mxfp4", "nvfp4", "mxfp8_e4m3", "mxfp6_e2m3", "mxint8", "int8", "int4")
ROWS = (1, 4, 16)
BURST = 3  # timed calls in a turn
PAUSE = 0.2  # seconds between contestants: OpenBLAS's idle workers spin on a core for a while
WEIGHT_FORMATS = ("mxfp4", "nvfp4", "int4", "mxfp8_e4m3", "int8")


def table(
    calls: dict[str, Callable[[], Any]], paths: dict[str, str], shape: tuple[int, int, int], n: int
) -> list[dict[str, Any]]:
    """One row per format, printed; the first call is numpy's."""
    seconds = take_turns(calls, n, BURST, pause=PAUSE)
    base = seconds.pop("numpy float32")
    rows = []
    for name, value in seconds.items():
        row: dict[str, Any] = {"shape": list(shape), "format": name, "path": paths[name]}
        row |= {
            "ms": round(value * 1e3, 3),
            "numpy_ms": round(base * 1e3, 3),
            "speed_against_numpy": round(base / value, 2),
        }
        rows.append(row)
        print(
            "{shape!s:>20} {format:<12}{ms:9.2f} ms  numpy {numpy_ms:9.2f} ms  "
            "{speed_against_numpy:6.2f}x  {path}".format(**row)
        )
    return rows


def product_rows(backend: CpuBackend, rounds: int) -> list[dict[str, Any]]:
    """Square products of two blocked matrices."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((SQUARE, SQUARE), dtype=np.float32) for _ in range(2))
    calls: dict[str, Callable[[], Any]] = {"numpy float32": lambda: x @ y.T}
    paths = {}
    for name in PRODUCTS:
        a, b = (backend.quantize(m, QuantSpec(name).resolve(2))[0] for m in (x, y))
        calls[name] = partial(backend.block_scaled_matmul, a, b)
        paths[name] = backend.path("block_scaled_matmul", a, b)
    return table(calls, paths, (SQUARE, SQUARE, SQUARE), rounds)


def weight_rows(backend: CpuBackend, rounds: int) -> list[dict[str, Any]]:
    """A few float32 rows times blocked weights."""
    rng = np.random.default_rng(1)
    w = rng.standard_normal((WEIGHTS, WEIGHTS), dtype=np.float32)
    packed = {name: backend.quantize(w, QuantSpec(name).resolve(2))[0] for name in WEIGHT_FORMATS}
    rows = []
    for m in ROWS:
        x = rng.standard_normal((m, WEIGHTS), dtype=np.float32)
        calls: dict[str, Callable[[], Any]] = {"numpy float32": partial(np.matmul, x, w.T)}
        calls |= {name: partial(backend.weight_only_matmul, x, q) for name, q in packed.items()}
        paths = {name: backend.path("weight_only_matmul", x, q) for name, q in packed.items()}
        rows += table(calls, paths, (m, WEIGHTS, WEIGHTS), rounds)
    return rows


def main() -> None:
    """Measure, print and write."""
    args = arguments(options(__doc__, rounds=7))
    backend, core = cpu_with_core()
    rows = product_rows(backend, args.rounds) + weight_rows(backend, args.rounds)
    write("cpu-gemm", rows, core.gemm_level(), args=args)


if __name__ == "__main__":
    main()
