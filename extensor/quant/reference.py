"""The exact reference: array -> codes and scales -> array, for any array module.

Vectorised, every step on integer bits or single float32 operations in a stated
order, so that C++ and CUDA can give the same bytes. The backends' generic methods
call these functions; the kernels are compared with them byte for byte; they
themselves are judged by the scalar oracle in ``tests/oracle``, which shares no
code with them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from extensor.quant import outlier
from extensor.quant.array import QuantArray, QuantStats
from extensor.quant.blockwise import decode_array, quantize_blocks
from extensor.quant.hadamard import inverse_hadamard
from extensor.quant.spec import QuantSpec
from extensor.random import Stream

__all__ = ["dequantize", "operand", "quantize"]

Array = Any


def quantize(
    x: Array,
    spec: QuantSpec,
    stream: Stream | None = None,
    previous_amax: Array | None = None,
    xp: Any = np,
) -> tuple[QuantArray, QuantStats]:
    """Quantize a float array of one axis or more.

    Args:
        x: float array; float64 and 16-bit floats are cast to float32 first.
        spec: how; resolved here for x's number of axes.
        stream: names the random bits; given exactly when rounding is stochastic.
        previous_amax: float32 of the scales' shape, with ``statistic="running"``: the last block
            maxima (None on the first call).
        xp: the array module.

    Returns:
        The stored array, and counts over the coded values (a Hadamard transform's padding counts,
        block padding does not).

    Raises:
        TypeError: if x is not a float array.
        ValueError: if the spec does not fit x, or the stream is missing or superfluous.
    """
    spec = spec.resolve(x.ndim)
    if x.dtype.kind != "f" and x.dtype.name != "bfloat16":
        raise TypeError(f"quantize: wanted a float array, got {x.dtype}; convert it first")
    if (stream is None) == (spec.rounding == "stochastic"):
        wanted = "needs a stream (a seed)" if stream is None else "takes no stream"
        raise ValueError(f"rounding={spec.rounding!r} {wanted}")
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes Inf: its block's rule holds
        x = xp.asarray(x, dtype=xp.float32)
    if spec.row.outliers:
        return outlier.quantize(x, spec, stream, xp)
    return quantize_blocks(x, spec, stream, previous_amax, xp)


def dequantize(q: QuantArray, xp: Any = np) -> Array:
    """Stored array -> float32 of ``q.shape``; a Hadamard transform is undone."""
    if q.spec.row.outliers:
        return outlier.dequantize(q, xp)
    values = decode_array(q, xp)
    if q.spec.transform:
        values = inverse_hadamard(values, q.spec.transform, q.shape[q.spec.axis], xp)
    return xp.ascontiguousarray(xp.moveaxis(values, -1, q.spec.axis))


def operand(
    x: Array, spec: QuantSpec, stream: Stream | None = None, xp: Any = np
) -> tuple[Array, QuantStats]:
    """The float32 values that a GEMM multiplies: quantized, decoded, still transformed."""
    q, stats = quantize(x, spec, stream, None, xp)
    if q.spec.row.outliers:
        return outlier.dequantize(q, xp), stats
    return xp.ascontiguousarray(xp.moveaxis(decode_array(q, xp), -1, q.spec.axis)), stats
