"""An array's values in units of their block's scale, beside the codes they are rounded to.

In these units all blocks share one picture of the element grid.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from extensor.formats import ElementFormat
from extensor.quant.hadamard import hadamard
from extensor.quant.reference import dequantize, quantize
from extensor.quant.rounding import pack, unpack
from extensor.quant.spec import QuantSpec

__all__ = ["GridValues", "grid_values"]


@dataclass(frozen=True)
class GridValues:
    """Values on a grid.

    Attributes:
        spec: the format and its blocks.
        scaled: float64, each value over its block's scale, before rounding; zeros and blocks
            without a usable scale are left out.
        codes: uint8, what each of them was rounded to.
        zeros: the share of all values that are exactly zero.
    """

    spec: QuantSpec
    scaled: np.ndarray[Any, Any]
    codes: np.ndarray[Any, Any]
    zeros: float

    @property
    def element(self) -> ElementFormat:
        """The grid."""
        return self.spec.row.element

    def shares(self) -> list[tuple[float, float]]:
        """(grid value, share of the values rounded to it), ascending; -0 and 0 are one place."""
        seen = np.bincount(self.codes, minlength=1 << self.element.bits) / max(self.codes.size, 1)
        shares: dict[float, float] = {}
        for code, share in enumerate(seen):
            value = self.element.values[code] + 0.0
            if np.isfinite(value):
                shares[value] = shares.get(value, 0.0) + float(share)
        return sorted(shares.items())


def grid_values(x: np.ndarray[Any, Any], spec: QuantSpec) -> GridValues:
    """Round an array to nearest on a spec's grid; a Hadamard transform is applied first.

    Raises:
        ValueError: for formats that keep more than codes and scales: outliers, zero points,
            minimums.
    """
    if spec.row.outliers or spec.is_affine or not spec.symmetric:
        raise ValueError(
            f"{spec.format}: expected values that are a code times a scale, got a format with "
            "exact outliers, a zero point or a minimum; sqnr() measures it"
        )
    spec = spec.resolve(x.ndim)
    if x.ndim > 1:  # a tile's rows lie on the axis before the blocks'
        x = np.moveaxis(x, ((spec.axis - 1) % x.ndim, spec.axis), (-2, -1))
    x = np.ascontiguousarray(x, np.float32)
    if spec.transform is not None:
        x = np.asarray(hadamard(x, spec.transform))
    spec = spec.replace(axis=x.ndim - 1, transform=None, rounding="nearest_even", element_scale=1.0)
    q, _ = quantize(x, spec)
    element, length = spec.row.element, x.shape[-1]
    coded = (*q.codes.shape[:-1], q.codes.shape[-1] * 8 // element.bits)
    top = pack(np.full(coded, element.max_magnitude_code, np.uint8), element.bits)
    tops = dequantize(dataclasses.replace(q, codes=top))  # each value's scale, times the top
    good = np.isfinite(tops) & (tops > 0) & (x != 0)
    scaled = x[good].astype(np.float64) / tops[good] * element.max
    codes = unpack(q.codes, element.bits, length)[good]
    return GridValues(spec, scaled, codes, float((x == 0).mean()) if x.size else 0.0)
