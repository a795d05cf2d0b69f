"""Launches of `w4a16_sm90_ring.cu`: up to 16 tokens times many packed E2M1 weights on Hopper."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.quant.array import QuantArray, tile_extent
from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.weight_only.program import Arguments, program, supports_packed
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.driver import SHARED_BYTES
from extensor_cuda.runtime.launch import launch

__all__ = ["CHUNK", "TILE_ROWS", "WARPS", "Schedule", "memory", "product", "source", "supports"]

Array = Any

TILE_ROWS, CHUNK = 16, 256
"""Rows of a tile of weights, elements of a chunk of K."""
WARPS = 14
"""That multiply, at most (eight are enough if they have as much to do)."""
_TOKENS = range(3, 17)
_AHEAD, _PRODUCERS, _STAGES = 2, 4, 18
"""Chunks of weights that a warp copies ahead, warps that copy x, chunks of x at most."""
_SOURCE = Path(__file__).parent / "w4a16_sm90_ring.cu"


@dataclass(frozen=True)
class Schedule:
    """How a product is divided.

    Attributes:
        slices: splits of K that different blocks have.
        groups: of tiles, each of as many blocks as there are slices.
        pairs: of tiles that a block has at a time.
        split: warps that share a pair's chunks of K.
    """

    slices: int
    groups: int
    pairs: int
    split: int


def memory(warps: int, tokens: int, block: int) -> tuple[int, int]:
    """Chunks of x in a block's shared memory, and all bytes of it."""
    ring = warps * _AHEAD * 2 * TILE_ROWS * (CHUNK // 2 + max(CHUNK // block, 4))
    stage = 8 * -(-tokens // 8) * (2 * CHUNK + 64) + 16
    stages = min((SHARED_BYTES - 1024 - ring) // stage, _STAGES)
    return stages, ring + stages * stage


def supports(w: QuantArray, tokens: int) -> bool:
    """Whether the kernel has such weights, if a weight-only product has them at all."""
    return tokens in _TOKENS and supports_packed(w)


@lru_cache(maxsize=1024)
def source(
    spec: QuantSpec,
    shape: tuple[int, ...],
    tokens: int,
    dtypes: tuple[str, str],
    schedule: Schedule,
    gated: bool = False,
) -> tuple[Source, int]:
    """The program, for dtypes of x and of the result, and a block's bytes of shared memory."""
    _, block = tile_extent(spec, shape)
    grain = max(CHUNK // block, 4)
    while shape[1] // block % grain:
        grain //= 2
    warps = schedule.pairs * schedule.split
    stages, shared = memory(warps, tokens, block)
    made = program(
        _SOURCE, spec, shape, *dtypes,
        WEIGHT_ONLY_SCALE_BYTES=grain,
        WEIGHT_ONLY_WARPS=warps,
        WEIGHT_ONLY_SPLIT_K=schedule.split,
        WEIGHT_ONLY_PRODUCER_WARPS=_PRODUCERS,
        WEIGHT_ONLY_DEPTH=_AHEAD,
        WEIGHT_ONLY_STAGES=stages,
        WEIGHT_ONLY_TILES=-(-tokens // 8),
        WEIGHT_ONLY_GATED=int(gated),
        COMMON_GUARD=0,
    )  # fmt: skip
    return made, shared


def product(given: Arguments, schedule: Schedule) -> None:
    """Write X w^T of weights that `supports` has; does not wait."""
    rows, n, k = given.sizes
    dtypes = given.x.dtype.name, given.out.dtype.name
    gated = given.gate is not None
    made, shared = source(given.w.spec, given.w.shape, given.tokens, dtypes, schedule, gated)
    partial, done = given.workspace(schedule.slices, rows, schedule.groups)
    threads = 32 * (schedule.pairs * schedule.split + _PRODUCERS)
    arrays = given.x, given.codes, given.scales, given.w.tensor_scale, partial, done, given.out
    numbers = *map(np.int32, (rows, n, k, schedule.slices)), *given.told
    blocks = schedule.groups * schedule.slices
    launch(made, "w4a16_sm90_ring", blocks, threads, *arrays, *numbers, shared=shared, pdl=True)
