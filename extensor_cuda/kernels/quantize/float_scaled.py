"""FP8, INT8 and INT4 under float scales, as they are stored: quantized and decoded on the GPU.

Scales of float32 or float16 for a tensor, a channel, a group or a tile of any size, along any axis,
with zero points or without. One launch finds the blocks' extremes, another divides and rounds
(`float_scaled.cu`). Bytes, scales and counts are the reference's. `plan_of` says what is not
covered. Operands that products read are `extensor_cuda.kernels.prepare.float_scaled_operand`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, final

import numpy as np

from extensor.backends.unsupported import Unsupported
from extensor.quant.array import QuantArray, block_grid, packed_length, tile_extent
from extensor.quant.spec import QuantSpec
from extensor.random import Stream
from extensor_cuda.kernels.quantize import float_scaled_blocks
from extensor_cuda.kernels.quantize.quantize import SLOTS, THREADS
from extensor_cuda.runtime.capture import random_arguments
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.counters import Counters, OperandCounts
from extensor_cuda.runtime.launch import launch

__all__ = [
    "FloatPlan",
    "dequantize",
    "fake_quantize",
    "float_source",
    "plan_of",
    "quantize",
]

Array = Any

_SOURCE = Path(__file__).parent / "float_scaled.cu"
_DEEP, _LANES = 32, 128  # as in float_scaled.cu: elements a thread goes along, values of a warp
_COLUMNS, _INNER, _ROWS = range(3)  # what memory runs along


@final
@dataclass(frozen=True)
class FloatPlan:
    """How an array of one shape is cut and placed.

    Attributes:
        spec: resolved.
        shape: of the array.
        sizes: (outer, rows, inner, columns), columns being the axis of the blocks.
        extent: what a block has of them.
        grid: how many blocks there are along them.
        contiguous_axis: which of columns, inner and rows memory runs along.
        codes_shape: of the packed codes.
        scales_shape: of the scales.
    """

    spec: QuantSpec
    shape: tuple[int, ...]
    sizes: tuple[int, int, int, int]
    extent: tuple[int, int, int, int]
    grid: tuple[int, int, int, int]
    contiguous_axis: int
    codes_shape: tuple[int, ...]
    scales_shape: tuple[int, ...]

    @cached_property
    def blocks(self) -> float_scaled_blocks.BlockPlan | None:
        """The plan of the faster kernels, in one reading, where they fit."""
        if self.column_bytes * self.codes_per_byte != self.sizes[3]:
            return None
        if self.contiguous_axis == _COLUMNS:
            return float_scaled_blocks.rowwise_plan(self.spec, self.sizes, self.extent, self.grid)
        if self.contiguous_axis != _ROWS or len(self.shape) != 2:
            return None
        extent = self.extent[3], self.extent[1]
        return float_scaled_blocks.columnwise_plan(self.spec, self.shape, extent, transposed=False)

    @property
    def codes_per_byte(self) -> int:
        """Codes of a byte."""
        return 8 // self.spec.row.element.bits

    @property
    def column_bytes(self) -> int:
        """Bytes of codes along the columns."""
        return self.codes_shape[self.spec.axis]

    @property
    def thread_bytes(self) -> int:
        """Bytes of codes of a thread."""
        _, rows, inner, _ = self.sizes
        return 1 if (self.column_bytes, inner, rows)[self.contiguous_axis] % 4 else 4

    @property
    def aligned_blocks(self) -> bool:
        """Whether the lanes of a block are a power of two, from a multiple of it on."""
        columns, length = self.sizes[3], self.extent[3]
        lanes = length // 4
        if self.contiguous_axis != _COLUMNS or columns % length or length % 4:
            return False
        return length % _LANES == 0 or (lanes < 32 and lanes & (lanes - 1) == 0)

    def numbers(self) -> list[np.uint32]:
        """Sizes, blocks and grid, as the kernels take them."""
        return [np.uint32(n) for n in (*self.sizes, *self.extent, *self.grid)]


@lru_cache(maxsize=4096)
def plan_of(
    spec: QuantSpec, shape: tuple[int, ...], decoding: bool = False
) -> FloatPlan | Unsupported:
    """The plan, or why the kernels do not cover it; decoding asks less of the spec."""
    try:
        spec = spec.resolve(len(shape))
    except ValueError as error:
        return Unsupported(str(error))  # the generic method raises it
    if math.prod(shape) == 0:
        return Unsupported("empty array")
    if not spec.has_float_scales or spec.kernel_gap:
        return Unsupported(f"{spec.format}, whose scales are no plain floats")
    if spec.transform:
        return Unsupported("a Hadamard transform under float scales")
    if spec.statistic != "amax" and not decoding:
        return Unsupported(f"the {spec.statistic} statistic")
    if spec.rule not in ("amax", "one") and not decoding:
        return Unsupported(f"the {spec.rule} scale rule")
    grid = block_grid(spec, shape)
    codes = list(shape)
    codes[spec.axis] = packed_length(spec, shape)
    if max(math.prod(shape), math.prod(codes), 2 * math.prod(grid)) >= 1 << 31:
        return Unsupported("2**31 elements or more")
    extent = tile_extent(spec, shape)
    sizes, blocks, counts = (_sorted(spec.axis, whole) for whole in (shape, extent, grid))
    fast = _COLUMNS if sizes[2] == 1 else _INNER
    if spec.axis == 0 and len(shape) > 1:
        fast = _ROWS
    return FloatPlan(spec, shape, sizes, blocks, counts, fast, tuple(codes), grid)


def _sorted(axis: int, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """(outer, rows, inner, columns): columns are the blocks' axis, rows the one before it."""
    if len(shape) == 1:
        return 1, 1, 1, shape[0]
    if axis == 0:  # a tile's rows are the axis before, which is the last
        return math.prod(shape[1:-1]), shape[-1], 1, shape[0]
    outer, inner = math.prod(shape[: axis - 1]), math.prod(shape[axis + 1 :])
    return outer, shape[axis - 1], inner, shape[axis]


@lru_cache(maxsize=1024)
def float_source(plan: FloatPlan, dtype: str, aligned: bool) -> Source:
    """The program for input of a dtype, from a multiple of 16 bytes on or not."""
    spec, elements = plan.spec, plan.thread_bytes * plan.codes_per_byte
    whole = plan.contiguous_axis != _COLUMNS or plan.sizes[3] % elements == 0
    macros = float_scaled_blocks.float_macros(spec, dtype) | {
        "QUANT_CONTIGUOUS_AXIS": plan.contiguous_axis,
        "QUANT_CODE_BYTES": plan.thread_bytes,
        "QUANT_WHOLE": int(aligned and whole and plan.thread_bytes == 4),
        "QUANT_ONE_BLOCK_A_THREAD": int(
            plan.contiguous_axis == _COLUMNS and plan.extent[3] % elements == 0
        ),
        "QUANT_ALIGNED_BLOCKS": int(plan.aligned_blocks),
    }
    return Source.read(_SOURCE, macros)


def _launch(
    plan: FloatPlan, dtype: str, pointer: int, kernel: str, threads: int, *arguments: Any
) -> None:
    source = float_source(plan, dtype, pointer % 16 == 0)
    launch(source, kernel, -(-threads // THREADS), THREADS, *arguments, *plan.numbers())


def quantize(
    x: Array, plan: FloatPlan, stream: Stream | None, xp: Any
) -> tuple[QuantArray, OperandCounts]:
    """Codes, scales and counts, without waiting.

    x is C-contiguous float32, bfloat16 or float16 of the plan's shape. The stream names the random
    bits, given exactly under stochastic rounding.
    """
    spec, dtype, (outer, rows, inner, columns) = plan.spec, x.dtype.name, plan.sizes
    codes = xp.empty(plan.codes_shape, dtype=np.uint8)
    scales = xp.empty(plan.scales_shape, dtype=spec.scale_name)
    zeros = None if spec.symmetric else xp.empty(plan.scales_shape, dtype=np.int8)
    counters = Counters(2 * SLOTS, xp)
    counts = OperandCounts(counters, (0, 2 * SLOTS), x.size)
    q = QuantArray(codes, scales, spec, plan.shape, zero_points=zeros)
    if plan.blocks and x.data.ptr % 16 == 0:
        out = float_scaled_blocks.BlockOutput(codes, scales, counters, zeros)
        float_scaled_blocks.quantize(plan.blocks, x, stream, out, xp)
        return q, counts
    groups = -(-(columns, inner, rows)[plan.contiguous_axis] // 4)
    lines = outer * (1 if plan.contiguous_axis == _ROWS else rows)
    deep = 1 if plan.contiguous_axis == _COLUMNS else -(-columns // _DEEP)
    most = xp.zeros((2 * math.prod(plan.scales_shape),), dtype=np.uint32)
    _launch(plan, dtype, x.data.ptr, "extremes", groups * lines * deep, x, most)
    arrays = x, most, codes, scales, zeros, counters.array
    numbers = *random_arguments(stream), np.uint32(plan.column_bytes)
    _launch(plan, dtype, x.data.ptr, "codes", codes.size // plan.thread_bytes, *arrays, *numbers)
    return q, counts


def fake_quantize(
    x: Array, plan: FloatPlan, stream: Stream | None, xp: Any
) -> tuple[Array, OperandCounts]:
    """The decoded values and counts, without waiting."""
    q, counts = quantize(x, plan, stream, xp)
    return dequantize(q, plan, xp), counts


def dequantize(q: QuantArray, plan: FloatPlan, xp: Any) -> Array:
    """Codes and scales -> float32 of the plan's shape, without waiting."""
    codes, scales = xp.ascontiguousarray(q.codes), xp.ascontiguousarray(q.scales)
    zeros = None if q.zero_points is None else xp.ascontiguousarray(q.zero_points)
    if codes.data.ptr % 4:
        codes = codes.copy()
    out = xp.empty(plan.shape, dtype=np.float32)
    threads = codes.size // plan.thread_bytes
    arrays = codes, scales, zeros, out, np.uint32(plan.column_bytes)
    _launch(plan, "float32", out.data.ptr, "values", threads, *arrays)
    return out
