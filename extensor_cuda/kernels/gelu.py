"""GELU and its gradient, one launch each way.

With u = 2**-24, within what `extensor.backends.cpu_training` states:

    gelu       |error| <= (x^2 / 2 + 16) u |gelu(x)| + 2**-144, and Phi likewise
    gelu_grad  |error| <= (x^2 / 2 + 16) u |g| (Phi(x) + |x| density(x)) + 2**-144 (1 + |g|)
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor_cuda.jit import Source, launch

__all__ = ["gelu", "gelu_grad", "source"]

Array = Any
_THREADS, _PART = 256, 1024  # as in gelu.cu


@cache
def source() -> Source:
    """The program."""
    return Source.read(Path(__file__).parent / "gelu.cu", {})


def gelu(x: Array, xp: Any) -> tuple[Array, Array]:
    """X Phi(x) and Phi(x) of a float32 C-contiguous array, not empty."""
    y, phi = xp.empty_like(x), xp.empty_like(x)
    launch(source(), "gelu", -(-x.size // _PART), _THREADS, x, y, phi, np.int64(x.size))
    return y, phi


def gelu_grad(g: Array, x: Array, phi: Array, xp: Any) -> Array:
    """Gradient of gelu, which gave ``phi``; arrays as there."""
    gx = xp.empty_like(x)
    arrays = g, x, phi, gx
    launch(source(), "gelu_grad", -(-x.size // _PART), _THREADS, *arrays, np.int64(x.size))
    return gx
