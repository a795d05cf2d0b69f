"""Rebasing MXFP8: FP8 codes under one power of two for many blocks, and how many values it changes.

An FP8 tensor core multiplies codes under one power of two for a row, or, where its sums move to
float32 every 128 terms, for a tile of 128 x 128. MXFP8 has a power of two for every 32 values.
Rebasing gives all blocks of a row or tile the largest of their scales s, and divides their codes by
what the scales grew. Blocks of zeros and NaN do not count towards s. An element of value v becomes
v / s, rounded to nearest even in its own format:

- normal there: the mantissa stays, and the value is exact;
- below the least normal number: off by up to half of the format's least number, 2**-10 s for E4M3
  and 2**-17 s for E5M2. The largest value of the row or tile is at least 256 s if its scales are
  those of OCP MX v1.0, section 6.3.

`rebased_values` is the definition, in float64, by rows or tiles: what a GPU multiplies of a stored
matrix. `rebase_tiles` makes the bytes that a `QuantSpec` with ``rebased`` stores, by tiles; they
are MXFP8 themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from extensor.formats import ELEMENTS
from extensor.quant.array import QuantArray, coded_length
from extensor.quant.rounding import decode, encode
from extensor.quant.scale_rules import E8M0_NAN
from extensor.quant.spec import REBASE_TILE

__all__ = ["RebasedValues", "rebase_tiles", "rebased_values"]

Array = Any

_MAX_SHIFT = 63  # binades; FP8 values are all zero so far below the scale
_CHANGED = 256  # a flag above the 8 bits of a code


@dataclass(frozen=True, eq=False)
class RebasedValues:
    """A matrix's values under common powers of two, and how many of them changed.

    Attributes:
        values: float64 (rows, K): the codes' values, without the power of two.
        exponents: int32 (rows,), or (rows, ceil(K / 128)) by tiles: the powers of two. A row or
            tile without a number has 0.
        changed: int64 (rows,): how many values differ from the stored ones.
        flushed: int64 (rows,): how many of these became zero.
    """

    values: Array
    exponents: Array
    changed: Array
    flushed: Array

    @property
    def shares(self) -> tuple[float, float]:
        """Changed and flushed values as shares of all values."""
        size = max(self.values.size, 1)
        return float(self.changed.sum() / size), float(self.flushed.sum() / size)


def rebased_values(q: QuantArray, tiles: bool = False) -> RebasedValues:
    """The values of a packed MXFP8 matrix under one power of two for each row or tile.

    A Hadamard transform is not undone.

    Args:
        q: numpy arrays; MXFP8 in blocks along its last axis.
        tiles: one power of two for each 128 x 128 values, not for each row.

    Raises:
        ValueError: for another format or axis.
    """
    element = q.spec.row.element
    if not q.spec.is_mxfp8 or len(q.shape) != 2:
        raise ValueError(
            f"rebased_values: expected a matrix in MXFP8, got {q.spec.format} of shape {q.shape}; "
            "other MX formats fit FP8 or bfloat16 exactly, so multiply them as they are"
        )
    if q.spec.axis != 1:
        raise ValueError(
            f"rebased_values: expected blocks along axis 1, got axis {q.spec.axis}; quantize along "
            "the axis that the product sums over"
        )
    assert isinstance(q.spec.tile, tuple)
    (rows, _), k = q.shape, coded_length(q.spec, q.shape)
    stored = decode(q.codes[:, :k], element).astype(np.float64)
    tile_rows, block = q.spec.tile
    scales = q.scales.astype(np.int64).repeat(tile_rows, axis=0)[:rows]
    scales = scales.repeat(block, axis=1)[:, :k]
    stored = np.where(scales == E8M0_NAN, np.nan, stored)
    counts = (stored != 0) & (scales != E8M0_NAN)
    height, width = (REBASE_TILE, REBASE_TILE) if tiles else (1, max(k, 1))
    largest = np.where(counts, scales, -1)
    for axis, side in enumerate((height, width)):
        starts = np.arange(0, largest.shape[axis], side)
        largest = np.maximum.reduceat(largest, starts, axis=axis)
    common = largest.repeat(height, axis=0)[:rows].repeat(width, axis=1)[:, :k]
    exact = np.ldexp(stored, np.where(counts, scales - common, 0).astype(np.int32))
    least = element.min_positive
    normal = ~(np.abs(exact) < element.min_normal)
    values = np.where(normal, exact, np.rint(np.where(normal, 0, exact) / least) * least)
    values = np.copysign(values, stored)
    changed = (values != exact) & ~np.isnan(exact)
    exponents = np.where(largest < 0, 0, largest - 127).astype(np.int32)
    exponents = exponents.repeat(height, axis=0)[:rows]
    return RebasedValues(
        values,
        exponents if tiles else exponents[:, 0],
        changed.sum(axis=1),
        (changed & (values == 0)).sum(axis=1),
    )


def rebase_tiles(q: QuantArray, xp: Any = np) -> tuple[QuantArray, Array, Array]:
    """Rebase a quantized array by tiles of 128 x 128: what a spec with ``rebased`` stores.

    Tiles lie in the array's last two axes, or in the block axis and the last one. Works on bytes
    alone.

    Args:
        q: just quantized, so that no block of zeros has a larger scale than blocks beside it.
        xp: the array module.

    Returns:
        The array, and how many values changed and became zero, integers of shape ().
    """
    axis, ndim = q.spec.axis, len(q.shape)
    assert isinstance(q.spec.tile, tuple)
    block = q.spec.tile[1]
    row_axis = -1 if axis < ndim - 1 else -2
    axes = (row_axis, axis - ndim), (-2, -1)
    grid = q.scales[None] if ndim == 1 else xp.moveaxis(q.scales, *axes)
    (rows, blocks), side = grid.shape[-2:], (REBASE_TILE, REBASE_TILE // block)
    pads = [(0, 0)] * (grid.ndim - 2) + [
        (0, -n % s) for n, s in ((rows, side[0]), (blocks, side[1]))
    ]
    padded = xp.pad(xp.where(grid == E8M0_NAN, xp.uint8(0), grid), pads)
    down, across = padded.shape[-2] // side[0], padded.shape[-1] // side[1]
    tiles = padded.reshape(*padded.shape[:-2], down, side[0], across, side[1])
    largest = tiles.max(axis=(-3, -1)).repeat(side[0], axis=-2).repeat(side[1], axis=-1)
    common = largest[..., :rows, :blocks]
    common = common[0] if ndim == 1 else xp.moveaxis(common, *reversed(axes))
    numbers = q.scales != E8M0_NAN
    shift = xp.where(numbers, xp.minimum(common - q.scales, xp.uint8(_MAX_SHIFT)), xp.uint8(0))
    # The codes stay in their order: each block's shift is put beside the values of the block.
    index = q.codes.reshape(*shift.shape[: axis + 1], block, *shift.shape[axis + 1 :])
    index = index.astype(xp.uint16) + xp.expand_dims(shift.astype(xp.uint16) << 8, axis + 1)
    found = _shifted_codes(q.spec.row.element.name, xp).take(index)
    codes = found.astype(xp.uint8).reshape(q.codes.shape)
    scales = xp.ascontiguousarray(xp.where(numbers, common, q.scales))
    spec = q.spec.replace(rebased=True)
    changed, flushed = found >= _CHANGED, found & (_CHANGED | 0x7F) == _CHANGED
    return replace(q, codes=codes, scales=scales, spec=spec), changed.sum(), flushed.sum()


@lru_cache(maxsize=8)
def _shifted_codes(element_name: str, xp: Any) -> Array:
    """Codes of value(code) * 2**-shift at 256 shift + code; rounded ones are `_CHANGED` more."""
    element = ELEMENTS[element_name]
    codes = np.arange(256, dtype=np.uint8)
    values = decode(codes, element)
    exact = np.ldexp(values.astype(np.float64), -np.arange(_MAX_SHIFT + 1)[:, None])
    numbers = np.isfinite(values)
    shifted = encode(np.where(numbers, exact, 0).astype(np.float32), element)[0]
    shifted = np.where(numbers, shifted, codes)
    changed = numbers & (decode(shifted, element) != exact)
    return xp.asarray((shifted + _CHANGED * changed).astype(np.uint16).reshape(-1))
