"""Quantizing arrays to codes and scales, and decoding them."""

from __future__ import annotations

from typing import Protocol

from extensor.backends.protocol.core import Array
from extensor.quant.array import QuantArray
from extensor.quant.recipe_state import Counts
from extensor.quant.round_to_odd import OddFloats, OddPlanes
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream

__all__ = ["QuantizeMethods", "SpecPair", "StreamPair"]

SpecPair = tuple[QuantSpec, QuantSpec]
StreamPair = tuple[Stream | None, Stream | None]


class QuantizeMethods(Protocol):
    """Quantizers and decoders."""

    def quantize(
        self,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None = None,
        previous_amax: Array | None = None,
        amax: Array | None = None,
    ) -> tuple[QuantArray, Counts]:
        """Float array -> codes, scales and counts. ``spec`` is resolved; ``stream`` iff stochastic.

        With ``amax`` x is rows of a matrix whose largest magnitude that is, float32 of shape ():
        the tensor scale is the matrix'. The spec has one, and x has whole tiles.

        Nothing waits for the device where a kernel quantizes; `stats_of` the counts does.
        """
        ...

    def pack(self, x: Array, spec: QuantSpec, stream: Stream | None = None) -> QuantArray:
        """The codes and scales that `quantize` gives, not counted: it does not wait."""
        ...

    def quantize_clipped(
        self, x: Array, spec: QuantSpec, stream: Stream | None = None
    ) -> tuple[QuantArray, Counts, Array]:
        """`quantize`, and a bit a value along the axis: 1 where it is within its block's largest.

        Under a Hadamard transform the bits are of the transformed values.
        """
        ...

    def dequantize(self, q: QuantArray, dtype: str = "float32") -> Array:
        """Codes and scales -> values of ``q.shape``, any Hadamard transform undone.

        ``dtype``: float32, or bfloat16 or float16, to which the float32 values are rounded once.
        """
        ...

    def fake_quantize(
        self, x: Array, spec: QuantSpec, stream: Stream | None = None
    ) -> tuple[Array, Counts]:
        """The float32 values a GEMM multiplies: quantized and decoded, still transformed.

        Same values, bit for bit, as decoding what `quantize` gives. Along the axis the result has
        the length the transform padded it to. It carries ``spec.element_scale``.
        """
        ...

    def quantize_rowwise_columnwise(
        self,
        x: Array,
        specs: SpecPair,
        streams: StreamPair = (None, None),
    ) -> tuple[tuple[QuantArray, Counts], tuple[QuantArray, Counts]]:
        """Quantize one array by two specs, as for two GEMMs: bit for bit two calls of `quantize`.

        A backend may read a matrix once for a spec rowwise and one columnwise.
        """
        ...

    def quantize_rowwise_columnwise_clipped(
        self,
        x: Array,
        specs: SpecPair,
        streams: StreamPair = (None, None),
    ) -> tuple[tuple[QuantArray, Counts, Array], tuple[QuantArray, Counts]]:
        """The same, with the clip mask of the first: `quantize_clipped`, then `quantize`."""
        ...

    def fake_quantize_rowwise_columnwise(
        self,
        x: Array,
        specs: SpecPair,
        streams: StreamPair = (None, None),
    ) -> tuple[tuple[Array, Counts], tuple[Array, Counts]]:
        """The same for `fake_quantize`."""
        ...

    def straight_through(
        self, g: Array, mask: Array | None, transform: Hadamard | None, length: int
    ) -> Array:
        """What a clip mask lets through of a gradient in a transform's domain, taken out of it.

        g is float32 (M, K'), the mask of `quantize_clipped` or None, the result (M, length).
        """
        ...

    odd_subnormals: bool
    """Whether `round_to_odd` holds values below 2**-126, too, which takes more bits: `odd_bits`."""

    def round_to_odd(self, x: Array, bits: int) -> OddFloats | OddPlanes | None:
        """`extensor.quant.round_to_odd.round_to_odd`, or `odd_planes` with `odd_subnormals`."""
        ...

    def odd_values(self, kept: OddFloats | OddPlanes) -> Array:
        """`OddFloats.values`, `OddPlanes.values`."""
        ...

    def bfloat16_values(self, x: Array) -> Array:
        """Float32 values rounded to the nearest bfloat16, ties to even, as float32."""
        ...
