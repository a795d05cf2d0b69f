"""Rows and columns of one matrix in one reading: two plans -> one launch.

Covers two specs that differ in their axis alone, in blocks of 16 to 64: no transform, no square
tile, no search for a scale, no scale window (whose maximum is of a direction's own blocks).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from extensor.quant.array import QuantArray, QuantStats
from extensor.quant.spec import QuantSpec
from extensor.random import Stream
from extensor_cuda.jit import Source, launch
from extensor_cuda.kernels import quantize as kernels
from extensor_cuda.kernels.quantize import CHUNK, SLOTS, THREADS, Plan

__all__ = ["PITCH", "SPAN", "TOP", "PairPlan", "Rebased", "pair_plan", "pair_source", "rebase_pair"]

Array = Any
Streams = tuple[Stream | None, Stream | None]

PITCH = 128
"""Rows of a rebased operand begin at multiples of so many bytes."""
# e2m1's 6 times 2**13 is E5M2's 49152; its 0.5 times 2**-15 is E5M2's least, 2**-16.
TOP, SPAN = 13, 28
_LEAST_TALL, _REBASED_TALL = 32, 128  # rows of a tile; rebased columns are written in whole lines
_MOST_BLOCK = 64


@dataclass(frozen=True)
class PairPlan:
    """Plans along rows and down columns of one matrix; ``swapped`` if asked the other way."""

    along: Plan
    down: Plan
    swapped: bool

    def ordered(self, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        """(along, down) in the order of the specs, or back."""
        return (pair[1], pair[0]) if self.swapped else pair


@dataclass(frozen=True)
class Rebased:
    """A matrix (M, K) as two operands of the FP8 GEMM, on the device.

    Attributes:
        rows: E5M2 codes, (M, K), rows `PITCH` bytes or a multiple apart.
        columns: likewise of the transposed matrix, (K, M).
        exponent: int32 (1,): codes times 2**exponent are the values.
        flag: uint32 (): not zero where a block lies outside the window of E5M2, and its codes
            are not its values.
    """

    rows: Array
    columns: Array
    exponent: Array
    flag: Array


@lru_cache(maxsize=4096)
def pair_plan(specs: tuple[QuantSpec, QuantSpec], shape: tuple[int, ...]) -> PairPlan | str:
    """The plan, or why one launch does not cover it."""
    if len(shape) != 2:
        return f"{len(shape)} axes"
    plans = [kernels.plan_of(spec, shape) for spec in specs]
    for plan in plans:
        if isinstance(plan, str):
            return plan
    first, second = (plan for plan in plans if isinstance(plan, Plan))
    if {first.spec.axis, second.spec.axis} != {0, 1}:
        return "both along one axis"
    swapped = first.spec.axis == 0
    along, down = (second, first) if swapped else (first, second)
    spec = along.spec
    if spec.replace(axis=0) != down.spec:
        return "specs that differ in more than their axis"
    if spec.transform or along.rows > 1 or spec.rule in kernels.SEARCHES:
        return "a transform, square tiles or a search for scales"
    if along.block > _MOST_BLOCK or spec.scale_window is not None:
        return f"blocks above {_MOST_BLOCK}, or a scale window"
    return PairPlan(along, down, swapped)


def _tile(plan: PairPlan, dtype: str, out: str) -> tuple[int, int, int]:
    """Rows and columns of a tile, and columns of a thread."""
    tall = _REBASED_TALL if out == "rebased" else max(_LEAST_TALL, plan.along.block)
    each = 2 if out == "values" else kernels.columns_of(plan.down, dtype)
    return tall, THREADS // (tall // CHUNK) * each, each


@lru_cache(maxsize=4096)
def pair_source(plan: PairPlan, dtype: str, out: str, whole: bool, stats: bool) -> Source:
    """The program; ``out`` is "codes", "values" or "rebased"."""
    tall, _, each = _tile(plan, dtype, out)
    extra = {"BOTH": 1, "TALL": tall, "COLUMNS": each, "WINDOW_TOP": TOP, "WINDOW_SPAN": SPAN}
    words = plan.along.spec.rounding == "stochastic" or plan.along.spec.ties != "even"
    extra["RESIDENT"] = 3 if whole and not words and out != "values" else 2
    return kernels.quantize_source(plan.along, dtype, out, whole, stats, tuple(extra.items()))


def _run(
    x: Array,
    plan: PairPlan,
    out: str,
    streams: Streams,
    counters: Array | None,
    arrays: dict[str, Array],
    pitches: tuple[int, int] = (0, 0),
) -> None:
    dtype, (rows, columns) = x.dtype.name, plan.along.shape
    tall, wide, _ = _tile(plan, dtype, out)
    whole = rows % tall == 0 and columns % wide == 0 and x.data.ptr % 16 == 0
    names = ("codes0", "codes1", "scales0", "scales1", "values0", "values1", "tensor")
    given = [arrays.get(name) for name in names]
    given += [counters, *(arrays.get(name) for name in ("maximum", "exponent", "flag"))]
    words = [w for s in streams for w in ((0,) * 4 if s is None else (*s.key, *s.counter_high))]
    launch(
        pair_source(plan, dtype, out, whole, counters is not None),
        "quantize_both",
        -(-rows // tall) * -(-columns // wide),
        THREADS,
        x,
        *(np.uint64(0) if array is None else array for array in given),
        *(np.uint32(word) for word in words),
        *(np.int64(size) for size in (*pitches, rows, columns)),
    )


def _counters(stats: bool, xp: Any) -> Array | None:
    return xp.zeros((2, SLOTS, 2), dtype=xp.uint64) if stats else None


def _stats(counters: Array, plan: PairPlan) -> tuple[QuantStats, QuantStats]:
    """Counts along rows and down columns; waits for the kernel."""
    sums = counters.get().sum(axis=1).tolist()
    first, second = (QuantStats(plan.along.count, int(s), int(f)) for s, f in sums)
    return first, second


def quantize_raw(
    x: Array,
    plan: PairPlan,
    streams: Streams,
    xp: Any,
    amax: Array | None = None,
    stats: bool = True,
) -> tuple[tuple[QuantArray, QuantArray], Array | None]:
    """Launch and return without waiting: arrays along rows and down columns, and the counters.

    Args:
        x: C-contiguous float32, bfloat16 or float16 matrix of the plan's shape.
        plan: from `pair_plan`.
        streams: along rows, and down columns.
        xp: cupy.
        amax: as for `extensor_cuda.kernels.quantize.quantize_raw`.
        stats: count saturated and flushed values.
    """
    tensor, _ = kernels.tensor_of(plan.along, x, amax, xp)
    arrays = {"tensor": tensor}
    made = []
    for i, side in enumerate((plan.along, plan.down)):
        codes, scales = (xp.empty(s, dtype=xp.uint8) for s in (side.codes_shape, side.scales_shape))
        arrays |= {f"codes{i}": codes, f"scales{i}": scales}
        whole = None if tensor is None else tensor[0]
        made.append(QuantArray(codes, scales, side.spec, side.shape, tensor_scale=whole))
    counters = _counters(stats, xp)
    _run(x, plan, "codes", streams, counters, arrays)
    return (made[0], made[1]), counters


def quantize(
    x: Array, plan: PairPlan, streams: Streams, xp: Any
) -> tuple[tuple[QuantArray, QuantStats], tuple[QuantArray, QuantStats]]:
    """Codes, scales and counts in the order of the specs; waits for the counts."""
    pair, counters = quantize_raw(x, plan, plan.ordered(streams), xp)
    counts = _stats(counters, plan)
    return plan.ordered(((pair[0], counts[0]), (pair[1], counts[1])))


def operand(
    x: Array, plan: PairPlan, streams: Streams, xp: Any
) -> tuple[tuple[Array, QuantStats], tuple[Array, QuantStats]]:
    """Decoded values and counts in the order of the specs; waits for the counts."""
    tensor, _ = kernels.tensor_of(plan.along, x, None, xp)
    values = [xp.empty(plan.along.shape, dtype=xp.float32) for _ in range(2)]
    arrays = {"tensor": tensor, "values0": values[0], "values1": values[1]}
    counters = _counters(True, xp)
    _run(x, plan, "values", plan.ordered(streams), counters, arrays)
    counts = _stats(counters, plan)
    return plan.ordered(((values[0], counts[0]), (values[1], counts[1])))


def rebase_pair(x: Array, plan: PairPlan, streams: Streams, xp: Any, amax: Array) -> Rebased:
    """MXFP4 operands of the FP8 GEMM, without packed storage between; does not wait.

    Args:
        x: C-contiguous float32, bfloat16 or float16 matrix of the plan's shape.
        plan: from `pair_plan`, of MXFP4 specs.
        streams: along rows, and down columns.
        xp: cupy.
        amax: float32 of shape () on the device: at least the largest finite magnitude. It decides
            the exponent; where values lie above it or far below, the flag is raised.

    Raises:
        ValueError: for a plan of another format.
    """
    element, spec = plan.along.spec.row.element, plan.along.spec
    if element.bits != 4 or not element.is_float or not spec.is_mx:
        raise ValueError(f"rebase_pair: wanted mxfp4, got {spec.format}; quantize, then multiply")
    rows, columns = plan.along.shape
    pitches = -(-columns // PITCH) * PITCH, -(-rows // PITCH) * PITCH
    along = xp.empty((rows, pitches[0]), dtype=xp.uint8)
    down = xp.empty((columns, pitches[1]), dtype=xp.uint8)
    exponent, flag = xp.empty(1, dtype=xp.int32), xp.zeros((), dtype=xp.uint32)
    arrays = {"codes0": along, "codes1": down, "maximum": amax}
    arrays |= {"exponent": exponent, "flag": flag}
    _run(x, plan, "rebased", streams, None, arrays, pitches)
    return Rebased(along[:, :columns], down[:, :rows], exponent, flag)
