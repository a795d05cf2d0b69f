"""Rounding float32 values to element codes, decoding them, and packing codes into bytes.

Rounding divides each value by the spacing of the grid about it, a power of two, and rounds the
quotient to an integer. Each step is one float32 operation whose result is exact.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from extensor.formats import ElementFormat
from extensor.formats.dialects import Ties

__all__ = ["decode", "encode", "pack", "round_magnitude", "signed", "unpack"]

Array = Any
_SEGMENT = 1 << 15  # values rounded at a time on numpy: they and their temporaries stay cached


def round_magnitude(
    x: Array, element: ElementFormat, words: Array | None = None, ties: Ties = "even", xp: Any = np
) -> Array:
    """Round |x| to the element's grid, continued to four times its largest value: int16 codes.

    Consecutive codes are consecutive grid values, so a code above
    ``element.max_magnitude_code`` means that the value saturates. With ``words`` (uint32, one per
    value) rounding is stochastic: up exactly when frac * 2**32 > word. Callers handle NaN first.
    """
    x = xp.asarray(x, dtype=xp.float32)
    size = xp.minimum(xp.abs(x), xp.float32(4 * element.max))
    if not element.is_float:
        return _round(size * xp.float32(1 << element.mantissa_bits), words, ties, xp)
    # The grid's spacing is 2**(grid_exponent + binade), by the exponent field of float32.
    lowest = element.min_exponent + 127
    binade = xp.maximum(size.view(xp.uint32) >> 23, xp.uint32(lowest)) - xp.uint32(lowest)
    inverse = (xp.uint32(127 - element.grid_exponent) - binade) << 23
    steps = _round(size * inverse.view(xp.float32), words, ties, xp)
    steps += (binade << element.mantissa_bits).astype(xp.int16)
    return steps


def _round(x: Array, words: Array | None, ties: Ties, xp: Any) -> Array:
    """Round float32 values of at least 0 to int16."""
    if words is None and ties == "even":
        return xp.rint(x).astype(xp.int16)
    whole = xp.floor(x)
    rest = x - whole
    if words is not None:  # compared in float64, which holds both sides
        up = rest * xp.float32(1 << 32) > words
    else:
        up = rest >= 0.5 if ties == "away" else rest > 0.5
    return whole.astype(xp.int16) + up


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
    if xp is not np or x.size <= _SEGMENT:
        return _encode(x, element, words, ties, xp)
    if not x.flags.c_contiguous and x.T.flags.c_contiguous:
        codes, saturated = encode(x.T, element, None if words is None else words.T, ties)
        return codes.T, saturated.T
    codes, saturated = np.empty(x.shape, np.uint8), np.empty(x.shape, bool)
    flat_codes, flat_saturated = codes.reshape(-1), saturated.reshape(-1)
    flat, flat_words = x.reshape(-1), None if words is None else words.reshape(-1)
    for begin in range(0, x.size, _SEGMENT):
        part = slice(begin, begin + _SEGMENT)
        some = None if flat_words is None else flat_words[part]
        flat_codes[part], flat_saturated[part] = _encode(flat[part], element, some, ties, xp)
    return codes, saturated


def _encode(
    x: Array, element: ElementFormat, words: Array | None, ties: Ties, xp: Any
) -> tuple[Array, Array]:
    """`encode` of a float32 array."""
    nan = xp.isnan(x)
    has_nan = bool(nan.any())
    if has_nan and element.nan_code is None:
        raise ValueError(f"{element.name} has no NaN; give the block a NaN scale instead")
    numbers = xp.where(nan, xp.float32(0), x) if has_nan else x
    magnitude = round_magnitude(numbers, element, words, ties, xp)
    saturated = magnitude > element.max_magnitude_code
    magnitude = xp.minimum(magnitude, xp.int16(element.max_magnitude_code))
    if has_nan:
        magnitude = xp.where(nan, xp.int16(element.nan_code), magnitude)
    negative = xp.signbit(x)
    if element.is_float:
        return magnitude.astype(xp.uint8) | negative * xp.uint8(element.sign_mask), saturated
    codes = signed(magnitude, negative, xp) & ((1 << element.bits) - 1)
    return codes.astype(xp.uint8), saturated


def signed(magnitude: Array, negative: Array, xp: Any = np) -> Array:
    """Int16 magnitudes, negated where ``negative``; many times faster than a selection."""
    return magnitude * (1 - 2 * negative.astype(xp.int16))


def decode(codes: Array, element: ElementFormat, xp: Any = np) -> Array:
    """Decode unpacked codes to float32, which holds every grid value."""
    if not codes.flags.c_contiguous and codes.T.flags.c_contiguous:
        return _values(element, xp).take(codes.T).T
    return _values(element, xp).take(codes)


@cache
def _values(element: ElementFormat, xp: Any) -> Array:
    """The value of every code."""
    return xp.asarray(np.array(element.values, dtype=np.float32))


_GROUP = {5: 8, 6: 4}
"""Codes of so many bits that fill whole bytes together."""


def pack(codes: Array, bits: int, xp: Any = np) -> Array:
    """Pack codes (..., L) of 4 to 8 bits into bytes along the last axis, lowest bits first."""
    if bits == 8:
        return codes
    if bits == 4:
        packed = xp.array(codes[..., 0::2])
        packed[..., : codes.shape[-1] // 2] |= codes[..., 1::2] << xp.uint8(4)
        return packed
    group = _GROUP[bits]
    short = -codes.shape[-1] % group
    whole = xp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, short)])
    groups = whole.shape[-1] // group
    lanes = whole.reshape(*codes.shape[:-1], groups, group).astype(xp.uint64)
    word = lanes[..., 0]
    for i in range(1, group):
        word = word | (lanes[..., i] << xp.uint64(bits * i))
    size = group * bits // 8
    bytes_ = xp.stack([(word >> xp.uint64(8 * i)) & xp.uint64(0xFF) for i in range(size)], axis=-1)
    packed = bytes_.astype(xp.uint8).reshape(*codes.shape[:-1], groups * size)
    return packed[..., : -(-codes.shape[-1] * bits // 8)]


def unpack(packed: Array, bits: int, length: int, xp: Any = np) -> Array:
    """The inverse of `pack`: the first ``length`` codes along the last axis, uint8."""
    if bits == 8:
        return packed[..., :length]
    if bits == 4:
        both = xp.empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=xp.uint8)
        both[..., 0::2], both[..., 1::2] = packed & xp.uint8(15), packed >> xp.uint8(4)
        return both[..., :length]
    group = _GROUP[bits]
    size = group * bits // 8
    short = -packed.shape[-1] % size
    whole = xp.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, short)])
    groups = whole.shape[-1] // size
    bytes_ = whole.reshape(*packed.shape[:-1], groups, size).astype(xp.uint64)
    word = bytes_[..., 0]
    for i in range(1, size):
        word = word | (bytes_[..., i] << xp.uint64(8 * i))
    mask = xp.uint64((1 << bits) - 1)
    lanes = xp.stack([(word >> xp.uint64(bits * i)) & mask for i in range(group)], axis=-1)
    return lanes.astype(xp.uint8).reshape(*packed.shape[:-1], groups * group)[..., :length]
