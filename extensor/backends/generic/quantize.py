"""Quantizers and decoders on any array module: the reference of `extensor.quant.reference`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from extensor.backends.generic.core import BFLOAT16, FLOAT32, GenericCore
from extensor.backends.protocol import Array, SpecPair, StreamPair
from extensor.backends.protocol.core import CoreMethods
from extensor.backends.protocol.quantize import QuantizeMethods
from extensor.quant import reference
from extensor.quant.array import QuantArray
from extensor.quant.hadamard import inverse_hadamard
from extensor.quant.recipe_state import Counts, stats_of
from extensor.quant.round_to_odd import OddFloats, OddPlanes, odd_planes, round_to_odd
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream

__all__ = ["GenericQuantize", "dense_values", "weight_activations"]


def dense_values(backend: QuantizeMethods, x: Array, dtype: str) -> Array:
    """What a product of ``dtype`` multiplies, as float32: the values of x, or these in bfloat16.

    Args:
        backend: the device's.
        x: float32 or a 16-bit float.
        dtype: "float32" or "bfloat16".
    """
    x = x.astype(np.float32, copy=False)
    return x if dtype == "float32" else backend.bfloat16_values(x)


def weight_activations(backend: CoreMethods, x: Array, dtype: str = "float32") -> Array:
    """The same for a product with packed weights: bfloat16 where x is that, or is rounded to it.

    Args:
        backend: the device's.
        x: of any dtype that float32 stands for.
        dtype: "float32" or "bfloat16".
    """
    if x.dtype == BFLOAT16:
        return x
    x = backend.cast(x, FLOAT32)
    if dtype == "float32":
        return x
    with np.errstate(all="ignore"):
        return backend.cast(x, BFLOAT16)


class GenericQuantize(GenericCore):
    """Quantizers and decoders."""

    odd_subnormals = False

    def quantize(
        self,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None = None,
        previous_amax: Array | None = None,
        amax: Array | None = None,
    ) -> tuple[QuantArray, Counts]:
        """See the protocol. A backend's own quantizer makes what is then rebased."""
        if amax is not None:
            return self._quantize_rows(x, spec, stream, amax)
        if spec.rebased:
            plain = spec.replace(rebased=False)
            q, counts = self.quantize(x, plain, stream, previous_amax)
            return reference.rebase(q, stats_of(counts))
        return reference.quantize(x, spec, stream, previous_amax, self.xp)

    def _quantize_rows(
        self, x: Array, spec: QuantSpec, stream: Stream | None, amax: Array
    ) -> tuple[QuantArray, Counts]:
        """Rows of a matrix: above a tile with its largest magnitude, which is then cut off."""
        assert spec.row.tensor_scale and isinstance(spec.tile, tuple), spec
        rows, whole = len(x), len(x) + spec.tile[spec.axis == 0]
        below = self.xp.zeros((whole, x.shape[1]), np.float32)
        below[:rows], below[rows, 0] = x, amax
        q, counts = self.quantize(below, spec, stream)
        parts = {name: q.parts[name] for name in ("codes", "scales")}
        own = {name: part[: part.shape[0] * rows // whole] for name, part in parts.items()}
        stats = replace(stats_of(counts), count=x.size)  # nothing is lost of the tile
        return replace(q, **own, shape=x.shape), stats

    def pack(self, x: Array, spec: QuantSpec, stream: Stream | None = None) -> QuantArray:
        """See the protocol."""
        return self.quantize(x, spec, stream)[0]

    def quantize_clipped(
        self, x: Array, spec: QuantSpec, stream: Stream | None = None
    ) -> tuple[QuantArray, Counts, Array]:
        """See the protocol."""
        return reference.quantize_clipped(x, spec, stream, self.xp)

    def straight_through(
        self, g: Array, mask: Array | None, transform: Hadamard | None, length: int
    ) -> Array:
        """See the protocol."""
        if mask is not None:
            g = reference.masked(g, mask, 1, self.xp)
        return g if transform is None else inverse_hadamard(g, transform, length, self.xp)

    def dequantize(self, q: QuantArray, dtype: str = "float32") -> Array:
        """See the protocol."""
        return reference.round_to(reference.dequantize(q, self.xp), dtype)

    def fake_quantize(
        self, x: Array, spec: QuantSpec, stream: Stream | None = None
    ) -> tuple[Array, Counts]:
        """See the protocol."""
        if spec.rebased:
            q, stats = self.quantize(x, spec, stream)
            return self.dequantize(q), stats
        return reference.fake_quantize(x, spec, stream, self.xp)

    def quantize_rowwise_columnwise(
        self, x: Array, specs: SpecPair, streams: StreamPair = (None, None)
    ) -> tuple[tuple[QuantArray, Counts], tuple[QuantArray, Counts]]:
        """See the protocol."""
        return self.quantize(x, specs[0], streams[0]), self.quantize(x, specs[1], streams[1])

    def quantize_rowwise_columnwise_clipped(
        self, x: Array, specs: SpecPair, streams: StreamPair = (None, None)
    ) -> tuple[tuple[QuantArray, Counts, Array], tuple[QuantArray, Counts]]:
        """See the protocol."""
        rowwise = self.quantize_clipped(x, specs[0], streams[0])
        return rowwise, self.quantize(x, specs[1], streams[1])

    def fake_quantize_rowwise_columnwise(
        self, x: Array, specs: SpecPair, streams: StreamPair = (None, None)
    ) -> tuple[tuple[Array, Counts], tuple[Array, Counts]]:
        """See the protocol."""
        rowwise = self.fake_quantize(x, specs[0], streams[0])
        return rowwise, self.fake_quantize(x, specs[1], streams[1])

    def round_to_odd(self, x: Array, bits: int) -> OddFloats | OddPlanes | None:
        """See the protocol."""
        return (odd_planes if self.odd_subnormals else round_to_odd)(x, bits, self.xp)

    def odd_values(self, kept: OddFloats | OddPlanes) -> Array:
        """See the protocol."""
        return kept.values(self.xp)

    def bfloat16_values(self, x: Array) -> Array:
        """See the protocol; NaN becomes the quiet one."""
        with np.errstate(all="ignore"):
            return x.astype(BFLOAT16).astype(np.float32)
