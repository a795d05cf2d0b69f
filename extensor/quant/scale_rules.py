"""Scale rules: how a block's E8M0 scale follows from its largest magnitude, or from its values.

Sources: OCP MX v1.0, section 6.3 (floor); arXiv 2506.08027, section 3.1, in
Transformer Engine's float32 form (rceil); compressed-tensors and Quark (even);
arXiv 2502.05003, section 3, and 2505.14669, section 4 (quest).
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np

from extensor.formats import ElementFormat

__all__ = [
    "E8M0_NAN", "E8M0_RULES", "E8M0_SEARCHES", "QUEST_CLIP",
    "e8m0_bytes", "power_of_two", "quest_bytes",
]  # fmt: skip

Array = Any
E8M0_NAN = 0xFF
_E8M0_MAX = 0xFE

E8M0_SEARCHES = ("mse", "quest")
"""Rules that read a block's values, not its largest magnitude alone."""
QUEST_CLIP = 2.92247856
"""Where E2M1's top value lies, in root mean squares of normal data, for the least squared error."""


def _bits(amax: Array, xp: Any) -> Array:
    return amax.view(xp.uint32).astype(xp.int64)


def _floor_log2(amax: Array, xp: Any) -> Array:
    return xp.frexp(amax)[1].astype(xp.int64) - 1


def _floor(amax: Array, element: ElementFormat, xp: Any) -> Array:
    return _floor_log2(amax, xp) - element.emax


def _ceil(amax: Array, element: ElementFormat, xp: Any) -> Array:
    power = xp.frexp(amax)[0] == 0.5
    return _floor_log2(amax, xp) + xp.where(power, 0, 1) - element.emax


def _rceil(amax: Array, element: ElementFormat, xp: Any) -> Array:
    bits = _bits(amax * xp.float32(np.float32(1) / np.float32(element.max)), xp)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = xp.where(exponent > 0, mantissa > 0, mantissa > 0x400000)
    return exponent + up - 127


def _even(amax: Array, element: ElementFormat, xp: Any) -> Array:
    half = 1 << (22 - element.mantissa_bits)
    return ((_bits(amax, xp) + half) >> 23) - 127 - element.emax


def _one(amax: Array, element: ElementFormat, xp: Any) -> Array:
    return xp.zeros(amax.shape, dtype=xp.int64)


E8M0_RULES: MappingProxyType[str, Callable[[Array, ElementFormat, Any], Array]] = MappingProxyType(
    {"floor": _floor, "rceil": _rceil, "ceil": _ceil, "even": _even, "one": _one}
)
"""Each rule: positive finite float32 maxima, element, array module -> exponents (int64)."""


def e8m0_bytes(
    amax: Array, element: ElementFormat, rule: str, window: int | None = None, xp: Any = np
) -> Array:
    """Scale bytes (uint8) of blocks with finite maxima ``amax`` (float32, any shape).

    A block of zeros gets byte 0 under every rule but ``"one"``. With ``window`` no exponent is more
    than that many binades below the largest one.
    """
    exponent = E8M0_RULES[rule](amax, element, xp)
    zero = amax == 0
    if window is not None and bool((~zero).any()):
        exponent = xp.maximum(exponent, exponent[~zero].max() - window)
    stored = xp.clip(exponent + 127, 0, _E8M0_MAX)
    if rule != "one":
        stored = xp.where(zero, 0, stored)
    return stored.astype(xp.uint8)


def power_of_two(exponent: Array, xp: Any = np) -> Array:
    """2**exponent as float32 for exponents in -149..127, built from bits (subnormals too)."""
    exponent = exponent.astype(xp.int64)
    normal = xp.maximum(exponent + 127, 0) << 23
    subnormal = xp.int64(1) << xp.clip(exponent + 149, 0, 22)
    return xp.where(exponent >= -126, normal, subnormal).astype(xp.uint32).view(xp.float32)


def quest_bytes(x: Array, count: Array, amax: Array, xp: Any = np) -> Array:
    """Scale bytes of the QuEST rule: 2**floor(log2(`QUEST_CLIP` / 6 * root mean square)).

    The block is divided by its largest power of two first, so that no square overflows or
    vanishes. Squares are summed in float32 over ascending positions.

    Args:
        x: finite float32 (blocks, block_size), zero on the padding.
        count: how many values of each block are real, (blocks,).
        amax: their largest magnitudes, float32 (blocks,).
        xp: the array module.

    Source: arXiv 2502.05003, section 3.1; 2505.14669, section 4.2, which lets squares deviate from
    the block's mean, near zero after a Hadamard transform.
    """
    power = xp.clip((_bits(amax, xp) >> 23) - 127, -126, 126)
    scaled = x * power_of_two(-power, xp)[:, None]
    total = xp.zeros(len(x), dtype=xp.float32)
    for position in range(x.shape[1]):
        total = total + xp.square(scaled[:, position])
    mean = total / xp.maximum(count, 1).astype(xp.float32)
    scale = xp.sqrt(mean) * xp.float32(QUEST_CLIP / 6)
    stored = xp.clip((_bits(scale, xp) >> 23) + power, 0, _E8M0_MAX)
    return xp.where(amax == 0, 0, stored).astype(xp.uint8)
