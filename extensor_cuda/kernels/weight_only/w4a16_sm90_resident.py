"""Launches of `w4a16_sm90_resident.cu`: up to 16 tokens times packed E2M1 weights on Hopper."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.quant.array import QuantArray, tile_extent
from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.weight_only.program import (
    TOKENS_PER_ROW,
    Arguments,
    program,
    supports_packed,
)
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["AHEAD", "CHUNK", "WARPS", "Schedule", "product", "source", "supports"]

Array = Any

WARPS, CHUNK, AHEAD = 8, 512, 2
"""Warps of a block, elements of K in a copy, copies ahead."""
_TOKENS = 16  # at most
_SOURCE = Path(__file__).parent / "w4a16_sm90_resident.cu"


@dataclass(frozen=True)
class Schedule:
    """How a product is divided.

    Attributes:
        slices: splits of K that different blocks have.
        slice_length: elements of K in one.
        split: of a slice, which a block's warps share; 1 if there are slices.
        groups: of rows of weights, each of as many blocks as there are slices.
        shared: bytes of shared memory of a block.
    """

    slices: int
    slice_length: int
    split: int
    groups: int
    shared: int


def supports(w: QuantArray, tokens: int) -> bool:
    """Whether the kernel has such weights, if a weight-only product has them at all."""
    return tokens <= _TOKENS and w.shape[0] >= 16 and supports_packed(w)


@lru_cache(maxsize=1024)
def _source(
    spec: QuantSpec, shape: tuple[int, ...], rows: int, dtype: str, out: str, gated: bool
) -> Source:
    _, block = tile_extent(spec, shape)
    return program(
        _SOURCE, spec, shape, dtype, out,
        WEIGHT_ONLY_SCALE_BYTES=4 if shape[1] // block % 16 or CHUNK // block % 16 else 16,
        WEIGHT_ONLY_WARPS=WARPS,
        WEIGHT_ONLY_CHUNK=CHUNK,
        WEIGHT_ONLY_DEPTH=AHEAD,
        WEIGHT_ONLY_TILES=-(-rows * TOKENS_PER_ROW[dtype] // 8),
        WEIGHT_ONLY_GATED=int(gated),
    )  # fmt: skip


def source(w: QuantArray, rows: int, dtype: str, out: str, gated: bool = False) -> Source:
    """The program for weights, rows of activations of a dtype, and a result's dtype."""
    return _source(w.spec, w.shape, rows, dtype, out, gated)


def product(given: Arguments, schedule: Schedule) -> None:
    """Write X w^T of weights that `supports` has; does not wait."""
    rows, n, k = given.sizes
    partial, done = given.workspace(schedule.slices, given.tokens, schedule.groups)
    made = source(given.w, rows, given.x.dtype.name, given.out.dtype.name, given.gate is not None)
    launched = made, "w4a16_sm90_resident", schedule.groups * schedule.slices, 32 * WARPS
    arrays = given.x, given.codes, given.scales, given.w.tensor_scale, partial, done, given.out
    numbers = (
        rows,
        n,
        k,
        schedule.slices,
        schedule.slice_length,
        schedule.split.bit_length() - 1,
    )
    told = *map(np.int32, numbers), *given.told
    launch(*launched, *arrays, *told, shared=schedule.shared)
