"""The outlier codec on the C++ core: what `extensor.quant.outlier` does, in the core's three steps.

Rows lie along the last axis there; another axis is moved, which copies. A row is one block and its
scale's place in C order does not change, so the random bits are the same.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from extensor.backends.cpu.core import ready
from extensor.backends.cpu.lowering import LoweredSpec, lower
from extensor.backends.protocol import Array
from extensor.quant.array import QuantArray, QuantStats
from extensor.quant.outlier import outlier_count
from extensor.quant.spec import QuantSpec
from extensor.random import Stream

__all__ = ["dequantize", "quantize"]


def _rows(x: Array, axis: int) -> Array:
    """``axis`` last and the others joined: a C-contiguous, aligned matrix."""
    moved = np.moveaxis(x, axis, -1)
    return ready(moved.reshape(math.prod(moved.shape[:-1]), moved.shape[-1]))


def _back(rows: Array, shape: tuple[int, ...], axis: int) -> Array:
    """The inverse for an array of ``shape``, whose extent along ``axis`` is that of the rows."""
    others = (n for a, n in enumerate(shape) if a != axis)
    whole = rows.reshape(*others, rows.shape[-1])
    return np.ascontiguousarray(np.moveaxis(whole, -1, axis))


def _lowered(backend: Any, spec: QuantSpec, shape: tuple[int, ...]) -> LoweredSpec:
    """The spec on rows, which the core covers if it covers the array."""
    plan = lower(backend.core, spec.replace(axis=1), shape)
    assert isinstance(plan, LoweredSpec), plan
    return plan


def quantize(
    backend: Any, x: Array, spec: QuantSpec, stream: Stream | None
) -> tuple[QuantArray, QuantStats]:
    """Quantize a float array under a resolved outlier spec that the core covers."""
    axis, shape = spec.axis, tuple(x.shape)
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes Inf
        rows = _rows(x.astype(np.float32, copy=False), axis)
    rest, means, index, values = backend.core.split_outliers(rows, outlier_count(spec, shape[axis]))
    plan = _lowered(backend, spec, rest.shape)
    q, stats = backend.encode(plan, rest, stream)
    decoded = backend.decode(plan, q)
    flushed = backend.core.join_outliers(decoded, q.scales, means, index, values, rows)
    parts = {"codes": q.codes, "scales": q.scales, "row_means": means}
    parts |= {"outlier_index": index, "outlier_value": values}
    stored = {name: _back(part, shape, axis) for name, part in parts.items()}
    stored_array = QuantArray(spec=spec, shape=shape, **stored)
    return stored_array, dataclasses.replace(stats, flushed=flushed)


def dequantize(backend: Any, q: QuantArray) -> Array:
    """Stored array -> float32 of ``q.shape``."""
    assert q.row_means is not None and q.outlier_index is not None and q.outlier_value is not None
    axis = q.spec.axis
    codes, scales, means, index, values = (
        _rows(part, axis)
        for part in (q.codes, q.scales, q.row_means, q.outlier_index, q.outlier_value)
    )
    shape = (len(means), q.shape[axis])
    plan = _lowered(backend, q.spec, shape)
    rest = backend.decode(plan, QuantArray(codes, scales, plan.spec, shape))
    backend.core.join_outliers(rest, scales, means, index, values, None)
    return _back(rest, q.shape, axis)
