"""Training's operands under float scales: values quantized to FP8 or INT8 as products read them.

Per tensor, per row or column, in blocks along the contraction or in square tiles, the matrix turned
where it is contracted along its first axis: by `float_scaled_rowwise` and
`float_scaled_columnwise`, or
where these do not fit in two passes of any shape (`kernels/prepare/float_scaled_operand.cu`).
Codes and scales are the reference's, bit for bit. Products: `extensor_cuda.scaled`. Nothing waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.quant.array import tile_extent
from extensor.quant.rounding import decode
from extensor.quant.spec import QuantSpec
from extensor.random import Stream
from extensor_cuda import tuned
from extensor_cuda.kernels.gemm.gemm_sm90 import MOST_TERMS
from extensor_cuda.kernels.quantize import float_scaled_columnwise, float_scaled_rowwise
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.operands import LEAST_WORK
from extensor_cuda.runtime.capture import clock_of
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.counters import Counters, OperandCounts
from extensor_cuda.runtime.launch import launch
from extensor_cuda.scaled import Side

__all__ = ["make", "reason", "scaled_source", "values"]

Array = Any

_SOURCE = Path(__file__).parent / "kernels" / "prepare" / "float_scaled_operand.cu"
_THREADS, _WARPS, _ROWS, _COLUMNS = 256, 8, 32, 128  # as in float_scaled_operand.cu


def reason(x: Array, spec: QuantSpec, work: int, capability: str) -> str | None:
    """Why x, blocked by a resolved spec, is not made such an operand; None if it is.

    Args:
        x: contiguous matrix, in a dtype that the quantizers read.
        spec: how it is quantized.
        work: M N K of the product.
        capability: compute capability of the GPU, such as "90".
    """
    if refused := tuned.refusal("scaled", work, capability, LEAST_WORK):
        return refused
    if x.ndim != 2 or not x.size or max(x.shape) > 1 << 30:
        return f"shape {x.shape}"
    return _spec_reason(spec, tuple(x.shape))


@lru_cache(maxsize=4096)
def _spec_reason(spec: QuantSpec, shape: tuple[int, ...]) -> str | None:
    element, k = spec.row.element, shape[spec.axis]
    if not spec.has_float_scales or spec.row.outliers or element.bits != 8:
        return f"{spec.format}; the kernel makes 8-bit codes under float scales"
    plain = spec.symmetric and spec.scale_name == "float32" and spec.rule == "amax"
    if not plain or spec.statistic != "amax" or spec.transform or spec.element_scale != 1.0:
        return (
            f"{spec.rule} rule, {spec.statistic} statistic, {spec.scale_name} scales, zero points"
        )
    if spec.ties != "even" or (element.is_float and spec.zero_sign != "kept"):
        return f"the rounding of dialect {spec.dialect}"
    extent = tile_extent(spec, shape)
    length, each = extent[spec.axis], extent[1 - spec.axis]
    if length < k and (length != 128 or not element.is_float):
        return (
            f"tiles {spec.tile} of {element.name}; the kernel has 128 along the contraction, of FP8"
        )
    if spec.rounding == "stochastic" and (each > 1 or spec.rbits != 32):
        return f"stochastic rounding in tiles {spec.tile} with {spec.rbits} bits"
    if not element.is_float and k > MOST_TERMS:
        return f"K = {k}, beyond {MOST_TERMS}"
    return None


@lru_cache(maxsize=64)
def scaled_source(spec: QuantSpec, dtype: str) -> Source:
    """The program for a resolved spec and an input dtype."""
    macros = float_scaled_rowwise.float_macros(spec, dtype) | {
        "PREPARE_COLUMNWISE": int(spec.axis == 0)
    }
    return Source.read(_SOURCE, macros)


def make(
    x: Array, specs: Sequence[QuantSpec], streams: Sequence[Stream | None], xp: Any
) -> list[tuple[Side, OperandCounts]]:
    """Operands of x under each spec, and their counts; does not wait.

    Args:
        x: contiguous matrix that `reason` covers.
        specs: resolved.
        streams: one per spec, given exactly under stochastic rounding.
        xp: cupy.
    """
    of_all = all(tile_extent(spec, x.shape) == x.shape for spec in specs)
    shared = len(specs) > 1 and of_all and _is_aligned(x) and x.size % 16 == 0
    most = float_scaled_rowwise.largest(x, specs[0], xp) if shared else None
    return [_make(x, spec, stream, most, xp) for spec, stream in zip(specs, streams, strict=True)]


def _is_aligned(x: Array) -> bool:
    return bool(x.data.ptr % 16 == 0)


def _make(
    x: Array, spec: QuantSpec, stream: Stream | None, most: Array | None, xp: Any
) -> tuple[Side, OperandCounts]:
    rows, columns = x.shape
    lines, k = (rows, columns) if spec.axis == 1 else (columns, rows)
    tall, wide = tile_extent(spec, x.shape)
    grid = -(-rows // tall), -(-columns // wide)
    counters = Counters(2 * kernels.SLOTS, xp)
    out = xp.empty((lines, -(-k // 16) * 16), dtype=np.uint8)
    scales = xp.empty(grid, dtype=np.float32)
    written = x, stream, out, scales, counters, xp
    by_lines = spec.axis == 1 and float_scaled_rowwise.lines_of(
        spec, (1, rows, 1, columns), (1, tall, 1, wide), (1, grid[0], 1, grid[1])
    )
    by_panels = spec.axis == 0 and float_scaled_columnwise.panels_of(
        spec, x.shape, (tall, wide), turned=True
    )
    if by_lines and _is_aligned(x):
        float_scaled_rowwise.quantize(by_lines, *written, most=most)
    elif by_panels and _is_aligned(x):
        float_scaled_columnwise.quantize(by_panels, *written, most=most)
    else:
        _any_shape(spec, (tall, wide), *written)
    element = spec.row.element
    kind = element.name if element.is_float else "s8"
    along, each = (scales.T, tall) if spec.axis == 1 else (scales, wide)
    return Side(kind, out[:, :k], along, each), OperandCounts(
        counters, (0, 2 * kernels.SLOTS), x.size
    )


def _any_shape(
    spec: QuantSpec,
    extent: tuple[int, int],
    x: Array,
    stream: Stream | None,
    out: Array,
    scales: Array,
    counters: Counters,
    xp: Any,
) -> None:
    """Codes, scales and counts where the faster kernels do not fit."""
    rows, columns = x.shape
    source = scaled_source(spec, x.dtype.name)
    most = xp.zeros(scales.shape, dtype=np.uint32)
    warps = -(-rows // _ROWS) * -(-columns // _COLUMNS)
    sizes = [np.int64(n) for n in (rows, columns, *extent, scales.shape[1])]
    words = (0, 0, 0, 0) if stream is None else (*stream.key, *stream.counter_high)
    place = -(-warps // _WARPS), _THREADS
    launch(source, "maxima", *place, x, most, *sizes)
    arrays = x, most, out, scales, counters.array, clock_of([stream])
    pitch = np.int64(out.shape[1])
    launch(source, "codes", *place, *arrays, *map(np.uint32, words), *sizes, pitch)


def values(side: Side, xp: Any) -> Array:
    """What a side means, float32 (rows, K)."""
    from extensor.formats import ELEMENTS

    element = ELEMENTS[{"s8": "int8"}.get(side.kind, side.kind)]
    rows, k = side.codes.shape
    grid = side.scales.T.repeat(side.each, axis=0)[:rows]
    if not side.by_row:
        grid = grid.repeat(128, axis=1)[:, :k]
    return decode(side.codes, element, xp) * grid
