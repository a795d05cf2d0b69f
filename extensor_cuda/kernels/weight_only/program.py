"""What the weight-only programs share on the host: macros, arguments, and room for sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from extensor.quant.array import QuantArray, tile_extent
from extensor.quant.spec import QuantSpec
from extensor_cuda.runtime.compile import Source

__all__ = [
    "FLOATS",
    "ONE",
    "TOKENS_PER_ROW",
    "Arguments",
    "Gate",
    "below_each_other",
    "program",
    "supports_packed",
    "taking_turns",
]

Array = Any

FLOATS = ("float32", "bfloat16")
"""Dtypes of activations and results, as the programs number them."""
TOKENS_PER_ROW = {"float32": 3, "bfloat16": 1}
"""Tokens, each a bfloat16 matrix's row, that a row of activations of a dtype is."""


_NONE = (1 << 31) - 1
ONE = (np.int32(_NONE), np.int32(_NONE), *(np.int64(0),) * 4)
"""The argument of a single matrix."""
Gate = tuple[float, float | None]
"""SwiGLU's alpha and its limit, if it has one."""


def below_each_other(weights: Sequence[QuantArray]) -> Sequence[np.generic]:
    """What kernels are told of two or three matrices, rows in sixteens, that follow each other.

    The tiles of 16 rows with which the later ones begin, and how many bytes their codes, then their
    scales, lie behind where the one before ends.
    """
    tiles = np.cumsum([w.shape[0] // 16 for w in weights])[:-1].tolist()
    parts = [[w.codes for w in weights], [w.scales for w in weights]]
    gaps = [
        [after.data.ptr - before.data.ptr - before.nbytes for before, after in pairwise(arrays)]
        for arrays in parts
    ]
    starts = [np.int32(n) for n in (*tiles, _NONE)[:2]]
    return (*starts, *(np.int64(n) for each in gaps for n in (*each, 0)[:2]))


def taking_turns(first: QuantArray, second: QuantArray) -> Sequence[np.generic]:
    """What kernels are told of a gate and what it multiplies, of one shape, rows in sixteens."""
    gaps = [
        np.int64(b.data.ptr - a.data.ptr)
        for a, b in ((first.codes, second.codes), (first.scales, second.scales))
    ]
    return (*ONE[:2], gaps[0], np.int64(0), gaps[1], np.int64(0))


class Arguments(NamedTuple):
    """What a weight-only kernel reads and writes.

    Attributes:
        x: (M, K), float32 or bfloat16; contiguous, from a multiple of 16 bytes on, as the next two.
        codes, scales: of the weights.
        w: (N, K), blocked along K.
        out: (M, N), float32 or bfloat16.
        zeros: makes so many counters that are zero, and that the kernel leaves so.
        xp: cupy.
        matrices: where w is several, one below the other: see `below_each_other`. The kernels of
            E2M1 in packed pieces take it, and a gate.
        gate: w is SwiGLU's gate and what it multiplies, one below the other, whose tiles take
            turns; out is (M, N / 2).
    """

    x: Array
    codes: Array
    scales: Array
    w: QuantArray
    out: Array
    zeros: Callable[[int], Array]
    xp: Any
    matrices: Sequence[np.generic] = ONE
    gate: Gate | None = None

    @property
    def told(self) -> Sequence[np.generic]:
        """What kernels are told of several matrices, and of the gate."""
        alpha, limit = self.gate or (1.0, None)
        numbers = alpha, math.inf if limit is None else limit, 0.0 if limit is None else 1.0
        return [*self.matrices, *(np.float32(number) for number in numbers)]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N and K."""
        return len(self.x), self.w.shape[0], self.x.shape[1]

    @property
    def tokens(self) -> int:
        """Rows of bfloat16 that x is."""
        return len(self.x) * TOKENS_PER_ROW[self.x.dtype.name]

    def workspace(self, slices: int, rows: int, groups: int) -> tuple[Any, Any]:
        """Where slices of K leave rows of sums, and counts of a group's slices that are done."""
        if slices == 1:
            return None, None
        sums = (slices, rows, -(-self.w.shape[0] // 4) * 4)
        return self.xp.empty(sums, dtype=np.float32), self.zeros(groups)


def supports_packed(w: QuantArray) -> bool:
    """Whether the kernels of E2M1 in packed pieces have such weights, (N, K) blocked along K.

    32 bits count tiles of 16 of N rows times 132 blocks, and 40 bits the elements.
    """
    if w.spec.has_float_scales or w.shape[1] % 128:
        return False
    whole = w.shape[1] // tile_extent(w.spec, w.shape)[1] % 4 == 0
    return whole and w.shape[0] < 1 << 28 and w.shape[0] * w.shape[1] < 1 << 40


@lru_cache(maxsize=512)
def _read(path: Path, macros: tuple[tuple[str, int], ...]) -> Source:
    return Source.read(path, dict(macros))


def program(
    path: Path, spec: QuantSpec, shape: tuple[int, ...], dtype: str, out: str, **own: int
) -> Source:
    """A program with the macros of `weights.cuh` and its own, one object for the same ones.

    ``dtype`` is of activations and ``out`` of the result, both of `FLOATS`; the weights are blocked
    along the last axis.
    """
    element, scaled = spec.row.element, spec.has_float_scales
    macros = {
        "CODEC_BITS": element.bits,
        "CODEC_IS_FLOAT": int(element.is_float),
        "CODEC_FLOAT_SCALES": int(scaled),
        "CODEC_FLOAT16_SCALES": int(spec.scale_name == "float16"),
        "CODEC_UE4M3": int(spec.row.tensor_scale),
        "CODEC_BLOCK": 32 if scaled else tile_extent(spec, shape)[1],
        "WEIGHT_ONLY_X_PARTS": TOKENS_PER_ROW[dtype],
        "WEIGHT_ONLY_IN": FLOATS.index(dtype),
        "WEIGHT_ONLY_OUT": FLOATS.index(out),
        "WEIGHT_ONLY_GATED": 0,
    }
    return _read(path, tuple((macros | own).items()))
