"""Encoding NVFP4: blocks -> e2m1 codes, e4m3 block scales and one float32 tensor scale.

Where rounding is close, the order of operations decides bits. So each library's order is kept as it
is, in float32 throughout; sf is the block scale's value:

=================== ============================== ============================ ==================
order               tensor scale                   sf before rounding           x is multiplied by
=================== ============================== ============================ ==================
transformer_engine  1 / S, S = 2688 / amax         amax_b * (S * (1 / 6))       1 / (sf * (1 / S))
torchao             amax / 2688                    (amax_b / 6) / scale         (1 / scale) / sf
model_optimizer     amax / 2688                    amax_b / (6 * scale)         divided: sf * scale
=================== ============================== ============================ ==================

Factors that overflow are float32's largest, divisors that underflow its smallest, where
the libraries would get NaN from zeros.

Sources: Transformer Engine, torchao 0.18 (`nvfp4_quantize`) and Model-Optimizer 0.47
(`NVFP4QTensor`), by their observable behaviour; four-over-six, arXiv 2512.02010, in
its authors' order; `least_error` is this project's (docs/formats.md); eden, arXiv 2601.22813,
section 4 (MS-EDEN), after EDEN, arXiv 2108.08842.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from extensor.quant.codec_types import SCALE_GRID, EncodedBlocks, kept_blocks, round_values
from extensor.quant.rounding import decode, encode
from extensor.quant.spec import QuantSpec

__all__ = ["EDEN_TOP", "encode_nvfp4"]

Array = Any

_FLOAT32_MAX = np.finfo(np.float32).max
_FLOAT32_LEAST = np.finfo(np.float32).smallest_subnormal
_UE4M3_NAN = 0x7F
EDEN_TOP = 6 / (17 / 16 * 0.93)
"""What a block's largest value becomes under `QuantSpec.eden`: a little beyond the largest code,
which has the least squared error on normal data once the correction is applied."""
# Valid NVFP4 scales whose product with e2m1 is exact in FP8: normal, significand 1, 1.25 or 1.5.
_FP8_EXACT = tuple(code for code in range(0x08, 0x7F) if code & 7 in (0, 2, 4))


def encode_nvfp4(
    x: Array, largest: Array, amax: Array, spec: QuantSpec, words: Array | None, xp: Any
) -> EncodedBlocks:
    """Encode float32 blocks (blocks, block_size).

    Args:
        x: the blocks.
        largest: their largest magnitudes (blocks,), NaN or Inf where a block is not finite.
        amax: what their scales are chosen from.
        spec: resolved.
        words: random words of x's shape for stochastic rounding.
        xp: the array module.
    """
    dialect = spec.dialect_row
    finite = xp.isfinite(largest)
    tensor_amax = largest.max() if largest.size else xp.float32(0)
    if not bool(finite.all()):  # finite values count, whatever is in their blocks
        magnitude = xp.abs(x)
        kept = xp.where(xp.isfinite(magnitude), magnitude, xp.float32(0))
        tensor_amax = kept.max() if kept.size else xp.float32(0)
    x = kept_blocks(x, finite, xp)
    amax = xp.where(finite, amax, xp.float32(0))
    tensor_scale = _tensor_scale(tensor_amax, spec, xp)
    scales = _block_scales(x, amax, tensor_amax, tensor_scale, spec, xp)
    zero = (amax == 0) | ~finite
    scales = xp.where(zero, 0, scales).astype(xp.uint8)
    if spec.eden:
        nearest = spec.replace(eden=False, rounding="nearest_even")
        codes, saturated = _codes(x, scales, tensor_scale, nearest, None, xp)
        scales = _corrected_scales(x, codes, scales, tensor_scale, spec, words, xp)
        scales = xp.where(zero, 0, scales).astype(xp.uint8)
    else:
        codes, saturated = _codes(x, scales, tensor_scale, spec, words, xp)
    scales = xp.where(finite & (amax == 0), dialect.nvfp4_zero_scale, scales)
    scales = xp.where(finite, scales, _UE4M3_NAN).astype(xp.uint8)
    return EncodedBlocks(codes, scales, saturated, tensor_scale=tensor_scale)


def _order(spec: QuantSpec) -> str:
    """The order of operations in force; rules that search for a scale are defined in one only."""
    return spec.dialect_row.nvfp4_order if spec.rule == "amax" else "transformer_engine"


def _encode_scale(tensor_amax: Array, spec: QuantSpec, xp: Any) -> Array:
    """S: the largest block scale times the largest code, divided by the tensor's largest value."""
    target = 256 * EDEN_TOP if spec.eden else 1536.0 if spec.rule == "four_over_six" else 2688.0
    scale = xp.minimum(xp.float32(target) / tensor_amax, xp.float32(_FLOAT32_MAX))
    return xp.where((tensor_amax == 0) | (scale == 0), xp.float32(1), scale).astype(xp.float32)


def _tensor_scale(tensor_amax: Array, spec: QuantSpec, xp: Any) -> Array:
    """The stored tensor scale. 1 for a tensor of zeros, where torchao's order would give NaN."""
    if _order(spec) == "transformer_engine":
        scale = xp.float32(1) / _encode_scale(tensor_amax, spec, xp)
    else:
        scale = tensor_amax / xp.float32(2688)
        scale = xp.where(scale == 0, xp.float32(1), scale)
    return xp.asarray(scale, dtype=xp.float32)


def _block_scales(
    x: Array, amax: Array, tensor_amax: Array, tensor_scale: Array, spec: QuantSpec, xp: Any
) -> Array:
    """Scale bytes of blocks that are not zero."""
    if spec.rule == "four_over_six":
        base = amax / xp.float32(6) * _encode_scale(tensor_amax, spec, xp)
        options = [_scale_byte(base * xp.float32(m), xp) for m in (1.0, 1.5)]
        return _least_error(x, options, tensor_scale, (tensor_amax, xp.float32(1536)), spec, xp)
    if spec.eden:
        base = amax * (_encode_scale(tensor_amax, spec, xp) * xp.float32(1 / EDEN_TOP))
        return _scale_byte(xp.minimum(base, xp.float32(SCALE_GRID.max)), xp)
    order = _order(spec)
    if order == "torchao":
        base = amax / xp.float32(6) / tensor_scale
    elif order == "model_optimizer":
        base = amax / (xp.float32(6) * tensor_scale)
        base = xp.where(base == 0, xp.float32(1), base)  # that library's guard for blocks of zeros
    else:
        base = amax * (_encode_scale(tensor_amax, spec, xp) * (xp.float32(1) / xp.float32(6)))
    base = xp.minimum(base, xp.float32(SCALE_GRID.max))
    if spec.rule == "least_error":
        options = _fp8_exact_options(base, xp)
        return _least_error(x, options, tensor_scale, (tensor_scale, None), spec, xp)
    return xp.maximum(_scale_byte(base, xp), xp.uint8(spec.dialect_row.nvfp4_least_scale))


def _scale_byte(value: Array, xp: Any) -> Array:
    return encode(value, SCALE_GRID, xp=xp)[0]


def _codes(
    x: Array, scales: Array, tensor_scale: Array, spec: QuantSpec, words: Array | None, xp: Any
) -> tuple[Array, Array]:
    """Codes of x under given block scale bytes, and which saturated."""
    value, order = decode(scales, SCALE_GRID, xp), _order(spec)
    if order == "model_optimizer":
        divisor = xp.maximum(value * tensor_scale, xp.float32(_FLOAT32_LEAST))
        return round_values(x / divisor[:, None], spec, words, xp)
    if order == "torchao":
        inverse = (xp.float32(1) / tensor_scale) / value
    else:
        inverse = xp.float32(1) / (value * tensor_scale)
    inverse = xp.minimum(inverse, xp.float32(_FLOAT32_MAX))
    if not spec.dialect_row.nvfp4_tiny_saturates:
        inverse = xp.where(scales == 0, xp.float32(0), inverse)
    return round_values(x * inverse[:, None], spec, words, xp)


def _corrected_scales(
    x: Array,
    codes: Array,
    scales: Array,
    tensor_scale: Array,
    spec: QuantSpec,
    words: Array | None,
    xp: Any,
) -> Array:
    """Scale bytes under which codes rounded to nearest are unbiased over random rotations.

    The scales of the blocks of one Hadamard transform are multiplied by sum(y y) / sum(y q), y the
    scaled values and q their codes' values, and rounded stochastically: up exactly when the
    fraction times 2**32 exceeds the block's first random word. Sums are float32 over a block's
    ascending positions, then over its transform's blocks.
    """
    assert spec.transform is not None and words is not None
    value = decode(scales, SCALE_GRID, xp)
    inverse = xp.minimum(xp.float32(1) / (value * tensor_scale), xp.float32(_FLOAT32_MAX))
    y = x * xp.where(scales == 0, xp.float32(0), inverse)[:, None]
    q = decode(codes, spec.row.element, xp)
    sums = []
    for product in (y * y, y * q):
        total = xp.zeros(len(x), dtype=xp.float32)
        for position in range(x.shape[1]):
            total = total + product[:, position]
        blocks = total.reshape(-1, spec.transform.size // x.shape[1])
        whole = xp.zeros(len(blocks), dtype=xp.float32)
        for block in range(blocks.shape[1]):
            whole = whole + blocks[:, block]
        sums.append(xp.repeat(whole, blocks.shape[1]))
    correction = xp.where(sums[1] == 0, xp.float32(1), sums[0] / sums[1])
    return encode(value * correction, SCALE_GRID, words[:, 0], xp=xp)[0]


def _fp8_exact_options(base: Array, xp: Any) -> list[Array]:
    """Four consecutive scale codes around ``base``, largest first."""
    table = xp.asarray(np.array(_FP8_EXACT, dtype=np.uint8))
    values = decode(table, SCALE_GRID, xp)
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
    factor, divisor = measure
    nearest = spec.replace(rounding="nearest_even", element_scale=1.0)
    for option in options:
        codes, _ = _codes(x, option, tensor_scale, nearest, None, xp)
        value = (
            decode(codes, spec.row.element, xp) * decode(option, SCALE_GRID, xp)[:, None] * factor
        )
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
