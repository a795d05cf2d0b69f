"""Products of FP8 and INT8 matrices under float scales, on Hopper's tensor cores.

One scale a row, or one for the tensor, multiplies the finished sum: rows first, then columns. FP8
under scales of 128 elements along K (1 x 128 or 128 x 128, arXiv 2412.19437, section 3.3): the
sum of each 128 is multiplied by both scales as it moves to float32. INT8 sums are exact in int32,
zero points are taken off in 64 bits, and the result is rounded three times: to float32 and by each
scale. With S = sum |a| |b| over K and r the exact result, the product is off by up to

    FP8, scales of rows    (K' 34 / 32 2**-13 + (K / 512 + 3) 2**-24) S, K' = min(K, 512)
    FP8, scales of 128     (128 34 / 32 2**-13 + (K / 128 + 2) 2**-24) S
    INT8                   2**-22 |r|

plus, where a partial product with a scale is below 2**-126, that much. The FP8 bounds are those of
`extensor_cuda.gemm`: subnormal codes count as large as the smallest normal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from extensor.quant.array import QuantArray, tile_extent
from extensor_cuda.expansion import Expansion
from extensor_cuda.kernels.gemm.block_scales import Stored, block_scales
from extensor_cuda.kernels.gemm.gemm_sm90 import (
    LINES,
    MOST_TERMS,
    Zeros,
    configure,
    empty_rows,
    gemm,
)
from extensor_cuda.kernels.gemm.requantize import Requantized, finished, type_of

__all__ = ["Side", "by_row", "joinable", "multiply", "pitched", "product", "reason", "row_reason"]

Array = Any

_OUT = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
_BLOCK = 128


@dataclass(frozen=True, eq=False)
class Side:
    """An operand.

    Attributes:
        kind: element type of the codes: "e4m3", "e5m2" or "s8".
        codes: (rows, K), rows a multiple of 16 bytes apart.
        scales: float32 or float16 (blocks along K, rows or fewer), of any strides.
        each: rows that share a scale.
        zeros: zero points, int32 (rows,), or None.
    """

    kind: str
    codes: Array
    scales: Array
    each: int
    zeros: Array | None = None

    @property
    def by_row(self) -> bool:
        """Whether one scale holds for all of K."""
        return bool(self.scales.shape[0] == 1)

    def factor(self) -> Array:
        """One scale for each row, or one for all; float32, side by side."""
        scales = self.scales[0].astype(np.float32, order="C", copy=False)
        if scales.size == 1 or self.each == 1:
            return scales
        return scales.repeat(self.each)[: len(self.codes)]


def reason(a: QuantArray, b: QuantArray) -> str | None:
    """Why there is no such product of these matrices, blocked along their last axis."""
    kinds = {_kind(q) for q in (a, b)}
    for q in (a, b):
        if refused := _reason(q):
            return refused
    if "s8" in kinds and len(kinds) > 1:
        return "an INT8 operand and an FP8 one"
    return None


def _kind(q: QuantArray) -> str:
    element = q.spec.row.element
    return element.name if element.is_float else "s8"


def _reason(q: QuantArray) -> str | None:
    element = q.spec.row.element
    if not q.spec.has_float_scales or q.spec.row.outliers:
        return f"{q.spec.row.name}, whose scales are no plain floats"
    if element.bits != 8:
        return f"{element.name} under float scales; the kernel has e4m3, e5m2 and int8"
    if q.spec.transform:
        return "a Hadamard transform to undo"
    if 0 in q.shape:
        return "an empty array"
    _, length = tile_extent(q.spec, q.shape)
    if length < q.shape[1] and (length != _BLOCK or not element.is_float):
        return (
            f"tiles {q.spec.tile} of {element.name}; the kernel has one scale along K, or FP8 "
            f"with one for each {_BLOCK}"
        )
    if not element.is_float and q.shape[1] > MOST_TERMS:
        return f"K = {q.shape[1]}, beyond {MOST_TERMS}, where int32 sums could overflow"
    return None


def pitched(codes: Array, xp: Any) -> Array:
    """A matrix with rows a multiple of 16 bytes apart, as TMA wants them; a copy if need be."""
    item = codes.dtype.itemsize
    apart, rest = divmod(codes.strides[0], 16)
    whole = codes.strides[1] == item and 16 * apart >= codes.shape[1] * item
    if whole and not (rest or codes.data.ptr % 16):
        return codes
    out = empty_rows(xp, codes.shape[0], codes.shape[1], codes.dtype)
    out[...] = codes
    return out


def _side(q: QuantArray, xp: Any) -> Side:
    rows, k = q.shape
    each, _ = tile_extent(q.spec, q.shape)
    zeros = None
    if q.zero_points is not None:
        zeros = q.zero_points[:, 0].astype(np.int32).repeat(each)[:rows]
    return Side(_kind(q), pitched(q.codes[:, :k], xp), q.scales.T, each, zeros)


def _zeros(a: Side, b: Side, xp: Any) -> Zeros | None:
    if a.zeros is None and b.zeros is None:
        return None
    row, column = (
        xp.zeros(len(side.codes), dtype=np.int32) if side.zeros is None else side.zeros
        for side in (a, b)
    )
    row_sum, column_sum = (side.codes.view(np.int8).sum(axis=1, dtype=np.int32) for side in (a, b))
    return Zeros(row, row_sum - np.int32(a.codes.shape[1]) * row, column, column_sum)


def _grid(side: Side) -> tuple[Stored, int]:
    """Scales of each 128 along K, for the kernel to lay out, and of how many rows."""
    rows, k = side.codes.shape
    alike = side.each % 128 == 0 or side.each >= rows
    lines = LINES if alike else 1
    return Stored(side.scales, -(-k // _BLOCK), -(-min(side.each, rows) // lines)), lines


def by_row(a: QuantArray, b: QuantArray, xp: Any) -> tuple[Expansion, Expansion]:
    """Matrices that `reason` covers, as codes and factors of their rows.

    Raises:
        ValueError: for scales that vary along K, and for zero points.
    """
    if refused := row_reason(a) or row_reason(b):
        raise ValueError(refused)
    sides = _side(a, xp), _side(b, xp)
    left, right = (Expansion(s.codes, s.kind, None, s.factor()) for s in sides)
    return left, right


def row_reason(q: QuantArray) -> str | None:
    """Why a matrix that `reason` covers is more than codes and factors of its rows."""
    if q.scales.shape[1] == 1 and q.zero_points is None:
        return None
    zeros = "" if q.zero_points is None else " and zero points"
    return (
        f"wanted one scale along K and no zero points, got {q.spec.format} in tiles "
        f"{q.spec.tile}{zeros}"
    )


def product(
    a: QuantArray, b: QuantArray, out_dtype: str | Requantized, xp: Any
) -> tuple[Array | QuantArray, str]:
    """The product a b^T of matrices that `reason` covers, and the way it was taken; does not wait.

    Args:
        a: (M, K), blocked along K.
        b: (N, K), blocked along K.
        out_dtype: "float32", "bfloat16" or where it goes quantized.
        xp: cupy.
    """
    return multiply(_side(a, xp), _side(b, xp), out_dtype, xp)


def joinable(a: Any, b: Any) -> bool:
    """Whether two operands are sides of one product: FP8 with FP8, INT8 with INT8."""
    sides = isinstance(a, Side) and isinstance(b, Side)
    return sides and (a.kind == "s8") == (b.kind == "s8")


def multiply(
    left: Side, right: Side, out_dtype: str | Requantized, xp: Any, bias: Array | None = None
) -> tuple[Array | QuantArray, str]:
    """The same of sides that `joinable` joins, plus a bias, float32 (N,)."""
    m, n = len(left.codes), len(right.codes)
    out = out_dtype if isinstance(out_dtype, Requantized) else empty_rows(xp, m, n, _OUT[out_dtype])
    by_row = left.by_row and right.by_row
    if by_row:
        config = configure(left.kind, m, n, type_of(out), b=right.kind)
        factors = left.factor(), right.factor()
        zeros = _zeros(left, right, xp)
        gemm(left.codes, right.codes, out, config, bias=bias, factors=factors, zeros=zeros)
        way = "int8 tensor cores" if left.kind == "s8" else "FP8 tensor cores"
    else:
        (of_left, row), (of_right, column) = _grid(left), _grid(right)
        rows, columns = block_scales((of_left, of_right), xp)
        config = configure(left.kind, m, n, type_of(out), b=right.kind, scales=(row, column))
        gemm(left.codes, right.codes, out, config, bias=bias, scales=(rows, columns))
        way = f"FP8 tensor cores, scaled every {_BLOCK}"
    return finished(out, xp), way
