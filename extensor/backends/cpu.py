"""The CPU backend: numpy, and the C++ core where it is built.

Each override first asks its ``_..._reason`` method why the core cannot take these
arguments. None means that it can; anything else is a sentence, and the generic
method runs instead. `CpuBackend.path` gives the same answer without running
anything, so that nobody has to guess which code a call takes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from extensor.backends import products
from extensor.backends.cpu_core import ready
from extensor.backends.cpu_dense import CpuDense
from extensor.backends.cpu_layers import CpuLayers
from extensor.backends.cpu_quantize import CpuQuantize
from extensor.backends.cpu_training import CpuTraining
from extensor.backends.cpu_windows import CpuWindows
from extensor.backends.protocol import Array
from extensor.backends.unsupported import Unsupported
from extensor.config import num_threads, require_core, use_core
from extensor.quant.array import QuantArray

__all__ = ["CpuBackend", "load_core", "make_backend"]


def load_core() -> tuple[Any, str]:
    """The C++ core and "", or None and why it is not used.

    Raises:
        RuntimeError: where the core is missing although EXTENSOR_REQUIRE_CORE=1.
    """
    if not use_core():
        return None, "EXTENSOR_CORE=0"
    try:
        return importlib.import_module("extensor._core._kernels"), ""
    except ImportError as error:
        if require_core():
            raise RuntimeError(
                f"EXTENSOR_REQUIRE_CORE=1, but the C++ core cannot be imported ({error}); install "
                "with a C++20 compiler (pip install -e .), or leave the variable out"
            ) from error
        return None, f"the C++ core is not built ({error})"


def make_backend() -> CpuBackend:
    """The CPU backend, on the C++ core where there is one."""
    return CpuBackend(*load_core())


class CpuBackend(CpuQuantize, CpuDense, CpuTraining, CpuWindows, CpuLayers):
    """numpy, with the hot methods in C++.

    Attributes:
        core: the extension module, or None.
        core_missing: why there is none; "" where there is one.
    """

    def __init__(self, core: Any, core_missing: str = "") -> None:
        super().__init__("cpu", np)
        self.core = core
        self.core_missing = core_missing
        if core is not None:
            core.set_threads(num_threads())

    def _reasons(self) -> dict[str, Callable[..., str | None]]:
        """For each method that the core has: why it does not take arguments, or None."""
        return {
            "quantize": self._quantize_reason,
            "dequantize": self._dequantize_reason,
            "fake_quantize": self._operand_reason,
            "quantize_rowwise_columnwise": self._quantize_pair_reason,
            "fake_quantize_rowwise_columnwise": self._operand_pair_reason,
            "block_scaled_matmul": self._block_matmul_reason,
            "weight_only_matmul": self._weight_matmul_reason,
            "product": self._product_reason,
            **self._dense_reasons(),
            **self._window_reasons(),
            **self._training_reasons(),
            **self._layer_reasons(),
        }

    def core_methods(self) -> frozenset[str]:
        """The methods that the core has; the others are made of these or run on numpy."""
        return frozenset(self._reasons())

    def path(self, method: str, *args: Any) -> str:
        """Which code ``method(*args)`` takes: "core (avx512)", or "generic: " and the reason.

        Raises:
            ValueError: for a method that the core does not have.
        """
        reasons = self._reasons()
        if method not in reasons:
            raise ValueError(f"path: wanted one of {', '.join(reasons)}, got {method!r}")
        reason = reasons[method](*args)
        if reason is not None:
            return f"generic: {reason}"
        if method == "weight_only_matmul":
            return f"core ({self.core.gemm_instructions()})"
        if method in ("block_scaled_matmul", "product"):
            kind = self._product_kind(*args) if method == "block_scaled_matmul" else "bf16"
            tiles = kind in ("bf16", "int8")
            level = self.core.gemm_level() if tiles else self.core.gemm_instructions()
            return f"core ({level}, {kind})"
        return f"core ({self.core.level()})"

    # --- blocked products ---

    def block_scaled_matmul(self, a: QuantArray, b: QuantArray) -> Array:
        """See the protocol; bounds in `extensor.backends.products`."""
        if len(a.shape) == 3 or self._block_matmul_reason(a, b):
            return super().block_scaled_matmul(a, b)
        sides = [products.matrix(self.core, q) for q in (a, b)]
        kind = self._product_kind(a, b)
        if kind == "bf16":
            return self.core.bf16_matmul(*sides)
        if kind == "int8":
            return self.core.int8_matmul(*sides)
        return self.core.block_scaled_matmul(*sides, products.block_step(a, b))

    def _product_kind(self, a: QuantArray, b: QuantArray) -> str:
        """Which of the core's products: "bf16", "int8", "integer", "float"; why not on tiles."""
        other = "integer" if products.block_step(a, b) else "float"
        if not self.core.gemm_has_amx():
            return other
        if other == "integer" and products.on_int8_tiles(a, b):
            return "int8"
        reason = products.bf16_reason(a, b)
        return "bf16" if reason is None else f"{other}: {reason}"

    def _block_matmul_reason(self, a: QuantArray, b: QuantArray) -> str | None:
        if self.core is None:
            return self.core_missing
        step = products.block_step(a, b)
        return step if isinstance(step, str) else None

    def weight_only_matmul(self, x: Array, w: QuantArray) -> Array:
        """See the protocol; bounds in `extensor.backends.products`. Widens bfloat16."""
        x = self._wide(x)
        if self._weight_matmul_reason(x, w):
            return super().weight_only_matmul(x, w)
        return self.core.weight_only_matmul(ready(x), products.matrix(self.core, w))

    def _weight_matmul_reason(self, x: Array, w: QuantArray) -> str | None:
        return self.core_missing if self.core is None else products.weight_reason(self._wide(x), w)

    def product(self, a: Any, b: Any, dtype: str = "float32", bias: Array | None = None) -> Array:
        """See the protocol; bounds in `extensor.backends.products`."""
        factors = self._product_factors(a, b)
        if not factors:
            return super().product(a, b, dtype, bias)
        out = self.core.bf16_value_matmul(a, b.T, *factors)
        if bias is not None:
            out += bias
        return out

    def _product_factors(
        self, a: Any, b: Any, dtype: str = "float32", bias: Array | None = None
    ) -> tuple[float, float] | Unsupported:
        if self.core is None:
            return Unsupported(self.core_missing)
        return products.operand_factors(self.core, a, b.T)

    def _product_reason(
        self, a: Any, b: Any, dtype: str = "float32", bias: Array | None = None
    ) -> str | None:
        factors = self._product_factors(a, b)
        return None if factors else factors.reason
