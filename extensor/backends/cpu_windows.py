"""The CPU backend's windows: convolution, pooling, im2col and col2im in float32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from extensor.backends import windows
from extensor.backends.cpu_core import CoreBackend
from extensor.backends.cpu_quantize import ready
from extensor.backends.protocol import Array, Window

__all__ = ["CpuWindows"]


class CpuWindows(CoreBackend):
    """The methods on windows, each in C++ where its ``_..._reason`` gives None."""

    def _window_reasons(self) -> dict[str, Callable[..., str | None]]:
        return {
            "im2col": self._im2col_reason,
            "col2im": self._col2im_reason,
            "conv2d": self._conv2d_reason,
            "conv2d_grad_x": self._conv2d_grad_x_reason,
            "conv2d_grad_w": self._conv2d_grad_w_reason,
            "max_pool2d": self._max_pool2d_reason,
            "max_pool2d_grad": self._max_pool2d_grad_reason,
        }

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

    def conv2d(
        self, x: Array, w: Array, window: Window, groups: int, bias: Array | None = None
    ) -> Array:
        """See the protocol."""
        if self._conv2d_reason(x, w, window, groups, bias):
            return super().conv2d(x, w, window, groups, bias)
        start = None if bias is None else ready(bias)
        return self.core.conv2d(ready(x), ready(w), *_placement(window), groups, start)

    def _conv2d_reason(
        self, x: Array, w: Array, window: Window, groups: int, bias: Array | None = None
    ) -> str | None:
        arrays = (x, w) if bias is None else (x, w, bias)
        return self._arrays_reason(*arrays) or _conv_reason(x.shape, w.shape, groups)

    def conv2d_grad_x(
        self, g: Array, w: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> Array:
        """See the protocol."""
        if self._conv2d_grad_x_reason(g, w, shape, window, groups):
            return super().conv2d_grad_x(g, w, shape, window, groups)
        return self.core.conv2d_grad_x(ready(g), ready(w), shape, *_placement(window), groups)

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
        return self.core.conv2d_grad_w(ready(g), ready(x), shape, *_placement(window), groups)

    def _conv2d_grad_w_reason(
        self, g: Array, x: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> str | None:
        return self._arrays_reason(g, x) or _conv_reason(x.shape, shape, groups)

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


def _placement(window: Window) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    return window.stride, window.padding, window.dilation


def _conv_reason(x: tuple[int, ...], w: tuple[int, ...], groups: int) -> str | None:
    if len(x) != 4 or len(w) != 4:
        return "not images"
    if groups < 1 or x[1] % groups or w[0] % groups:
        return "channels that the groups do not divide"
    return None
