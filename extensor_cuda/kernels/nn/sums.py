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

_LINES, _LINES_AT_END = 8, 32  # rows that a block has at a time, in the first launch and the last
_BLOCKS, _MAX_CHUNKS, _MIN_ROWS = 1056, 256, 32


@lru_cache(maxsize=8)
def sums_source(kind: str, each: int, lines: int) -> Source:
    """The program for a dtype, so many columns a lane and so many rows at a time."""
    macros = {"NN_IN": KINDS.index(kind), "NN_THREAD_VALUES": each, "NN_BLOCK_ROWS": lines}
    return Source.read(Path(__file__).parent / "sums.cu", macros)


def _chunk(rows: int, panels: int) -> int:
    """Rows of a chunk: as many chunks as fill a GPU, each worth a block's while."""
    chunks = min(max(_BLOCKS // panels, 1), _MAX_CHUNKS)
    return max(-(-rows // chunks // _MIN_ROWS) * _MIN_ROWS, _MIN_ROWS)


def _each(columns: int, itemsize: int, aligned: bool) -> int:
    each = 16 // itemsize
    return each if aligned and columns % each == 0 else 1


def depth(rows: int, columns: int, itemsize: int, aligned: bool = True) -> int:
    """How many additions a value goes through at most."""
    chunk = _chunk(rows, -(-columns // (32 * _each(columns, itemsize, aligned))))
    chunks = -(-rows // chunk)
    last = -(-chunks // _LINES_AT_END) + _LINES_AT_END if chunks > 1 else 0
    return -(-chunk // _LINES) + _LINES + last


def column_sums(x: Array, xp: Any) -> Array:
    """Float32 (columns,) of C-contiguous float32 or bfloat16 (rows, columns), not empty."""
    rows, columns = x.shape
    each = _each(columns, x.itemsize, x.data.ptr % 16 == 0)
    panels = -(-columns // (32 * each))
    chunk = _chunk(rows, panels)
    chunks = -(-rows // chunk)
    out = xp.empty((chunks, columns), dtype=np.float32)
    sizes, program = map(np.int64, (rows, columns, chunk)), sums_source(x.dtype.name, each, _LINES)
    launch(program, "column_sums", chunks * panels, 32 * _LINES, x, out, *sizes)
    if chunks == 1:
        return out[0]
    total = xp.empty(columns, dtype=np.float32)
    program, blocks = sums_source("float32", 1, _LINES_AT_END), -(-columns // 32)
    arguments = out, total, *map(np.int64, (chunks, columns, chunks))
    launch(program, "column_sums", blocks, 32 * _LINES_AT_END, *arguments)
    return total
