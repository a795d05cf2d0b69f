"""The outlier codec: a row's largest values are kept exactly, the others as FP8 or FP4 codes.

The codec works on each row of n values along the axis:

    mean = float32(sum of the row in float64, from 0.0 by ascending index, / n)
    r = x - mean                                   (float32)
    the k largest |r| (ties: the lower index) are outliers: x and its index are stored exactly
    r of the others is quantized with one float32 scale per row; outliers have code 0
    dequantized: decoded r + mean, then the exact values are put back

k is ``spec.outliers``; by default an eighth of the row, at most the format's number. A row with NaN
or Inf gets a NaN scale and dequantizes to NaN. This is not an MX format.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from extensor.quant.array import QuantArray, QuantStats
from extensor.quant.block_codec import decode_array, quantize_blocks
from extensor.quant.spec import QuantSpec
from extensor.random import Stream

__all__ = ["dequantize", "outlier_count", "quantize"]

Array = Any


def outlier_count(spec: QuantSpec, length: int) -> int:
    """How many values are stored exactly of a row of ``length`` values."""
    if spec.outliers is not None:
        return min(spec.outliers, length)
    return min(spec.row.outliers, length // 8)


def quantize(
    x: Array, spec: QuantSpec, stream: Stream | None, xp: Any = np
) -> tuple[QuantArray, QuantStats]:
    """Quantize float32 x under a resolved outlier spec."""
    axis, length = spec.axis, x.shape[spec.axis]
    rows = xp.moveaxis(x, axis, -1)
    finite = xp.isfinite(rows).all(axis=-1, keepdims=True)
    safe = xp.where(finite, rows, xp.float32(0))
    total = xp.cumsum(safe.astype(xp.float64), axis=-1)[..., -1:] if length else 0.0
    mean = ((total + 0.0) / max(length, 1) * xp.ones(finite.shape)).astype(xp.float32)
    with np.errstate(over="ignore"):  # r beyond float32 is an outlier, or makes its row NaN
        rest = safe - mean
    # A stable sort of negated magnitudes puts the lower index first among equals.
    order = xp.argsort(-xp.abs(rest), axis=-1, kind="stable")[..., : outlier_count(spec, length)]
    index = xp.sort(order, axis=-1).astype(xp.int32)
    values = xp.take_along_axis(rows, index.astype(xp.int64), axis=-1)
    keep = xp.ones(rest.shape, dtype=bool)
    xp.put_along_axis(keep, index.astype(xp.int64), False, axis=-1)
    rest = xp.where(keep, rest, xp.float32(0))
    rest = xp.where(finite, rest, xp.float32(np.nan))
    q, stats = quantize_blocks(xp.moveaxis(rest, -1, axis), spec, stream, None, xp)
    extra = {"row_means": mean, "outlier_index": index, "outlier_value": values}
    moved = {k: xp.ascontiguousarray(xp.moveaxis(v, -1, axis)) for k, v in extra.items()}
    q = dataclasses.replace(q, **moved)
    # The block quantizer counted zeros of r; flushed values are zeros of the array.
    flushed = int(((x != 0) & (dequantize(q, xp) == 0)).sum())
    return q, dataclasses.replace(stats, flushed=flushed)


def dequantize(q: QuantArray, xp: Any = np) -> Array:
    """Decode a stored array to float32 of ``q.shape``."""
    assert q.row_means is not None and q.outlier_index is not None
    axis = q.spec.axis
    with np.errstate(over="ignore"):  # the largest values may round up to Inf
        values = decode_array(q, xp) + xp.moveaxis(q.row_means, axis, -1)
    index = xp.moveaxis(q.outlier_index, axis, -1).astype(xp.int64)
    exact = xp.moveaxis(q.outlier_value, axis, -1)
    broken = xp.isnan(xp.moveaxis(q.scales, axis, -1))
    xp.put_along_axis(values, index, xp.where(broken, xp.float32(np.nan), exact), axis=-1)
    return xp.ascontiguousarray(xp.moveaxis(values, -1, axis))
