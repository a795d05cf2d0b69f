"""GEMM operands as float32 values, for a backend without kernels for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from extensor.backends.layers import dense_values
from extensor.backends.protocol import Array, Backend, CastSpec, OperandSpec, Prepared
from extensor.quant.recipe_state import Counts
from extensor.quant.spec import QuantSpec
from extensor.random import Stream

__all__ = ["FloatPreparation"]


@dataclass(frozen=True, eq=False)
class FloatPreparation:
    """Operands that are float32 arrays: quantized and decoded, or rounded."""

    backend: Backend
    x: Array
    specs: Sequence[OperandSpec]
    streams: Sequence[Stream | None]

    compact = False
    batch_key = None

    def run(self) -> Prepared:
        """Make the operands; values along the columns are given as a transposed view."""
        backend, x, specs, streams = self.backend, self.x, self.specs, self.streams
        first = specs[0]
        if isinstance(first, CastSpec):
            values = dense_values(backend, x, first.dtype)
            return [(values if spec.axis == 1 else values.T, None) for spec in specs]
        quant = [spec for spec in specs if isinstance(spec, QuantSpec)]
        made: Sequence[tuple[Array, Counts]]
        if len(quant) == 2:
            made = backend.fake_quantize_rowwise_columnwise(
                x, (quant[0], quant[1]), (streams[0], streams[1])
            )
        else:
            made = [backend.fake_quantize(x, quant[0], streams[0])]
        return [
            (values if spec.axis == 1 else values.T, counts)
            for spec, (values, counts) in zip(quant, made, strict=True)
        ]
