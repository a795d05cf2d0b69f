"""Placing `w4a16_sm90_resident.cu`: products of up to 16 tokens with packed E2M1 weights on Hopper.

How a product is divided is a model of what the busiest warp does, by shapes alone, so that sums are
the same on any GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.quant.array import QuantArray, tile_extent
from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.weight_only.program import PARTS, countable, is_scaled, program, room
from extensor_cuda.runtime import driver
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["Cut", "cut", "cuts", "decode_source", "product", "taken"]

Array = Any

_TOKENS, _WARPS, _CHUNK, _AHEAD, _PROCESSORS = 16, 8, 512, 2, 132
"""Tokens at most, warps of a block, elements of K in a copy, copies ahead, blocks."""
_SOURCE = Path(__file__).parent / "w4a16_sm90_resident.cu"


@dataclass(frozen=True)
class Cut:
    """How `w4a16_sm90_resident.cu` divides a product.

    Attributes:
        slices: parts of K that different blocks have.
        stretch: elements of K in one.
        parts: of a slice, which a block's warps share; 1 if there are slices.
        groups: of rows of weights, each of as many blocks as there are slices.
        shared: bytes of shared memory of a block.
    """

    slices: int
    stretch: int
    parts: int
    groups: int
    shared: int


def cuts(lines: int, columns: int, tokens: int, block: int) -> list[tuple[float, Cut]]:
    """Ways to divide N = lines and K = columns that fit, and what the busiest warp has to do.

    In copies of a chunk, each about 1.5 us where memory is the bound. No way asks how many
    multiprocessors there are, so that sums are the same on any GPU. A block takes so much shared
    memory that a multiprocessor has one: early starts put two on those that were done first.
    """
    chunks, tiles = -(-columns // _CHUNK), -(-lines // 16)
    ring = _WARPS * _AHEAD * 16 * (_CHUNK // 2 + 32 + _CHUNK // block)
    found = []
    for slices in range(1, min(chunks, _PROCESSORS) + 1):
        each = -(-chunks // slices)
        groups = min(_PROCESSORS // slices, tiles)
        most = -(-tiles // groups)  # of a block
        for parts in (1, 2, 4, 8) if slices == 1 else (1,):
            sums = 64 * most * tokens * parts if slices == 1 else 0
            shared = ring + tokens * (2 * each * _CHUNK + 64) + sums
            if (slices - 1) * each >= chunks or shared > driver.SHARED_BYTES - 64:
                continue
            cost = -(-most // (_WARPS // parts)) * -(-each // parts) + tokens * each / 40
            if slices > 1:  # the last block adds what others left
                cost += 1.3 + tokens * most * slices / 1900
            shared = max(shared, driver.SHARED_BYTES // 2)
            found.append((cost, Cut(slices, each * _CHUNK, parts, groups, shared)))
    return found


@lru_cache(maxsize=1024)
def cut(lines: int, columns: int, tokens: int, block: int) -> Cut | None:
    """The quickest of `cuts`; None if there is none."""
    found = cuts(lines, columns, tokens, block)
    return min(found, key=lambda way: way[0])[1] if found else None


def taken(w: QuantArray, tokens: int) -> bool:
    """Whether the kernel has such weights, of which `extensor_cuda.decode` has a product at all.

    Args:
        w: (N, K), blocked along K.
        tokens: rows of x, three for each of float32.
    """
    if is_scaled(w.spec) or tokens > _TOKENS or w.shape[1] % 128 or w.shape[0] < 16:
        return False
    _, length = tile_extent(w.spec, w.shape)
    if w.shape[1] // length % 4 or not countable(w.shape):
        return False
    return cut(*w.shape, tokens, length) is not None


@lru_cache(maxsize=1024)
def _source(spec: QuantSpec, shape: tuple[int, ...], rows: int, dtype: str, out: str) -> Source:
    _, block = tile_extent(spec, shape)
    return program(
        _SOURCE, spec, shape, dtype, out,
        WEIGHT_ONLY_SCALE_BYTES=4 if shape[1] // block % 16 or _CHUNK // block % 16 else 16,
        WEIGHT_ONLY_WARPS=_WARPS,
        WEIGHT_ONLY_CHUNK=_CHUNK,
        WEIGHT_ONLY_DEPTH=_AHEAD,
        WEIGHT_ONLY_TILES=-(-rows * PARTS[dtype] // 8),
    )  # fmt: skip


def decode_source(w: QuantArray, rows: int, dtype: str, out: str) -> Source:
    """The program for weights, rows of activations of a dtype, and a result's dtype."""
    return _source(w.spec, w.shape, rows, dtype, out)


def product(
    x: Array,
    w: QuantArray,
    codes: Array,
    scales: Array,
    out: Array,
    zeros: Callable[[int], Array],
    xp: Any,
) -> None:
    """Write X w^T of contiguous arrays to `out`; does not wait.

    Args:
        x: (M, K), float32 or bfloat16, from a multiple of 16 bytes on, as are the next two.
        w: (N, K), which `taken` has.
        codes: its codes.
        scales: its scales.
        out: (M, N), float32 or bfloat16.
        zeros: makes so many counters that are zero, and that the kernel leaves so.
        xp: cupy.
    """
    (rows, columns), lines, dtype = x.shape, w.shape[0], x.dtype.name
    tokens, null = rows * PARTS[dtype], np.uint64(0)
    made = cut(lines, columns, tokens, tile_extent(w.spec, w.shape)[1])
    assert made is not None
    partial, done = room(made.slices, tokens, lines, made.groups, zeros, xp)
    launch(
        decode_source(w, rows, dtype, out.dtype.name),
        "decode_few",
        made.groups * made.slices,
        32 * _WARPS,
        x,
        codes,
        scales,
        null if w.tensor_scale is None else w.tensor_scale,
        partial,
        done,
        out,
        *(np.int32(n) for n in (rows, lines, columns, made.slices, made.stretch)),
        np.int32(made.parts.bit_length() - 1),
        shared=made.shared,
        pdl=True,
    )
