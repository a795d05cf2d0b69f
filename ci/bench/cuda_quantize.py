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

import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ci.bench.gpu import Call, as_cupy, cuda, normal, options, times_of, write_gpu
from extensor.quant.array import QuantArray
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream
from extensor_cuda.kernels.nn import elementwise, norm
from extensor_cuda.kernels.quantize import dequantize, float_scaled, rowwise_columnwise
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.kernels.quantize.norm_quantize import Norm, norm_quantize
from extensor_cuda.matmul.prepare import FLOAT_SCALES, FUSED

SIZE = 16384
SHAPE, COUNT = (SIZE, SIZE), SIZE * SIZE
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


class Contest:
    """The contestants by name: bytes that must move, and a call that takes a round's number.

    Args:
        xp: cupy.
        only: parts of names; only contestants with one of them take part. Empty: all.
    """

    def __init__(self, xp: Any, only: Sequence[str]) -> None:
        self.xp, self.only = xp, only
        self.torch_inputs = [normal(*SHAPE, seed=seed) for seed in (0, 1)]
        self.inputs = [as_cupy(x, xp) for x in self.torch_inputs]
        self.amax = xp.asarray(max(float(x.abs().max()) for x in self.torch_inputs), "float32")
        self.hopper = xp.cuda.Device().compute_capability == "90"
        self.calls: dict[str, tuple[int, Call]] = {}

    def wants(self, name: str) -> bool:
        """Whether a contestant of that name, or one of several whose names it holds, takes part."""
        return not self.only or any(word in name for word in ("clone", *self.only))

    def add(self, name: str, moved: int, run: Callable[[Any], Any], inputs: Any = None) -> None:
        """A contestant that runs on one of two inputs."""
        inputs = inputs or self.inputs
        if self.wants(name):
            self.calls[name] = moved, lambda turn: run(inputs[turn % 2])


def quantizers(contest: Contest) -> None:
    """MX and NVFP4 formats in one direction; their decoders."""
    xp = contest.xp
    for name, spec in SPECS.items():
        if not contest.wants(f"dequantize {name}, counts"):
            continue
        plan = kernels.plan_of(spec, SHAPE)
        assert plan, plan
        given = contest.amax if "given" in name else None
        stream = STREAM if spec.rounding == "stochastic" else None
        run = partial(kernels.quantize_raw, plan=plan, stream=stream, xp=xp, amax=given)
        q = run(contest.inputs[0]).q
        assert q is not None
        moved = 2 * COUNT + q.nbytes + (2 * COUNT if plan.needs_tensor and given is None else 0)
        for stats in (False, True):
            contest.add(name + ", counts" * stats, moved, partial(run, stats=stats))
        if name in ("mxfp8_e4m3 rows", "mxfp4 rows", "mxfp4 columns"):
            decode = partial(dequantize.dequantize, q, plan, xp)
            contest.add(f"dequantize {name}", 4 * COUNT + q.nbytes, partial(_without, decode))


def _without(call: Callable[[], Any], x: Any) -> Any:
    """A call that reads none of the inputs."""
    return call()


def float_scales(contest: Contest) -> None:
    """FP8, INT8 and INT4 under float scales."""
    xp = contest.xp
    for name, spec in FLOATS.items():
        if not contest.wants(f"{name}, operand; dequantize {name}"):
            continue
        spec = spec.resolve(2)
        plan = float_scaled.plan_of(spec, SHAPE)
        assert plan, plan
        stream = STREAM if spec.rounding == "stochastic" else None
        q, _ = float_scaled.quantize(contest.inputs[0], plan, stream, xp)
        moved = 2 * COUNT + q.nbytes
        contest.add(name, moved, partial(float_scaled.quantize, plan=plan, stream=stream, xp=xp))
        if spec.row.element.bits == 8 and spec.symmetric:
            contest.add(f"{name}, operand", moved, _operands(FLOAT_SCALES, [spec], [stream], xp))
        decode = partial(float_scaled.dequantize, q, plan, xp)
        contest.add(f"dequantize {name}", 4 * COUNT + q.nbytes, partial(_without, decode))


def _operands(
    preparer: Any, specs: Any, streams: Any, xp: Any, state: Any = None
) -> Callable[[Any], Any]:
    """What prepares GEMM operands of x."""
    return lambda x: preparer.run(x, specs, streams, xp, state)


def rows_and_columns(contest: Contest) -> None:
    """Rows and columns in one reading: packed storage; the FP8 product's operands."""
    xp = contest.xp
    for name, random in (*((name, False) for name in PAIRS), ("mxfp4", True)):
        title = f"{name} rows + columns" + ", stochastic, 8 bits" * random
        if not contest.wants(f"{title}, counts; {name} operands of training, stochastic"):
            continue
        rows = QuantSpec(name, 1, rbits=8)
        rows = rows.replace(rounding="stochastic") if random else rows
        streams = (STREAM, STREAM) if random else (None, None)
        plan = rowwise_columnwise.row_column_plan((rows, rows.replace(axis=0)), SHAPE)
        assert plan, plan
        run = partial(
            rowwise_columnwise.quantize_raw, plan=plan, streams=streams, xp=xp, amax=contest.amax
        )
        moved = 2 * COUNT + sum(q.nbytes for q in run(contest.inputs[0])[0])
        for stats in (False, True):
            contest.add(title + ", counts" * stats, moved, partial(run, stats=stats))
        if name == "mxfp4" and contest.hopper:
            noise = rows.replace(rbits=32) if random else rows
            specs = [noise.resolve(2), noise.replace(axis=0).resolve(2)]
            title = f"{name} operands of training" + ", stochastic" * random
            contest.add(title, 4 * COUNT, _operands(FUSED, specs, streams, xp, {}))


def norms(contest: Contest) -> None:
    """RMSNorm and quantizing: in one reading, and as two kernels with bfloat16 between them."""
    xp = contest.xp
    if not contest.hopper:
        return
    weight = xp.linspace(0.5, 1.5, SIZE, dtype=xp.float32)

    def alone(x: Any) -> Any:
        return norm.norm(x, weight, None, 1e-5, False, xp, narrow=True)[0]

    contest.add("rms_norm alone", 4 * COUNT, alone)
    for name, only_rows in itertools.product(("mxfp4", "mxfp8_e4m3"), (True, False)):
        title = f"rms_norm + {name} rows" + " + columns" * (not only_rows)
        if not contest.wants(title):
            continue
        spec = QuantSpec(name, 1)
        plan = rowwise_columnwise.row_column_plan((spec, spec.replace(axis=0)), SHAPE)
        assert plan, plan
        run = partial(norm_quantize, norm=Norm(weight), plan=plan, xp=xp, only_rows=only_rows)
        made = run(contest.inputs[0])[:2]
        moved = 2 * COUNT + sum(q.nbytes for q in made if q is not None)

        def unfused(
            x: Any, plan: rowwise_columnwise.RowColumnPlan = plan, only_rows: bool = only_rows
        ) -> Any:
            y = alone(x)
            if only_rows:
                return kernels.quantize_raw(y, plan.rowwise, None, xp, stats=False)
            return rowwise_columnwise.quantize_raw(y, plan, (None, None), xp, stats=False)

        contest.add(title, moved, partial(run, stats=False))
        contest.add(f"{title}, two kernels", moved, unfused)


def activations(contest: Contest) -> None:
    """GELU and quantizing: in one reading, and as two kernels with bfloat16 between them."""
    xp = contest.xp

    def alone(x: Any) -> Any:
        return elementwise.unary("gelu", x, xp)

    contest.add("activation gelu alone", 4 * COUNT, alone)
    for name, axes in itertools.product(("mxfp4", "mxfp8_e4m3"), ("rows", "columns", "both")):
        title = f"activation gelu + {name} {axes}"
        if not contest.wants(title):
            continue
        specs = QuantSpec(name, 1).resolve(2), QuantSpec(name, 0).resolve(2)

        def run(x: Any, activation: str, specs: Any = specs, axes: str = axes) -> list[QuantArray]:
            if axes == "both":
                both = rowwise_columnwise.row_column_plan(specs, SHAPE, activation)
                assert both, both
                return [*rowwise_columnwise.quantize_raw(x, both, (None, None), xp, stats=False)[0]]
            plan = kernels.plan_of(specs[axes == "columns"], SHAPE, False, activation)
            assert plan, plan
            q = kernels.quantize_raw(x, plan, None, xp, stats=False).q
            assert q is not None
            return [q]

        def unfused(x: Any, run: Callable[[Any, str], Any] = run) -> Any:
            return run(alone(x), "")

        moved = 2 * COUNT + sum(q.nbytes for q in run(contest.inputs[0], "gelu"))
        contest.add(title, moved, partial(run, activation="gelu"))
        contest.add(f"{title}, two kernels", moved, unfused)


def main() -> None:
    """Measure, print and write."""
    parser = options(__doc__, rounds=27)
    parser.add_argument("--only", nargs="*", default=[], help="parts of contestants' names")
    chosen = parser.parse_args()
    xp = cuda().xp
    contest = Contest(xp, chosen.only)
    contest.add("torch clone", 4 * COUNT, torch.clone, contest.torch_inputs)
    for enter in (quantizers, float_scales, rows_and_columns, norms, activations):
        enter(contest)
    moved = {name: size for name, (size, _) in contest.calls.items()}
    times = times_of({name: call for name, (_, call) in contest.calls.items()}, chosen.rounds, 1)
    medians = {name: statistics.median(found) for name, found in times.items()}
    copy_rate = moved["torch clone"] / medians["torch clone"]
    rows = []
    for name, median in medians.items():
        rate = moved[name] / median
        row: dict[str, Any] = {
            "name": name,
            "milliseconds": round(median, 4),
            "lowest": round(min(times[name]), 4),
            "terabytes_per_second": round(rate / 1e9, 3),
            "of_copy": round(rate / copy_rate, 3),
        }
        rows.append(row)
        print("{name:48s} {milliseconds:7.4f} ms  {of_copy:6.3f} of copy".format(**row))
    write_gpu("cuda-quantize", rows, xp, merge="name", by_kind=False)


if __name__ == "__main__":
    main()
