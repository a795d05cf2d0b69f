"""The CPU backend's matrix products, on the core's threads.

`extensor.backends.cpu.product_paths` has the bounds of products of blocked matrices and operands.
Of float matrices (M, K) and (K, N), against exact arithmetic, with u = 2**-24,
gamma_n = n u / (1 - n u), no overflow or underflow:

    matmul         |error| <= gamma_(K + 1) (|bias| + |a| |b|), K products a sum

Every sum is one chain in the order of its terms, whatever the number of threads. Where numpy's BLAS
is faster it is kept: products with fewer than `_MIN_SIDE` columns, or rows, unless these meet a
layer's weight as it lies in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from extensor.backends.cpu import product_paths as paths
from extensor.backends.cpu.core import CpuCore, ready, runs_in_core
from extensor.backends.protocol import Array
from extensor.backends.unsupported import Unsupported
from extensor.quant.array import QuantArray

__all__ = ["CpuMatmul"]

_MIN_SIDE = 8
"""1 x 512 x 512 takes BLAS 14 us and the core 60; 8 x 512 x 512 takes 89 and 70 (measured)."""
_MIN_WEIGHT = 1 << 20
"""Elements of a layer's weight that one row meets in the core; BLAS is faster from the cache."""
_VECTOR = Unsupported("a vector")


class CpuMatmul(CpuCore):
    """Products of float arrays, of block-scaled arrays, and of a recipe's operands."""

    def _choose_matmul(self, a: Array, b: Array, bias: Array | None = None) -> Any:
        core = self.float32_core(a, b) if bias is None else self.float32_core(a, b, bias)
        if not core:
            return core
        if a.ndim < 2 or b.ndim < 2:
            return _VECTOR
        rows, columns = a.size // a.shape[-1] if b.ndim == 2 else a.shape[-2], b.shape[-1]
        as_stored = b.ndim == 2 and b.strides[0] == b.itemsize
        if rows < _MIN_SIDE <= columns and as_stored and (rows > 1 or b.size >= _MIN_WEIGHT):
            return core
        if min(rows, columns) < _MIN_SIDE:
            return Unsupported(
                f"{rows} rows by {columns} columns; BLAS is faster below {_MIN_SIDE}"
            )
        return core

    @runs_in_core(_choose_matmul)
    def matmul(self, core: Any, a: Array, b: Array, bias: Array | None = None) -> Array:
        """See the protocol."""
        if b.ndim == 2 and a.ndim > 2:
            rows = self.matmul(a.reshape(math.prod(a.shape[:-1]), a.shape[-1]), b, bias)
            return rows.reshape(*a.shape[:-1], b.shape[-1])
        sides = (a, b)
        if not core.supports_matmul(a, b):  # no neighbours in memory along a matrix's axis
            sides = (ready(a), ready(b))
        return core.matmul(*sides, None if bias is None else ready(bias))

    def _choose_block_scaled(
        self, a: QuantArray, b: QuantArray, dtype: str = "float32"
    ) -> paths.BlockProduct | Unsupported:
        if self.core is None:
            return Unsupported(self.core_missing)
        return paths.choose_block_product(self.core, a, b)

    @runs_in_core(_choose_block_scaled)
    def block_scaled_matmul(
        self, plan: paths.BlockProduct, a: QuantArray, b: QuantArray, dtype: str = "float32"
    ) -> Array:
        """See the protocol."""
        core = self.core
        sides = paths.matrix(core, a), paths.matrix(core, b)
        if plan.kind == "bf16":
            out = core.bf16_matmul(*sides)
        elif plan.kind == "int8":
            out = core.int8_matmul(*sides)
        else:
            out = core.block_scaled_matmul(*sides, plan.step, plan.fixed)
        return self._narrow(out, dtype)

    def _choose_weight_only(self, x: Array, w: QuantArray, dtype: str = "float32") -> Any:
        if self.core is None:
            return Unsupported(self.core_missing)
        return paths.choose_weight_only(self.core, x, w)

    @runs_in_core(_choose_weight_only)
    def weight_only_matmul(
        self, weights: Any, x: Array, w: QuantArray, dtype: str = "float32"
    ) -> Array:
        """See the protocol. Widens bfloat16."""
        return self._narrow(self.core.weight_only_matmul(ready(self._wide(x)), weights), dtype)

    def bound_weight_only(self, x: Array, w: QuantArray) -> Callable[[Array], Array]:
        """`weight_only_matmul` with w, for float32 arrays of the shape of x, chosen once."""
        weights = self._choose_weight_only(x, w)
        if isinstance(weights, Unsupported):
            return lambda x: self.weight_only_matmul(x, w)
        multiply = self.core.weight_only_matmul
        return lambda x: multiply(ready(x), weights)

    def _choose_product(
        self,
        a: Any,
        b: Any,
        dtype: str = "float32",
        bias: Array | None = None,
        fallbacks: dict[str, Any] | None = None,
    ) -> tuple[float, float] | Unsupported:
        if self.core is None:
            return Unsupported(self.core_missing)
        return paths.operand_factors(self.core, a, b)

    @runs_in_core(_choose_product)
    def product(
        self,
        factors: tuple[float, float],
        a: Any,
        b: Any,
        dtype: str = "float32",
        bias: Array | None = None,
        fallbacks: dict[str, Any] | None = None,
    ) -> Array:
        """See the protocol."""
        out = self.core.bf16_value_matmul(a, b.T, *factors)
        if bias is not None:
            out += bias
        return out

    def product_level(self, method: str, plan: Any) -> str | None:
        """The instructions of a product, and which kind of product; None for other methods."""
        if method == "weight_only_matmul":
            level: str = self.core.gemm_instructions()
            return level
        if method == "product":
            return f"{self.core.gemm_level()}, bf16"
        if isinstance(plan, paths.BlockProduct):
            level = self.core.gemm_level() if plan.on_tiles else self.core.gemm_instructions()
            return f"{level}, {plan.kind}{plan.why}"
        return None
