"""Products with packed weights at every number of rows: no cliff, and never slower than decoded.

    python ci/bench/cpu_sweep.py
    EXTENSOR_NUM_THREADS=1 OMP_NUM_THREADS=1 python ci/bench/cpu_sweep.py --cpu-time  # if busy

float32 rows, 1 to 4096, times packed weights, beside decoding the weights first and multiplying,
and beside the float32 product; all take turns. Printed is every point where the packed product is
slower than one of the two by more than NOISE, or costs more than twice as much a row as the next
smaller number of rows. The rows are those and, for each shape and format, the worst ratios.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ci.bench.contest import arguments, cpu_with_core, options, take_turns, write
from extensor.backends.cpu import CpuBackend
from extensor.quant.spec import QuantSpec

ROWS = (1, 2, 3, 4, 5, 7, 8, 12, 13, 16, 24, 31, 32, 33, 48, 64, 96, 97, 128, 200, 256, 512, 1024,
        2048, 4096)  # fmt: skip
SHAPES = ((576, 576), (3072, 576), (576, 1536), (577, 1000), (64, 4096), (4096, 96))
NOISE = 1.05
SPECS = {
    "mxfp4": QuantSpec("mxfp4"),
    "nvfp4": QuantSpec("nvfp4"),
    "int4": QuantSpec("int4"),
    "Q4_0": QuantSpec("int4", scale_dtype="float16"),
    "Q4_1": QuantSpec("int4", scale_dtype="float16", minimum=True),
    "Q4_K": QuantSpec("int4", minimum=True, super_block=256),
    "Q5_K": QuantSpec("int5", minimum=True, super_block=256),
    "Q6_K": QuantSpec("int6", tile=(1, 16), super_block=256),
    "Q8_0": QuantSpec("int8", tile=(1, 32), scale_dtype="float16"),
    "int8": QuantSpec("int8"),
    "mxfp6_e2m3": QuantSpec("mxfp6_e2m3"),
    "mxfp6_e3m2": QuantSpec("mxfp6_e3m2"),
    "mxfp8_e4m3": QuantSpec("mxfp8_e4m3"),
    "mxfp8_e5m2": QuantSpec("mxfp8_e5m2"),
    "fp8, tensor": QuantSpec("fp8_e4m3", tile="tensor"),
    "fp8, channel": QuantSpec("fp8_e4m3", tile="channel"),
    "fp8, 128x128": QuantSpec("fp8_e4m3", tile=(128, 128)),
}


def sweep(
    backend: CpuBackend, shape: tuple[int, int], rounds: int, clock: Callable[[], float]
) -> list[dict[str, Any]]:
    """All numbers of rows of one shape of weights; the points that are slow, and the worst."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal(shape, dtype=np.float32)
    packed = {name: backend.quantize(w, spec.resolve(2))[0] for name, spec in SPECS.items()}
    worst = dict.fromkeys(SPECS, (0.0, 0.0))
    before: dict[str, float] = {}
    found = []
    for rows in ROWS:
        x = rng.standard_normal((rows, shape[1]), dtype=np.float32)
        calls: dict[str, Callable[[], Any]] = {"float32": partial(backend.matmul, x, w.T)}
        for name, q in packed.items():
            calls[name] = partial(backend.weight_only_matmul, x, q)
            calls[f"{name} decoded"] = partial(_decoded, backend, x, q)
        seconds = take_turns(calls, rounds, middle=min, clock=clock)
        for name in SPECS:
            mine = seconds[name]
            of = mine / seconds[f"{name} decoded"], mine / seconds["float32"]
            worst[name] = max(worst[name][0], of[0]), max(worst[name][1], of[1])
            step = mine / rows / before.get(name, np.inf)
            if max(of) > NOISE or step > 2:
                found.append({"shape": list(shape), "format": name, "rows": rows,
                              "of_decoded": round(of[0], 2), "of_float32": round(of[1], 2),
                              "of_row_before": round(step, 2)})  # fmt: skip
                print("slow:", found[-1], flush=True)
            before[name] = mine / rows
    for name, (decoded, dense) in worst.items():
        row = {"shape": list(shape), "format": name, "rows": "worst"}
        found.append(row | {"of_decoded": round(decoded, 2), "of_float32": round(dense, 2)})
        print(found[-1], flush=True)
    return found


def _decoded(backend: CpuBackend, x: Any, q: Any) -> Any:
    return backend.matmul(x, backend.dequantize(q).T)


def main() -> None:
    """Measure, print and write."""
    parser = options(__doc__, rounds=5)
    parser.add_argument("--cpu-time", action="store_true", help="of one thread: on busy machines")
    args = arguments(parser)
    clock = time.process_time if args.cpu_time else time.perf_counter
    backend, core = cpu_with_core()
    rows = [row for shape in SHAPES for row in sweep(backend, shape, args.rounds, clock)]
    write("cpu-sweep", rows, core.gemm_level(), args=args)


if __name__ == "__main__":
    main()
