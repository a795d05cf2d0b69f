"""Certificates: what a conversion did to each weight, proved by comparing every value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from extensor.quant.array import QuantArray
from extensor.quant.reference import dequantize

__all__ = ["TensorCertificate", "compare", "kind_of"]

Array = npt.NDArray[Any]
Stored = Array | QuantArray

_ROWS_AT_ONCE = 1 << 22  # values compared at a time
_LISTED = 8


@dataclass(frozen=True)
class TensorCertificate:
    """What became of one weight.

    Attributes:
        name: the weight's.
        before, after: dtypes or formats.
        lossless: whether every value is equal (NaN equals NaN; -0 equals 0).
        max_error: the largest absolute difference.
        sqnr_db: signal to quantization noise in decibels; infinite if lossless.
        blocks: how many blocks of the new format, or values of a dense one, hold a difference.
        of_blocks: out of how many.
        first_blocks: positions of the first of them, in the shape of the scales.
        nbytes_before, nbytes_after: stored bytes.

    >>> from extensor.io.stored import compare
    >>> w = et.randn(4, 64, seed=0).to_mxfp4().data
    >>> compare("w", w, w).lossless
    True
    """

    name: str
    before: str
    after: str
    lossless: bool
    max_error: float
    sqnr_db: float
    blocks: int
    of_blocks: int
    first_blocks: tuple[tuple[int, ...], ...]
    nbytes_before: int
    nbytes_after: int

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON takes them: an infinite SQNR, and errors with NaN, as None.

        >>> from extensor.io.stored import compare
        >>> w = et.zeros((4, 4)).numpy()
        >>> compare("w", w, w).as_json()["sqnr_db"] is None
        True
        """
        found = dict(self.__dict__)
        for key in ("sqnr_db", "max_error"):
            if not math.isfinite(found[key]):
                found[key] = None
        found["first_blocks"] = [list(block) for block in self.first_blocks]
        return found


def kind_of(value: Stored) -> str:
    """The dtype or format of a weight, as certificates name it."""
    if not isinstance(value, QuantArray):
        return str(value.dtype)
    spec = value.spec
    tile = "x".join(map(str, spec.tile)) if isinstance(spec.tile, tuple) else f"per {spec.tile}"
    extra = [f"super-blocks of {spec.super_block}"] if spec.super_block else []
    extra += ["minimum"] if spec.minimum else []
    extra += ["zero point"] if not spec.symmetric else []
    return ", ".join([f"{spec.format} {tile}", *extra])


def compare(name: str, before: Stored, after: Stored) -> TensorCertificate:
    """Compare every value of a weight before and after a conversion.

    Args:
        name: the weight's.
        before: as it was read.
        after: as it is written.

    Returns:
        The certificate.

    Raises:
        ValueError: for different shapes.

    >>> from extensor.io.stored import compare
    >>> x = et.randn(4, 64, seed=0)
    >>> 18 < compare("w", x.numpy(), x.to_mxfp4().data).sqnr_db < 20
    True
    """
    if tuple(before.shape) != tuple(after.shape):
        raise ValueError(f"{name}: shape {before.shape} became {after.shape}")
    old, new = _values(before), _values(after)
    with np.errstate(invalid="ignore", over="ignore"):
        same = (old == new) | ((old != old) & (new != new))
        lossless = bool(same.all())
        worst = signal = noise = 0.0
        if not lossless:
            flat_old, flat_new = old.reshape(-1), new.reshape(-1)
            for start in range(0, flat_old.size, _ROWS_AT_ONCE):
                a = flat_old[start : start + _ROWS_AT_ONCE].astype(np.float64)
                error = flat_new[start : start + _ROWS_AT_ONCE].astype(np.float64) - a
                worst = float(np.fmax(worst, np.abs(error).max()))
                if np.isnan(error).any():
                    worst = math.nan
                signal, noise = signal + float(a @ a), noise + float(error @ error)
    count, total, first = _blocks(same, after)
    sqnr = (
        math.inf if lossless else 10 * math.log10(signal / noise) if signal and noise else -math.inf
    )
    sizes = int(before.nbytes), int(after.nbytes)
    return TensorCertificate(
        name, kind_of(before), kind_of(after), lossless, worst, sqnr, count, total, first, *sizes
    )


def _values(value: Stored) -> Array:
    if isinstance(value, QuantArray):
        return dequantize(value)
    if value.dtype.kind in "fiub":
        return value
    return value.astype(np.float32)  # bfloat16 and the like, exactly


def _blocks(same: Array, after: Stored) -> tuple[int, int, tuple[tuple[int, ...], ...]]:
    """How many blocks hold a difference, of how many, and where the first are."""
    bad = np.argwhere(~same)
    if not isinstance(after, QuantArray):
        return len(bad), same.size, tuple(map(tuple, bad[:_LISTED].tolist()))
    grid = after.scales.shape
    extent = [-(-n // g) if g else 1 for n, g in zip(after.shape, grid, strict=True)]
    if isinstance(after.spec.tile, tuple):
        extent[after.spec.axis] = after.spec.tile[1]
        if after.spec.tile[0] > 1:
            extent[after.spec.axis - 1] = after.spec.tile[0]
    if not len(bad):
        return 0, math.prod(grid), ()
    places = np.unique(bad // np.array(extent), axis=0)
    return len(places), math.prod(grid), tuple(map(tuple, places[:_LISTED].tolist()))
