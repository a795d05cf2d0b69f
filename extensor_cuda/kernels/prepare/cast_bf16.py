"""Launching `cast_bf16.cu`: floats rounded or cut to bfloat16, and partial sums added."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor_cuda.kernels.gemm.config import Config, Split
from extensor_cuda.kernels.gemm.gemm_sm90 import empty_rows, partial_sum_rows
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["add_partial_sums", "bf16_source", "bf16_triple", "empty_partial_sums", "round_to_bf16"]

Array = Any

_SOURCE = Path(__file__).parent / "cast_bf16.cu"
_THREADS = 256  # as in cast_bf16.cu
_FORMATS = ("float32", "bfloat16", "float16")


@lru_cache(maxsize=16)
def bf16_source(dtype: str, whole: bool, out: str = "float32") -> Source:
    """The program that rounds matrices of a dtype, and adds partial sums to an ``out``."""
    macros = {
        "PREPARE_IN": _FORMATS.index(dtype),
        "PREPARE_WHOLE": int(whole),
        "PREPARE_OUT_BF16": int(out == "bfloat16"),
    }
    return Source.read(_SOURCE, macros)


def round_to_bf16(x: Array, xp: Any) -> Array:
    """A contiguous matrix of floats as bfloat16 bits; does not wait.

    A bfloat16 one whose rows lie a multiple of 16 bytes apart is not copied.
    """
    rows, columns = x.shape
    aligned = x.data.ptr % 16 == 0
    if x.dtype.name == "bfloat16" and aligned and x.strides[0] % 16 == 0:
        return x.view(xp.uint16)
    bits = empty_rows(xp, rows, columns, np.uint16)
    pitch = bits.strides[0] // 2
    whole = aligned and pitch == columns
    threads = rows * pitch // (8 if whole else 2)
    sizes, program = map(np.int64, (rows, columns, pitch)), bf16_source(x.dtype.name, whole)
    launch(program, "cast", -(-threads // _THREADS), _THREADS, x, bits, *sizes)
    return bits


def bf16_triple(x: Array, xp: Any) -> Array:
    """Float32 (M, K) as the bits of three bfloat16 matrices, (3 M, K), that add up to it.

    One below the other, the smallest values first; infinities and NaN are in the last alone.
    """
    rows, columns = x.shape
    out = empty_rows(xp, 3 * rows, columns, np.uint16)
    pitch = out.strides[0] // 2
    sizes, blocks = map(np.int64, (rows, columns, pitch)), -(-rows * pitch // (2 * _THREADS))
    x, program = xp.ascontiguousarray(x), bf16_source("float32", True)
    launch(program, "split_bf16x3", blocks, _THREADS, x, out, *sizes)
    return out


def empty_partial_sums(m: int, n: int, split: Split, config: Config, xp: Any) -> Array:
    """Where the partial sums of a split-K product (m, n) go, before they are added."""
    return empty_rows(xp, split.count * partial_sum_rows(m, config), n, np.float32)


def add_partial_sums(partial: Array, split: Split, out: Array, bias: Array | None) -> None:
    """Out (M, N) = the partial sums of a product, added in order, then the bias; does not wait."""
    below, (m, n) = len(partial) // split.count, out.shape
    pitch, quads = out.strides[0] // out.itemsize, partial.strides[0] // 16
    sizes = (np.int64(size) for size in (split.count, below, m, n, quads, pitch))
    program = bf16_source("float32", True, out.dtype.name)
    blocks = -(-m * quads // _THREADS)
    launch(program, "add_splits", blocks, _THREADS, partial, bias, out, *sizes)
