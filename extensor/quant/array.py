"""QuantArray: the stored codes and scales of a quantized array, without arithmetic.

``codes`` has the array's shape, but its block axis holds bytes. The elements along that axis are
zero-padded to whole blocks and packed, the first element in the lowest bits: two 4-bit codes share
a byte, four 6-bit codes share three. ``scales`` has the array's shape with each axis divided by the
tile's extent on it, rounded up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from extensor.quant.spec import QuantSpec

__all__ = [
    "QuantArray",
    "QuantStats",
    "block_grid",
    "coded_length",
    "stored_nbytes",
    "super_grid",
    "tile_extent",
]

Array = Any
"""An array of the backend's array module (numpy.ndarray or cupy.ndarray)."""


@dataclass(frozen=True)
class QuantStats:
    """Counts of what quantizing did to the values.

    Attributes:
        count: values quantized.
        saturated: values that would round beyond the largest code.
        flushed: values other than zero that dequantize to zero.
        rebase_changed: values changed by rebasing to a tile's common scale (`QuantSpec.rebased`).
        fallbacks: products that a GPU computed in bfloat16, since FP8 did not hold an operand;
            counted with the first operand: x of fprop, g of dgrad and of wgrad.

    >>> et.quant.QuantStats(count=64, saturated=1) + et.quant.QuantStats(count=64)
    QuantStats(count=128, saturated=1, flushed=0, rebase_changed=0, fallbacks=0)
    """

    count: int = 0
    saturated: int = 0
    flushed: int = 0
    rebase_changed: int = 0
    fallbacks: int = 0

    def __add__(self, other: QuantStats) -> QuantStats:
        return QuantStats(
            self.count + other.count,
            self.saturated + other.saturated,
            self.flushed + other.flushed,
            self.rebase_changed + other.rebase_changed,
            self.fallbacks + other.fallbacks,
        )


@dataclass(frozen=True, eq=False)
class QuantArray:
    """A quantized array: codes, scales, and what else its format stores.

    An `ExTensor` of a blocked dtype holds one as its ``data``.

    Attributes:
        codes: uint8, packed along ``spec.axis``.
        scales: uint8 bits (E8M0, unsigned E4M3) or float16/float32, one per block.
        spec: the resolved spec.
        shape: the logical shape; padding never shows in it.
        tensor_scale: float32 of shape (), for formats with a scale per tensor.
        zero_points: int8 of the shape of ``scales``, for asymmetric formats.
        minimums: of the shape and dtype of ``scales``, for specs with a ``minimum``: floats, or
            integers under ``super_minimums``.
        super_scales: float16, one for each super-block; ``scales`` are then integers.
        super_minimums: float16 likewise; subtracted: a block's minimum is -integer * float16.
        row_means: float32, shape with the axis reduced to 1 (outlier codec).
        outlier_index: int32, shape with the axis holding k positions (outlier codec).
        outlier_value: float32, the exact values at those positions (outlier codec).

    >>> stored = et.ones((4, 64)).to_mxfp4().data
    >>> stored.shape, {name: part.shape for name, part in stored.parts.items()}
    ((4, 64), {'codes': (4, 32), 'scales': (4, 2)})
    >>> stored.nbytes
    136
    """

    codes: Array
    scales: Array
    spec: QuantSpec
    shape: tuple[int, ...]
    tensor_scale: Array | None = None
    zero_points: Array | None = None
    minimums: Array | None = None
    super_scales: Array | None = None
    super_minimums: Array | None = None
    row_means: Array | None = None
    outlier_index: Array | None = None
    outlier_value: Array | None = None

    @property
    def parts(self) -> dict[str, Array]:
        """The arrays that are stored, by field name."""
        names: tuple[str, ...] = ("codes", "scales", "tensor_scale", "zero_points")
        names += ("minimums", "super_scales", "super_minimums")
        names += ("row_means", "outlier_index", "outlier_value")
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all stored arrays."""
        return sum(int(part.nbytes) for part in self.parts.values())


_MAX_PADDED_TILE = 4096


def tile_extent(spec: QuantSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A block's length on each axis, for a resolved spec and a shape.

    Raises:
        ValueError: for blocks of more than 4,096 elements that are longer than their axis: each
            would be padded, a few numbers to gigabytes.
    """
    if spec.tile == "tensor":
        return tuple(max(n, 1) for n in shape)
    extent = [1] * len(shape)
    if spec.tile == "channel":
        extent[spec.axis] = max(shape[spec.axis], 1)
        return tuple(extent)
    assert isinstance(spec.tile, tuple)
    rows, columns = spec.tile
    extent[spec.axis - 1] = rows
    extent[spec.axis] = columns
    for axis in (spec.axis - 1, spec.axis):
        _check_padding("tile", extent[axis], shape[axis])
    return tuple(extent)


def _check_padding(what: str, extent: int, length: int) -> None:
    if extent > max(length, _MAX_PADDED_TILE):
        raise ValueError(
            f"{what}: expected at most {max(length, _MAX_PADDED_TILE)} elements on an axis of "
            f"{length}, got {extent}, which would be padding; 'channel' spans an axis of any length"
        )


def coded_length(spec: QuantSpec, shape: tuple[int, ...]) -> int:
    """Elements stored along the block axis: its length, padded to the Hadamard size if any."""
    length = shape[spec.axis]
    size = spec.transform.size if spec.transform else 1
    return -(-length // size) * size


def block_grid(spec: QuantSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The number of blocks on each axis, which is the shape of ``scales``."""
    coded = list(shape)
    coded[spec.axis] = coded_length(spec, shape)
    return tuple(
        -(-n // extent) for n, extent in zip(coded, tile_extent(spec, tuple(coded)), strict=True)
    )


def stored_nbytes(spec: QuantSpec, shape: tuple[int, ...]) -> int:
    """Bytes of an array in a format, padding included; not of the outlier codec.

    Whole blocks of ``bits`` a value, each with a scale, and a zero point or minimum if it has one:
    bits + 8 / block a value of an MX format, so MXFP4 takes 4.25 and MXFP8 8.25.

    Args:
        spec: resolved.
        shape: of the array.

    Returns:
        The `QuantArray.nbytes` of what quantizing gives.

    >>> from extensor.quant.array import stored_nbytes
    >>> stored_nbytes(et.QuantSpec("mxfp4").resolve(2), (64, 64)) * 8 / 64**2
    4.25
    """
    codes = math.prod(shape) // max(shape[spec.axis], 1) * packed_length(spec, shape)
    wide = {"float32": 4, "float16": 2}.get(spec.scale_name, 1)
    kinds = 2 if spec.minimum else 1  # a scale, and a minimum
    each = wide * kinds + (0 if spec.symmetric else 1)
    whole = 4 if spec.row.tensor_scale else 0
    if spec.super_block is not None:
        whole += 2 * kinds * math.prod(super_grid(spec, shape))
    return codes + each * math.prod(block_grid(spec, shape)) + whole


def super_grid(spec: QuantSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The number of super-blocks on each axis, which is the shape of ``super_scales``."""
    assert spec.super_block is not None and isinstance(spec.tile, tuple)
    _check_padding("super_block", spec.super_block, shape[spec.axis])
    grid = list(block_grid(spec, shape))
    grid[spec.axis] = -(-grid[spec.axis] // (spec.super_block // spec.tile[1]))
    return tuple(grid)


def packed_length(spec: QuantSpec, shape: tuple[int, ...]) -> int:
    """Bytes of ``codes`` along the block axis: whole blocks, packed."""
    coded = list(shape)
    coded[spec.axis] = coded_length(spec, shape)
    extent = tile_extent(spec, tuple(coded))[spec.axis]
    padded = -(-coded[spec.axis] // extent) * extent
    return math.ceil(padded * spec.row.element.bits / 8)
