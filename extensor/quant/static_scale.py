"""Static quantization: a whole tensor under one scale, which calibration chose beforehand.

No pass over the values is needed to find their range, and a value's code does not depend on its
neighbours. With scale s and, for asymmetric integers, zero point z:

    code = clip(rne(x / s) + z)

Values beyond the range saturate and are counted. NaN or Inf make the whole tensor NaN, as they do
under dynamic scales (docs/adr/0007).

Source: Jacob et al., arXiv 1712.05877, section 2.1; Krishnamoorthi, arXiv 1806.08342, section 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from extensor.quant.array import QuantArray, QuantStats
from extensor.quant.rounding import decode, encode
from extensor.quant.scale_encoders import asymmetric_scale, float_scale
from extensor.quant.spec import QuantSpec

__all__ = ["StaticScale", "check_static_spec", "choose_static_scale", "quantize_static"]

Array = Any


@dataclass(frozen=True)
class StaticScale:
    """A scale for a whole tensor, chosen by calibration.

    Attributes:
        scale: what a code's value is multiplied by; a positive float32.
        zero_point: the code of 0, for an asymmetric format; None for a symmetric one.
    """

    scale: float
    zero_point: int | None = None

    def __post_init__(self) -> None:
        if not (0.0 < self.scale < math.inf and float(np.float32(self.scale)) == self.scale):
            raise ValueError(f"scale: expected a positive float32, got {self.scale!r}")
        if self.zero_point is not None and not -128 <= self.zero_point <= 127:
            raise ValueError(f"zero_point: expected -128..127 or None, got {self.zero_point!r}")


def check_static_spec(spec: QuantSpec) -> None:
    """Refuse specs that static quantization does not support.

    Raises:
        ValueError: unless the spec has one float32 scale for the tensor, codes of 8 bits, rounds to
            nearest even, and changes nothing else about the values.
    """
    plain = QuantSpec(spec.format, axis=spec.axis, tile="tensor", symmetric=spec.symmetric)
    if spec.resolve(2) != plain.resolve(2) or spec.row.element.bits != 8:
        raise ValueError(
            "static scale: expected codes of 8 bits under one float32 scale, tile='tensor', and "
            f"else the defaults of QuantSpec, got {spec}"
        )
    if spec.scale_name != "float32" or spec.row.outliers:
        raise ValueError(f"static scale: expected a format with float32 scales, got {spec.format}")


def choose_static_scale(low: float, high: float, spec: QuantSpec) -> StaticScale:
    """Choose the scale whose codes cover [min(low, 0), max(high, 0)].

    Asymmetric: s = (high - low) / 255 and z = rne(-128 - low / s). Symmetric: s is the larger
    magnitude over the format's largest value. An empty range takes s = 1.

    Args:
        low: the least value to cover, finite.
        high: the largest, finite.
        spec: see `check_static_spec`.

    Raises:
        ValueError: if the spec takes no static scale, or the range is not finite.
    """
    check_static_spec(spec)
    if not -math.inf < low <= high < math.inf:
        raise ValueError(f"range: expected finite low <= high, got {low!r} and {high!r}")
    ends = [np.array([end], np.float32) for end in (min(low, 0.0), max(high, 0.0))]
    if spec.symmetric:
        amax = np.maximum(-ends[0], ends[1])
        stored, _ = float_scale(amax / np.float32(spec.row.element.max), spec, np)
        return StaticScale(float(stored[0]))
    stored, _, point = asymmetric_scale(ends[0], ends[1], spec)
    return StaticScale(float(stored[0]), int(point[0]))


def quantize_static(
    x: Array, spec: QuantSpec, static: StaticScale, xp: Any = np
) -> tuple[QuantArray, QuantStats]:
    """Quantize float32 x under a static scale.

    Args:
        x: float32 array of one axis or more.
        spec: see `check_static_spec`; resolved here.
        static: with a zero point exactly if the spec is asymmetric.
        xp: the array module.

    Returns:
        The stored array, whose one scale is the given one (NaN if x is not finite), and counts.

    Raises:
        ValueError: if spec and scale do not go together.
    """
    check_static_spec(spec)
    if (static.zero_point is None) != spec.symmetric:
        raise ValueError(
            f"static scale: expected a zero point exactly if symmetric=False, got {static} with "
            f"symmetric={spec.symmetric}"
        )
    spec = spec.resolve(x.ndim)
    finite = bool(xp.isfinite(x).all())
    safe = x if finite else xp.zeros_like(x)
    with np.errstate(over="ignore", under="ignore"):
        scaled = safe / xp.float32(static.scale)
    if spec.row.element.is_float:
        codes, saturated = encode(scaled, spec.row.element, None, "even", xp)
        zero = decode(codes, spec.row.element, xp) == 0
    else:
        codes, saturated, zero = _integers(scaled, spec, static.zero_point, xp)
    if not finite:
        codes, saturated = xp.zeros_like(codes), xp.zeros_like(saturated)
    one = (1,) * x.ndim
    q = QuantArray(
        codes=codes,
        scales=xp.full(one, static.scale if finite else np.nan, dtype=xp.float32),
        spec=spec,
        shape=tuple(x.shape),
        zero_points=None
        if static.zero_point is None
        else xp.full(one, static.zero_point, dtype=xp.int8),
    )
    flushed = int((zero & (safe != 0)).sum())
    return q, QuantStats(int(x.size), int(saturated.sum()), flushed)


def _integers(
    scaled: Array, spec: QuantSpec, zero_point: int | None, xp: Any
) -> tuple[Array, Array, Array]:
    """Codes, which values saturate, and which are coded as 0; rint rounds to nearest even."""
    point = zero_point or 0
    top = spec.row.element.max_magnitude_code
    low, high = (-top, top) if spec.symmetric else (-top - 1, top)
    signed = xp.rint(scaled)
    signed += xp.float32(point)  # both are integers; beyond 2**24 either saturates
    saturated = (signed < low) | (signed > high)
    signed = xp.clip(signed, low, high)
    return signed.astype(xp.int8).view(xp.uint8), saturated, signed == point
