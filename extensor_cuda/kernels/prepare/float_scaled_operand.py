"""FP8 and INT8 operands under float scales, (rows, K) from either axis of a matrix of floats.

By `kernels.quantize.float_scaled_blocks`, or where this does not fit in two passes of any shape
(`float_scaled_operand.cu`). Codes and scales are the reference's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from extensor.quant.array import tile_extent
from extensor.quant.spec import QuantSpec
from extensor.random import Stream
from extensor_cuda.kernels.quantize import float_scaled_blocks
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.runtime.capture import random_arguments
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.counters import Counters
from extensor_cuda.runtime.launch import launch

__all__ = ["Quantized", "quantize", "scaled_source", "shared_amax"]

Array = Any

_SOURCE = Path(__file__).parent / "float_scaled_operand.cu"
_THREADS, _WARPS, _ROWS, _COLUMNS = 256, 8, 32, 128  # as in float_scaled_operand.cu


class Quantized(NamedTuple):
    """Codes (rows, K), float32 scales as the spec's axis lies, and two counters a slot."""

    codes: Array
    scales: Array
    counters: Counters


@lru_cache(maxsize=64)
def scaled_source(spec: QuantSpec, dtype: str) -> Source:
    """The program for a resolved spec and an input dtype."""
    macros = float_scaled_blocks.float_macros(spec, dtype)
    return Source.read(_SOURCE, macros | {"PREPARE_COLUMNWISE": int(spec.axis == 0)})


def _is_aligned(x: Array) -> bool:
    return bool(x.data.ptr % 16 == 0)


def shared_amax(x: Array, specs: Sequence[QuantSpec], xp: Any) -> Array | None:
    """The largest magnitude of x where several specs have one scale for all of it; else None."""
    of_all = all(tile_extent(spec, x.shape) == x.shape for spec in specs)
    shared = len(specs) > 1 and of_all and _is_aligned(x) and x.size % 16 == 0
    return float_scaled_blocks.largest(x, specs[0], xp) if shared else None


def quantize(
    x: Array, spec: QuantSpec, stream: Stream | None, amax: Array | None, xp: Any
) -> Quantized:
    """One operand of a contiguous matrix; does not wait.

    The stream is given exactly under stochastic rounding; ``amax`` is from `shared_amax`.
    """
    rows, columns = x.shape
    lines, k = (rows, columns) if spec.axis == 1 else (columns, rows)
    block_rows, block_columns = tile_extent(spec, x.shape)
    grid = -(-rows // block_rows), -(-columns // block_columns)
    counters = Counters(2 * kernels.SLOTS, xp)
    out = xp.empty((lines, -(-k // 16) * 16), dtype=np.uint8)
    scales = xp.empty(grid, dtype=np.float32)
    if spec.axis == 1:
        sizes = (1, rows, 1, columns), (1, block_rows, 1, block_columns), (1, grid[0], 1, grid[1])
        plan = float_scaled_blocks.rowwise_plan(spec, *sizes)
    else:
        plan = float_scaled_blocks.columnwise_plan(
            spec, x.shape, (block_rows, block_columns), transposed=True
        )
    if plan and _is_aligned(x):
        written = float_scaled_blocks.BlockOutput(out, scales, counters)
        float_scaled_blocks.quantize(plan, x, stream, written, xp, amax)
    else:
        source = scaled_source(spec, x.dtype.name)
        most = xp.zeros(grid, dtype=np.uint32)
        warps = -(-rows // _ROWS) * -(-columns // _COLUMNS)
        blocks = -(-warps // _WARPS), _THREADS
        numbers = [np.int64(n) for n in (rows, columns, block_rows, block_columns, grid[1])]
        launch(source, "maxima", *blocks, x, most, *numbers)
        arrays = x, most, out, scales, counters.array
        pitch = np.int64(out.shape[1])
        launch(source, "codes", *blocks, *arrays, *random_arguments(stream), *numbers, pitch)
    return Quantized(out[:, :k], scales, counters)
