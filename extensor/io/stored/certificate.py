"""Certificates: what a conversion did to each weight, proved by comparing every value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from extensor.backends.registry import get as get_backend
from extensor.quant.array import QuantArray
from extensor.schema import FileError

__all__ = ["Conversion", "LossyConversionError", "TensorCertificate", "compare", "kind_of"]

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


class LossyConversionError(FileError, ValueError):
    """A conversion that would change values, refused; nothing was written.

    Attributes:
        certificates: of all weights.

    >>> issubclass(et.io.stored.LossyConversionError, ValueError)
    True
    """

    def __init__(self, certificates: list[TensorCertificate]) -> None:
        lossy = [c for c in certificates if not c.lossless]
        listed = "; ".join(
            f"{c.name}: {c.before} to {c.after}, SQNR {c.sqnr_db:.2f} dB" for c in lossy[:8]
        )
        rest = f"; and {len(lossy) - 8} more" if len(lossy) > 8 else ""
        super().__init__(
            f"only lossless: {len(lossy)} of {len(certificates)} weights would change: "
            f"{listed}{rest}. Nothing was written"
        )
        self.certificates = certificates


@dataclass
class Conversion:
    """What was written.

    Attributes:
        certificates: what became of each weight.
        files: the files.
        notes: what else a user should know.
        dropped: stored tensors that the new layout does not have, such as scales of activations.

    >>> et.io.stored.Conversion().certificates
    []
    """

    certificates: list[TensorCertificate] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dropped: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The certificate file's contents.

        >>> et.io.stored.Conversion().as_json()["lossless"]
        True
        """
        return {
            "lossless": all(c.lossless for c in self.certificates),
            "weights": [c.as_json() for c in self.certificates],
            "dropped": list(self.dropped),
            "notes": self.notes,
        }


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
        different = old != new
        if different.any():
            different &= (old == old) | (new == new)
        lossless = not different.any()
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
    count, total, first = _blocks(different, lossless, after)
    if lossless:
        sqnr = math.inf
    else:
        lost = not signal or not noise or math.isinf(noise)  # Inf where a value became Inf
        sqnr = -math.inf if lost else 10 * math.log10(signal / noise)
    sizes = int(before.nbytes), int(after.nbytes)
    return TensorCertificate(
        name, kind_of(before), kind_of(after), lossless, worst, sqnr, count, total, first, *sizes
    )


def _values(value: Stored) -> Array:
    if isinstance(value, QuantArray):
        values: Array = get_backend("cpu").dequantize(value)  # the reference's bytes
        return values
    if value.dtype.kind in "fiub":
        return value
    return value.astype(np.float32)  # bfloat16 and the like, exactly


def _blocks(
    different: Array, lossless: bool, after: Stored
) -> tuple[int, int, tuple[tuple[int, ...], ...]]:
    """How many blocks hold a difference, of how many, and where the first are."""
    bad = different
    if isinstance(after, QuantArray):
        grid = after.scales.shape
        if lossless:
            return 0, math.prod(grid), ()
        extent = [-(-n // g) if g else 1 for n, g in zip(after.shape, grid, strict=True)]
        if isinstance(after.spec.tile, tuple):
            extent[after.spec.axis] = after.spec.tile[1]
            if after.spec.tile[0] > 1:
                extent[after.spec.axis - 1] = after.spec.tile[0]
        for axis, length in enumerate(extent):
            if length > 1:
                starts = np.arange(0, bad.shape[axis], length)
                bad = np.logical_or.reduceat(bad, starts, axis=axis)
        total = math.prod(grid)
    else:
        total = bad.size
    first = np.flatnonzero(bad)[:_LISTED]
    places = np.stack(np.unravel_index(first, bad.shape), axis=-1) if bad.ndim else first[:, None]
    return int(np.count_nonzero(bad)), total, tuple(map(tuple, places.tolist()))
