"""Launches of `w4a16_sm90_ring.cu`: up to 16 tokens times many packed E2M1 weights on Hopper.

How a product is divided is a model of its time by shapes alone, so that sums are the same on any
GPU.
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

_TOKENS = range(3, 17)
_TALL, _PIECE, _PROCESSORS, _AHEAD = 16, 256, 132, 2
"""Rows of a tile, elements of a piece of K, blocks, pieces of weights that a warp copies ahead."""
_WARPS, _BRINGING = 14, 4
"""Warps that multiply, at most (eight are enough if they have as much to do), and that bring x."""
_STAGES, _SLICES = 18, 8
"""Pieces of x in shared memory, and slices of K, at most."""
_SOURCE = Path(__file__).parent / "w4a16_sm90_ring.cu"


@dataclass(frozen=True)
class Cut:
    """How `w4a16_sm90_ring.cu` divides a product.

    Attributes:
        slices: parts of K that different blocks have.
        groups: of tiles, each of as many blocks as there are slices.
        pairs: of tiles that a block has at a time.
        parts: warps that share a pair's pieces of K.
    """

    slices: int
    groups: int
    pairs: int
    parts: int


def _memory(warps: int, tokens: int, block: int) -> tuple[int, int]:
    """Pieces of x in a block's shared memory, and all bytes of it."""
    ring = warps * _AHEAD * 2 * _TALL * (_PIECE // 2 + max(_PIECE // block, 4))
    stage = 8 * -(-tokens // 8) * (2 * _PIECE + 64) + 16
    stages = min((driver.SHARED_BYTES - 1024 - ring) // stage, _STAGES)
    return stages, ring + stages * stage


def _idle(pieces: int, pairs: int, parts: int) -> float:
    """The time of the busiest scheduler to what it were if all had as much to do."""
    warps = pairs * parts
    if parts == 2 and pairs % 2 and pairs > 1:  # shared so that they have
        return 1.0 + parts / pieces
    return -(-warps // 4) * 4 / warps * -(-pieces // parts) * parts / pieces


def cuts(lines: int, columns: int, tokens: int, block: int) -> list[tuple[float, Cut]]:
    """Ways to divide N = lines and K = columns, each with its time in us by a model.

    No way asks how many multiprocessors there are, so that sums are the same on any GPU.
    """
    pieces, tiles = -(-columns // _PIECE), -(-lines // _TALL)
    piece = 0.079 if tokens <= 8 else 0.095  # of a tile, by all warps
    found = []
    for slices in range(1, min(pieces, _PROCESSORS, _SLICES) + 1):
        groups, each = min(_PROCESSORS // slices, tiles), -(-pieces // slices)
        most = -(-tiles // groups)
        start = 4.5 + 0.1 * tokens
        if slices > 1:  # written and read again
            start += 8 + slices * tokens * lines / 5e5
        least = -(-most // (2 * _WARPS))
        for rounds in (least, least + 1):
            pairs = -(-most // (2 * rounds))
            for parts in range(1, min(_WARPS // pairs, each) + 1):
                if parts > _memory(pairs * parts, tokens, block)[0]:
                    continue  # a warp would wait for x that has no place yet
                wait = max(8 / (pairs * parts), 1.0) + 0.005 * pairs * parts
                work = 2 * pairs * rounds * each * piece * _idle(each, pairs, parts) * wait
                found.append((start + work, Cut(slices, groups, pairs, parts)))
    return found


@lru_cache(maxsize=1024)
def cut(lines: int, columns: int, tokens: int, block: int) -> Cut:
    """The quickest of `cuts`."""
    return min(cuts(lines, columns, tokens, block), key=lambda way: way[0])[1]


def taken(w: QuantArray, tokens: int) -> bool:
    """Whether the kernel has such weights, of which `extensor_cuda.decode` has a product at all.

    Args:
        w: (N, K), blocked along K.
        tokens: rows of x, three for each of float32.
    """
    if is_scaled(w.spec) or tokens not in _TOKENS or w.shape[1] % 128:
        return False
    if w.shape[0] <= 2 * _PROCESSORS * _TALL:  # a block would have a pair of tiles or less
        return False
    _, length = tile_extent(w.spec, w.shape)
    return w.shape[1] // length % 4 == 0 and countable(w.shape)


@lru_cache(maxsize=1024)
def _source(
    spec: QuantSpec, shape: tuple[int, ...], tokens: int, dtype: str, out: str
) -> tuple[Source, Cut, int]:
    _, block = tile_extent(spec, shape)
    grain = max(_PIECE // block, 4)
    while shape[1] // block % grain:
        grain //= 2
    made = cut(*shape, tokens, block)
    warps = made.pairs * made.parts
    stages, shared = _memory(warps, tokens, block)
    source = program(
        _SOURCE, spec, shape, dtype, out,
        WEIGHT_ONLY_SCALE_BYTES=grain,
        WEIGHT_ONLY_WARPS=warps,
        WEIGHT_ONLY_SPLIT_K=made.parts,
        WEIGHT_ONLY_PRODUCER_WARPS=_BRINGING,
        WEIGHT_ONLY_DEPTH=_AHEAD,
        WEIGHT_ONLY_STAGES=stages,
        WEIGHT_ONLY_TILES=-(-tokens // 8),
        COMMON_GUARD=0,
    )  # fmt: skip
    return source, made, shared


def decode_source(w: QuantArray, rows: int, dtype: str, out: str) -> tuple[Source, Cut, int]:
    """The program for weights, rows of activations of a dtype, and a result's dtype.

    Returns:
        The program, how it divides the product, and the bytes of shared memory of a block.
    """
    return _source(w.spec, w.shape, rows * PARTS[dtype], dtype, out)


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
    null = np.uint64(0)
    source, made, shared = decode_source(w, rows, dtype, out.dtype.name)
    partial, done = room(made.slices, rows, lines, made.groups, zeros, xp)
    launch(
        source,
        "decode_ring",
        made.groups * made.slices,
        32 * (made.pairs * made.parts + _BRINGING),
        x,
        codes,
        scales,
        null if w.tensor_scale is None else w.tensor_scale,
        partial,
        done,
        out,
        *(np.int32(n) for n in (rows, lines, columns, made.slices)),
        shared=shared,
        pdl=True,
    )
