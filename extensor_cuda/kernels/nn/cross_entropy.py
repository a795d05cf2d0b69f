"""Softmax and cross-entropy of rows of scores, one launch each way, without storing the softmax.

With u = 2**-24, n classes, p the softmax and d the row's maximum less its scores:

    losses    |error| <= (sum p d + n + 8) u + 4 u (|log sum| + |d of the label|), and with
              smoothing s also s (n + 3) u mean(d)
    gradient  |error| <= ((d + sum p d + n + 16) u p + 4 u (p + target)) |weight|, from exact scores

Scores may be bfloat16; losses are float32 then, and the gradient is rounded to bfloat16 once.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor_cuda.kernels.nn.elementwise import ROW_THREADS, kind, row_warps
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["MAX_CLASSES", "grad", "loss_source", "losses", "ranks"]

Array = Any

MAX_CLASSES = 1 << 24
"""Of `ranks`, which counts in float32."""


@lru_cache(maxsize=4)
def loss_source(warps: int, scores: int = 0) -> Source:
    """The program in which so many warps, 1 or 8, have a row of scores of a kind."""
    macros = {"NN_WARPS": warps, "NN_IN": scores}
    return Source.read(Path(__file__).parent / "cross_entropy.cu", macros)


def _launch(kernel: str, x: Array, *arguments: Any) -> None:
    rows, classes = x.shape
    warps = row_warps(classes)
    blocks = -(-rows * 32 * warps // ROW_THREADS)
    launch(loss_source(warps, kind(x)), kernel, blocks, ROW_THREADS, *arguments)


def losses(x: Array, labels: Array, smoothing: float, xp: Any) -> tuple[Array, Array]:
    """Losses (N,), and what the gradient needs of each row.

    x is float32 or bfloat16 (N, C), C-contiguous, not empty; labels are int64 (N,) in 0..C - 1.
    """
    out = xp.empty(len(x), dtype=np.float32)
    kept = xp.empty((len(x), 2), dtype=np.float32)
    numbers = np.float32(smoothing), *map(np.int64, x.shape)
    _launch("losses", x, x, labels, out, kept, *numbers)
    return out, kept


def grad(weight: Array, x: Array, labels: Array, kept: Array, smoothing: float, xp: Any) -> Array:
    """Gradient in x; ``weight`` is float32 of 1 or N values, the rest as of `losses`."""
    out = xp.empty_like(x)
    numbers = np.float32(smoothing), *map(np.int64, (weight.size > 1, *x.shape))
    _launch("losses_grad", x, weight, x, labels, kept, out, *numbers)
    return out


def ranks(x: Array, labels: Array, xp: Any) -> Array:
    """Classes before each row's label, int32 (N,); arguments as of `losses`."""
    out = xp.empty(len(x), dtype=np.int32)
    _launch("ranks", x, x, labels, out, *map(np.int64, x.shape))
    return out
