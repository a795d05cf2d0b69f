"""Products of bfloat16 operands on Hopper's tensor cores, for what a recipe leaves unquantized.

A matrix is rounded to bfloat16 once, as it lies; one that is bfloat16 is read where it is. The
product reads it along its rows or down its columns (`extensor_cuda.kernels.gemm.gemm_sm90`), so
that nothing
is turned: a linear layer's three products take one rounding of x, of w and of g. The bound is that
of `extensor_cuda.gemm`; where K is multiplied in parts, which the shape alone decides
(`configure_parts`), the parts are added in order, which cuts less. Nothing here waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from extensor_cuda.kernels.gemm.gemm_sm90 import (
    Config,
    Split,
    configure_parts,
    empty_rows,
    gemm,
    rows_of_parts,
)
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["Dense", "add_parts", "empty_parts", "make", "multiply", "source", "thirds"]

Array = Any

_THREADS = 256  # as in cast_bf16.cu
_FORMATS = ("float32", "bfloat16", "float16")
_OUT = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


@dataclass(frozen=True, eq=False)
class Dense:
    """A matrix as a product takes it.

    Attributes:
        bits: uint16, of bfloat16 values, rows a multiple of 16 bytes apart.
        down: whether it lies as (K, rows), contracted down its columns, and not as (rows, K).
    """

    bits: Array
    down: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, K)."""
        rows, k = self.bits.shape[:: -1 if self.down else 1]
        return rows, k

    def values(self, xp: Any) -> Array:
        """The values as float32, (rows, K)."""
        wide = (self.bits.astype(xp.uint32) << 16).view(xp.float32)
        return wide.T if self.down else wide


@lru_cache(maxsize=16)
def source(dtype: str, whole: bool, out: str = "float32") -> Source:
    """The program that rounds matrices of a dtype, and adds parts of a sum to an ``out``."""
    path = Path(__file__).parent / "kernels" / "prepare" / "cast_bf16.cu"
    macros = {
        "PREPARE_IN": _FORMATS.index(dtype),
        "PREPARE_WHOLE": int(whole),
        "PREPARE_OUT_BF16": int(out == "bfloat16"),
    }
    return Source.read(path, macros)


def make(x: Array, axes: Sequence[int], xp: Any) -> list[Dense]:
    """A contiguous matrix of floats, to be contracted along each of ``axes``: rounded once."""
    bits = _rounded(x, xp)
    return [Dense(bits, axis == 0) for axis in axes]


def _rounded(x: Array, xp: Any) -> Array:
    rows, columns = x.shape
    aligned = x.data.ptr % 16 == 0
    if x.dtype.name == "bfloat16" and aligned and x.strides[0] % 16 == 0:
        return x.view(xp.uint16)
    bits = empty_rows(xp, rows, columns, np.uint16)
    pitch = bits.strides[0] // 2
    whole = aligned and pitch == columns
    threads = rows * pitch // (8 if whole else 2)
    sizes = (np.int64(size) for size in (rows, columns, pitch))
    program = source(x.dtype.name, whole)
    launch(program, "dense", -(-threads // _THREADS), _THREADS, x, bits, *sizes)
    return bits


def thirds(x: Array, xp: Any) -> Array:
    """Float32 (M, K) as the bits of three bfloat16 matrices, (3 M, K), that add up to it.

    One below the other, the smallest values first; infinities and NaN are in the last alone.
    """
    rows, columns = x.shape
    out = empty_rows(xp, 3 * rows, columns, np.uint16)
    pitch = out.strides[0] // 2
    sizes = (np.int64(size) for size in (rows, columns, pitch))
    blocks = -(-rows * pitch // (2 * _THREADS))
    launch(
        source("float32", True), "thirds", blocks, _THREADS, xp.ascontiguousarray(x), out, *sizes
    )
    return out


def multiply(a: Dense, b: Dense, dtype: str, xp: Any, bias: Array | None = None) -> Array:
    """The product a b^T + bias of (M, K) and (N, K) as "float32" or "bfloat16", without waiting.

    Args:
        a: left operand.
        b: right operand.
        dtype: of the result.
        xp: cupy.
        bias: float32 (N,), added to the float32 sum; None: none.
    """
    (m, k), n = a.shape, b.shape[0]
    out = empty_rows(xp, m, n, _OUT[dtype])
    config, split = configure_parts("bf16", m, n, k, dtype, (a.down, b.down))
    if split is None:
        gemm(a.bits, b.bits, out, config, bias=bias)
    else:
        parts = empty_parts(m, n, split, config, xp)
        gemm(a.bits, b.bits, parts, config, split=split)
        add_parts(parts, split, out, bias, xp)
    return xp.ascontiguousarray(out)


def empty_parts(m: int, n: int, split: Split, config: Config, xp: Any) -> Array:
    """Where the parts of a product (m, n) go, before they are added."""
    return empty_rows(xp, split.parts * rows_of_parts(m, config), n, np.float32)


def add_parts(parts: Array, split: Split, out: Array, bias: Array | None, xp: Any) -> None:
    """Out (M, N) = the parts of a product, added in order, then the bias; does not wait."""
    below, (m, n) = len(parts) // split.parts, out.shape
    pitch, quads = out.strides[0] // out.itemsize, parts.strides[0] // 16
    sizes = (np.int64(size) for size in (split.parts, below, m, n, quads, pitch))
    given = np.uint64(0) if bias is None else bias
    program = source("float32", True, out.dtype.name)
    blocks = -(-m * quads // _THREADS)
    launch(program, "add_parts", blocks, _THREADS, parts, given, out, *sizes)
