"""Encoding blocks: one function for each kind of scale; and decoding all of them.

An encoder takes float32 (blocks, block_size) and returns `EncodedBlocks`. A block that holds NaN
gets a NaN scale and zero codes, so that it dequantizes to NaN and never to a silent zero. So does a
block that holds Inf, unless the dialect says otherwise.

Sources: OCP MX v1.0, section 6.3; docs/formats.md for float scales, whose order of operations is
this project's. NVFP4 is in `extensor.quant.nvfp4`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from extensor.formats import ElementFormat
from extensor.quant.codec_types import (
    SCALE_GRID,
    EncodedBlocks,
    block_amax,
    kept_blocks,
    round_values,
)
from extensor.quant.nvfp4 import encode_nvfp4
from extensor.quant.rounding import decode, round_magnitude, signed
from extensor.quant.scale_rules import (
    E8M0_NAN,
    E8M0_SEARCHES,
    e8m0_bytes,
    power_of_two,
    quest_bytes,
)
from extensor.quant.spec import QuantSpec

__all__ = [
    "asymmetric_scale", "block_statistic", "decode_blocks", "encode_blocks", "float_scale",
    "half_scale", "scale_values",
]  # fmt: skip

Array = Any


def encode_blocks(
    x: Array,
    real: Callable[[], Array],
    spec: QuantSpec,
    words: Array | None,
    previous_amax: Array | None,
    xp: Any = np,
) -> EncodedBlocks:
    """Encode float32 blocks (blocks, block_size); ``real()`` is False on the padding."""
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        if not spec.symmetric:
            return _asymmetric(x, real(), spec, words, xp)
        largest = block_amax(x, xp)
        amax = block_statistic(x, real, largest, spec, previous_amax, xp)
        if spec.is_mx and spec.rule in E8M0_SEARCHES:
            finite = xp.isfinite(largest)
            safe = xp.where(finite, amax, xp.float32(0))
            kept = kept_blocks(x, finite, xp)
            encoded = _mx(x, largest, _searched_bytes(kept, real, safe, spec, xp), spec, words, xp)
        elif spec.is_mx:
            safe = xp.where(xp.isfinite(largest), amax, xp.float32(0))
            scales = e8m0_bytes(safe, spec.row.element, spec.rule, spec.scale_window, xp)
            encoded = _mx(x, largest, scales, spec, words, xp)
        else:
            encode = _float_scaled if spec.has_float_scales else encode_nvfp4
            encoded = encode(x, largest, amax, spec, words, xp)
        if spec.zero_sign == "zeros_negative":  # padding and NaN blocks hold codes 0 all the same
            stored = real() & ~xp.isnan(scale_values(encoded.scales, spec, xp))[:, None]
            encoded.codes = xp.where(stored, encoded.codes, 0).astype(xp.uint8)
        return encoded


def decode_blocks(
    codes: Array,
    scales: Array,
    spec: QuantSpec,
    tensor_scale: Array | None,
    zero_points: Array | None,
    xp: Any = np,
) -> Array:
    """Decode unpacked codes (blocks, block_size) and scales (blocks,) to float32 values."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        grid = decode(codes, spec.row.element, xp)
        if zero_points is not None:
            grid = grid - zero_points[:, None].astype(xp.float32)
        values = grid * scale_values(scales, spec, xp)[:, None]
        return values if tensor_scale is None else values * tensor_scale


def scale_values(scales: Array, spec: QuantSpec, xp: Any) -> Array:
    """The float32 values of stored scales."""
    if spec.is_mx:
        value = power_of_two(scales.astype(xp.int64) - 127, xp)
        return xp.where(scales == E8M0_NAN, xp.float32(np.nan), value)
    if spec.row.scale.name == "ue4m3":
        return decode(scales, SCALE_GRID, xp)
    return scales.astype(xp.float32)


def block_statistic(
    x: Array,
    real: Callable[[], Array],
    largest: Array,
    spec: QuantSpec,
    previous_amax: Array | None,
    xp: Any = np,
) -> Array:
    """The magnitude that each block's scale is chosen from, float32 (blocks,).

    ``largest`` holds the largest magnitudes, whose NaN and Inf pass through. ``percentile``: the
    ceil(p * n / 100)-th smallest of the block's n real magnitudes (nearest rank); where that is
    zero although the block is not, the maximum. ``running``: max(amax, float32(decay) * previous
    amax); zero for a block of zeros, whose scale does not depend on the past.
    """
    if spec.statistic == "running" and previous_amax is not None:
        decayed = xp.float32(spec.decay) * previous_amax
        return xp.where(largest == 0, largest, xp.maximum(largest, decayed))
    if spec.statistic != "percentile" or not x.size:
        return largest
    inside = real()
    ordered = xp.sort(xp.where(inside, xp.abs(x), xp.float32(np.inf)), axis=1)
    count = inside.sum(axis=1)
    rank = xp.ceil(spec.percentile * count / 100).astype(xp.int64)  # p / 100 would round first
    rank = xp.clip(rank, 1, xp.maximum(count, 1))
    chosen = xp.take_along_axis(ordered, rank[:, None] - 1, axis=1)[:, 0]
    return xp.where(xp.isfinite(largest) & (chosen > 0), chosen, largest)


def _searched_bytes(
    x: Array, real: Callable[[], Array], amax: Array, spec: QuantSpec, xp: Any
) -> Array:
    """E8M0 bytes of finite blocks under a rule of `E8M0_SEARCHES`.

    ``mse``: of the scale that nothing exceeds (rceil) and half of it, the one whose codes have the
    smaller squared error; the larger wins ties. Errors count in units of their own scale, summed
    in float32 over ascending positions: E(s / 2) / 4 < E(s). For E2M1 in blocks of up to 128 no
    other power of two has a smaller error (docs/formats.md).
    """
    if spec.rule == "quest":
        return quest_bytes(x, real().sum(axis=1), amax, xp)
    whole = e8m0_bytes(amax, spec.row.element, "rceil", None, xp).astype(xp.int64)
    half = whole - 1
    errors = []
    nearest = spec.replace(rounding="nearest_even", element_scale=1.0)
    for byte in (whole, half):
        scaled = x * power_of_two(127 - xp.maximum(byte, 0), xp)[:, None]
        codes, _ = round_values(scaled, nearest, None, xp)
        square = xp.square(decode(codes, spec.row.element, xp) - scaled)
        error = xp.zeros(len(x), dtype=xp.float32)
        for position in range(x.shape[1]):
            error = error + square[:, position]
        errors.append(error)
    least = max(spec.dialect_row.mx_least_divisor + 127, 0)
    better = (errors[1] * xp.float32(0.25) < errors[0]) & (half >= least)
    return xp.where(better, half, whole).astype(xp.uint8)


def _mx(
    x: Array, largest: Array, scales: Array, spec: QuantSpec, words: Array | None, xp: Any
) -> EncodedBlocks:
    dialect = spec.dialect_row
    finite, infinite = xp.isfinite(largest), xp.isinf(largest)
    inf_byte = dialect.inf_byte_in(spec.row.element)
    keep = finite | (infinite & (inf_byte != E8M0_NAN))
    scales = xp.where(finite, scales, xp.where(infinite, inf_byte, E8M0_NAN))
    divisor = xp.maximum(scales.astype(xp.int64) - 127, dialect.mx_least_divisor)
    inverse = power_of_two(-divisor, xp)
    codes, saturated = round_values(kept_blocks(x * inverse[:, None], keep, xp), spec, words, xp)
    return EncodedBlocks(codes, scales.astype(xp.uint8), saturated)


def float_scale(ratio: Array, spec: QuantSpec, xp: Any) -> tuple[Array, Array]:
    """The scale as stored, and its float32 value; a ratio of zero gives scale 1."""
    scale = xp.where(ratio == 0, xp.float32(1), ratio)
    if spec.scale_name == "float16":
        half = half_scale(scale, xp)
        return half, half.astype(xp.float32)
    return scale, scale


def half_scale(scale: Array, xp: Any = np) -> Array:
    """A float32 scale as float16: zero stays zero, nothing else becomes zero or infinite."""
    half = scale.astype(xp.float16)
    tiny = xp.float16(np.finfo(np.float16).smallest_subnormal)
    half = xp.where((half == 0) & (scale != 0), tiny, half)
    half = xp.where(xp.isinf(half), xp.float16(np.finfo(np.float16).max), half)
    return half.astype(xp.float16)


def _float_scaled(
    x: Array, largest: Array, amax: Array, spec: QuantSpec, words: Array | None, xp: Any
) -> EncodedBlocks:
    finite = xp.isfinite(largest)
    ratio = xp.where(finite, amax, xp.float32(0)) / xp.float32(spec.row.element.max)
    if spec.rule == "one":
        ratio = xp.ones_like(ratio)
    stored, scale = float_scale(ratio, spec, xp)
    scaled = kept_blocks(x, finite, xp) / scale[:, None]
    codes, saturated = round_values(scaled, spec, words, xp)
    return EncodedBlocks(codes, xp.where(finite, stored, stored.dtype.type(np.nan)), saturated)


def _asymmetric(
    x: Array, real: Array, spec: QuantSpec, words: Array | None, xp: Any
) -> EncodedBlocks:
    """Integers with a zero point.

    s = (max - min) / (qmax - qmin) and z = rne(qmin - min / s), in float64 and rounded once.
    """
    element: ElementFormat = spec.row.element
    finite = xp.isfinite(block_amax(x, xp))
    safe = kept_blocks(x, finite, xp)
    low, high = safe.min(axis=1, initial=0), safe.max(axis=1, initial=0)
    stored, scale, point = asymmetric_scale(low, high, spec, xp)
    scaled = safe / scale[:, None]
    if spec.element_scale != 1.0:
        scaled = scaled * xp.float32(spec.element_scale)
    magnitude = round_magnitude(scaled, element, words, spec.ties, xp)
    shifted = signed(magnitude, xp.signbit(scaled), xp) + point[:, None].astype(xp.int16)
    low_code, high_code = _codes_of(element)
    saturated = (shifted < low_code) | (shifted > high_code)
    codes = xp.clip(shifted, low_code, high_code) & ((1 << element.bits) - 1)
    codes = xp.where(real & finite[:, None], codes, 0).astype(xp.uint8)  # zero is code z, padding 0
    scales = xp.where(finite, stored, stored.dtype.type(np.nan))
    return EncodedBlocks(
        codes, scales, saturated & finite[:, None], zero_points=point.astype(xp.int8)
    )


def _codes_of(element: ElementFormat) -> tuple[int, int]:
    """The least and the largest code of an asymmetric integer."""
    return -(1 << (element.bits - 1)), (1 << (element.bits - 1)) - 1


def asymmetric_scale(
    low: Array, high: Array, spec: QuantSpec, xp: Any = np
) -> tuple[Array, Array, Array]:
    """Scales and zero points for ranges [low, high] that contain 0.

    Returns:
        The scales as stored, their float32 values, and int64 zero points.
    """
    low_code, high_code = _codes_of(spec.row.element)
    low, high = low.astype(xp.float64), high.astype(xp.float64)
    ratio = ((high - low) / (high_code - low_code)).astype(xp.float32)
    if spec.rule == "one":
        ratio = xp.ones_like(ratio)
    stored, scale = float_scale(ratio, spec, xp)
    point = xp.clip(xp.rint(low_code - low / scale.astype(xp.float64)), low_code, high_code)
    return stored, scale, point.astype(xp.int64)
