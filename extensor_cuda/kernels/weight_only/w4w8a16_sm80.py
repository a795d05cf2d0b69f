"""Launches of `w4w8a16_sm80.cu`: up to 64 tokens times packed weights, on sm_80 and later."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.quant.array import QuantArray, tile_extent
from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.weight_only.program import TOKENS_PER_ROW, Arguments, program
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["TILE_ROWS", "product", "segment", "source"]

Array = Any

TILE_ROWS = 64
_THREADS = 128  # as in w4w8a16_sm80.cu
# By tiles of 8 tokens: elements of K in shared memory, segments copied ahead, blocks of an SM.
_X_CHUNK = {1: 512, 2: 512, 4: 256, 8: 256}
_DEPTH = {1: 4, 2: 4, 4: 4, 8: 2}
_RESIDENT = {1: 8, 2: 6, 4: 3, 8: 2}
_SOURCE = Path(__file__).parent / "w4w8a16_sm80.cu"


def _lane(spec: QuantSpec, shape: tuple[int, ...]) -> int:
    """Neighbouring elements of a row in a lane: 16 bytes, if four lanes' share a group's scale."""
    widest = 128 // spec.row.element.bits
    _, length = tile_extent(spec, shape)
    if not spec.has_float_scales or length >= shape[1]:
        return widest
    return next(n for n in (32, 16, 8) if n <= widest and length % (4 * n) == 0)


def segment(w: QuantArray) -> int:
    """Elements of K that a split of K is a multiple of."""
    return 4 * _lane(w.spec, w.shape)


@lru_cache(maxsize=1024)
def _source(spec: QuantSpec, shape: tuple[int, ...], rows: int, dtype: str, out: str) -> Source:
    tiles = next(n for n in (1, 2, 4, 8) if 8 * n >= rows * TOKENS_PER_ROW[dtype])
    length, lane = tile_extent(spec, shape)[1], _lane(spec, shape)
    groups = spec.has_float_scales and length < shape[1]
    return program(
        _SOURCE, spec, shape, dtype, out,
        WEIGHT_ONLY_GROUP=length // (4 * lane) if groups else 0,
        WEIGHT_ONLY_LANE_ELEMENTS=lane,
        WEIGHT_ONLY_X_ELEMENTS=_X_CHUNK[tiles],
        WEIGHT_ONLY_DEPTH=_DEPTH[tiles],
        WEIGHT_ONLY_TILES=tiles,
        WEIGHT_ONLY_MIN_CTAS=_RESIDENT[tiles],
    )  # fmt: skip


def source(w: QuantArray, rows: int, dtype: str, out: str) -> Source:
    """The program for weights and that many rows of activations of a dtype."""
    return _source(w.spec, w.shape, rows, dtype, out)


def product(given: Arguments, schedule: tuple[int, int]) -> None:
    """Write X w^T; does not wait. ``schedule``: the splits of K, and the elements of one."""
    (rows, n, k), w, xp = given.sizes, given.w, given.xp
    made = source(w, rows, given.x.dtype.name, given.out.dtype.name)
    splits, split_length = schedule
    count, scales, points = -(-n // TILE_ROWS), given.scales, w.zero_points
    if w.spec.has_float_scales and len(scales) < n:  # one scale for all rows
        scales = scales.repeat(n, axis=0)
        points = None if points is None else points.repeat(n, axis=0)
    sums = xp.empty((splits, given.tokens, n), dtype=np.float32)
    points = None if points is None else xp.ascontiguousarray(points)
    arrays = given.x, given.codes, scales, points, w.tensor_scale, sums, given.zeros(count)
    pitches = map(np.int64, (given.codes.shape[1], scales.shape[1]))
    numbers = (
        *map(np.int32, (rows, n, k)),
        *pitches,
        np.int32(splits),
        np.int32(split_length),
    )
    launch(made, "w4w8a16_sm80", count * splits, _THREADS, *arrays, given.out, *numbers)
