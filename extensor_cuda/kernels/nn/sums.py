"""Sums down the columns of a matrix in two launches: the gradient of a bias.

The order of the additions is the shape's alone. With u = 2**-24 and d from `depth`, the most
additions that a value goes through, a sum is off by up to d u / (1 - d u) sum |x|.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["KINDS", "column_sums", "depth", "sums_source"]

Array = Any
KINDS = ("float32", "bfloat16")

_BLOCK_ROWS, _LAST_BLOCK_ROWS = 8, 32  # rows of a block at a time, in the first and last launch
_BLOCKS, _MAX_CHUNKS, _MIN_ROWS = 1056, 256, 32


@lru_cache(maxsize=8)
def sums_source(kind: str, each: int, block_rows: int) -> Source:
    """The program for a dtype, so many columns a lane and so many rows at a time."""
    macros = {"NN_IN": KINDS.index(kind), "NN_THREAD_VALUES": each, "NN_BLOCK_ROWS": block_rows}
    return Source.read(Path(__file__).parent / "sums.cu", macros)


def _chunk(rows: int, column_tiles: int) -> int:
    """Rows of a chunk: as many chunks as fill a GPU, each worth a block's while."""
    chunks = min(max(_BLOCKS // column_tiles, 1), _MAX_CHUNKS)
    return max(-(-rows // chunks // _MIN_ROWS) * _MIN_ROWS, _MIN_ROWS)


def _each(columns: int, itemsize: int, aligned: bool) -> int:
    each = 16 // itemsize
    return each if aligned and columns % each == 0 else 1


def depth(rows: int, columns: int, itemsize: int, aligned: bool = True) -> int:
    """How many additions a value goes through at most."""
    chunk = _chunk(rows, -(-columns // (32 * _each(columns, itemsize, aligned))))
    chunks = -(-rows // chunk)
    last = -(-chunks // _LAST_BLOCK_ROWS) + _LAST_BLOCK_ROWS if chunks > 1 else 0
    return -(-chunk // _BLOCK_ROWS) + _BLOCK_ROWS + last


def column_sums(x: Array, xp: Any) -> Array:
    """Float32 (columns,) of C-contiguous float32 or bfloat16 (rows, columns), not empty."""
    rows, columns = x.shape
    each = _each(columns, x.itemsize, x.data.ptr % 16 == 0)
    column_tiles = -(-columns // (32 * each))
    chunk = _chunk(rows, column_tiles)
    chunks = -(-rows // chunk)
    out = xp.empty((chunks, columns), dtype=np.float32)
    program = sums_source(x.dtype.name, each, _BLOCK_ROWS)
    sizes = map(np.int64, (rows, columns, chunk))
    launch(program, "column_sums", chunks * column_tiles, 32 * _BLOCK_ROWS, x, out, *sizes)
    if chunks == 1:
        return out[0]
    total = xp.empty(columns, dtype=np.float32)
    program, blocks = sums_source("float32", 1, _LAST_BLOCK_ROWS), -(-columns // 32)
    arguments = out, total, *map(np.int64, (chunks, columns, chunks))
    launch(program, "column_sums", blocks, 32 * _LAST_BLOCK_ROWS, *arguments)
    return total
