"""Placing `decode_hopper.cu`: products of up to 64 tokens with packed E2M1 weights on Hopper.

How a product is divided is a model of what the busiest multiprocessor does, by shapes alone, so
that sums are the same on any GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.quant.array import QuantArray, tile_extent
from extensor_cuda.jit import Source, launch
from extensor_cuda.kernels import hopper

__all__ = ["PARTS", "Cut", "cut", "cuts", "decode_source", "meeting", "product", "taken"]

Array = Any

PARTS = {"float32": 3, "bfloat16": 1}
"""Tokens, each a bfloat16 matrix's row, that a row of activations of a dtype is."""
_FLOATS = ("float32", "bfloat16")  # as IN and OUT number them
_THREADS, _BRINGING, _TALL, _SEGMENT, _PROCESSORS = 640, 4, 64, 128, 132
_SOURCE = Path(__file__).parent / "decode_hopper.cu"


@dataclass(frozen=True)
class Cut:
    """How a product is divided.

    Attributes:
        split: warpgroups of a block that share rows of weights and divide K.
        shares: equal parts of all the work, which blocks take in turn.
        most: shares that meet in a group of rows, at most.
        stages: pieces of x that shared memory holds.
        shared: bytes of shared memory of a block.
    """

    split: int
    shares: int
    most: int
    stages: int
    shared: int


def _fit(split: int, wide: int, dtype: str) -> tuple[int, int] | None:
    """Stages and bytes of shared memory for 8 `wide` tokens; None if there is not enough."""
    tokens, item = 8 * wide, 4 if dtype == "float32" else 2
    stage = split * 256 * tokens
    raw = tokens // PARTS[dtype] * (split * _SEGMENT * item + 16)
    beside = 1024 + -(-_BRINGING * raw // 128) * 128 + 16 * tokens * (_TALL + 4)
    for stages in (8, 6, 4, 3, 2):
        shared = beside + stages * (stage + 16)
        if shared <= hopper.SHARED - 1024:
            return stages, shared
    return None


def meeting(groups: int, pieces: int, shares: int) -> int:
    """How many of so many equal shares of the pieces of groups of rows meet in a group, at most."""
    if shares % groups == 0 and pieces % (shares // groups) == 0:
        return shares // groups
    return -(-pieces * shares // (groups * pieces)) + 1


def cuts(lines: int, columns: int, tokens: int, dtype: str) -> list[tuple[float, Cut]]:
    """Ways to divide N = lines and K = columns, each with its time in us by the model.

    Args:
        lines: rows of weights.
        columns: of weights.
        tokens: rows of x times its `PARTS`.
        dtype: of x.
    """
    found = []
    for split in (1, 2, 4):
        if (room := _fit(split, -(-tokens // 8), dtype)) is None:
            continue
        groups, pieces = -(-lines // (_TALL * 4 // split)), -(-(columns // _SEGMENT) // split)
        total = groups * pieces
        even = {groups * n for n in range(1, min(pieces, _PROCESSORS) + 1) if pieces % n == 0}
        for shares in sorted({min(total, _PROCESSORS), *(n for n in even if n < 8 * _PROCESSORS)}):
            most = meeting(groups, pieces, shares)
            # A piece: instructions of its 16 warps, or its bytes of weights and x from the cache.
            piece = max(0.5, (17.4 + 0.256 * split * tokens) / 42)
            cost = -(-shares // _PROCESSORS) * (-(-total // shares) * piece + 1)
            if most > 1:
                cost += 1.5 + most * tokens * lines / 5e5
            found.append((cost, Cut(split, shares, most, *room)))
    return found


@lru_cache(maxsize=1024)
def cut(lines: int, columns: int, tokens: int, dtype: str) -> Cut:
    """The quickest of `cuts`."""
    return min(cuts(lines, columns, tokens, dtype), key=lambda way: way[0])[1]


def taken(w: QuantArray) -> bool:
    """Whether the kernel has such weights, of which `extensor_cuda.decode` has a product at all."""
    scaled = w.spec.is_mx or w.spec.row.tensor_scale
    return scaled and w.shape[1] % _SEGMENT == 0 and w.shape[0] * w.shape[1] < 1 << 40


@lru_cache(maxsize=256)
def _source(
    ue4m3: bool, block: int, tiles: int, made: Cut, dtype: str, out: str
) -> Source:
    macros = {
        "BITS": 4,
        "IS_FLOAT": 1,
        "SCALED": 0,
        "HALF": 0,
        "UE4M3": int(ue4m3),
        "BLOCK": block,
        "SPLIT": made.split,
        "STAGES": made.stages,
        "TILES": tiles,
        "PARTS": PARTS[dtype],
        "IN": _FLOATS.index(dtype),
        "OUT": _FLOATS.index(out),
        "GUARD": 0,
    }
    plain = Source.read(_SOURCE, macros)
    function = hopper.wgmma("bf16", "bf16", 8 * tiles, registers=True)
    return replace(plain, text=plain.text.replace("//WGMMA//", function))


def decode_source(w: QuantArray, rows: int, dtype: str, out: str, made: Cut) -> Source:
    """The program for weights, rows of activations of a dtype, a result's dtype and a division."""
    _, block = tile_extent(w.spec, w.shape)
    return _source(w.spec.row.tensor_scale, block, -(-rows * PARTS[dtype] // 8), made, dtype, out)


def product(
    x: Array, w: QuantArray, codes: Array, scales: Array, out: Array, zeros: Any, xp: Any
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
    made = cut(lines, columns, rows * PARTS[dtype], dtype)
    groups = -(-lines // (_TALL * 4 // made.split))
    null = np.uint64(0)
    partial, done = null, null
    if made.most > 1:
        partial = xp.empty((made.most, rows, lines), dtype=np.float32)
        done = zeros(groups)
    launch(
        decode_source(w, rows, dtype, out.dtype.name, made),
        "decode_tokens",
        min(made.shares, hopper.multiprocessors(xp.cuda.runtime.getDevice())),
        _THREADS,
        x,
        codes,
        scales,
        null if w.tensor_scale is None else w.tensor_scale,
        partial,
        done,
        out,
        *(np.int32(n) for n in (rows, lines, columns, made.shares)),
        shared=made.shared,
        early=True,
    )
