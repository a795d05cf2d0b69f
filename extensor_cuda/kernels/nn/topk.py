"""The largest values of rows, and their positions: one launch."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor_cuda.kernels.nn.elementwise import kind
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["MAX_LENGTH", "source", "topk"]

Array = Any
MAX_LENGTH = 1024
"""Values of a row, which a warp holds."""
_THREADS = 256


@lru_cache(maxsize=64)
def source(values: int, length: int) -> Source:
    """The program for rows of a kind, as long as that or shorter by less than a warp."""
    macros = {"NN_IN": values, "NN_EACH": -(-length // 32)}
    return Source.read(Path(__file__).parent / "topk.cu", macros)


def topk(x: Array, k: int, xp: Any) -> tuple[Array, Array]:
    """Of x (..., n), C-contiguous and not empty: values and int64 positions (..., k)."""
    length = x.shape[-1]
    rows, shape = x.size // length, (*x.shape[:-1], k)
    values, positions = xp.empty(shape, dtype=x.dtype), xp.empty(shape, dtype=np.int64)
    numbers = np.int64(rows), np.int32(length), np.int32(k)
    blocks = -(-rows * 32 // _THREADS)
    launch(source(kind(x), length), "topk", blocks, _THREADS, x, values, positions, *numbers)
    return values, positions
