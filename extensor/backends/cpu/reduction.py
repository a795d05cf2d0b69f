"""The CPU backend's gradient reduction: the generic methods' bits, in one pass over memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from extensor.backends.cpu.core import CpuCore, first_arrays, ready, runs_in_core
from extensor.backends.protocol import Array
from extensor.backends.unsupported import Unsupported
from extensor.random import Stream

__all__ = ["CpuReduction"]


class CpuReduction(CpuCore):
    """Gradients as integers under a block's exponent."""

    @runs_in_core(first_arrays(1))
    def block_max(self, core: Any, x: Array) -> Array:
        """See the protocol."""
        return core.block_max(ready(x))

    @runs_in_core(first_arrays(1))
    def block_square_sums(self, core: Any, x: Array) -> Array:
        """See the protocol."""
        return core.block_square_sums(ready(x))

    @runs_in_core(first_arrays(1))
    def fixed_point(self, core: Any, x: Array, anchors: Array) -> Array:
        """See the protocol."""
        return core.fixed_point(ready(x), anchors)

    def _choose_limbs(self, limbs: Array, *others: Any) -> Any:
        if self.core is None:
            return Unsupported(self.core_missing)
        if not limbs.size or not (limbs.flags.c_contiguous and limbs.flags.writeable):
            return Unsupported("limbs that are empty, strided or read-only")
        return self.core

    @runs_in_core(_choose_limbs)
    def add_limbs(self, core: Any, limbs: Array, x: Array, before: Array, after: Array) -> None:
        """See the protocol."""
        core.add_limbs(limbs, ready(x), before, after)

    @runs_in_core(_choose_limbs)
    def limb_total(self, core: Any, limbs: Array, before: Array, after: Array) -> Array:
        """See the protocol."""
        return core.limb_total(limbs, before, after)

    def _choose_any(self, first: Array, *others: Any) -> Any:
        if self.core is None:
            return Unsupported(self.core_missing)
        return self.core if first.size else Unsupported("empty array")

    @runs_in_core(_choose_any)
    def fixed_point_mean(self, core: Any, total: Array, anchors: Array, divisor: float) -> Array:
        """See the protocol."""
        return core.fixed_point_mean(total, anchors, divisor)

    @runs_in_core(first_arrays(1))
    def mxint(
        self,
        core: Any,
        x: Array,
        exponents: Array,
        bits: int,
        stream: Stream | None,
        first_block: int,
        residual: Array | None,
    ) -> Array:
        """See the protocol."""
        words = None if stream is None else (*stream.key, *stream.counter_high)
        encode = core.mxint8 if bits == 8 else core.mxint16
        return encode(ready(x), exponents, words, first_block, residual)

    @runs_in_core(_choose_any)
    def mxint_mean(self, core: Any, codes: Array, exponents: Array, divisor: float) -> Array:
        """See the protocol."""
        mean = core.mxint8_mean if codes.dtype == np.int8 else core.mxint16_mean
        return mean(codes, exponents, divisor)
