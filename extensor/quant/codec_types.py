"""What quantizing a list of blocks gives, and how one of them is rounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from extensor.formats import ELEMENTS
from extensor.quant.rounding import encode
from extensor.quant.spec import QuantSpec

__all__ = ["SCALE_GRID", "Coded", "round_values"]

Array = Any

SCALE_GRID = ELEMENTS["e4m3"]
"""The grid of ue4m3 block scales."""


@dataclass
class Coded:
    """What a family returns: unpacked codes, one scale per block, and what else is stored."""

    codes: Array
    scales: Array
    saturated: Array
    tensor_scale: Array | None = None
    zero_points: Array | None = None


def round_values(
    x: Array, spec: QuantSpec, words: Array | None, xp: Any = np
) -> tuple[Array, Array]:
    """Codes (uint8) of scaled float32 values, and which saturated, under the spec's dialect."""
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
