"""Products of bfloat16 operands on Hopper's tensor cores, for what a recipe leaves unquantized.

Both operands are rounded to bfloat16 and laid out with the contraction contiguous, then multiplied
by the kernel that `extensor_cuda.gemm` describes, with its bound. Nothing here waits for the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from extensor_cuda.jit import Source, launch
from extensor_cuda.kernels.gemm import configure, empty_rows, gemm

__all__ = ["Dense", "make", "multiply", "source"]

Array = Any

_TILE, _THREADS = 64, 256  # as in dense.cu
_FORMATS = ("float32", "bfloat16", "float16")
_OUT = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


@dataclass(frozen=True, eq=False)
class Dense:
    """A matrix as a product takes it.

    Attributes:
        bits: uint16, of bfloat16 values (rows, K), rows a multiple of 16 bytes apart.
    """

    bits: Array

    def values(self, xp: Any) -> Array:
        """The values as float32."""
        return (self.bits.astype(xp.uint32) << 16).view(xp.float32)


@lru_cache(maxsize=8)
def source(dtype: str, turned: bool) -> Source:
    """The program that rounds matrices of a dtype, and turns them if asked to."""
    path = Path(__file__).parent / "kernels" / "dense.cu"
    return Source.read(path, {"IN": _FORMATS.index(dtype), "TURNED": int(turned)})


def make(x: Array, axis: int, xp: Any) -> Dense:
    """A contiguous matrix of floats, to be contracted along ``axis``, without waiting."""
    rows, k = x.shape if axis == 1 else x.shape[::-1]
    bits = empty_rows(xp, rows, k, np.uint16)
    if axis == 1 and x.dtype.name == "bfloat16" and x.data.ptr % 16 == x.strides[0] % 16 == 0:
        return Dense(x.view(xp.uint16))
    tiles = -(-x.shape[0] // _TILE) * -(-x.shape[1] // _TILE)
    sizes = (*x.shape, bits.strides[0] // 2)
    program = source(x.dtype.name, axis == 0)
    launch(program, "dense", tiles, _THREADS, x, bits, *(np.int64(size) for size in sizes))
    return Dense(bits)


def multiply(a: Dense, b: Dense, dtype: str, xp: Any) -> Array:
    """The product a b^T of (M, K) and (N, K) as "float32" or "bfloat16", without waiting."""
    size = len(a.bits), len(b.bits)
    out = empty_rows(xp, *size, _OUT[dtype])
    gemm(a.bits, b.bits, out, configure("bf16", *size, dtype))
    return xp.ascontiguousarray(out)
