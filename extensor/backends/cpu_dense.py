"""The CPU backend's float32 products and attention, on the core's threads.

Against exact arithmetic, with u = 2**-24, gamma_n = n u / (1 - n u), no overflow or underflow:

    matmul         |error| <= gamma_(K + 1) (|bias| + |a| |b|), K products a sum
    attention      p = softmax(s), s = scale q k^T: of a score |error| <= e = gamma_(d + 1) scale
                   |q| |k|^T; of the result |error| <= (2 max e + gamma_(2 S + 16)) p |v|
                   where max e and the distance to the largest score are small

The gradients of attention are sums of these; tests compare them with float64. Every sum is one
chain in the order of its terms, whatever the number of threads. Where numpy's BLAS is faster it is
kept: products with fewer than `_LEAST` rows or columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from extensor.backends.cpu_core import CoreBackend, ready
from extensor.backends.protocol import Array

__all__ = ["CpuDense"]

_LEAST = 8
"""1 x 512 x 512 takes BLAS 14 us and the core 60; 8 x 512 x 512 takes 89 and 70 (measured)."""


class CpuDense(CoreBackend):
    """Products and attention, each in C++ where its reason is None."""

    def _dense_reasons(self) -> dict[str, Callable[..., str | None]]:
        return {
            "matmul": self._matmul_reason,
            "attention": self._arguments_reason,
            "attention_grad": self._attention_grad_reason,
        }

    def matmul(self, a: Array, b: Array, bias: Array | None = None) -> Array:
        """See the protocol."""
        if b.ndim == 2 and a.ndim > 2:
            rows = self.matmul(a.reshape(math.prod(a.shape[:-1]), a.shape[-1]), b, bias)
            return rows.reshape(*a.shape[:-1], b.shape[-1])
        if self._matmul_reason(a, b, bias):
            return super().matmul(a, b, bias)
        sides = (a, b)
        if not self.core.supports_matmul(a, b):  # no neighbours in memory along a matrix's axis
            sides = (ready(a), ready(b))
        return self.core.matmul(*sides, None if bias is None else ready(bias))

    def _matmul_reason(self, a: Array, b: Array, bias: Array | None = None) -> str | None:
        if reason := self._arguments_reason(a, b, bias):
            return reason
        if a.ndim < 2 or b.ndim < 2:
            return "a vector"
        rows, columns = a.size // a.shape[-1] if b.ndim == 2 else a.shape[-2], b.shape[-1]
        if min(rows, columns) < _LEAST:
            return f"{rows} rows by {columns} columns; BLAS is faster below {_LEAST}"
        return None

    def attention(
        self, q: Array, k: Array, v: Array, causal: bool, scale: float
    ) -> tuple[Array, Array]:
        """See the protocol."""
        if self._arrays_reason(q, k, v):
            return super().attention(q, k, v, causal, scale)
        out, stats = self.core.attention(_rows(q), _rows(k), _rows(v), causal, scale)
        return out, stats

    def attention_grad(
        self,
        g: Array,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        stats: Array,
        causal: bool,
        scale: float,
        into: tuple[Array, Array, Array],
    ) -> None:
        """See the protocol."""
        if self._attention_grad_reason(g, q, k, v, out, stats, causal, scale, into):
            super().attention_grad(g, q, k, v, out, stats, causal, scale, into)
            return
        arrays = (_rows(a) for a in (g, q, k, v, out))
        self.core.attention_grad(tuple(arrays), ready(stats), causal, scale, into)

    def _attention_grad_reason(
        self,
        g: Array,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        stats: Array,
        causal: bool,
        scale: float,
        into: tuple[Array, Array, Array],
    ) -> str | None:
        if reason := self._arrays_reason(g, q, k, v, out, stats, *into):
            return reason
        if any(_rows(a) is not a for a in into):
            return "gradients to write that are strided along the last axis, or misaligned"
        return None


def _rows(x: Array) -> Array:
    """The array, or a copy where the last axis is strided or steps are no whole floats."""
    good = x.flags.aligned and (x.shape[-1] == 1 or x.strides[-1] == x.itemsize)
    if good and not any(step % x.itemsize for step in x.strides):
        return x
    return ready(x)
