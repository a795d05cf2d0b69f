"""Launches of `w4w8a16_sm90_wgmma.cu`: up to 64 tokens times packed weights on Hopper.

E2M1, INT4 and INT8, these under float scales of rows or of groups of whole segments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.quant.array import QuantArray, tile_extent
from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.common.wgmma import wgmma
from extensor_cuda.kernels.weight_only.program import TOKENS_PER_ROW, Arguments, program
from extensor_cuda.runtime import driver
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["SEGMENT", "TILE_ROWS", "Schedule", "fit", "product", "source", "supports"]

Array = Any

TILE_ROWS, SEGMENT = 64, 128
"""Rows of weights of a warpgroup, elements of K in a segment."""
_THREADS, _PRODUCERS = 640, 4
_LONGEST = 32  # block of a scale of E2M1, of which a lane has one at least
_SOURCE = Path(__file__).parent / "w4w8a16_sm90_wgmma.cu"


@dataclass(frozen=True)
class Schedule:
    """How a product is divided.

    Attributes:
        split: warpgroups of a block that share rows of weights and divide K.
        slices: splits of K that different blocks have.
        stages: stages of x that shared memory holds.
        depth: segments of weights that a warp asks for in advance.
        shared: bytes of shared memory of a block.
    """

    split: int
    slices: int
    stages: int
    depth: int
    shared: int


def fit(split: int, tiles: int, dtype: str, bits: int) -> tuple[int, int, int] | None:
    """Stages, depth and bytes of shared memory for tiles of 8 tokens; None: too little."""
    tokens, item = 8 * tiles, 4 if dtype == "float32" else 2
    stage = split * 256 * tokens
    raw = tokens // TOKENS_PER_ROW[dtype] * (split * SEGMENT * item + 16)
    codes = 256 * bits  # of 16 rows
    # Sums lie where the codes did.
    least = max(2, -(-tokens * (TILE_ROWS + 4) // (codes + 16 * bits)))
    for stages, depth in ((8, 8), (6, 6), (4, 6), (4, 4), (4, 3), (4, 2)):
        rings = (
            -(-_PRODUCERS * raw // 128) * 128 + stages * (stage + 16) + 16 * depth * (codes + 128)
        )
        if depth >= least and (shared := 1024 + rings) <= driver.SHARED_BYTES - 1024:
            return stages, depth, shared
    return None


def supports(w: QuantArray) -> bool:
    """Whether the kernel has such weights, if a weight-only product has them at all."""
    if w.shape[1] % SEGMENT or w.shape[0] * w.shape[1] >= 1 << 40 or w.codes.shape[1] >= 1 << 29:
        return False
    _, length = tile_extent(w.spec, w.shape)
    if not w.spec.has_float_scales:
        return length <= _LONGEST
    if length >= w.shape[1]:
        return bool(w.codes.shape[1] % 16 == 0)  # which are padded to whole groups
    # Scales and zero points of groups are copied four bytes at a time.
    return length % SEGMENT == 0 and w.scales.size % 4 == 0


@lru_cache(maxsize=256)
def _with_wgmma(plain: Source, tiles: int) -> Source:
    function = wgmma("bf16", "bf16", 8 * tiles, registers=True)
    return replace(plain, text=plain.text.replace("//WGMMA//", function))


@lru_cache(maxsize=1024)
def _source(
    spec: QuantSpec, shape: tuple[int, ...], zeros: bool, rows: int, dtypes: tuple[str, str],
    schedule: Schedule,
) -> Source:  # fmt: skip
    tiles = -(-rows * TOKENS_PER_ROW[dtypes[0]] // 8)
    _, length = tile_extent(spec, shape)
    groups = spec.has_float_scales and length < shape[1]
    plain = program(
        _SOURCE, spec, shape, *dtypes,
        WEIGHT_ONLY_GROUP=length // SEGMENT if groups else 0,  # segments that share a float scale
        CODEC_ZERO_POINTS=int(zeros),
        WEIGHT_ONLY_SPLIT_K=schedule.split,
        WEIGHT_ONLY_STAGES=schedule.stages,
        WEIGHT_ONLY_DEPTH=schedule.depth,
        WEIGHT_ONLY_TILES=tiles,
        COMMON_GUARD=0,
    )  # fmt: skip
    return _with_wgmma(plain, tiles)


def source(w: QuantArray, rows: int, dtype: str, out: str, schedule: Schedule) -> Source:
    """The program for weights, rows of activations of a dtype, a result's dtype and a division."""
    return _source(w.spec, w.shape, w.zero_points is not None, rows, (dtype, out), schedule)


def product(given: Arguments, schedule: Schedule) -> None:
    """Write X w^T of weights that `supports` has; does not wait."""
    (rows, n, k), w, xp = given.sizes, given.w, given.xp
    groups = -(-n // (TILE_ROWS * 4 // schedule.split))
    points = None
    if w.zero_points is not None:  # four of which are copied at a time
        points = xp.ascontiguousarray(w.zero_points)
        points = points.copy() if points.data.ptr % 16 else points
    partial, done = given.workspace(schedule.slices, rows, groups)
    made = source(w, rows, given.x.dtype.name, given.out.dtype.name, schedule)
    blocks = min(groups * schedule.slices, driver.multiprocessors(xp.cuda.runtime.getDevice()))
    arrays = given.x, given.codes, given.scales, points, w.tensor_scale, partial, done, given.out
    pitches = given.codes.shape[1], given.scales.shape[1] if len(given.scales) == n else 0
    numbers = *map(np.int32, (rows, n, k, schedule.slices)), *map(np.int64, pitches)
    launched = made, "w4w8a16_sm90_wgmma", blocks, _THREADS
    launch(*launched, *arrays, *numbers, shared=schedule.shared, pdl=True)
