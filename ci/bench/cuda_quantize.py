"""The fused CUDA quantizers against a copy: bytes moved per second, beside torch's clone.

    python ci/bench/cuda_quantize.py [--rounds N] [--only mxfp4 ...]

Normal bfloat16 data of 16384 x 16384. Every contestant's bytes are what it must read and write once
(values in, codes and scales out); its rate stands beside the rate of torch's clone of the same
array, timed in the same round. CUDA events around single calls, the contestants taking turns,
medians, two inputs in turn so that nothing is left in the cache. The tensor maximum of NVFP4 is
given ("amax given") or found by a pass of its own. "counts" also counts saturated and flushed
values. Needs a GPU, torch and the extra ``cuda13``; writes GPU, versions and command beside the
figures.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import torch

from ci.bench.contest import GPU_PACKAGES, gpu_of, write
from extensor.backends import registry
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream
from extensor_cuda.kernels.nn import elementwise, norm
from extensor_cuda.kernels.quantize import dequantize, float_scaled, rowwise_columnwise
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.kernels.quantize.norm_quantize import Norm, norm_quantize
from extensor_cuda.matmul.prepare import FLOAT_SCALES, FUSED

SIZE = 16384
STREAM = Stream(seed=1, step=2, tensor=3, slot=4)
SPECS = {
    "mxfp8_e4m3 rows": QuantSpec("mxfp8_e4m3"),
    "mxfp4 rows": QuantSpec("mxfp4"),
    "nvfp4 rows, amax given": QuantSpec("nvfp4"),
    "nvfp4 rows": QuantSpec("nvfp4"),
    "mxfp6_e2m3 rows": QuantSpec("mxfp6_e2m3"),
    "mxint8 rows": QuantSpec("mxint8"),
    "mxfp4 rows, rceil": QuantSpec("mxfp4", scale_rule="rceil"),
    "mxfp4 rows, stochastic, 8 bits": QuantSpec("mxfp4", rounding="stochastic", rbits=8),
    "mxfp4 rows, stochastic, 32 bits": QuantSpec("mxfp4", rounding="stochastic"),
    "mxfp8_e4m3 columns": QuantSpec("mxfp8_e4m3", axis=0),
    "nvfp4 columns, amax given": QuantSpec("nvfp4", axis=0),
    "mxfp4 columns": QuantSpec("mxfp4", axis=0),
    "mxfp4 rows, Hadamard-16": QuantSpec("mxfp4", transform=Hadamard(16)),
    "mxfp4 rows, Hadamard-16, stochastic, 8 bits": QuantSpec(
        "mxfp4", transform=Hadamard(16), rounding="stochastic", rbits=8
    ),
    "mxfp4 rows, Hadamard-128": QuantSpec("mxfp4", transform=Hadamard(128)),
    "mxfp4 columns, Hadamard-16, stochastic, 8 bits": QuantSpec(
        "mxfp4", axis=0, transform=Hadamard(16), rounding="stochastic", rbits=8
    ),
    "nvfp4 rows, four-over-six, amax given": QuantSpec("nvfp4", scale_rule="four_over_six"),
    "nvfp4 columns, four-over-six, amax given": QuantSpec(
        "nvfp4", axis=0, scale_rule="four_over_six"
    ),
    "nvfp4_fp8exact rows, amax given": QuantSpec("nvfp4_fp8exact"),
    "nvfp4_fp8exact columns, amax given": QuantSpec("nvfp4_fp8exact", axis=0),
    "nvfp4_fp8exact 16x16 tiles, amax given": QuantSpec("nvfp4_fp8exact", tile=(16, 16)),
    "nvfp4 16x16 tiles, amax given": QuantSpec("nvfp4", tile=(16, 16)),
    "mxfp8_e4m3 32x32 tiles": QuantSpec("mxfp8_e4m3", tile=(32, 32)),
}

PAIRS = ("mxfp8_e4m3", "mxfp4", "nvfp4")
"""Formats of rows and columns in one reading; the tensor's maximum is given."""

FLOATS = {
    "fp8_e4m3, a scale a row": QuantSpec("fp8_e4m3", tile="channel"),
    "fp8_e4m3, 1 x 128": QuantSpec("fp8_e4m3", tile=(1, 128)),
    "fp8_e4m3, 128 x 128": QuantSpec("fp8_e4m3", tile=(128, 128)),
    "fp8_e4m3, a scale a tensor": QuantSpec("fp8_e4m3"),
    "fp8_e4m3, a scale a column, columns": QuantSpec("fp8_e4m3", axis=0, tile="channel"),
    "fp8_e4m3, 1 x 128, columns": QuantSpec("fp8_e4m3", axis=0, tile=(1, 128)),
    "int8, a scale a row": QuantSpec("int8"),
    "int8, a scale a row, stochastic": QuantSpec("int8", rounding="stochastic"),
    "int8, a scale a row, zero points": QuantSpec("int8", symmetric=False),
    "int4, groups of 32": QuantSpec("int4", tile=(1, 32)),
    "int4, groups of 128": QuantSpec("int4", tile=(1, 128)),
    "int4, groups of 128, columns": QuantSpec("int4", axis=0, tile=(1, 128)),
}
"""Under float scales: codes as they lie; FP8 and INT8 also as training's products read them."""

Call = Callable[[int], Any]


def inputs(xp: Any) -> list[tuple[torch.Tensor, Any]]:
    """Two arrays, each as torch's and as cupy's view of the same memory."""
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        x = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
        made.append((x, xp.from_dlpack(x.view(torch.int16)).view(ml_dtypes.bfloat16)))
    return made


def decode(xp: Any, plan: kernels.Plan, q: Any, turn: int) -> Any:
    return dequantize.dequantize(q, plan, xp)


Wanted = Callable[[str], bool]
"""Whether a contestant of that name, or one of several whose names it holds, is asked for."""


def contestants(
    xp: Any, data: list[tuple[torch.Tensor, Any]], wanted: Wanted
) -> dict[str, tuple[int, Call]]:
    """Bytes that must move, and a call that takes a round's number."""
    count = SIZE * SIZE
    made: dict[str, tuple[int, Call]] = {
        "torch clone": (4 * count, lambda turn: data[turn % 2][0].clone())
    }
    for name, spec in SPECS.items():
        if not wanted(f"dequantize {name}, counts"):
            continue
        plan = kernels.plan_of(spec, (SIZE, SIZE))
        assert isinstance(plan, kernels.Plan), plan
        stream = STREAM if spec.rounding == "stochastic" else None
        amax = None
        if "given" in name:
            amax = xp.asarray(max(float(x.abs().max()) for x, _ in data), dtype=xp.float32)
        example = kernels.quantize_raw(data[0][1], plan, stream, xp, amax).q
        assert example is not None
        moved = 2 * count + example.nbytes + (2 * count if plan.needs_tensor and not amax else 0)
        for stats in (False, True):

            def call(
                turn: int,
                plan: kernels.Plan = plan,
                stream: Stream | None = stream,
                amax: Any = amax,
                stats: bool = stats,
            ) -> Any:
                return kernels.quantize_raw(data[turn % 2][1], plan, stream, xp, amax, stats)

            made[name + (", counts" if stats else "")] = (moved, call)
        if name in ("mxfp8_e4m3 rows", "mxfp4 rows", "mxfp4 columns"):
            made[f"dequantize {name}"] = (
                4 * count + example.nbytes,
                partial(decode, xp, plan, example),
            )
    for more in (float_contestants, pair_contestants, norm_contestants, activation_contestants):
        made |= more(xp, data, wanted)
    return made


def float_contestants(
    xp: Any, data: list[tuple[torch.Tensor, Any]], wanted: Wanted
) -> dict[str, tuple[int, Call]]:
    """FP8, INT8 and INT4 under float scales."""
    made: dict[str, tuple[int, Call]] = {}
    for name, spec in FLOATS.items():
        if not wanted(f"{name}, operand; dequantize {name}"):
            continue
        spec = spec.resolve(2)
        plan = float_scaled.plan_of(spec, (SIZE, SIZE))
        assert isinstance(plan, float_scaled.FloatPlan), plan
        stream = STREAM if spec.rounding == "stochastic" else None
        example, _ = float_scaled.quantize(data[0][1], plan, stream, xp)
        moved = 2 * SIZE * SIZE + example.nbytes

        def call(turn: int, plan: Any = plan, stream: Any = stream) -> Any:
            return float_scaled.start(data[turn % 2][1], plan, stream, xp)

        def operand(turn: int, spec: Any = spec, stream: Any = stream) -> Any:
            return FLOAT_SCALES.run(data[turn % 2][1], [spec], [stream], xp, None)

        def decode(turn: int, q: Any = example, plan: Any = plan) -> Any:
            return float_scaled.dequantize(q, plan, xp)

        made[name] = (moved, call)
        if spec.row.element.bits == 8 and spec.symmetric:
            made[f"{name}, operand"] = (moved, operand)
        made[f"dequantize {name}"] = (4 * SIZE * SIZE + example.nbytes, decode)
    return made


def pair_contestants(
    xp: Any, data: list[tuple[torch.Tensor, Any]], wanted: Wanted
) -> dict[str, tuple[int, Call]]:
    """Rows and columns in one reading: packed storage; the FP8 product's operands."""
    count, made = SIZE * SIZE, dict[str, tuple[int, Call]]()
    amax = xp.asarray(max(float(x.abs().max()) for x, _ in data), dtype=xp.float32)
    for name in PAIRS:
        for rounding in ("nearest_even", "stochastic")[: 2 if name == "mxfp4" else 1]:
            rows = QuantSpec(name, 1, rbits=8).replace(rounding=rounding)
            plan = rowwise_columnwise.row_column_plan((rows, rows.replace(axis=0)), (SIZE, SIZE))
            assert isinstance(plan, rowwise_columnwise.RowColumnPlan), plan
            random = rounding == "stochastic"
            streams = (STREAM, STREAM) if random else (None, None)
            title = f"{name} rows + columns" + ", stochastic, 8 bits" * random
            if not wanted(f"{title}, counts; {name} operands of training, stochastic"):
                continue
            example = rowwise_columnwise.quantize_raw(data[0][1], plan, streams, xp, amax)[0]
            moved = 2 * count + sum(q.nbytes for q in example)
            for stats in (False, True):

                def call(
                    turn: int, plan: Any = plan, streams: Any = streams, stats: bool = stats
                ) -> Any:
                    return rowwise_columnwise.quantize_raw(
                        data[turn % 2][1], plan, streams, xp, amax, stats
                    )

                made[title + ", counts" * stats] = (moved, call)
            if name == "mxfp4" and xp.cuda.Device().compute_capability == "90":
                noise = rows.replace(rbits=32) if random else rows
                sides = [noise.resolve(2), noise.replace(axis=0).resolve(2)]
                memory: dict[str, Any] = {}

                def rebase(
                    turn: int,
                    sides: Any = sides,
                    streams: Any = streams,
                    memory: Any = memory,
                ) -> Any:
                    return FUSED.run(data[turn % 2][1], sides, streams, xp, memory)

                made[f"{name} operands of training" + ", stochastic" * random] = (4 * count, rebase)
    return made


def norm_contestants(
    xp: Any, data: list[tuple[torch.Tensor, Any]], wanted: Wanted
) -> dict[str, tuple[int, Call]]:
    """RMSNorm and quantizing: in one reading, and as two kernels with bfloat16 between them."""
    made: dict[str, tuple[int, Call]] = {}
    if xp.cuda.Device().compute_capability != "90":
        return made
    weight = xp.linspace(0.5, 1.5, SIZE, dtype=xp.float32)

    def alone(turn: int) -> Any:
        return norm.norm(data[turn % 2][1], weight, None, 1e-5, False, xp, narrow=True)[0]

    made["rms_norm alone"] = (4 * SIZE * SIZE, alone)
    for name in ("mxfp4", "mxfp8_e4m3"):
        spec = QuantSpec(name, 1)
        plan = rowwise_columnwise.row_column_plan((spec, spec.replace(axis=0)), (SIZE, SIZE))
        assert isinstance(plan, rowwise_columnwise.RowColumnPlan), plan
        for only_rows in (True, False):
            title = f"rms_norm + {name} rows" + " + columns" * (not only_rows)
            if not wanted(title):
                continue
            example = norm_quantize(data[0][1], Norm(weight), plan, xp, only_rows=only_rows)
            moved = 2 * SIZE * SIZE + sum(q.nbytes for q in example[:2] if q is not None)

            def fused(turn: int, plan: Any = plan, only_rows: bool = only_rows) -> Any:
                given = {"only_rows": only_rows, "stats": False}
                return norm_quantize(data[turn % 2][1], Norm(weight), plan, xp, **given)

            def unfused(turn: int, plan: Any = plan, only_rows: bool = only_rows) -> Any:
                y = alone(turn)
                if only_rows:
                    return kernels.quantize_raw(y, plan.rowwise, None, xp, stats=False)
                return rowwise_columnwise.quantize_raw(y, plan, (None, None), xp, stats=False)

            made |= {title: (moved, fused), title + ", two kernels": (moved, unfused)}
    return made


def activation_contestants(
    xp: Any, data: list[tuple[torch.Tensor, Any]], wanted: Wanted
) -> dict[str, tuple[int, Call]]:
    """GELU and quantizing: in one reading, and as two kernels with bfloat16 between them."""

    def alone(turn: int) -> Any:
        return elementwise.unary("gelu", data[turn % 2][1], xp)

    made: dict[str, tuple[int, Call]] = {"activation gelu alone": (4 * SIZE * SIZE, alone)}
    for name, way in itertools.product(("mxfp4", "mxfp8_e4m3"), ("rows", "columns", "both")):
        title = f"activation gelu + {name} {way}"
        if not wanted(title):
            continue
        sides = QuantSpec(name, 1).resolve(2), QuantSpec(name, 0).resolve(2)

        def run(x: Any, activation: str, sides: Any = sides, way: str = way) -> list[Any]:
            if way == "both":
                plans = rowwise_columnwise.row_column_plan(sides, (SIZE, SIZE), activation)
                assert isinstance(plans, rowwise_columnwise.RowColumnPlan), plans
                return list(
                    rowwise_columnwise.quantize_raw(x, plans, (None, None), xp, stats=False)[0]
                )
            plan = kernels.plan_of(sides[way == "columns"], (SIZE, SIZE), False, activation)
            assert isinstance(plan, kernels.Plan), plan
            return [kernels.quantize_raw(x, plan, None, xp, stats=False).q]

        moved = 2 * SIZE * SIZE + sum(q.nbytes for q in run(data[0][1], "gelu"))

        def fused(turn: int, run: Any = run) -> Any:
            return run(data[turn % 2][1], "gelu")

        def unfused(turn: int, run: Any = run) -> Any:
            return run(alone(turn), "")

        made |= {title: (moved, fused), title + ", two kernels": (moved, unfused)}
    return made


def measure(calls: dict[str, tuple[int, Call]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every call in every round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn, (name, (_, call)) in itertools.product(range(rounds), calls.items()):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # the host runs ahead, so that no launch gap is timed
        start.record()
        call(turn)
        stop.record()
        stop.synchronize()
        if turn >= 3:
            times[name].append(start.elapsed_time(stop))
    return times


def chosen_words(chosen: argparse.Namespace) -> list[str]:
    """The command's arguments."""
    only = ["--only", *chosen.only] if chosen.only else []
    return ["--rounds", str(chosen.rounds), *only]


def main() -> None:
    parser = argparse.ArgumentParser(description="fused CUDA quantizers against torch's clone")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", nargs="*", default=[], help="parts of contestants' names")
    chosen = parser.parse_args()
    xp = registry.get("cuda").xp
    data = inputs(xp)

    def wanted(name: str) -> bool:
        return not chosen.only or any(o in name for o in ("clone", *chosen.only))

    calls = {n: c for n, c in contestants(xp, data, wanted).items() if wanted(n)}
    times = measure(calls, chosen.rounds)
    copy = statistics.median(times["torch clone"])
    copy_rate = calls["torch clone"][0] / copy
    rows = []
    for name, milliseconds in times.items():
        median = statistics.median(milliseconds)
        rate = calls[name][0] / median
        row: dict[str, Any] = {
            "name": name,
            "milliseconds": round(median, 4),
            "lowest": round(min(milliseconds), 4),
            "terabytes_per_second": round(rate / 1e9, 3),
            "of_copy": round(rate / copy_rate, 3),
        }
        rows.append(row)
        print("{name:48s} {milliseconds:7.4f} ms  {of_copy:6.3f} of copy".format(**row))
    words = ["python", "ci/bench/cuda_quantize.py", *chosen_words(chosen)]
    write("cuda-quantize", " ".join(words), rows, about=gpu_of(xp), packages=GPU_PACKAGES)


if __name__ == "__main__":
    main()
