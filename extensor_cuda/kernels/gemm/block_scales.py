"""Float scales of blocks along K, laid out as the Hopper GEMM reads them: one launch a product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["Stored", "block_scales", "source"]

Array = Any

_TILE, _THREADS = 32, 256  # as in block_scales.cu
_BEYOND = 256  # scales that may be read behind a line of them: a tile's width


@dataclass(frozen=True, eq=False)
class Stored:
    """Scales of a matrix's rows, as they lie.

    Attributes:
        scales: float32 or float16 (blocks along K, groups of rows), of any strides; or one block,
            whose scales are those of all.
        blocks: along K.
        each: rows that share a scale; of `LINES` rows where the GEMM's config says so.
    """

    scales: Array
    blocks: int
    each: int


@cache
def source() -> Source:
    """The program."""
    return Source.read(Path(__file__).parent / "block_scales.cu", {})


def _arguments(side: Stored, out: Array) -> list[Any]:
    """What the kernel is told of a side.

    Raises:
        ValueError: for scales of another dtype or number.
    """
    scales, item = side.scales, side.scales.itemsize
    (held, groups), (along, across) = scales.shape, scales.strides
    half = scales.dtype == np.float16
    if held not in (1, side.blocks) or not (half or scales.dtype == np.float32):
        raise ValueError(
            f"block_scales: expected float32 or float16 scales of {side.blocks} blocks along K, or "
            f"of one for all, got {scales.dtype} {scales.shape}; convert them, or cut them to size"
        )
    steps = along // item if held > 1 else 0, across // item
    sizes = half, side.blocks, groups, side.each, *out.shape
    # As arrays: made one by one they take longer than all else here.
    return [scales, out, *np.array(steps, np.int64), *np.array(sizes, np.uint32)]


def block_scales(sides: Sequence[Stored], xp: Any, whole: int = 1) -> list[Array]:
    """Scales of one or two matrices, laid out for `gemm_sm90.gemm`; does not wait.

    For each float32 (blocks, pitch): a row's scale at its place in each line, readable a tile
    beyond the last, zeros beyond the rows and beyond the blocks, of which a multiple of ``whole``
    is made.
    """
    made, tiles, arguments = [], [], []
    for side in sides:
        columns = -(-side.scales.shape[1] * side.each // 4) * 4 + _BEYOND
        out = xp.empty((-(-side.blocks // whole) * whole, columns), dtype=np.float32)
        made.append(out)
        tiles.append(-(-len(out) // _TILE) * -(-columns // _TILE))
        arguments.append(_arguments(side, out))
    # A side alone is told twice, and its blocks are all there are.
    parts = *arguments[0], *arguments[-1], np.uint32(tiles[0])
    launch(source(), "block_scales", sum(tiles), _THREADS, *parts, pdl=True)
    return made
