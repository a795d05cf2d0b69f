"""Quantizes a matrix rowwise and columnwise in one launch, which reads it once.

Supports two specs that differ in their axis alone, in blocks of 16 to 64: no transform, no square
tile, no search for a scale, no scale window (whose maximum is of a direction's own blocks).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

import numpy as np

from extensor.backends.unsupported import Unsupported
from extensor.quant.array import QuantArray
from extensor.quant.scale_rules import E8M0_SEARCHES
from extensor.quant.spec import QuantSpec
from extensor.random import Stream
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.kernels.quantize.quantize import CHUNK, SLOTS, THREADS, Plan
from extensor_cuda.runtime.capture import random_arguments
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.counters import Counters, OperandCounts
from extensor_cuda.runtime.launch import launch

__all__ = [
    "RowColumnPlan",
    "fake_quantize",
    "quantize",
    "quantize_clipped",
    "quantize_raw",
    "row_column_plan",
    "row_column_source",
]

Array = Any
Streams = tuple[Stream | None, Stream | None]

_MIN_TILE_ROWS = 32  # rows of a tile
_MAX_BLOCK = 64


@final
@dataclass(frozen=True)
class RowColumnPlan:
    """A matrix's plans of both axes; ``swapped`` if the columnwise spec came first."""

    rowwise: Plan
    columnwise: Plan
    swapped: bool

    def ordered(self, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        """(rowwise, columnwise) in the order of the specs, or back."""
        return (pair[1], pair[0]) if self.swapped else pair


@lru_cache(maxsize=4096)
def row_column_plan(
    specs: tuple[QuantSpec, QuantSpec], shape: tuple[int, ...], activation: str = ""
) -> RowColumnPlan | Unsupported:
    """The plan, or why one launch does not cover it; ``activation`` as of `kernels.plan_of`."""
    if len(shape) != 2:
        return Unsupported(f"{len(shape)} axes")
    first, second = (kernels.plan_of(spec, shape, False, activation) for spec in specs)
    if not first:
        return first
    if not second:
        return second
    if {first.spec.axis, second.spec.axis} != {0, 1}:
        return Unsupported("both along one axis")
    swapped = first.spec.axis == 0
    rowwise, columnwise = (second, first) if swapped else (first, second)
    spec = rowwise.spec
    if spec.replace(axis=0) != columnwise.spec:
        return Unsupported("specs that differ in more than their axis")
    searches = (*kernels.SEARCHES, *E8M0_SEARCHES)
    if spec.transform or rowwise.rows > 1 or spec.rule in searches:
        return Unsupported("a transform, square tiles or a search for scales")
    if rowwise.block > _MAX_BLOCK or spec.scale_window is not None:
        return Unsupported(f"blocks above {_MAX_BLOCK}, or a scale window")
    return RowColumnPlan(rowwise, columnwise, swapped)


def _tile(plan: RowColumnPlan, dtype: str, out: str) -> tuple[int, int, int]:
    """Rows and columns of a tile, and columns of a thread."""
    tile_rows = max(_MIN_TILE_ROWS, plan.rowwise.block)
    each = 2 if out == "values" else kernels.columns_of(plan.columnwise, dtype)
    return tile_rows, THREADS // (tile_rows // CHUNK) * each, each


@lru_cache(maxsize=4096)
def row_column_source(
    plan: RowColumnPlan, dtype: str, out: str, whole: bool, stats: bool, masked: bool = False
) -> Source:
    """The program; ``out`` is "codes" or "values", beside the former a clip mask if ``masked``."""
    tile_rows, _, each = _tile(plan, dtype, out)
    extra = {
        "QUANT_ROWWISE_COLUMNWISE": 1,
        "QUANT_CTA_ROWS": tile_rows,
        "QUANT_THREAD_COLUMNS": each,
    }
    spec = plan.rowwise.spec
    words = spec.rounding == "stochastic" or spec.ties != "even"
    pairs = spec.row.element.bits == 4 and spec.is_mx
    # Three blocks leave 80 registers to a thread.
    few = not plan.rowwise.activation and (not stats or pairs or dtype == "float32")
    three = whole and not words and out != "values" and few
    extra["QUANT_MIN_CTAS"] = 3 if three else 2
    given = (*extra.items(), *(kernels.MASKED if masked else ()))
    return kernels.quantize_source(plan.rowwise, dtype, out, whole, stats, given)


def _run(
    x: Array,
    plan: RowColumnPlan,
    out: str,
    streams: Streams,
    counters: Counters | None,
    arrays: dict[str, Array],
) -> None:
    dtype, (rows, columns) = x.dtype.name, plan.rowwise.shape
    tile_rows, tile_columns, _ = _tile(plan, dtype, out)
    whole = rows % tile_rows == 0 and columns % tile_columns == 0 and x.data.ptr % 16 == 0
    names = ("codes0", "codes1", "scales0", "scales1", "values0", "values1", "tensor")
    given = [*(arrays.get(name) for name in names), None if counters is None else counters.array]
    numbers = *random_arguments(*streams), np.int64(rows), np.int64(columns)
    masked = "mask" in arrays
    if masked:
        given.append(arrays["mask"])
    source = row_column_source(plan, dtype, out, whole, counters is not None, masked)
    blocks = -(-rows // tile_rows) * -(-columns // tile_columns)
    launch(source, "quantize_both", blocks, THREADS, x, *given, *numbers)


def _stats(counters: Counters | None, plan: RowColumnPlan) -> list[OperandCounts]:
    """The rowwise and the columnwise counts, which wait for the kernel when they are called."""
    assert counters is not None
    parts = (0, 2 * SLOTS), (2 * SLOTS, 4 * SLOTS)
    return [OperandCounts(counters, part, plan.rowwise.count) for part in parts]


def quantize_raw(
    x: Array,
    plan: RowColumnPlan,
    streams: Streams,
    xp: Any,
    amax: Array | None = None,
    stats: bool = True,
    mask: Array | None = None,
) -> tuple[tuple[QuantArray, QuantArray], Counters | None]:
    """Launch and return without waiting: rowwise and columnwise arrays, and the counters.

    A ``mask`` is written where it is given. The rest is
    as of `extensor_cuda.kernels.quantize.quantize.quantize_raw`, with a stream for each
    direction.
    """
    tensor, _ = kernels.tensor_of(plan.rowwise, x, amax, None, xp)
    row, column = (kernels.empty_array(p, xp, tensor) for p in (plan.rowwise, plan.columnwise))
    arrays = {"codes0": row.codes, "codes1": column.codes, "tensor": tensor}
    arrays |= {"scales0": row.scales, "scales1": column.scales}
    if mask is not None:
        arrays["mask"] = mask
    counters = Counters(4 * SLOTS, xp) if stats else None
    _run(x, plan, "codes", streams, counters, arrays)
    return (row, column), counters


def quantize(
    x: Array, plan: RowColumnPlan, streams: Streams, xp: Any
) -> tuple[tuple[QuantArray, OperandCounts], tuple[QuantArray, OperandCounts]]:
    """Codes, scales and counts in the order of the specs, without waiting."""
    pair, counters = quantize_raw(x, plan, plan.ordered(streams), xp)
    counts = _stats(counters, plan)
    return plan.ordered(((pair[0], counts[0]), (pair[1], counts[1])))


def quantize_clipped(
    x: Array, plan: RowColumnPlan, streams: Streams, xp: Any
) -> tuple[tuple[QuantArray, OperandCounts, Array], tuple[QuantArray, OperandCounts]]:
    """The same of a plan that is not swapped, with the rowwise clip mask."""
    rows, columns = plan.rowwise.shape
    mask = xp.empty((rows, -(-columns // 8)), dtype=np.uint8)
    pair, counters = quantize_raw(x, plan, streams, xp, mask=mask)
    counts = _stats(counters, plan)
    return (pair[0], counts[0], mask), (pair[1], counts[1])


def fake_quantize(
    x: Array, plan: RowColumnPlan, streams: Streams, xp: Any
) -> tuple[tuple[Array, OperandCounts], tuple[Array, OperandCounts]]:
    """Decoded values and counts in the order of the specs, without waiting."""
    tensor, _ = kernels.tensor_of(plan.rowwise, x, None, None, xp)
    values = [xp.empty(plan.rowwise.shape, dtype=xp.float32) for _ in range(2)]
    arrays = {"tensor": tensor, "values0": values[0], "values1": values[1]}
    counters = Counters(4 * SLOTS, xp)
    _run(x, plan, "values", plan.ordered(streams), counters, arrays)
    counts = _stats(counters, plan)
    return plan.ordered(((values[0], counts[0]), (values[1], counts[1])))
