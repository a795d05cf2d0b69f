"""Convolution and pooling on the GPU: the kernel that runs each, or why there is none.

Functions as in `extensor_cuda.nn`. Results have the CPU's bits.
"""

from __future__ import annotations

from typing import Any

from extensor.backends.generic import conv_pool
from extensor.backends.protocol import Window
from extensor.backends.unsupported import Unsupported
from extensor_cuda.dispatch import Call, contiguous, dtype_gap, unless
from extensor_cuda.kernels.nn import conv_pool as kernels

__all__ = ["conv2d_grad_x", "max_pool2d", "max_pool2d_grad"]

Array = Any


def conv2d_grad_x(
    xp: Any, g: Array, w: Array, shape: tuple[int, ...], window: Window, groups: int
) -> Call:
    """See the protocol: a product, and a launch that sums its patches."""

    def call() -> Any:
        patches = conv_pool.patches_grad(g, w, shape, window, groups, xp)
        return kernels.fold(contiguous(xp, patches), shape, window, xp)

    return unless(dtype_gap((g, w)), call)


def max_pool2d(xp: Any, x: Array, window: Window) -> Call:
    """See the protocol."""

    def call() -> Any:
        out = conv_pool.check_max_windows(window, x.shape[2:])
        return kernels.max_pool(contiguous(xp, x), window, out, xp)

    return unless(dtype_gap((x,)), call)


def max_pool2d_grad(
    xp: Any, g: Array, index: Array, shape: tuple[int, ...], window: Window | None = None
) -> Call:
    """See the protocol."""
    if window is None:
        return Unsupported("an unknown window")

    def call() -> Any:
        gg, at = contiguous(xp, g), contiguous(xp, index)
        return kernels.max_pool_grad(gg, at, shape, window, xp)

    return unless(dtype_gap((g,)), call)
