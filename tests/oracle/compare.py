"""Comparing what was stored with what the oracle says, down to the byte."""

from __future__ import annotations

import numpy as np

PARTS = (
    "codes",
    "scales",
    "tensor_scale",
    "zero_points",
    "row_means",
    "outlier_index",
    "outlier_value",
)


def hexes(part: np.ndarray) -> str:
    return part.tobytes().hex(" ") if part.size <= 64 else part.tobytes()[:64].hex(" ") + " ..."


def same_bytes(name: str, got: object, expected: object, context: object = "") -> None:
    """Fail with the first coordinate that differs and the bytes there; any NaN equals any NaN."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype, (
        f"{name}: dtype {got.dtype}, expected {expected.dtype}; {context}"
    )
    assert got.shape == expected.shape, (
        f"{name}: shape {got.shape}, expected {expected.shape}; {context}"
    )
    unsigned = np.dtype(f"u{got.dtype.itemsize}")
    differs = np.ascontiguousarray(got).view(unsigned) != np.ascontiguousarray(expected).view(
        unsigned
    )
    if got.dtype.kind == "f":
        differs &= ~(np.isnan(got) & np.isnan(expected))
    if not differs.any():
        return
    got, expected = np.atleast_1d(got, expected)  # as `differs` is
    at = tuple(int(i) for i in np.argwhere(differs)[0])
    raise AssertionError(
        f"{name}{list(at)}: got {got[at]!r} (bytes {got[at].tobytes().hex()}), "
        f"expected {expected[at]!r} (bytes {expected[at].tobytes().hex()}); "
        f"{int(differs.sum())} of {got.size} differ; {context}\n"
        f"got      {hexes(got)}\nexpected {hexes(expected)}"
    )


def same_stored(q: object, stats: object, oracle: object, context: object = "") -> None:
    """A QuantArray and its QuantStats against the oracle's result."""
    for name in PARTS:
        got, want = getattr(q, name), getattr(oracle, name)
        assert (got is None) == (want is None), f"{name}: got {got}, expected {want}; {context}"
        if want is not None:
            same_bytes(name, got, want, context)
    counted = stats.count, stats.saturated, stats.flushed
    expected = oracle.operand.size, oracle.saturated, oracle.flushed
    assert counted == expected, (
        f"count, saturated, flushed: {counted}, expected {expected}; {context}"
    )
    parts = [part for name in PARTS if (part := getattr(oracle, name)) is not None]
    total = sum(np.asarray(part).nbytes for part in parts)
    assert q.nbytes == total, f"nbytes: {q.nbytes}, expected {total}; {context}"
