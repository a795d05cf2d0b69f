"""Blocks -> codes and scales, one function per kind of scale.

Each family works on (blocks, block_size) float32 and returns a `Coded`. A block
that holds NaN (or, where the dialect does not say otherwise, Inf) gets a NaN
scale and zero codes: it dequantizes to NaN, never to a silent zero.

Sources: OCP MX v1.0, section 6.3; Transformer Engine's NVFP4 order of operations;
four-over-six, arXiv 2512.02010; the float-scaled orders are this project's, stated
in docs/formats.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from extensor.formats import ELEMENTS, ElementFormat
from extensor.quant.rounding import decode, encode, round_magnitude
from extensor.quant.scale_rules import E8M0_NAN, e8m0_bytes, power_of_two
from extensor.quant.spec import QuantSpec

__all__ = ["Coded", "block_statistic", "decode_blocks", "encode_blocks"]

Array = Any

_FLOAT32_MAX = np.finfo(np.float32).max
_UE4M3_NAN = 0x7F
_E4M3 = ELEMENTS["e4m3"]
# Valid NVFP4 scales whose product with e2m1 is exact in FP8: normal, significand 1, 1.25 or 1.5.
_FP8_EXACT = tuple(code for code in range(0x08, 0x7F) if code & 7 in (0, 2, 4))


@dataclass
class Coded:
    """What a family returns: unpacked codes, one scale per block, and what else is stored."""

    codes: Array
    scales: Array
    saturated: Array
    tensor_scale: Array | None = None
    zero_points: Array | None = None


def encode_blocks(
    x: Array,
    real: Array,
    spec: QuantSpec,
    words: Array | None,
    previous_amax: Array | None,
    xp: Any = np,
) -> Coded:
    """Code float32 blocks (blocks, block_size) ; ``real`` is False on the padding."""
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        if not spec.symmetric:
            return _asymmetric(x, real, spec, words, xp)
        amax = block_statistic(x, real, spec, previous_amax, xp)
        if spec.is_mx:
            return _mx(x, amax, spec, words, xp)
        if spec.row.tensor_scale:
            return _nvfp4(x, amax, spec, words, xp)
        return _float_scaled(x, amax, spec, words, xp)


def decode_blocks(
    codes: Array,
    scales: Array,
    spec: QuantSpec,
    tensor_scale: Array | None,
    zero_points: Array | None,
    xp: Any = np,
) -> Array:
    """Unpacked codes (blocks, block_size) and scales (blocks,) -> float32 values."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        grid = decode(codes, spec.row.element, xp)
        if zero_points is not None:
            grid = grid - zero_points[:, None].astype(xp.float32)
        values = grid * _scale_values(scales, spec, xp)[:, None]
        return values if tensor_scale is None else values * tensor_scale


def _scale_values(scales: Array, spec: QuantSpec, xp: Any) -> Array:
    """Stored scales -> float32."""
    if spec.is_mx:
        value = power_of_two(scales.astype(xp.int64) - 127, xp)
        return xp.where(scales == E8M0_NAN, xp.float32(np.nan), value)
    if spec.row.scale.name == "ue4m3":
        return decode(scales, _E4M3, xp)
    return scales.astype(xp.float32)


def block_statistic(
    x: Array, real: Array, spec: QuantSpec, previous_amax: Array | None, xp: Any = np
) -> Array:
    """What stands for each block's largest magnitude, float32 (blocks,).

    NaN and Inf pass through. ``percentile``: the ceil(p * n / 100)-th smallest of the block's n
    real magnitudes (nearest rank); where that is zero although the block is not, the maximum.
    ``running``: max(amax, float32(decay) * previous amax); zero for a block of zeros, whose scale
    does not depend on the past.
    """
    magnitude = xp.abs(x)
    amax = magnitude.max(axis=1) if x.size else xp.zeros(len(x), dtype=xp.float32)
    if spec.statistic == "running" and previous_amax is not None:
        return xp.where(amax == 0, amax, xp.maximum(amax, xp.float32(spec.decay) * previous_amax))
    if spec.statistic != "percentile" or not x.size:
        return amax
    ordered = xp.sort(xp.where(real, magnitude, xp.float32(np.inf)), axis=1)
    count = real.sum(axis=1)
    rank = xp.ceil(spec.percentile * count / 100).astype(xp.int64)  # p / 100 would round first
    rank = xp.clip(rank, 1, xp.maximum(count, 1))
    chosen = xp.take_along_axis(ordered, rank[:, None] - 1, axis=1)[:, 0]
    return xp.where(xp.isfinite(amax) & (chosen > 0), chosen, amax)


def _round(x: Array, spec: QuantSpec, words: Array | None, xp: Any) -> tuple[Array, Array]:
    if spec.element_scale != 1.0:
        x = x * xp.float32(spec.element_scale)
    return encode(x, spec.row.element, words, spec.dialect_row.ties, xp)


def _mx(x: Array, amax: Array, spec: QuantSpec, words: Array | None, xp: Any) -> Coded:
    dialect = spec.dialect_row
    infinite = xp.isinf(x).any(axis=1) & ~xp.isnan(x).any(axis=1)
    finite = xp.isfinite(x).all(axis=1)
    keep = finite | (infinite & (dialect.mx_inf_byte != E8M0_NAN))
    safe = xp.where(finite, amax, xp.float32(0))
    scales = e8m0_bytes(safe, spec.row.element, spec.rule, spec.scale_window, xp)
    scales = xp.where(finite, scales, xp.where(infinite, dialect.mx_inf_byte, E8M0_NAN))
    inverse = power_of_two(127 - scales.astype(xp.int64), xp)
    scaled = xp.where(keep[:, None], x * inverse[:, None], xp.float32(0))
    codes, saturated = _round(scaled, spec, words, xp)
    return Coded(codes, scales.astype(xp.uint8), saturated)


def _nvfp4(x: Array, amax: Array, spec: QuantSpec, words: Array | None, xp: Any) -> Coded:
    finite = xp.isfinite(x).all(axis=1)
    magnitude = xp.abs(x)
    tensor_amax = xp.where(xp.isfinite(magnitude), magnitude, xp.float32(0))
    tensor_amax = tensor_amax.max() if x.size else xp.float32(0)
    x = xp.where(finite[:, None], x, xp.float32(0))
    amax = xp.where(finite, amax, xp.float32(0))
    target = 1536.0 if spec.rule == "four_over_six" else 2688.0  # largest scale times largest code
    encode_scale = xp.minimum(xp.float32(target) / tensor_amax, xp.float32(_FLOAT32_MAX))
    encode_scale = xp.where(
        (tensor_amax == 0) | (encode_scale == 0), xp.float32(1), encode_scale
    ).astype(xp.float32)
    tensor_scale = xp.asarray(xp.float32(1) / encode_scale, dtype=xp.float32)
    if spec.rule == "four_over_six":
        base = amax / xp.float32(6) * encode_scale
        factor = tensor_amax.astype(xp.float32)
        options = [encode(base * xp.float32(m), _E4M3, xp=xp)[0] for m in (1.0, 1.5)]
        measure = (factor, xp.float32(1536))
    else:
        base = amax * (encode_scale * (xp.float32(1) / xp.float32(6)))
        base = xp.minimum(base, xp.float32(_E4M3.max))
        if spec.rule == "least_error":
            options = _fp8_exact_options(base, xp)
        else:
            options = [encode(base, _E4M3, xp=xp)[0]]
        measure = (tensor_scale, None)
    scales = _least_error(x, options, tensor_scale, measure, spec, xp)
    zero = (amax == 0) | ~finite
    scales = xp.where(zero, 0, scales).astype(xp.uint8)
    codes, saturated = _nvfp4_codes(x, scales, tensor_scale, spec, words, xp)
    scales = xp.where(finite & (amax == 0), spec.dialect_row.nvfp4_zero_scale, scales)
    scales = xp.where(finite, scales, _UE4M3_NAN).astype(xp.uint8)
    return Coded(codes, scales, saturated, tensor_scale=tensor_scale)


def _nvfp4_codes(
    x: Array, scales: Array, tensor_scale: Array, spec: QuantSpec, words: Array | None, xp: Any
) -> tuple[Array, Array]:
    """Codes of x under given block scale bytes: rne(x * min(1 / (sf * (1 / S_enc)), FLT_MAX))."""
    decoded = decode(scales, _E4M3, xp) * tensor_scale
    inverse = xp.minimum(xp.float32(1) / decoded, xp.float32(_FLOAT32_MAX))
    if not spec.dialect_row.nvfp4_tiny_saturates:
        inverse = xp.where(scales == 0, xp.float32(0), inverse)
    return _round(x * inverse[:, None], spec, words, xp)


def _fp8_exact_options(base: Array, xp: Any) -> list[Array]:
    """Four consecutive scale codes around ``base``, largest first."""
    table = xp.asarray(np.array(_FP8_EXACT, dtype=np.uint8))
    values = decode(table, _E4M3, xp)
    at = xp.clip(xp.searchsorted(values, base), 0, len(_FP8_EXACT) - 1)
    return [table[xp.clip(at + step, 0, len(_FP8_EXACT) - 1)] for step in (1, 0, -1, -2)]


def _least_error(
    x: Array,
    options: list[Array],
    tensor_scale: Array,
    measure: tuple[Array, Array | None],
    spec: QuantSpec,
    xp: Any,
) -> Array:
    """Of several scale bytes per block, the one with the least squared error; the first wins ties.

    The error sums ((q * sf) * factor [/ divisor] - x)**2 in float32 over ascending positions.
    """
    best, least = options[0], None
    if len(options) == 1:
        return best
    factor, divisor = measure
    nearest = spec.replace(rounding="nearest_even", element_scale=1.0)
    for option in options:
        codes, _ = _nvfp4_codes(x, option, tensor_scale, nearest, None, xp)
        value = decode(codes, spec.row.element, xp) * decode(option, _E4M3, xp)[:, None] * factor
        if divisor is not None:
            value = value / divisor
        square = xp.square(value - x)
        error = xp.zeros(len(x), dtype=xp.float32)
        for position in range(x.shape[1]):
            error = error + square[:, position]
        if least is None:
            least = error
        else:
            better = error < least
            best, least = xp.where(better, option, best), xp.where(better, error, least)
    return best


def _float_scale(ratio: Array, spec: QuantSpec, xp: Any) -> tuple[Array, Array]:
    """The stored scale and its float32 value; a scale that rounds to zero is 1."""
    scale = xp.where(ratio == 0, xp.float32(1), ratio)
    if spec.scale_name == "float16":
        half = scale.astype(xp.float16)
        half = xp.where(half == 0, xp.float16(np.finfo(np.float16).smallest_subnormal), half)
        half = xp.where(xp.isinf(half), xp.float16(np.finfo(np.float16).max), half)
        return half.astype(xp.float16), half.astype(xp.float32)
    return scale, scale


def _float_scaled(x: Array, amax: Array, spec: QuantSpec, words: Array | None, xp: Any) -> Coded:
    finite = xp.isfinite(x).all(axis=1)
    ratio = xp.where(finite, amax, xp.float32(0)) / xp.float32(spec.row.element.max)
    if spec.rule == "one":
        ratio = xp.ones_like(ratio)
    stored, scale = _float_scale(ratio, spec, xp)
    safe = xp.where(finite[:, None], x, xp.float32(0))
    codes, saturated = _round(safe / scale[:, None], spec, words, xp)
    return Coded(codes, xp.where(finite, stored, stored.dtype.type(np.nan)), saturated)


def _asymmetric(x: Array, real: Array, spec: QuantSpec, words: Array | None, xp: Any) -> Coded:
    """Integers with a zero point, both by way of float64 and rounded once.

    s = (max - min) / (qmax - qmin); z = rne(qmin - min / s).
    """
    element: ElementFormat = spec.row.element
    low_code, high_code = -(1 << (element.bits - 1)), (1 << (element.bits - 1)) - 1
    finite = xp.isfinite(x).all(axis=1)
    safe = xp.where(finite[:, None], x, xp.float32(0))
    zero = xp.zeros((len(x), 1), dtype=xp.float32)
    low = xp.concatenate([safe, zero], axis=1).min(axis=1).astype(xp.float64)
    high = xp.concatenate([safe, zero], axis=1).max(axis=1).astype(xp.float64)
    ratio = ((high - low) / (high_code - low_code)).astype(xp.float32)
    if spec.rule == "one":
        ratio = xp.ones_like(ratio)
    stored, scale = _float_scale(ratio, spec, xp)
    point = xp.clip(xp.rint(low_code - low / scale.astype(xp.float64)), low_code, high_code)
    point = point.astype(xp.int64)
    scaled = safe / scale[:, None]
    if spec.element_scale != 1.0:
        scaled = scaled * xp.float32(spec.element_scale)
    magnitude = round_magnitude(scaled, element, words, spec.dialect_row.ties, xp)
    signed = xp.where(xp.signbit(scaled), -magnitude, magnitude) + point[:, None]
    saturated = (signed < low_code) | (signed > high_code)
    codes = xp.clip(signed, low_code, high_code) & ((1 << element.bits) - 1)
    codes = xp.where(real & finite[:, None], codes, 0).astype(xp.uint8)  # zero is code z, padding 0
    scales = xp.where(finite, stored, stored.dtype.type(np.nan))
    return Coded(codes, scales, saturated & finite[:, None], zero_points=point.astype(xp.int8))
