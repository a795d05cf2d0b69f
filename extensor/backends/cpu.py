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
from functools import lru_cache
from typing import Any

import numpy as np

from extensor.backends import products, windows
from extensor.backends.generic import GenericBackend
from extensor.backends.protocol import Array, Window
from extensor.config import num_threads, require_core, use_core
from extensor.quant.array import QuantArray, QuantStats, block_grid, coded_length, packed_length
from extensor.quant.hadamard import hadamard_signs
from extensor.quant.scale_rules import E8M0_NAN
from extensor.quant.spec import QuantSpec
from extensor.random import Stream

__all__ = ["CpuBackend", "load_core", "make_backend"]

_NO_STREAM = (0, 0, 0, 0)
_FLOAT32 = np.dtype(np.float32)
# A panel of columns under a Hadamard transform is copied whole; longer ones would leave the cache.
_MAX_SPAN = 8192
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


class CpuBackend(GenericBackend):
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
            "im2col": self._im2col_reason,
            "col2im": self._col2im_reason,
            "conv2d": self._conv2d_reason,
            "conv2d_grad_x": self._conv2d_grad_x_reason,
            "conv2d_grad_w": self._conv2d_grad_w_reason,
            "max_pool2d": self._max_pool2d_reason,
            "max_pool2d_grad": self._max_pool2d_grad_reason,
        }
        if method not in reasons:
            raise ValueError(f"path: wanted one of {', '.join(reasons)}, got {method!r}")
        reason = reasons[method](*args)
        if reason is not None:
            return f"generic: {reason}"
        if method == "block_matmul":
            return f"core ({self.core.gemm_level()}, {self._product_kind(*args)})"
        level = self.core.gemm_level() if method == "weight_matmul" else self.core.level()
        return f"core ({level})"

    def _arrays_reason(self, *arrays: Array) -> str | None:
        if self.core is None:
            return self.core_missing
        for x in arrays:
            if x.dtype != _FLOAT32:
                return f"{x.dtype} array; the core computes in float32"
            if x.size == 0:
                return "empty array"
        return None

    # --- windows ---

    def im2col(self, x: Array, window: Window) -> Array:
        """See the protocol."""
        if self._im2col_reason(x, window):
            return super().im2col(x, window)
        return self.core.im2col(_ready(x), window.kernel, *_placement(window))

    def _im2col_reason(self, x: Array, window: Window) -> str | None:
        return self._arrays_reason(x)

    def col2im(self, columns: Array, shape: tuple[int, ...], window: Window) -> Array:
        """See the protocol."""
        if self._col2im_reason(columns, shape, window):
            return super().col2im(columns, shape, window)
        return self.core.col2im(_ready(columns), shape, window.kernel, *_placement(window))

    def _col2im_reason(self, columns: Array, shape: tuple[int, ...], window: Window) -> str | None:
        return self._arrays_reason(columns)

    def conv2d(self, x: Array, w: Array, window: Window, groups: int) -> Array:
        """See the protocol."""
        if self._conv2d_reason(x, w, window, groups):
            return super().conv2d(x, w, window, groups)
        return self.core.conv2d(_ready(x), _ready(w), *_placement(window), groups)

    def _conv2d_reason(self, x: Array, w: Array, window: Window, groups: int) -> str | None:
        return self._arrays_reason(x, w) or _conv_reason(x.shape, w.shape, groups)

    def conv2d_grad_x(
        self, g: Array, w: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> Array:
        """See the protocol."""
        if self._conv2d_grad_x_reason(g, w, shape, window, groups):
            return super().conv2d_grad_x(g, w, shape, window, groups)
        placement = window.padding, window.dilation
        return self.core.conv2d_grad_x(_ready(g), _ready(w), shape, *placement, groups)

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
        return self.core.conv2d_grad_w(_ready(g), _ready(x), shape, *_placement(window), groups)

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
        values, index = self.core.max_pool2d(_ready(x), window.kernel, *_placement(window))
        return values, index

    def _max_pool2d_reason(self, x: Array, window: Window) -> str | None:
        return self._arrays_reason(x)

    def max_pool2d_grad(self, g: Array, index: Array, shape: tuple[int, ...]) -> Array:
        """See the protocol."""
        if self._max_pool2d_grad_reason(g, index, shape):
            return super().max_pool2d_grad(g, index, shape)
        return self.core.max_pool2d_grad(_ready(g), _ready(index), shape)

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
        return self.core.weight_matmul(_ready(x), products.matrix(self.core, w))

    def _weight_matmul_reason(self, x: Array, w: QuantArray) -> str | None:
        return self.core_missing if self.core is None else products.weight_reason(x, w)

    # --- quantizing ---

    def quantize(
        self,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None = None,
        previous_amax: Array | None = None,
    ) -> tuple[QuantArray, QuantStats]:
        """See the protocol."""
        if self._quantize_reason(x, spec, stream, previous_amax):
            return super().quantize(x, spec, stream, previous_amax)
        placed = _place(self.core, spec, x.shape)
        assert isinstance(placed, _Placed)
        codes, scales, tensor_scale, saturated, flushed = self.core.quantize(
            placed.plan,
            _as_float32(x),
            placed.layout,
            placed.codes_shape,
            placed.scales_shape,
            _stream_words(stream),
        )
        q = QuantArray(
            codes=codes,
            scales=scales,
            spec=placed.spec,
            shape=tuple(x.shape),
            tensor_scale=np.asarray(tensor_scale, _FLOAT32) if spec.row.tensor_scale else None,
        )
        return q, QuantStats(placed.count, saturated, flushed)

    def _quantize_reason(
        self,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None = None,
        previous_amax: Array | None = None,
    ) -> str | None:
        if reason := self._operand_reason(x, spec, stream):
            return reason
        if previous_amax is not None:
            return "a running maximum"
        placed = _place(self.core, spec, x.shape)
        assert isinstance(placed, _Placed)
        return placed.no_codes

    def dequantize(self, q: QuantArray) -> Array:
        """See the protocol."""
        if self._dequantize_reason(q):
            return super().dequantize(q)
        placed = _place(self.core, q.spec, q.shape)
        assert isinstance(placed, _Placed)
        tensor_scale = 1.0 if q.tensor_scale is None else float(q.tensor_scale)
        codes, scales = _ready(q.codes), _ready(q.scales)
        return self.core.dequantize(
            placed.plan, codes, scales, tensor_scale, placed.layout, q.shape
        )

    def _dequantize_reason(self, q: QuantArray) -> str | None:
        if self.core is None:
            return self.core_missing
        if q.spec.transform:
            return "a Hadamard transform to undo"
        if math.prod(q.shape) == 0:
            return "empty array"
        placed = _place(self.core, q.spec, q.shape)
        return placed if isinstance(placed, str) else None

    def operand(
        self, x: Array, spec: QuantSpec, stream: Stream | None = None
    ) -> tuple[Array, QuantStats]:
        """See the protocol."""
        if self._operand_reason(x, spec, stream):
            return super().operand(x, spec, stream)
        placed = _place(self.core, spec, x.shape)
        assert isinstance(placed, _Placed)
        values, saturated, flushed = self.core.operand(
            placed.plan, _as_float32(x), placed.layout, placed.coded, _stream_words(stream)
        )
        return values, QuantStats(placed.count, saturated, flushed)

    def _operand_reason(
        self, x: Array, spec: QuantSpec, stream: Stream | None = None
    ) -> str | None:
        if self.core is None:
            return self.core_missing
        if x.size == 0 or x.ndim == 0:
            return "empty array or scalar"
        if x.dtype.kind != "f" and x.dtype.name != "bfloat16":
            return f"{x.dtype} array"
        if (stream is None) == (spec.rounding == "stochastic"):
            return "the stream does not go with the rounding"
        if spec.kernel_gap:
            return spec.kernel_gap
        placed = _place(self.core, spec, x.shape)
        return placed if isinstance(placed, str) else None


def _ready(x: Array) -> Array:
    """C-contiguous and aligned, copied only where it is not."""
    return x if x.flags.c_contiguous and x.flags.aligned else np.array(x, order="C")


def _as_float32(x: Array) -> Array:
    if x.dtype == _FLOAT32:
        return _ready(x)
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes Inf: its block's rule holds
        return np.ascontiguousarray(x, dtype=_FLOAT32)


def _placement(window: Window) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    return window.stride, window.padding, window.dilation


def _conv_reason(x: tuple[int, ...], w: tuple[int, ...], groups: int) -> str | None:
    if len(x) != 4 or len(w) != 4:
        return "not images"
    if groups < 1 or x[1] % groups or w[0] % groups:
        return "channels that the groups do not divide"
    return None


def _stream_words(stream: Stream | None) -> tuple[int, int, int, int]:
    return _NO_STREAM if stream is None else (*stream.key, *stream.counter_high)


class _Placed:
    """A spec resolved for one shape, as the core takes it (see QuantJob in kernels.hpp)."""

    def __init__(self, core: Any, spec: QuantSpec, shape: tuple[int, ...], layout: list[int]):
        self.spec = spec
        self.layout = layout
        self.plan = _plan(core, spec)
        coded = list(shape)
        coded[spec.axis] = coded_length(spec, shape)
        self.coded = tuple(coded)
        self.count = math.prod(coded)
        self.scales_shape = block_grid(spec, shape)
        codes = list(shape)
        codes[spec.axis] = packed_length(spec, shape)
        self.codes_shape = tuple(codes)
        tile_length, columns, tiles = layout[6], layout[3] > 1, self.scales_shape[spec.axis]
        # Blocks down columns are packed one by one, so each must fill whole bytes.
        self.no_codes = None
        if columns and tiles > 1 and tile_length * spec.row.element.bits % 8:
            self.no_codes = f"blocks of {tile_length} down columns do not fill whole bytes"


@lru_cache(maxsize=4096)
def _place(core: Any, spec: QuantSpec, shape: tuple[int, ...]) -> _Placed | str:
    """The spec on arrays of ``shape``, or why the core does not cover it."""
    try:
        spec = spec.resolve(len(shape))
    except ValueError as error:
        return str(error)  # the generic method raises it
    if spec.row.outliers:
        return "the outlier codec"
    if not spec.symmetric:
        return "a zero point"
    if spec.statistic != "amax":
        return f"the {spec.statistic} statistic"
    if spec.scale_name == "float16":
        return "float16 scales"
    if spec.rule not in ("floor", "rceil", "ceil", "even", "one", "amax"):
        return f"the {spec.rule} scale rule"
    layout = _layout(spec, shape)
    if isinstance(layout, str):
        return layout
    if math.prod(block_grid(spec, shape)) >= 1 << 32:
        return "2**32 blocks or more"
    tile_rows, tile_length, columns = layout[5], layout[6], layout[3] > 1
    per_call = 128 // spec.rbits
    if spec.rounding == "stochastic" and tile_rows > 1 and tile_length % per_call:
        return f"stochastic tiles whose rows of {tile_length} split a random draw"
    if spec.transform and columns and math.lcm(tile_length, spec.transform.size) > _MAX_SPAN:
        return f"a Hadamard transform down columns in blocks of {tile_length}"
    return _Placed(core, spec, shape, layout)


def _layout(spec: QuantSpec, shape: tuple[int, ...]) -> list[int] | str:
    """(outer, rows, length, inner, coded, tile rows, tile length), or why there is none."""
    axis, last = spec.axis, len(shape) - 1
    coded = coded_length(spec, shape)
    before, after = shape[:axis], math.prod(shape[axis + 1 :])
    if spec.tile == "channel":
        rows, columns = 1, coded
    elif spec.tile == "tensor":
        rows, columns = math.prod(before) if axis == last else after, coded
        if axis != last and before:
            return "one scale per tensor, along an axis in the middle"
    else:
        assert isinstance(spec.tile, tuple)
        rows, columns = spec.tile
    if axis == last:
        if rows == 1 or spec.tile == "tensor":
            return [1, math.prod(before), shape[axis], 1, coded, rows, columns]
        return [math.prod(before[:-1]), before[-1], shape[axis], 1, coded, rows, columns]
    if after == 1:  # contiguous after all; tiles have one column
        if rows > 1 and spec.tile != "tensor" and len(shape) != 2:
            return "tiles of several rows along an axis in the middle"
        return [1, math.prod(before), shape[axis], 1, coded, 1, columns]
    if rows > 1 and len(shape) != 2 and spec.tile != "tensor":
        return "tiles of several rows along an axis in the middle"
    return [math.prod(before), 1, shape[axis], after, coded, rows, columns]


def _plan(core: Any, spec: QuantSpec) -> Any:
    dialect = spec.dialect_row
    return core.Plan(
        element=spec.row.element.name,
        scale=spec.scale_name,
        rule=spec.rule,
        ties=spec.ties,
        stochastic=spec.rounding == "stochastic",
        rbits=spec.rbits,
        # None only where `kernel_gap` leaves encoding to numpy; decoding does not read it.
        mx_inf_byte=E8M0_NAN if dialect.mx_inf_byte is None else dialect.mx_inf_byte,
        nv_zero_byte=dialect.nvfp4_zero_scale,
        nv_tiny_saturates=dialect.nvfp4_tiny_saturates,
        window=-1 if spec.scale_window is None else spec.scale_window,
        element_scale=spec.element_scale,
        signs=hadamard_signs(spec.transform).tolist() if spec.transform else [],
    )
