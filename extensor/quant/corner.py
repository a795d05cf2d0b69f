"""A few values of a quantized array, decoded from the codes and scales of its corner alone."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from extensor.quant.array import QuantArray, tile_extent
from extensor.quant.reference import dequantize
from extensor.quant.rounding import unpack

__all__ = ["Corner", "code_shares", "corner", "to_host"]

Array = Any
ROWS, COLUMNS = 4, 8


@dataclass(frozen=True)
class Corner:
    """The first values along the block axis and one other axis; further axes at index 0.

    Attributes:
        axes: the axes of rows and columns, in the array's order; one axis of a vector.
        values: float32, (rows, columns).
        scales: as stored, of the blocks that the values are in, likewise (rows, columns).
    """

    axes: tuple[int, ...]
    values: Array
    scales: Array


def to_host(array: Array) -> np.ndarray[Any, Any]:
    """A numpy array; a device's is copied."""
    host: np.ndarray[Any, Any] = array if isinstance(array, np.ndarray) else array.get()
    return host


def corner(q: QuantArray) -> Corner | None:
    """Decode the corner; None for formats that need whole rows (outliers), and without values.

    Only the corner's bytes are copied from a device.
    """
    spec, ndim = q.spec, len(q.shape)
    if spec.row.outliers or spec.super_block is not None or not math.prod(q.shape):
        return None
    axis, length = spec.axis, q.shape[spec.axis]
    other = None if ndim == 1 else ndim - 1 if axis != ndim - 1 else ndim - 2
    extent = tile_extent(spec, q.shape)
    size = extent[axis]  # of a block
    count = max(COLUMNS, spec.transform.size if spec.transform else 0)
    if size < count:
        count = math.lcm(size, count)  # whole blocks
    block = min(size, count)  # a block that is cut keeps its scale
    blocks = count // block
    height = 1 if other is None else extent[other]
    rows = 1 if other is None else min(ROWS, q.shape[other])
    high = -(-rows // height)

    def cut(part: Array, columns: int, lines: int) -> Array:
        key = [slice(0, 1)] * ndim
        key[axis] = slice(0, columns)
        if other is not None:
            key[other] = slice(0, lines)
        host = to_host(part[tuple(key)])
        order = [a for a in range(ndim) if a not in (other, axis)] + [other or 0, axis]
        matrix = host.transpose(order[-ndim:] if ndim > 1 else [0])
        return np.ascontiguousarray(matrix.reshape(matrix.shape[-2] if ndim > 1 else 1, -1))

    bits = spec.row.element.bits
    small = dataclasses.replace(
        q,
        codes=cut(q.codes, count * bits // 8, rows),
        scales=cut(q.scales, blocks, high),
        zero_points=None if q.zero_points is None else cut(q.zero_points, blocks, high),
        minimums=None if q.minimums is None else cut(q.minimums, blocks, high),
        tensor_scale=None if q.tensor_scale is None else to_host(q.tensor_scale),
        shape=(rows, min(length, count)),
        spec=spec.replace(axis=1, tile=(min(height, rows), block), rebased=False),
    )
    values = dequantize(small)[:, :COLUMNS]
    scales = small.scales[:, : -(-values.shape[1] // block)]
    if other is None:
        return Corner((axis,), values, scales)
    if other > axis:
        return Corner((axis, other), values.T, scales.T)
    return Corner((other, axis), values, scales)


def code_shares(q: QuantArray, most: int) -> tuple[list[tuple[str, float]], int]:
    """How often each code's value occurs among at most so many values; wide grids in ranges.

    Args:
        q: any array.
        most: how many values are looked at, the first along every axis.

    Returns:
        (value or range, share), ascending; and how many values were looked at.
    """
    element, axis = q.spec.row.element, q.spec.axis
    left, key = max(most, 1), [slice(0, 0)] * len(q.shape)
    order = [axis, *(a for a in reversed(range(len(q.shape))) if a != axis)]
    taken = {}
    for place in order:
        taken[place] = min(q.shape[place], left)
        left //= max(taken[place], 1)
        key[place] = slice(0, taken[place])
    count = taken[axis]
    key[axis] = slice(0, -(-count * element.bits // 8))
    packed = np.moveaxis(to_host(q.codes[tuple(key)]), axis, -1)
    codes = unpack(np.ascontiguousarray(packed), element.bits, count).reshape(-1)
    seen = np.bincount(codes, minlength=1 << element.bits) / max(codes.size, 1)
    shares: dict[float, float] = {}
    for code, share in enumerate(seen):
        value = element.values[code] + 0.0
        if math.isfinite(value):
            shares[value] = shares.get(value, 0.0) + float(share)
    points = sorted(shares.items())
    group = -(-len(points) // 32)
    rows = []
    for start in range(0, len(points), group):
        part = points[start : start + group]
        name = f"{part[0][0]:.3g}" + (f" to {part[-1][0]:.3g}" if len(part) > 1 else "")
        rows.append((name, sum(share for _, share in part)))
    return rows, codes.size
