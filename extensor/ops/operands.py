"""What the GEMMs of a quantized layer multiply: operands as the layer's recipe wants them.

A matrix is contracted along its rows (axis -1) or its columns (axis -2); a stack of matrices, one
for each group of a convolution, likewise. Every function counts what it quantized in the context.
"""

from __future__ import annotations

from functools import lru_cache

from extensor.backends.protocol import Array, Backend
from extensor.quant.context import LayerContext
from extensor.quant.spec import QuantSpec
from extensor.random import Stream

__all__ = ["dense", "gradient_values", "placed", "values"]


def dense(backend: Backend, x: Array, dtype: str) -> Array:
    """An operand that is not quantized: float32 as it is, bfloat16 rounded but still float32."""
    return x if dtype == "float32" else backend.bfloat16_values(x)


@lru_cache(maxsize=1024)
def _along(spec: QuantSpec, axis: int, ndim: int) -> QuantSpec:
    """The spec along one axis, counted from the last, of ``ndim``."""
    return spec.replace(axis=axis + ndim).resolve(ndim)


def placed(
    context: LayerContext, slot: str, spec: QuantSpec, axis: int, ndim: int
) -> tuple[QuantSpec, Stream | None]:
    """The slot's spec along ``axis`` (-1: rows, -2: columns); its stream if it is stochastic."""
    along = _along(spec, axis, ndim)
    stream = context.stream(slot, axis == -2) if along.rounding == "stochastic" else None
    return along, stream


def values(backend: Backend, x: Array, context: LayerContext, slot: str, axis: int) -> Array:
    """The values of a matrix, or of each group's, that GEMM ``slot`` contracts along ``axis``."""
    wanted = context.operand(slot)
    if isinstance(wanted, str):
        return dense(backend, x, wanted)
    made, stats = backend.operand(x, *placed(context, slot, wanted, axis, x.ndim))
    context.record(slot, stats)
    return made


def gradient_values(
    backend: Backend, g: Array, context: LayerContext, needs: tuple[bool, bool]
) -> tuple[Array | None, Array | None]:
    """What dgrad and wgrad make of a gradient (M, N): its rows and its columns, read once."""
    rows, columns = context.operand("dgrad.g"), context.operand("wgrad.g")
    if not all(needs) or isinstance(rows, str) or isinstance(columns, str):
        return (
            values(backend, g, context, "dgrad.g", -1) if needs[0] else None,
            values(backend, g, context, "wgrad.g", -2) if needs[1] else None,
        )
    first, first_stream = placed(context, "dgrad.g", rows, -1, 2)
    second, second_stream = placed(context, "wgrad.g", columns, -2, 2)
    along, down = backend.operand_pair(g, (first, second), (first_stream, second_stream))
    context.record("dgrad.g", along[1])
    context.record("wgrad.g", down[1])
    return along[0], down[0]
