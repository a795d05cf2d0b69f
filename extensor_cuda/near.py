"""MXFP8 as operands of FP8 tensor cores, near-exactly: asked for by name, and what it lost counted.

Of a stored matrix each row has one power of two, its largest scale; elements under smaller scales
move down in their own format and are rounded to nearest even where they become subnormal
(`kernels/prepare/rebase_mxfp8.cu`; the rule, and the same on the CPU: `extensor.quant.rebase`). A
value is off by up to 2**-10 (E4M3) or 2**-17 (E5M2) times its row's largest scale, and most are
not changed at all: how many were is counted by row, on the device.

What training quantizes under a spec with ``rebased`` (`extensor_cuda.operands`) has a power of two
for each square of 128 x 128 instead, known when the square is read, so that the codes are written
at once. Products of such operands scale the sum of every 128 terms, and are off by up to

    (128 34 / 32 2**-13 + (K / 128 + 2) 2**-24) S, S = sum |a| |b| over K

plus, where a partial product with its scales is below 2**-126, that much.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from extensor.formats import ELEMENTS
from extensor.quant.array import QuantArray, coded_length
from extensor.quant.rounding import decode
from extensor.quant.spec import REBASE_TILE, QuantSpec
from extensor_cuda.expansion import Expansion
from extensor_cuda.kernels.gemm.gemm_sm90 import LINES, configure, empty_rows, gemm
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["Inexact", "Square", "multiply", "near", "near_source", "squares"]

Array = Any

_SOURCE = Path(__file__).parent / "kernels" / "prepare" / "rebase_mxfp8.cu"
_THREADS = 128
_BEHIND = 64  # floats that may be read behind the last row's: a tile's width
_OUT = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


@dataclass(frozen=True, eq=False)
class Inexact:
    """How many values of an operand are not those that are stored.

    Attributes:
        counts: uint32 (rows, 2) on the device: values changed, and those of them that became zero.
        size: of the operand.
    """

    counts: Array
    size: int

    def shares(self) -> tuple[float, float]:
        """Changed and flushed, of all values. Waits for the GPU."""
        changed, flushed = (int(n) for n in self.counts.get().sum(axis=0, dtype=np.int64))
        return changed / self.size, flushed / self.size


@dataclass(frozen=True, eq=False)
class Square:
    """A matrix as a product takes it: (rows, K), whatever the axis that it was blocked along.

    Attributes:
        codes: uint8, rows a multiple of 16 bytes apart.
        scales: float32, from `squares`: what the codes are multiplied by.
        kind: their element type.
    """

    codes: Array
    scales: Array
    kind: str

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, K)."""
        rows, k = self.codes.shape
        return rows, k

    def values(self, xp: Any) -> Array:
        """What the codes mean, float32 (rows, K)."""
        rows, k = self.shape
        each = self.scales.T.repeat(LINES, axis=0)[:rows].repeat(REBASE_TILE, axis=1)[:, :k]
        return decode(self.codes, ELEMENTS[self.kind], xp) * each


def squares(x: Array, spec: QuantSpec, xp: Any) -> Array:
    """Where the scales of a matrix's squares go: float32 (squares along K, pitch).

    One for every `LINES` rows, as the GEMM reads them, and what it may read behind the last.
    """
    rows, k = x.shape if spec.axis == 1 else x.shape[::-1]
    pitch = -(-rows // REBASE_TILE) * (REBASE_TILE // LINES) + _BEHIND
    return xp.empty((-(-k // REBASE_TILE), pitch), dtype=np.float32)


def multiply(a: Square, b: Square, dtype: str, xp: Any, bias: Array | None = None) -> Array:
    """The product a b^T + bias of (M, K) and (N, K) as "float32" or "bfloat16", without waiting.

    Args:
        a: left operand.
        b: right operand.
        dtype: of the result.
        xp: cupy.
        bias: float32 (N,), added to the float32 sum; None: none.
    """
    m, n = a.shape[0], b.shape[0]
    out = empty_rows(xp, m, n, _OUT[dtype])
    config = configure(a.kind, m, n, dtype, b=b.kind, scales=(LINES, LINES))
    gemm(a.codes, b.codes, out, config, bias=bias, scales=(a.scales, b.scales))
    return xp.ascontiguousarray(out)


@lru_cache(maxsize=64)
def near_source(spec: QuantSpec) -> Source:
    """The program that rebases packed rows of a resolved MXFP8 spec."""
    element = spec.row.element
    assert isinstance(spec.tile, tuple)
    macros = {
        "MANTISSA": element.mantissa_bits,
        "MIN_EXPONENT": element.min_exponent,
        "MAX_CODE": element.max_magnitude_code,
        "BLOCK": spec.tile[1],
        "TILE_ROWS": spec.tile[0],
    }
    return Source.read(_SOURCE, macros)


def near(q: QuantArray, xp: Any) -> tuple[Expansion, Inexact]:
    """A packed matrix with an exponent for each row, and what that changed; does not wait.

    Args:
        q: MXFP8 (rows, K) in tiles (n, 16 to 128) along its last axis.
        xp: cupy.
    """
    assert isinstance(q.spec.tile, tuple)
    (rows, _), k = q.shape, coded_length(q.spec, q.shape)
    codes = xp.ascontiguousarray(q.codes)
    codes = codes if codes.data.ptr % 16 == 0 else codes.copy()
    scales = xp.ascontiguousarray(q.scales)
    out = xp.empty(codes.shape, dtype=np.uint8)
    exponents, counts = xp.empty(rows, dtype=np.int32), xp.empty((rows, 2), dtype=np.uint32)
    arrays = (codes, scales, out, exponents, counts)
    launch(near_source(q.spec), "near", rows, _THREADS, *arrays, np.int64(scales.shape[1]))
    return Expansion(out[:, :k], q.spec.row.element.name, exponents), Inexact(counts, rows * k)
