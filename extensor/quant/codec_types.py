"""The result of encoding blocks, and the steps that all encoders share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from extensor.formats import ELEMENTS
from extensor.quant.rounding import encode
from extensor.quant.spec import QuantSpec

__all__ = ["SCALE_GRID", "EncodedBlocks", "block_amax", "kept_blocks", "round_values"]

Array = Any

SCALE_GRID = ELEMENTS["e4m3"]
"""The grid of ue4m3 block scales."""


@dataclass
class EncodedBlocks:
    """Encoded blocks before packing.

    Attributes:
        codes: uint8 (blocks, block_size), one code each.
        scales: (blocks,), as they are stored.
        saturated: bool (blocks, block_size): values beyond the largest code.
        tensor_scale: float32 of shape (), for formats with a scale per tensor.
        zero_points: int8 (blocks,), for asymmetric formats.
        minimums: (blocks,), as they are stored, for specs with a minimum.
        super_scales: float16 (super-blocks,).
        super_minimums: float16 (super-blocks,).
    """

    codes: Array
    scales: Array
    saturated: Array
    tensor_scale: Array | None = None
    zero_points: Array | None = None
    minimums: Array | None = None
    super_scales: Array | None = None
    super_minimums: Array | None = None


def block_amax(x: Array, xp: Any = np) -> Array:
    """The largest magnitude of each float32 block (blocks, block_size); a NaN's where it holds one.

    Compared as integers, which order magnitudes as floats do, Inf and NaN above: twice as fast.
    """
    bits = xp.abs(x).view(xp.uint32)
    # CuPy's `max` takes no `initial`, and neither library has a maximum of nothing.
    largest = bits.max(axis=1) if bits.size else xp.zeros(bits.shape[:1], bits.dtype)
    return largest.view(xp.float32)


def kept_blocks(x: Array, keep: Array, xp: Any = np) -> Array:
    """The blocks x (blocks, block_size), zero where ``keep`` (blocks,) is False."""
    return x if bool(keep.all()) else xp.where(keep[:, None], x, xp.float32(0))


def round_values(
    x: Array, spec: QuantSpec, words: Array | None, xp: Any = np
) -> tuple[Array, Array]:
    """Round scaled float32 values under the spec's dialect: uint8 codes, and which saturated."""
    if spec.element_scale != 1.0:
        x = x * xp.float32(spec.element_scale)
    element = spec.row.element
    codes, saturated = encode(x, element, words, spec.ties, xp)
    sign = spec.zero_sign
    if element.is_float and sign != "kept":
        magnitude = codes & xp.uint8(element.sign_mask - 1)
        affected = magnitude == 0 if sign == "codes_positive" else x == 0
        zero = element.sign_mask if sign == "zeros_negative" else 0
        codes = xp.where(affected, xp.uint8(zero), codes)
    return codes, saturated
