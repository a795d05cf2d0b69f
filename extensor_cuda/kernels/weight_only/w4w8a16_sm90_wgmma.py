"""Placing `w4w8a16_sm90_wgmma.cu`: products of up to 64 tokens with packed weights on Hopper.

E2M1, INT4 and INT8, these under float scales of rows or of groups of whole segments.

How a product is divided is a model of what the busiest multiprocessor does, by shapes alone, so
that sums are the same on any GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.quant.array import QuantArray, tile_extent
from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.common.wgmma import wgmma
from extensor_cuda.kernels.weight_only.program import PARTS, is_scaled, program, room
from extensor_cuda.runtime import driver
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["Cut", "cut", "cuts", "decode_source", "product", "taken"]

Array = Any

_THREADS, _BRINGING, _TALL, _SEGMENT, _PROCESSORS = 640, 4, 64, 128, 132
_LONGEST = 32  # block of a scale of E2M1, of which a lane has one at least
_SOURCE = Path(__file__).parent / "w4w8a16_sm90_wgmma.cu"


@dataclass(frozen=True)
class Cut:
    """How a product is divided.

    Attributes:
        split: warpgroups of a block that share rows of weights and divide K.
        slices: parts of K that different blocks have.
        stages: pieces of x that shared memory holds.
        depth: segments of weights that a warp asks for in advance.
        shared: bytes of shared memory of a block.
    """

    split: int
    slices: int
    stages: int
    depth: int
    shared: int


def _fit(split: int, wide: int, dtype: str, bits: int) -> tuple[int, int, int] | None:
    """Stages, depth and bytes of shared memory for 8 `wide` tokens; None if there is not enough."""
    tokens, item = 8 * wide, 4 if dtype == "float32" else 2
    stage = split * 256 * tokens
    raw = tokens // PARTS[dtype] * (split * _SEGMENT * item + 16)
    codes = 256 * bits  # of 16 rows
    least = max(2, -(-tokens * (_TALL + 4) // (codes + 16 * bits)))  # sums lie where the codes did
    for stages, depth in ((8, 8), (6, 6), (4, 6), (4, 4), (4, 3), (4, 2)):
        rings = (
            -(-_BRINGING * raw // 128) * 128 + stages * (stage + 16) + 16 * depth * (codes + 128)
        )
        if depth >= least and (shared := 1024 + rings) <= driver.SHARED_BYTES - 1024:
            return stages, depth, shared
    return None


def cuts(lines: int, columns: int, tokens: int, dtype: str, bits: int) -> list[tuple[float, Cut]]:
    """Ways to divide N = lines and K = columns, each with its time in us by the model.

    Args:
        lines: rows of weights.
        columns: of weights.
        tokens: rows of x times its `PARTS`.
        dtype: of x.
        bits: of a weight.
    """
    found = []
    for split in (1, 2, 4):
        if (room := _fit(split, -(-tokens // 8), dtype, bits)) is None:
            continue
        groups, pieces = -(-lines // (_TALL * 4 // split)), -(-(columns // _SEGMENT) // split)
        for slices in range(1, min(pieces, _PROCESSORS) + 1):
            # A piece as it was measured on an H200, for 1 to 64 tokens within a tenth; of integers
            # within a fifth, INT4 quicker, INT8 slower.
            piece = 0.82 + 0.0045 * tokens * (1 + split)
            cost = -(-groups * slices // _PROCESSORS) * (-(-pieces // slices) * piece + 1)
            if slices > 1:  # written and read again
                cost += 2 + slices * tokens * lines / 5e5
            found.append((cost, Cut(split, slices, *room)))
    return found


@lru_cache(maxsize=1024)
def cut(lines: int, columns: int, tokens: int, dtype: str, bits: int) -> Cut:
    """The quickest of `cuts`."""
    return min(cuts(lines, columns, tokens, dtype, bits), key=lambda way: way[0])[1]


def _group(spec: QuantSpec, shape: tuple[int, ...]) -> int:
    """Segments that have a float scale, 0 if it is a row's."""
    _, length = tile_extent(spec, shape)
    return 0 if length >= shape[1] else length // _SEGMENT


def taken(w: QuantArray) -> bool:
    """Whether the kernel has such weights, of which `extensor_cuda.decode` has a product at all."""
    if w.shape[1] % _SEGMENT or w.shape[0] * w.shape[1] >= 1 << 40 or w.codes.shape[1] >= 1 << 29:
        return False
    _, length = tile_extent(w.spec, w.shape)
    if not is_scaled(w.spec):
        return length <= _LONGEST
    if length >= w.shape[1]:
        return bool(w.codes.shape[1] % 16 == 0)  # which are padded to whole groups
    # Scales and zero points of groups are copied four bytes at a time.
    return length % _SEGMENT == 0 and w.scales.size % 4 == 0


@lru_cache(maxsize=256)
def _with_wgmma(plain: Source, tiles: int) -> Source:
    function = wgmma("bf16", "bf16", 8 * tiles, registers=True)
    return replace(plain, text=plain.text.replace("//WGMMA//", function))


@lru_cache(maxsize=1024)
def _source(
    spec: QuantSpec, shape: tuple[int, ...], zeros: bool, rows: int, dtype: str, out: str, made: Cut
) -> Source:
    tiles = -(-rows * PARTS[dtype] // 8)
    plain = program(
        _SOURCE, spec, shape, dtype, out,
        WEIGHT_ONLY_GROUP=_group(spec, shape) if is_scaled(spec) else 0,
        CODEC_ZERO_POINTS=int(zeros),
        WEIGHT_ONLY_SPLIT_K=made.split,
        WEIGHT_ONLY_STAGES=made.stages,
        WEIGHT_ONLY_DEPTH=made.depth,
        WEIGHT_ONLY_TILES=tiles,
        COMMON_GUARD=0,
    )  # fmt: skip
    return _with_wgmma(plain, tiles)


def decode_source(w: QuantArray, rows: int, dtype: str, out: str, made: Cut) -> Source:
    """The program for weights, rows of activations of a dtype, a result's dtype and a division."""
    return _source(w.spec, w.shape, w.zero_points is not None, rows, dtype, out, made)


def product(
    x: Array,
    w: QuantArray,
    codes: Array,
    scales: Array,
    out: Array,
    zeros: Callable[[int], Array],
    xp: Any,
) -> None:
    """Write X w^T to `out`, of arguments as `decode_few.product` has them; does not wait."""
    (rows, columns), lines, dtype = x.shape, w.shape[0], x.dtype.name
    made = cut(lines, columns, rows * PARTS[dtype], dtype, w.spec.row.element.bits)
    groups = -(-lines // (_TALL * 4 // made.split))
    null = np.uint64(0)
    points = null
    if w.zero_points is not None:  # four of which are copied at a time
        points = xp.ascontiguousarray(w.zero_points)
        points = points.copy() if points.data.ptr % 16 else points
    partial, done = room(made.slices, rows, lines, groups, zeros, xp)
    launch(
        decode_source(w, rows, dtype, out.dtype.name, made),
        "decode_tokens",
        min(groups * made.slices, driver.multiprocessors(xp.cuda.runtime.getDevice())),
        _THREADS,
        x,
        codes,
        scales,
        points,
        null if w.tensor_scale is None else w.tensor_scale,
        partial,
        done,
        out,
        *(np.int32(n) for n in (rows, lines, columns, made.slices)),
        np.int64(codes.shape[1]),
        np.int64(scales.shape[1] if len(scales) == lines else 0),
        shared=made.shared,
        pdl=True,
    )
