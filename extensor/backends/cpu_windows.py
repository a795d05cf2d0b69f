"""The CPU backend's windows: convolution and pooling in float32, patches quantized or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from extensor.backends import windows
from extensor.backends.cpu_core import CoreBackend, ready
from extensor.backends.cpu_quantize import covered, place
from extensor.backends.protocol import Array, Window
from extensor.quant.array import QuantStats
from extensor.quant.recipe_state import Counts
from extensor.quant.spec import QuantSpec
from extensor.random import Stream

__all__ = ["CpuWindows"]

_LONGEST_BLOCK = 512  # along the pixels: a piece of the patches holds whole blocks


class CpuWindows(CoreBackend):
    """The methods on windows, each in C++ where its ``_..._reason`` gives None."""

    def _window_reasons(self) -> dict[str, Callable[..., str | None]]:
        return {
            "quantized_conv2d": self._operand_conv2d_reason,
            "quantized_conv2d_grad_w": self._operand_conv2d_grad_w_reason,
            "conv2d": self._conv2d_reason,
            "conv2d_grad_x": self._conv2d_grad_x_reason,
            "conv2d_grad_w": self._conv2d_grad_w_reason,
            "max_pool2d": self._arguments_reason,
            "max_pool2d_grad": self._max_pool2d_grad_reason,
        }

    def quantized_conv2d(
        self,
        x: Array,
        w: Array,
        spec: QuantSpec,
        stream: Stream | None,
        shape: tuple[int, ...],
        window: Window,
        bias: Array | None = None,
    ) -> tuple[Array, Counts]:
        """See the protocol."""
        if self._operand_conv2d_reason(x, w, spec, stream, shape, window, bias):
            return super().quantized_conv2d(x, w, spec, stream, shape, window, bias)
        plan, length, count = self._patch_plan(x, spec, shape, window)
        where = (shape, _placement(window), x.shape[1] // shape[1])
        start = None if bias is None else ready(bias)
        y, *lost = self.core.quantized_conv2d(plan, length, ready(x), ready(w), *where, start)
        return y, QuantStats(count, *lost)

    def _operand_conv2d_reason(
        self,
        x: Array,
        w: Array,
        spec: QuantSpec,
        stream: Stream | None,
        shape: tuple[int, ...],
        window: Window,
        bias: Array | None = None,
    ) -> str | None:
        reason = self._arguments_reason(x, w, bias)
        return reason or _patch_reason(self.core, x, spec, shape, window)

    def quantized_conv2d_grad_w(
        self,
        g: Array,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None,
        shape: tuple[int, ...],
        window: Window,
    ) -> tuple[Array, Counts]:
        """See the protocol."""
        if self._operand_conv2d_grad_w_reason(g, x, spec, stream, shape, window):
            return super().quantized_conv2d_grad_w(g, x, spec, stream, shape, window)
        plan, length, count = self._patch_plan(x, spec, shape, window)
        where = (shape, _placement(window), x.shape[1] // shape[1])
        gw, *lost = self.core.quantized_conv2d_grad_w(plan, length, ready(g), ready(x), *where)
        return gw, QuantStats(count, *lost)

    def _operand_conv2d_grad_w_reason(
        self,
        g: Array,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None,
        shape: tuple[int, ...],
        window: Window,
    ) -> str | None:
        if reason := self._arrays_reason(g, x):
            return reason
        if reason := _patch_reason(self.core, x, spec, shape, window):
            return reason
        tile = spec.tile
        if not isinstance(tile, tuple) or tile[1] > _LONGEST_BLOCK:
            return f"blocks of {tile} along the pixels"
        return None

    def _patch_plan(
        self, x: Array, spec: QuantSpec, shape: tuple[int, ...], window: Window
    ) -> tuple[Any, int, int]:
        """The core's plan, the length of a block, and how many values there are."""
        matrix = _patch_shape(x, shape, window)
        found = covered(self.core, spec, matrix)
        return found.plan, found.layout[6], math.prod(matrix)

    def conv2d(
        self, x: Array, w: Array, window: Window, groups: int, bias: Array | None = None
    ) -> Array:
        """See the protocol."""
        if self._conv2d_reason(x, w, window, groups, bias):
            return super().conv2d(x, w, window, groups, bias)
        start = None if bias is None else ready(bias)
        return self.core.conv2d(ready(x), ready(w), _placement(window), groups, start)

    def _conv2d_reason(
        self, x: Array, w: Array, window: Window, groups: int, bias: Array | None = None
    ) -> str | None:
        return self._arguments_reason(x, w, bias) or _conv_reason(x.shape, w.shape, groups)

    def conv2d_grad_x(
        self, g: Array, w: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> Array:
        """See the protocol."""
        if self._conv2d_grad_x_reason(g, w, shape, window, groups):
            return super().conv2d_grad_x(g, w, shape, window, groups)
        return self.core.conv2d_grad_x(ready(g), ready(w), shape, _placement(window), groups)

    def _conv2d_grad_x_reason(
        self, g: Array, w: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> str | None:
        return self._arrays_reason(g, w) or _conv_reason(shape, w.shape, groups)

    def conv2d_grad_w(
        self, g: Array, x: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> Array:
        """See the protocol."""
        if self._conv2d_grad_w_reason(g, x, shape, window, groups):
            return super().conv2d_grad_w(g, x, shape, window, groups)
        return self.core.conv2d_grad_w(ready(g), ready(x), shape, _placement(window), groups)

    def _conv2d_grad_w_reason(
        self, g: Array, x: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> str | None:
        return self._arrays_reason(g, x) or _conv_reason(x.shape, shape, groups)

    def max_pool2d(self, x: Array, window: Window) -> tuple[Array, Array]:
        """See the protocol."""
        if self._arrays_reason(x):
            return super().max_pool2d(x, window)
        windows.check_max_windows(window, x.shape[2:])
        values, index = self.core.max_pool2d(ready(x), window.kernel, _placement(window))
        return values, index

    def max_pool2d_grad(
        self, g: Array, index: Array, shape: tuple[int, ...], window: Window | None = None
    ) -> Array:
        """See the protocol."""
        if self._max_pool2d_grad_reason(g, index, shape):
            return super().max_pool2d_grad(g, index, shape)
        return self.core.max_pool2d_grad(ready(g), ready(index), shape)

    def _max_pool2d_grad_reason(self, g: Array, index: Array, shape: tuple[int, ...]) -> str | None:
        if reason := self._arrays_reason(g):
            return reason
        return None if index.dtype == np.int32 else f"{index.dtype} positions, not int32"


def _placement(window: Window) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    return window.stride, window.padding, window.dilation


def _conv_reason(x: tuple[int, ...], w: tuple[int, ...], groups: int) -> str | None:
    if len(x) != 4 or len(w) != 4:
        return "not images"
    if groups < 1 or x[1] % groups or w[0] % groups:
        return "channels that the groups do not divide"
    return None


def _patch_shape(x: Array, shape: tuple[int, ...], window: Window) -> tuple[int, ...]:
    """The shape of x's patches; see `Backend.quantized_conv2d`."""
    ho, wo = window.output_size(x.shape[2:])
    matrix = (math.prod(shape[1:]), x.shape[0] * ho * wo)
    groups = x.shape[1] // shape[1]
    return matrix if groups == 1 else (groups, *matrix)


def _patch_reason(
    core: Any, x: Array, spec: QuantSpec, shape: tuple[int, ...], window: Window
) -> str | None:
    """Why the core does not quantize patches by this spec on the way; None if it does."""
    if spec.rounding == "stochastic":
        return "stochastic rounding, whose bits depend on the place in the matrix"
    if spec.transform:
        return "a Hadamard transform"
    whole = spec.row.tensor_scale or spec.scale_window is not None or spec.tile == "tensor"
    if whole or spec.rebased:
        return "scales that depend on the whole matrix"
    if isinstance(spec.tile, tuple) and spec.tile[0] > 1:
        return f"tiles of {spec.tile[0]} rows"
    found = place(core, spec, _patch_shape(x, shape, window))
    return found if isinstance(found, str) else None
