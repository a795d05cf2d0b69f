"""Matrix products on any array module; operands are float32 values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from extensor.backends.generic.core import BFLOAT16, FLOAT32
from extensor.backends.generic.quantize import GenericQuantize, dense_values
from extensor.backends.protocol import (
    Array,
    CastSpec,
    OperandSpec,
    PackedOperand,
    Preparation,
    Prepared,
)
from extensor.backends.protocol.quantize import QuantizeMethods
from extensor.quant import views
from extensor.quant.array import QuantArray, coded_length
from extensor.quant.hadamard import SOME_SIGNS
from extensor.quant.kept import packs
from extensor.quant.recipe_state import Counts
from extensor.quant.spec import QuantSpec
from extensor.random import Stream

__all__ = ["FloatPreparation", "GenericMatmul", "coded_values"]


def coded_values(q: QuantArray) -> QuantArray:
    """A packed array whose decoding gives what a GEMM multiplies: a transform is not undone."""
    if q.spec.transform is None:
        return q
    shape, spec = list(q.shape), q.spec
    shape[spec.axis] = coded_length(spec, q.shape)
    if q.spec.transform.signs == "per_step":  # those of each step would be looked up in vain
        spec = spec.drawn_from or spec.with_signs(SOME_SIGNS[q.spec.transform.size])
    return replace(q, spec=_without_transform(spec), shape=tuple(shape))


@lru_cache(maxsize=1024)
def _without_transform(spec: QuantSpec) -> QuantSpec:
    return spec.replace(transform=None, eden=False)


@dataclass(frozen=True, eq=False)
class _Packed:
    """Codes and scales that decode to an operand."""

    backend: QuantizeMethods
    stored: QuantArray

    @property
    def arrays(self) -> Sequence[Array]:
        return tuple(self.stored.parts.values())

    def operand(self) -> Array:
        values = self.backend.dequantize(self.stored)
        return values if self.stored.spec.axis == 1 else values.T


@dataclass(frozen=True, eq=False)
class _Narrow:
    """The bfloat16 values of an operand that is rounded to them."""

    backend: GenericMatmul
    values: Array
    axis: int

    @property
    def arrays(self) -> Sequence[Array]:
        return (self.values,)

    def operand(self) -> Array:
        values = self.backend.cast(self.values, FLOAT32)
        return values if self.axis == 1 else values.T


@dataclass(eq=False)
class FloatPreparation:
    """Operands that are float32 arrays: quantized and decoded, or rounded."""

    backend: GenericMatmul
    x: Array
    specs: Sequence[OperandSpec]
    streams: Sequence[Stream | None]

    compact = False
    batch_key = None
    keeps_second = False
    packs_second = False
    path = "values"

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

    def run_packing(self) -> list[tuple[Any, Counts | None]]:
        """See the protocol; each is made alone."""
        first, second = (
            replace(self, specs=[spec], streams=[stream])
            for spec, stream in zip(self.specs, self.streams, strict=True)
        )
        return [first.run()[0], second.pack() or (None, None)]

    def pack(self) -> tuple[PackedOperand, Counts | None] | None:
        """Codes and scales, or bfloat16 of float32 values."""
        x, (spec,), (stream,) = self.x, self.specs, self.streams
        if not packs(spec.dtype if isinstance(spec, CastSpec) else spec, tuple(x.shape), x.dtype):
            return None
        if isinstance(spec, CastSpec):
            with np.errstate(all="ignore"):
                return _Narrow(self.backend, self.backend.cast(x, BFLOAT16), spec.axis), None
        q, counts = self.backend.quantize(x, spec, stream)
        return _Packed(self.backend, coded_values(q)), counts


class GenericMatmul(GenericQuantize):
    """Products of float arrays, of block-scaled arrays, and of a recipe's operands.

    Attributes:
        groups_products: whether products of groups of rows are quicker in one call.
    """

    groups_products = False

    def matmul(self, a: Array, b: Array, bias: Array | None = None) -> Array:
        """See the protocol."""
        if b.ndim == 2 and a.ndim > 2:  # one product instead of one per leading index
            rows = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
            return GenericMatmul.matmul(self, rows, b, bias).reshape(*a.shape[:-1], b.shape[-1])
        out = self.xp.matmul(a, b)
        if bias is not None:
            out += bias
        return out

    def block_scaled_matmul(self, a: QuantArray, b: QuantArray, dtype: str = "float32") -> Array:
        """See the protocol: the matrices of stacks one after the other."""
        if len(a.shape) == 2:
            out = self.xp.matmul(self.dequantize(a), self.dequantize(b).T)
            return self._narrow(out, dtype)
        out = self.xp.empty((*a.shape[:2], b.shape[1]), dtype=FLOAT32)
        for i, sides in enumerate(zip(views.unstack(a), views.unstack(b), strict=True)):
            out[i] = self.block_scaled_matmul(*sides)
        return self._narrow(out, dtype)

    def _narrow(self, sums: Array, dtype: str) -> Array:
        """Float32 sums as what a product is asked for in, rounded once."""
        if dtype == "float32":
            return sums
        with np.errstate(all="ignore"):
            return self.cast(sums, BFLOAT16)

    def stored_product(self, a: QuantArray, b: QuantArray) -> Array:
        """See the protocol."""
        return self.block_scaled_matmul(a, b)

    def weight_only_matmul(self, x: Array, w: QuantArray, dtype: str = "float32") -> Array:
        """See the protocol."""
        return self._narrow(self.xp.matmul(self._wide(x), self.dequantize(w).T), dtype)

    def weight_only_matmuls(
        self, x: Array, weights: Sequence[QuantArray], dtype: str = "float32"
    ) -> Sequence[Array]:
        """See the protocol."""
        return [self.weight_only_matmul(x, w, dtype) for w in weights]

    def rebased_matmul(
        self, x: Array, spec: QuantSpec, w: QuantArray, dtype: str = "float32"
    ) -> tuple[Array, Counts]:
        """See the protocol."""
        q, counts = self.quantize(x, spec)
        return self.block_scaled_matmul(q, w, dtype), counts

    def grouped_weight_only_matmul(
        self, x: Array, weights: Sequence[QuantArray], ends: Sequence[int]
    ) -> Array:
        """See the protocol."""
        starts = (0, *ends[:-1])
        parts = [
            self.weight_only_matmul(x[start:end], w)
            for w, start, end in zip(weights, starts, ends, strict=True)
        ]
        return self.xp.concatenate(parts)

    def bound_weight_only(self, x: Array, w: QuantArray) -> Callable[[Array], Array]:
        """See the protocol."""
        return lambda x: self.weight_only_matmul(x, w)

    def prepare(
        self,
        x: Array,
        specs: Sequence[OperandSpec],
        streams: Sequence[Stream | None],
        work: int,
        amax_state: dict[str, Any] | None = None,
    ) -> Preparation:
        """See the protocol: operands are float32 values, too large to be kept."""
        return FloatPreparation(self, x, specs, streams)

    def run_batch(self, preparations: Sequence[Preparation]) -> list[Prepared]:
        """See the protocol: one after the other."""
        return [preparation.run() for preparation in preparations]

    def packed_operand(self, q: QuantArray, work: int) -> Any:
        """See the protocol."""
        return _Packed(self, q).operand()

    def product(
        self,
        a: Any,
        b: Any,
        dtype: str = "float32",
        bias: Array | None = None,
        fallbacks: dict[str, Any] | None = None,
    ) -> Array:
        """See the protocol."""
        out = self.matmul(a, b.T)
        if bias is not None:
            out += bias
        return out
