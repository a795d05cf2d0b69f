"""MXFP8 near-exactly: FP8 codes under one power of two per row, and how many values that changed.

With s the largest scale of a row's blocks that are neither zero nor NaN, an element under scale t
becomes element t / s in its own format, rounded to nearest even. What is normal there keeps its
mantissa and is exact; below the format's least normal number it moves by up to half of its least
number: 2**-10 s for E4M3 and 2**-17 s for E5M2, where the row's largest value is 256 s or more if
the scales are those of OCP MX v1.0, section 6.3. One power of two a row is what an FP8 tensor core
can multiply by; `extensor_cuda.near` makes the same codes on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from extensor.quant.array import QuantArray, coded_length
from extensor.quant.rounding import decode
from extensor.quant.spec import QuantSpec

__all__ = ["NearExact", "is_mxfp8", "near_exact"]

Array = Any


@dataclass(frozen=True, eq=False)
class NearExact:
    """A matrix's values, and what they lost.

    Attributes:
        values: float64 (rows, K): the codes' values, without the row's power of two.
        exponents: int32 (rows,): the power of two; 0 of a row without a number.
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


def is_mxfp8(spec: QuantSpec) -> bool:
    """Whether a spec's elements are FP8 under powers of two."""
    return spec.is_mx and spec.row.element.is_float and spec.row.element.bits == 8


def near_exact(q: QuantArray) -> NearExact:
    """The near-exact values of a packed MXFP8 matrix on the CPU, still transformed.

    Args:
        q: numpy arrays; MXFP8 in blocks along its last axis.

    Raises:
        ValueError: for another format or axis.
    """
    element = q.spec.row.element
    if not is_mxfp8(q.spec) or len(q.shape) != 2:
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
    top = np.where(live, scales, -1).max(axis=1, initial=-1, keepdims=True)
    exact = np.ldexp(held, np.where(live, scales - top, 0).astype(np.int32))
    least = element.min_positive
    normal = ~(np.abs(exact) < element.min_normal)
    values = np.where(normal, exact, np.rint(np.where(normal, 0, exact) / least) * least)
    values = np.copysign(values, held)
    changed = (values != exact) & ~np.isnan(exact)
    return NearExact(
        values,
        np.where(top < 0, 0, top - 127)[:, 0].astype(np.int32),
        changed.sum(axis=1),
        (changed & (values == 0)).sum(axis=1),
    )
