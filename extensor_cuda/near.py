"""MXFP8 as operands of FP8 tensor cores, near-exactly: asked for by name, and what it lost counted.

Each row has one power of two, its largest scale; elements under smaller scales move down in their
own format and are rounded to nearest even where they become subnormal (`kernels/near.cu`; the
rule, and the same on the CPU: `extensor.quant.near`). A value is off by up to 2**-10 (E4M3) or
2**-17 (E5M2) times its row's largest scale, and most are not changed at all: how many were is
counted by row, on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.quant.array import QuantArray, coded_length
from extensor.quant.near import is_mxfp8
from extensor.quant.spec import QuantSpec
from extensor_cuda.expansion import Expansion
from extensor_cuda.jit import Source, launch

__all__ = ["Inexact", "is_mxfp8", "near", "near_source"]

Array = Any

_SOURCE = Path(__file__).parent / "kernels" / "near.cu"
_THREADS = 128


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


@lru_cache(maxsize=64)
def near_source(spec: QuantSpec) -> Source:
    """The program that rebases packed rows of a resolved MXFP8 spec."""
    element = spec.row.element
    assert isinstance(spec.tile, tuple)
    macros = {
        "MANTISSA": element.mantissa_bits,
        "LEAST": element.min_exponent,
        "FIRST": element.max_magnitude_code + 1,
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
