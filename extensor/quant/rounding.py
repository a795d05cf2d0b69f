"""Rounding float32 values to element codes and decoding them, on integer bits.

No float arithmetic is used, so the result does not depend on a library's casts, on fused
multiply-adds or on flush-to-zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from extensor.formats import ElementFormat
from extensor.formats.dialects import Ties

__all__ = ["decode", "encode", "pack", "round_magnitude", "unpack"]

Array = Any


def round_magnitude(
    x: Array, element: ElementFormat, words: Array | None = None, ties: Ties = "even", xp: Any = np
) -> Array:
    """Round |x| to the element's grid, continued without an upper end: int64 codes.

    Consecutive codes are consecutive grid values, so a code above
    ``element.max_magnitude_code`` means that the value saturates. With ``words`` (uint32, one per
    value) rounding is stochastic: up exactly when frac * 2**32 > word. Callers handle NaN first.
    """
    bits = xp.asarray(x, dtype=xp.float32).view(xp.uint32) & xp.uint32(0x7FFFFFFF)
    bits = bits.astype(xp.int64)
    exponent = xp.maximum(bits >> 23, 1)  # |x| = mantissa * 2**(exponent - 150)
    mantissa = (bits & 0x7FFFFF) | xp.where(bits >> 23 > 0, 1 << 23, 0)
    if element.is_float:
        field = xp.maximum(exponent - 127 - element.min_exponent + 1, 1)
    else:
        field = xp.ones_like(exponent)
    # Bits below the grid's last place; at 60 no value can round up any more.
    shift = xp.clip(element.grid_exponent + field - 1 - (exponent - 150), 0, 60)
    quotient = mantissa >> shift
    rest = mantissa & ((xp.int64(1) << shift) - 1)
    if words is not None:
        up = _stochastic_up(rest, shift, words.astype(xp.int64), xp)
    else:
        half = xp.int64(1) << xp.maximum(shift - 1, 0)
        above = rest > half
        if ties == "even":
            above |= (rest == half) & (quotient & 1 == 1)
        elif ties == "away":
            above |= rest == half
        up = above & (shift > 0)
    return ((field - 1) << element.mantissa_bits) + quotient + up


def _stochastic_up(rest: Array, shift: Array, words: Array, xp: Any) -> Array:
    """Whether rest / 2**shift * 2**32 > word, in integers: word < ceil(rest * 2**(32 - shift))."""
    left, right = xp.maximum(32 - shift, 0), xp.maximum(shift - 32, 0)
    threshold = xp.where(shift <= 32, rest << left, (rest + (xp.int64(1) << right) - 1) >> right)
    return words < threshold


def encode(
    x: Array, element: ElementFormat, words: Array | None = None, ties: Ties = "even", xp: Any = np
) -> tuple[Array, Array]:
    """Round float32 values to the grid, saturating.

    Args:
        x: float32 values of any shape. Infinities saturate.
        element: the grid.
        words: uint32 random words of x's shape for stochastic rounding; None rounds to nearest.
        ties: how nearest rounds halfway between two grid values.
        xp: the array module.

    Returns:
        uint8 codes (sign included) and a bool mask of the values that saturated.

    Raises:
        ValueError: for a NaN where the grid has none.
    """
    x = xp.asarray(x, dtype=xp.float32)
    nan = xp.isnan(x)
    if element.nan_code is None and bool(nan.any()):
        raise ValueError(f"{element.name} has no NaN; give the block a NaN scale instead")
    magnitude = round_magnitude(x, element, words, ties, xp)
    saturated = (magnitude > element.max_magnitude_code) & ~nan
    magnitude = xp.minimum(magnitude, element.max_magnitude_code)
    if element.nan_code is not None:
        magnitude = xp.where(nan, element.nan_code, magnitude)
    negative = xp.signbit(x)
    if element.is_float:
        codes = magnitude | xp.where(negative, element.sign_mask, 0)
    else:
        codes = xp.where(negative, -magnitude, magnitude) & ((1 << element.bits) - 1)
    return codes.astype(xp.uint8), saturated


def decode(codes: Array, element: ElementFormat, xp: Any = np) -> Array:
    """Decode unpacked codes to float32, which holds every grid value."""
    return xp.asarray(np.array(element.values, dtype=np.float32))[codes]


def pack(codes: Array, bits: int, xp: Any = np) -> Array:
    """Pack codes (..., L) of 4, 6 or 8 bits into bytes along the last axis, lowest bits first."""
    if bits == 8:
        return codes
    group = 4 if bits == 6 else 2
    short = -codes.shape[-1] % group
    whole = xp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, short)])
    groups = whole.shape[-1] // group
    lanes = whole.reshape(*codes.shape[:-1], groups, group).astype(xp.uint32)
    word = lanes[..., 0]
    for i in range(1, group):
        word = word | (lanes[..., i] << xp.uint32(bits * i))
    size = group * bits // 8
    bytes_ = xp.stack([(word >> xp.uint32(8 * i)) & xp.uint32(0xFF) for i in range(size)], axis=-1)
    packed = bytes_.astype(xp.uint8).reshape(*codes.shape[:-1], groups * size)
    return packed[..., : -(-codes.shape[-1] * bits // 8)]


def unpack(packed: Array, bits: int, length: int, xp: Any = np) -> Array:
    """The inverse of `pack`: the first ``length`` codes along the last axis, uint8."""
    if bits == 8:
        return packed[..., :length]
    group = 4 if bits == 6 else 2
    size = group * bits // 8
    short = -packed.shape[-1] % size
    whole = xp.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, short)])
    groups = whole.shape[-1] // size
    bytes_ = whole.reshape(*packed.shape[:-1], groups, size).astype(xp.uint32)
    word = bytes_[..., 0]
    for i in range(1, size):
        word = word | (bytes_[..., i] << xp.uint32(8 * i))
    mask = xp.uint32((1 << bits) - 1)
    lanes = xp.stack([(word >> xp.uint32(bits * i)) & mask for i in range(group)], axis=-1)
    return lanes.astype(xp.uint8).reshape(*packed.shape[:-1], groups * group)[..., :length]
