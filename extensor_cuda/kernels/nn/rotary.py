"""Turns heads by their positions' angles in one launch, from whatever rows they lie in."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.backends.heads import empty_heads
from extensor.backends.unsupported import Unsupported
from extensor_cuda.kernels.nn.elementwise import kind
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["gap", "rotary", "source"]

Array = Any
_THREADS, _VECTOR = 256, 8  # as in rotary.cu


@lru_cache(maxsize=2)
def source(dtype: int) -> Source:
    """The program for heads of a kind."""
    return Source.read(Path(__file__).parent / "rotary.cu", {"NN_A": dtype})


def gap(x: Array, cos: Array, sin: Array, interleaved: bool) -> Unsupported | None:
    """Why the kernel does not turn these float32 or bfloat16 heads; None where it does."""
    half = cos.shape[-1]
    if x.ndim != 4 or interleaved or 2 * half != x.shape[3] or half % _VECTOR:
        return Unsupported("heads that are not (B, H, T, 2 n) with pairs n apart, n in eights")
    tables = (cos, sin)
    if any(t.size != x.shape[2] * half or t.dtype != np.float32 for t in tables):
        return Unsupported("angles that are not one for each position in float32")
    if not all(t.flags.c_contiguous and t.data.ptr % 16 == 0 for t in tables):
        return Unsupported("tables that are strided, or not aligned to 16 bytes")
    if x.size // (2 * _VECTOR) > 2**32 - _THREADS:
        return Unsupported("more than 2^32 vectors")
    strides = [stride // x.itemsize for stride in x.strides]
    if strides[3] != 1 or any(s % _VECTOR for s in strides[:3]) or x.data.ptr % 16:
        return Unsupported("heads that are strided, or not aligned to 16 bytes")
    return None


def rotary(x: Array, cos: Array, sin: Array, xp: Any) -> Array:
    """Of x's shape, dtype and order in memory; arguments without a `gap`, not empty."""
    out, half = empty_heads(x, xp), x.shape[3] // 2
    rows = x.size // x.shape[3]
    blocks = -(-rows * (half // _VECTOR) // _THREADS)
    axes: list[int] = []
    for axis in sorted(range(3), key=x.strides.__getitem__):
        apart = x.strides[axis] // x.itemsize, out.strides[axis] // x.itemsize
        axes += x.shape[axis], *apart, half if axis == 2 else 0
    numbers = map(np.int64, (rows, half, *axes))
    launch(source(kind(x)), "rotary", blocks, _THREADS, x, cos, sin, out, *numbers)
    return out
