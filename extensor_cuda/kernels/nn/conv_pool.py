"""Max pooling, and patches summed back to images: one launch each, the CPU's bits.

A sum goes through the windows that cover a place in their order, as
`extensor.backends.generic.conv_pool` adds them.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.backends.protocol import Window
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["fold", "max_pool", "max_pool_grad", "source"]

Array = Any
_THREADS = 256


@cache
def source() -> Source:
    """The program."""
    return Source.read(Path(__file__).parent / "conv_pool.cu", {})


def _shape(window: Window, size: tuple[int, int], out: tuple[int, int]) -> list[Any]:
    """`SHAPE` of conv_pool.cu."""
    numbers = (*size, *out, *window.kernel, *window.stride, *window.padding, *window.dilation)
    return [np.int32(number) for number in numbers]


def _launch(kernel: str, count: int, *arguments: Any) -> None:
    launch(source(), kernel, -(-count // _THREADS), _THREADS, *arguments, np.int64(count))


def max_pool(x: Array, window: Window, out: tuple[int, int], xp: Any) -> tuple[Array, Array]:
    """Maxima, of size ``out``, and their places, of float32 C-contiguous (N, C, H, W)."""
    shape = (*x.shape[:2], *out)
    best, index = xp.empty(shape, dtype=np.float32), xp.empty(shape, dtype=np.int32)
    numbers = _shape(window, x.shape[2:], out)
    _launch("max_pool", math.prod(shape), x, best, index, *numbers)
    return best, index


def max_pool_grad(g: Array, index: Array, shape: tuple[int, ...], window: Window, xp: Any) -> Array:
    """The gradient in x, of ``shape``; g and index are C-contiguous, not empty."""
    out = xp.empty(shape, dtype=np.float32)
    numbers = _shape(window, (shape[2], shape[3]), g.shape[2:])
    _launch("max_pool_grad", out.size, g, index, out, *numbers)
    return out


def fold(patches: Array, shape: tuple[int, ...], window: Window, xp: Any) -> Array:
    """(N, C, kh, kw, Ho, Wo), C-contiguous, summed to ``shape`` (N, C, H, W)."""
    out = xp.empty(shape, dtype=np.float32)
    numbers = _shape(window, (shape[2], shape[3]), patches.shape[4:])
    _launch("fold", out.size, patches, out, *numbers)
    return out
