"""FP8, INT8 and INT4 under float scales rowwise or columnwise, in one reading.

Along rows: groups, channels, tensors and tiles whose rows are multiples of 16
(`float_scaled_rowwise.cu`). Down a matrix's columns: groups of 16 to 128, tiles of 128 x 128,
columns and matrices, without zero points (`float_scaled_columnwise.cu`); codes are written as the
matrix lies, or transposed, as a GEMM reads what it contracts along the first axis. The scale of a
tensor or of a column takes a reading before. `float_scaled` covers the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.quant.spec import QuantSpec
from extensor.random import Stream
from extensor_cuda.kernels.quantize.quantize import CHUNK, INPUTS, THREADS, encoding_macros
from extensor_cuda.runtime.capture import random_arguments
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.counters import Counters
from extensor_cuda.runtime.launch import launch

__all__ = [
    "BlockOutput",
    "BlockPlan",
    "block_source",
    "columnwise_plan",
    "float_macros",
    "largest",
    "quantize",
    "rowwise_plan",
]

Array = Any
Macros = tuple[tuple[str, int], ...]

_FOLDER = Path(__file__).parent
_KEPT = 4  # chunks that a thread holds, along rows
_MAX_BLOCK_CHUNKS = 8192  # chunks of a block of values beyond which its threads are too few
_MAX_LANES = 32
_SIDE = 128  # of a block of threads' tile, as in float_scaled_columnwise.cu
_BLOCK_ROWS = (16, 32, 64, 128)
_ROWWISE = ("quantize_groups", "quantize_blocks", "quantize_all")  # QUANT_PATH, by number
_COLUMN_TILES = "quantize_column_tiles"
_FOUND_BEFORE = ("", "columns", "all")  # QUANT_AMAX_GIVEN, by number: nothing, each column, all


@dataclass(frozen=True)
class BlockPlan:
    """How a kernel takes an array of one shape.

    Attributes:
        spec: resolved.
        kernel: its name.
        macros: its program's, beside the spec's and the dtype's.
        grid: blocks of threads.
        threads: of each.
        sizes: numbers that the kernel is given.
        found_before: of what another reading finds the largest magnitude: "", "columns" or "all".
    """

    spec: QuantSpec
    kernel: str
    macros: Macros
    grid: int
    threads: int
    sizes: tuple[Any, ...]
    found_before: str = ""


@lru_cache(maxsize=4096)
def rowwise_plan(
    spec: QuantSpec,
    sizes: tuple[int, int, int, int],
    extent: tuple[int, int, int, int],
    blocks: tuple[int, int, int, int],
) -> BlockPlan | None:
    """How (outer, rows, 1, columns) elements in such blocks are taken; None: not by these kernels.

    ``sizes`` are the array's, ``extent`` a block's, ``blocks`` how many there are along each; the
    spec is resolved, under plain float scales.
    """
    _, rows, inner, columns = sizes
    block_rows, block_columns = extent[1], extent[3]
    nearest = spec.rounding == "nearest_even" and spec.ties == "even"
    if not (spec.symmetric or nearest) or inner > 1 or columns % CHUNK or block_columns % CHUNK:
        return None
    chunks, lanes = math.prod(sizes) // CHUNK, block_columns // CHUNK
    aligned = lanes <= _MAX_LANES and lanes & (lanes - 1) == 0 and columns % block_columns == 0
    if extent == sizes or (block_rows == 1 and aligned):
        whole = extent == sizes
        kept = 1 if spec.rounding == "stochastic" and not whole else _KEPT
        macros = _rowwise_macros(
            2 if whole else 0, CHUNK if whole else block_columns, THREADS, kept
        )
        grid = -(-chunks // (THREADS * kept))
        kernel, before = _ROWWISE[2 if whole else 0], _FOUND_BEFORE[2 if whole else 0]
        return BlockPlan(spec, kernel, macros, grid, THREADS, (np.int64(chunks),), before)
    chunks_per_block = min(block_rows, rows) * min(lanes, columns // CHUNK)
    if extent[0] > 1 or chunks_per_block > _MAX_BLOCK_CHUNKS:
        return None
    threads = min(THREADS, max(32, 1 << (chunks_per_block - 1).bit_length()))
    macros = _rowwise_macros(1, CHUNK, threads, min(_KEPT, -(-chunks_per_block // threads)))
    numbers = tuple(
        map(np.uint32, (rows, columns // CHUNK, block_rows, lanes, blocks[1], blocks[3]))
    )
    return BlockPlan(spec, _ROWWISE[1], macros, math.prod(blocks), threads, numbers)


def _rowwise_macros(path: int, block: int, threads: int, kept: int) -> Macros:
    """``block``: values that share a scale where they are neighbouring lanes', else a lane's."""
    sizes = ("CODEC_BLOCK", block), ("CODEC_THREADS", threads), ("QUANT_KEPT_CHUNKS", kept)
    return (("QUANT_PATH", path), *sizes)


@lru_cache(maxsize=4096)
def columnwise_plan(
    spec: QuantSpec, shape: tuple[int, int], extent: tuple[int, int], transposed: bool
) -> BlockPlan | None:
    """How a matrix blocked along axis 0 is taken; None: not by these kernels.

    ``extent`` is of a block of values: its rows and columns. The spec is resolved, under plain
    float scales, and of 8 bits if codes are transposed.
    """
    (rows, columns), (block_rows, block_columns) = shape, extent
    random = spec.rounding == "stochastic"
    if not spec.symmetric or columns % 4 or max(shape) > 1 << 30:
        return None
    given = 0
    if block_columns == 1 and block_rows >= rows:
        given, block_rows = 1, _SIDE
    elif block_columns >= columns and block_rows >= rows:
        if rows * columns % 16 or (random and (extent != shape or rows % 16)):
            return None
        given, block_rows = 2, _SIDE
    elif block_rows not in _BLOCK_ROWS or (block_columns > 1 and extent != (_SIDE, _SIDE)):
        return None
    tiles = ("QUANT_TILES_128X128", int(given == 0 and block_columns > 1))
    of_block = ("QUANT_AMAX_GIVEN", given), ("QUANT_BLOCK_ROWS", block_rows), tiles
    macros = *of_block, ("QUANT_TRANSPOSED", int(transposed))
    grid, sizes = -(-rows // _SIDE) * -(-columns // _SIDE), (np.int64(rows), np.int64(columns))
    return BlockPlan(spec, _COLUMN_TILES, macros, grid, THREADS, sizes, _FOUND_BEFORE[given])


def block_source(plan: BlockPlan, dtype: str) -> Source:
    """The program for input of a dtype."""
    return _source(plan.spec, dtype, plan.kernel == _COLUMN_TILES, plan.macros)


@lru_cache(maxsize=1024)
def _source(spec: QuantSpec, dtype: str, columnwise: bool, macros: Macros) -> Source:
    path = _FOLDER / f"float_scaled_{'columnwise' if columnwise else 'rowwise'}.cu"
    return Source.read(path, float_macros(spec, dtype) | dict(macros))


def float_macros(spec: QuantSpec, dtype: str) -> dict[str, object]:
    """How values of a dtype become codes under float scales, for a resolved spec."""
    return encoding_macros(spec) | {
        "CODEC_IN": INPUTS.index(dtype),
        "CODEC_OUT": 0,
        "CODEC_STATS": 1,
        "CODEC_ACTIVATE": 0,
        "CODEC_UE4M3": 0,
        "CODEC_NEEDS_TENSOR": 0,
        "CODEC_HADAMARD": 0,
        "CODEC_BLOCK": CHUNK,
        "CODEC_FLOAT16_SCALES": int(spec.scale_name == "float16"),
        "CODEC_RULE_ONE": int(spec.rule == "one"),
        "CODEC_ZERO_POINTS": int(not spec.symmetric),
    }


_WHOLE = _rowwise_macros(2, CHUNK, THREADS, _KEPT)


def largest(x: Array, spec: QuantSpec, xp: Any) -> Array:
    """Of 16 n values, 16-byte aligned, uint32 (2,): bits of the largest magnitude.

    For a spec with zero points those of the largest value above zero, and of that below it.
    """
    amax, chunks = xp.zeros(2, dtype=np.uint32), x.size // CHUNK
    source, grid = _source(spec, x.dtype.name, False, _WHOLE), -(-chunks // (THREADS * _KEPT))
    launch(source, "largest", grid, THREADS, x, amax, np.int64(chunks))
    return amax


@dataclass(frozen=True, eq=False)
class BlockOutput:
    """Arrays that `quantize` writes.

    Attributes:
        codes: 16-byte aligned; as the input lies, or if they are transposed (columns, pitch), with
            rows up to a multiple of 16.
        scales: one for each block.
        counters: of saturated and flushed values.
        zero_points: int8, one for each block, where the spec has them.
    """

    codes: Array
    scales: Array
    counters: Counters
    zero_points: Array | None = None


def quantize(
    plan: BlockPlan,
    x: Array,
    stream: Stream | None,
    out: BlockOutput,
    xp: Any,
    amax: Array | None = None,
) -> None:
    """Write codes, scales and counts, without waiting.

    x is C-contiguous and 16-byte aligned. ``amax`` is what `largest` finds, if it is known.
    """
    source = block_source(plan, x.dtype.name)
    if plan.found_before == "columns":
        amax = xp.zeros(x.shape[1], dtype=np.uint32)
        launch(source, "largest_of_columns", plan.grid, THREADS, x, amax, *plan.sizes)
    elif plan.found_before == "all" and amax is None:
        amax = largest(x, plan.spec, xp)
    tiled = plan.kernel == _COLUMN_TILES
    zeros = () if tiled else (out.zero_points,)
    pitch = (np.int64(out.codes.shape[1]),) if tiled else ()
    arrays = x, out.codes, out.scales, *zeros, amax, out.counters.array
    numbers = *random_arguments(stream), *plan.sizes, *pitch
    launch(source, plan.kernel, plan.grid, plan.threads, *arrays, *numbers)
