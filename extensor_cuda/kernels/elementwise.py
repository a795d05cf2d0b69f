"""GELU and its gradient, relu's gradient, rounding to bfloat16: one launch each.

With u = 2**-24, within what `extensor.backends.cpu_training` states:

    gelu       |error| <= (x^2 / 2 + 16) u |gelu(x)| + 2**-144, and Phi likewise
    gelu_grad  |error| <= (x^2 / 2 + 16) u |g| (Phi(x) + |x| density(x)) + 2**-144 (1 + |g|)

The others have the CPU's bits.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor_cuda.jit import Source, launch

__all__ = ["bfloat16_values", "gelu", "gelu_grad", "relu_grad", "source"]

Array = Any
_THREADS, _PART = 256, 1024  # as in elementwise.cu


@cache
def source() -> Source:
    """The program."""
    return Source.read(Path(__file__).parent / "elementwise.cu", {})


def _launch(kernel: str, *arrays: Array) -> None:
    """On float32 C-contiguous arrays of one size, not empty."""
    size = arrays[0].size
    launch(source(), kernel, -(-size // _PART), _THREADS, *arrays, np.int64(size))


def gelu(x: Array, xp: Any) -> tuple[Array, Array]:
    """X Phi(x) and Phi(x) of a float32 C-contiguous array, not empty."""
    y, phi = xp.empty_like(x), xp.empty_like(x)
    _launch("gelu", x, y, phi)
    return y, phi


def gelu_grad(g: Array, x: Array, phi: Array, xp: Any) -> Array:
    """Gradient of gelu, which gave ``phi``; arrays as there."""
    gx = xp.empty_like(x)
    _launch("gelu_grad", g, x, phi, gx)
    return gx


def relu_grad(g: Array, out: Array, xp: Any) -> Array:
    """G where relu's output is positive, 0 elsewhere; arrays as there."""
    gx = xp.empty_like(out)
    _launch("relu_grad", g, out, gx)
    return gx


def bfloat16_values(x: Array, xp: Any) -> Array:
    """The values rounded to bfloat16; arrays as there."""
    out = xp.empty_like(x)
    _launch("bfloat16_values", x, out)
    return out
