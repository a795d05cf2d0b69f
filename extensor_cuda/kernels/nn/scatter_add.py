"""Rows added to rows of a table, in two launches and in order: the gradient of an embedding.

Positions that repeat are summed one after the other, so a sum of n terms is off by up to
n 2**-24 of the sum of magnitudes, and is the same in each run.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["add_rows", "source", "sum_rows"]

Array = Any
_THREADS, _MAX_KEPT = 256, 32  # as in scatter_add.cu


@cache
def source() -> Source:
    """The program."""
    return Source.read(Path(__file__).parent / "scatter_add.cu", {})


def add_rows(out: Array, index: Array, rows: Array, xp: Any) -> None:
    """out[index] += rows in place.

    Out is float32 (N, *rest), C-contiguous; rows are float32 (*index.shape, *rest); the index, of
    any shape, holds whole numbers in -N..N - 1.
    """
    _add(out, index, rows, len(out), None, xp)


def sum_rows(index: Array, rows: Array, length: int, xp: Any) -> tuple[Array, Array]:
    """See the protocol; a row's sum lies where the row is met first, other rows are zeros.

    Rows are float32 (index.size, width); the index is as in `add_rows`.
    """
    slots, out = xp.full(length, -1, dtype=np.int32), xp.zeros(rows.shape, dtype=np.float32)
    _add(out, index, rows, length, slots, xp)
    return slots, out


def _add(out: Array, index: Array, rows: Array, length: int, slots: Array | None, xp: Any) -> None:
    """Add to the index's rows of ``out``; with ``slots`` to those of each row's first position."""
    width = math.prod(out.shape[1:])
    if not index.size or not width:
        return
    index = xp.ascontiguousarray(index.astype(np.int64, copy=False))
    column_tiles = -(-width // _THREADS)
    found = xp.zeros((length, 2), dtype=np.uint32)
    kept = xp.empty((length, _MAX_KEPT), dtype=np.uint32)
    sizes = np.int64(index.size), np.int64(length)
    launch(source(), "collect", -(-index.size // _THREADS), _THREADS, index, found, kept, *sizes)
    arrays = index, found, kept, xp.ascontiguousarray(rows), out, slots
    blocks = min(index.size, length) * column_tiles
    launch(source(), "add_rows", blocks, _THREADS, *arrays, *sizes, np.int64(width))
