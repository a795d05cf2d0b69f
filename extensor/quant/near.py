"""MXFP8 near-exactly: FP8 codes under common powers of two, and how many values that changed.

With s the largest scale of a group's blocks that are neither zero nor NaN, an element under scale t
becomes element t / s in its own format, rounded to nearest even. What is normal there keeps its
mantissa and is exact; below the format's least normal number it moves by up to half of its least
number: 2**-10 s for E4M3 and 2**-17 s for E5M2, where the group's largest value is 256 s or more if
the scales are those of OCP MX v1.0, section 6.3. An FP8 tensor core multiplies by one power of two
a row, or, if its sums move to float32 every 128 terms, by one a square of 128 x 128: stored
matrices are taken by rows (`near_exact`; `extensor_cuda.near` makes the same codes on a GPU), and
what a `QuantSpec` with ``near`` quantizes by squares (`settled`), which is MXFP8 itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from extensor.formats import ELEMENTS
from extensor.quant.array import QuantArray, coded_length
from extensor.quant.rounding import decode, encode
from extensor.quant.scale_rules import E8M0_NAN
from extensor.quant.spec import NEAR_SIDE

__all__ = ["NearExact", "near_exact", "settled"]

Array = Any

_MOST = 63  # binades: all of FP8 is zero so far down
_CHANGED = 256  # beside a code


@dataclass(frozen=True, eq=False)
class NearExact:
    """A matrix's values, and what they lost.

    Attributes:
        values: float64 (rows, K): the codes' values, without the row's power of two.
        exponents: int32 (rows,), or as `near_exact` says: the power of two; 0 of a row, or a
            square, without a number.
        changed: int64 (rows,): how many values are not those that are stored.
        flushed: int64 (rows,): how many of these are zero now.
    """

    values: Array
    exponents: Array
    changed: Array
    flushed: Array

    @property
    def shares(self) -> tuple[float, float]:
        """Changed and flushed, of all values."""
        size = max(self.values.size, 1)
        return float(self.changed.sum() / size), float(self.flushed.sum() / size)


def near_exact(q: QuantArray, squares: bool = False) -> NearExact:
    """The near-exact values of a packed MXFP8 matrix on the CPU, still transformed.

    Args:
        q: numpy arrays; MXFP8 in blocks along its last axis.
        squares: groups are squares of 128 x 128, and exponents (rows, ceil(K / 128)), not rows.

    Raises:
        ValueError: for another format or axis.
    """
    element = q.spec.row.element
    if not q.spec.is_mxfp8 or len(q.shape) != 2:
        raise ValueError(
            f"near_exact: wanted a matrix in MXFP8, got {q.spec.format} of shape {q.shape}; other "
            "MX formats fit FP8 or bfloat16 exactly, so multiply them as they are"
        )
    if q.spec.axis != 1:
        raise ValueError(
            f"near_exact: wanted blocks along axis 1, got axis {q.spec.axis}; quantize along the "
            "axis that the product sums over"
        )
    assert isinstance(q.spec.tile, tuple)
    (rows, _), k = q.shape, coded_length(q.spec, q.shape)
    held = decode(q.codes[:, :k], element).astype(np.float64)
    each, block = q.spec.tile
    scales = q.scales.astype(np.int64).repeat(each, axis=0)[:rows].repeat(block, axis=1)[:, :k]
    held = np.where(scales == 255, np.nan, held)
    live = (held != 0) & (scales != 255)
    tall, wide = (NEAR_SIDE, NEAR_SIDE) if squares else (1, max(k, 1))
    tops = np.where(live, scales, -1)
    for axis, side in enumerate((tall, wide)):
        tops = np.maximum.reduceat(tops, np.arange(0, tops.shape[axis], side), axis=axis)
    top = tops.repeat(tall, axis=0)[:rows].repeat(wide, axis=1)[:, :k]
    exact = np.ldexp(held, np.where(live, scales - top, 0).astype(np.int32))
    least = element.min_positive
    normal = ~(np.abs(exact) < element.min_normal)
    values = np.where(normal, exact, np.rint(np.where(normal, 0, exact) / least) * least)
    values = np.copysign(values, held)
    changed = (values != exact) & ~np.isnan(exact)
    exponents = np.where(tops < 0, 0, tops - 127).astype(np.int32).repeat(tall, axis=0)[:rows]
    return NearExact(
        values,
        exponents if squares else exponents[:, 0],
        changed.sum(axis=1),
        (changed & (values == 0)).sum(axis=1),
    )


def settled(q: QuantArray, xp: Any = np) -> tuple[QuantArray, Array, Array]:
    """What a spec with ``near`` stores, of what it stores without; works on bytes alone.

    Squares are those of the array's last two axes, or of the blocks' axis and the last one.

    Args:
        q: just quantized, so that no block of zeros has a larger scale than blocks beside it.
        xp: the array module.

    Returns:
        The array, and how many values changed and became zero, integers of shape ().
    """
    axis, ndim = q.spec.axis, len(q.shape)
    assert isinstance(q.spec.tile, tuple)
    block = q.spec.tile[1]
    across = -1 if axis < ndim - 1 else -2
    axes = (across, axis - ndim), (-2, -1)
    lines = q.scales[None] if ndim == 1 else xp.moveaxis(q.scales, *axes)
    (rows, blocks), side = lines.shape[-2:], (NEAR_SIDE, NEAR_SIDE // block)
    pads = [(0, 0)] * (lines.ndim - 2) + [
        (0, -n % s) for n, s in ((rows, side[0]), (blocks, side[1]))
    ]
    least = xp.pad(xp.where(lines == E8M0_NAN, xp.uint8(0), lines), pads)
    squares = least.reshape(*least.shape[:-2], -1, side[0], least.shape[-1] // side[1], side[1])
    tops = squares.max(axis=(-3, -1)).repeat(side[0], axis=-2).repeat(side[1], axis=-1)
    top = tops[..., :rows, :blocks]
    top = top[0] if ndim == 1 else xp.moveaxis(top, *reversed(axes))
    numbers = q.scales != E8M0_NAN
    shift = xp.where(numbers, xp.minimum(top - q.scales, xp.uint8(_MOST)), xp.uint8(0))
    # Byte by byte as they lie: blocks beside the values of each.
    place = q.codes.reshape(*shift.shape[: axis + 1], block, *shift.shape[axis + 1 :])
    place = place.astype(xp.uint16) + xp.expand_dims(shift.astype(xp.uint16) << 8, axis + 1)
    found = _table(q.spec.row.element.name, xp).take(place)
    codes = found.astype(xp.uint8).reshape(q.codes.shape)
    scales = xp.ascontiguousarray(xp.where(numbers, top, q.scales))
    spec = q.spec.replace(near=True)
    changed, gone = found >= _CHANGED, found & (_CHANGED | 0x7F) == _CHANGED
    return replace(q, codes=codes, scales=scales, spec=spec), changed.sum(), gone.sum()


@lru_cache(maxsize=8)
def _table(name: str, xp: Any) -> Array:
    """Codes of 8 bits times 2**-shift, at 256 shift + code; `_CHANGED` more if rounded."""
    element = ELEMENTS[name]
    codes = np.arange(256, dtype=np.uint8)
    held = decode(codes, element)
    exact = np.ldexp(held.astype(np.float64), -np.arange(_MOST + 1)[:, None])
    numbers = np.isfinite(held)
    made = encode(np.where(numbers, exact, 0).astype(np.float32), element)[0]
    made = np.where(numbers, made, codes)
    changed = numbers & (decode(made, element) != exact)
    return xp.asarray((made + _CHANGED * changed).astype(np.uint16).reshape(-1))
