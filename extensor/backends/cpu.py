"""The CPU backend: numpy, and the C++ core where it is built.

Each override first asks its ``_..._reason`` method why the core cannot take these
arguments. None means that it can; anything else is a sentence, and the generic
method runs instead. `CpuBackend.path` gives the same answer without running
anything, so that nobody has to guess which code a call takes.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from extensor.backends import products, windows
from extensor.backends.cpu_dense import CpuDense
from extensor.backends.cpu_quantize import CpuQuantize, ready
from extensor.backends.protocol import Array, Window
from extensor.config import num_threads, require_core, use_core
from extensor.quant.array import QuantArray

__all__ = ["CpuBackend", "load_core", "make_backend"]

_FLOAT32 = np.dtype(np.float32)
# Sums over few pixels for many weights: there numpy's BLAS beats the direct kernel.
_FEW_PIXELS, _MANY_TAPS = 16, 1024


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


class CpuBackend(CpuQuantize, CpuDense):
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

    def path(self, method: str, *args: Any) -> str:
        """Which code ``method(*args)`` takes: "core (avx512)", or "generic: " and the reason.

        Raises:
            ValueError: for a method that the core does not have.
        """
        reasons: dict[str, Callable[..., str | None]] = {
            "quantize": self._quantize_reason,
            "dequantize": self._dequantize_reason,
            "operand": self._operand_reason,
            "block_matmul": self._block_matmul_reason,
            "weight_matmul": self._weight_matmul_reason,
            "operand_matmul": self._operand_matmul_reason,
            "im2col": self._im2col_reason,
            "col2im": self._col2im_reason,
            "conv2d": self._conv2d_reason,
            "conv2d_grad_x": self._conv2d_grad_x_reason,
            "conv2d_grad_w": self._conv2d_grad_w_reason,
            "max_pool2d": self._max_pool2d_reason,
            "max_pool2d_grad": self._max_pool2d_grad_reason,
            **self._dense_reasons(),
            **self._training_reasons(),
        }
        if method not in reasons:
            raise ValueError(f"path: wanted one of {', '.join(reasons)}, got {method!r}")
        reason = reasons[method](*args)
        if reason is not None:
            return f"generic: {reason}"
        if method == "block_matmul":
            return f"core ({self.core.gemm_level()}, {self._product_kind(*args)})"
        if method == "operand_matmul":
            return f"core ({self.core.gemm_level()}, bf16)"
        level = self.core.gemm_level() if method == "weight_matmul" else self.core.level()
        return f"core ({level})"

    # --- windows ---

    def im2col(self, x: Array, window: Window) -> Array:
        """See the protocol."""
        if self._im2col_reason(x, window):
            return super().im2col(x, window)
        return self.core.im2col(ready(x), window.kernel, *_placement(window))

    def _im2col_reason(self, x: Array, window: Window) -> str | None:
        return self._arrays_reason(x)

    def col2im(self, columns: Array, shape: tuple[int, ...], window: Window) -> Array:
        """See the protocol."""
        if self._col2im_reason(columns, shape, window):
            return super().col2im(columns, shape, window)
        return self.core.col2im(ready(columns), shape, window.kernel, *_placement(window))

    def _col2im_reason(self, columns: Array, shape: tuple[int, ...], window: Window) -> str | None:
        return self._arrays_reason(columns)

    def conv2d(self, x: Array, w: Array, window: Window, groups: int) -> Array:
        """See the protocol."""
        if self._conv2d_reason(x, w, window, groups):
            return super().conv2d(x, w, window, groups)
        return self.core.conv2d(ready(x), ready(w), *_placement(window), groups)

    def _conv2d_reason(self, x: Array, w: Array, window: Window, groups: int) -> str | None:
        return self._arrays_reason(x, w) or _conv_reason(x.shape, w.shape, groups)

    def conv2d_grad_x(
        self, g: Array, w: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> Array:
        """See the protocol."""
        if self._conv2d_grad_x_reason(g, w, shape, window, groups):
            return super().conv2d_grad_x(g, w, shape, window, groups)
        placement = window.padding, window.dilation
        return self.core.conv2d_grad_x(ready(g), ready(w), shape, *placement, groups)

    def _conv2d_grad_x_reason(
        self, g: Array, w: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> str | None:
        if reason := self._arrays_reason(g, w):
            return reason
        if window.stride != (1, 1):
            return f"stride {window.stride}; the core's kernel has stride 1"
        extent = [d * (k - 1) for d, k in zip(window.dilation, window.kernel, strict=True)]
        if window.padding[0] > extent[0] or window.padding[1] > extent[1]:
            return f"padding {window.padding} is as large as the kernel"
        return _conv_reason(shape, w.shape, groups)

    def conv2d_grad_w(
        self, g: Array, x: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> Array:
        """See the protocol."""
        if self._conv2d_grad_w_reason(g, x, shape, window, groups):
            return super().conv2d_grad_w(g, x, shape, window, groups)
        return self.core.conv2d_grad_w(ready(g), ready(x), shape, *_placement(window), groups)

    def _conv2d_grad_w_reason(
        self, g: Array, x: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> str | None:
        if reason := self._arrays_reason(g, x) or _conv_reason(x.shape, shape, groups):
            return reason
        if math.prod(g.shape[2:]) <= _FEW_PIXELS and math.prod(shape[1:]) >= _MANY_TAPS:
            return f"{math.prod(shape[1:])} weights per output and few pixels; BLAS is faster"
        return None

    def max_pool2d(self, x: Array, window: Window) -> tuple[Array, Array]:
        """See the protocol."""
        if self._max_pool2d_reason(x, window):
            return super().max_pool2d(x, window)
        windows.check_max_windows(window, x.shape[2:])
        values, index = self.core.max_pool2d(ready(x), window.kernel, *_placement(window))
        return values, index

    def _max_pool2d_reason(self, x: Array, window: Window) -> str | None:
        return self._arrays_reason(x)

    def max_pool2d_grad(self, g: Array, index: Array, shape: tuple[int, ...]) -> Array:
        """See the protocol."""
        if self._max_pool2d_grad_reason(g, index, shape):
            return super().max_pool2d_grad(g, index, shape)
        return self.core.max_pool2d_grad(ready(g), ready(index), shape)

    def _max_pool2d_grad_reason(self, g: Array, index: Array, shape: tuple[int, ...]) -> str | None:
        if reason := self._arrays_reason(g):
            return reason
        return None if index.dtype == np.int32 else f"{index.dtype} positions, not int32"

    # --- blocked products ---

    def block_matmul(self, a: QuantArray, b: QuantArray) -> Array:
        """See the protocol; bounds in `extensor.backends.products`."""
        if self._block_matmul_reason(a, b):
            return super().block_matmul(a, b)
        sides = [products.matrix(self.core, q) for q in (a, b)]
        if self._product_kind(a, b) == "bf16":
            return self.core.bf16_matmul(*sides)
        return self.core.block_matmul(*sides, products.block_step(a, b))

    def _product_kind(self, a: QuantArray, b: QuantArray) -> str:
        """Which of the core's products: "bf16", "integer", "float", with why it is not bf16."""
        other = "integer" if products.block_step(a, b) else "float"
        if not self.core.gemm_has_bf16():
            return other
        reason = products.bf16_reason(a, b)
        return "bf16" if reason is None else f"{other}: {reason}"

    def _block_matmul_reason(self, a: QuantArray, b: QuantArray) -> str | None:
        if self.core is None:
            return self.core_missing
        step = products.block_step(a, b)
        return step if isinstance(step, str) else None

    def weight_matmul(self, x: Array, w: QuantArray) -> Array:
        """See the protocol; bounds in `extensor.backends.products`."""
        if self._weight_matmul_reason(x, w):
            return super().weight_matmul(x, w)
        return self.core.weight_matmul(ready(x), products.matrix(self.core, w))

    def _weight_matmul_reason(self, x: Array, w: QuantArray) -> str | None:
        return self.core_missing if self.core is None else products.weight_reason(x, w)

    def operand_matmul(self, a: Array, b: Array) -> Array:
        """See the protocol; bounds in `extensor.backends.products`."""
        if self._operand_matmul_reason(a, b):
            return super().operand_matmul(a, b)
        return self.core.bf16_value_matmul(a, b)

    def _operand_matmul_reason(self, a: Array, b: Array) -> str | None:
        return self.core_missing if self.core is None else products.operand_reason(self.core, a, b)


def _placement(window: Window) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    return window.stride, window.padding, window.dilation


def _conv_reason(x: tuple[int, ...], w: tuple[int, ...], groups: int) -> str | None:
    if len(x) != 4 or len(w) != 4:
        return "not images"
    if groups < 1 or x[1] % groups or w[0] % groups:
        return "channels that the groups do not divide"
    return None
