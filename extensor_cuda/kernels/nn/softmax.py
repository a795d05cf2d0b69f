"""Softmax of rows, and attention's rows between its products, one launch each way.

With u = 2**-24, n the length of a row, p the probabilities and d the row's maximum less its values:

    softmax       |error| <= (d + sum p d + n + 16) u p + 2**-126
    softmax_grad  |error| <= (n + 4) u p (|g| + sum |g p|) + 2**-126

and of bfloat16 rows that, rounded to bfloat16 once.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor_cuda.kernels.nn.elementwise import ROW_THREADS, kind, row_warps
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["MAX_LENGTH", "attend", "attend_grad", "softmax", "softmax_grad", "softmax_source"]

Array = Any
MAX_LENGTH = 8192
"""The longest row whose values fit the registers of a block."""


@lru_cache(maxsize=64)
def softmax_source(length: int, values: int = 0) -> Source:
    """The program for rows of up to so many values of a kind."""
    warps = row_warps(length)
    each = 1 << (-(-length // (32 * warps)) - 1).bit_length()
    macros = {"NN_WARPS": warps, "NN_THREAD_VALUES": each, "NN_IN": values}
    return Source.read(Path(__file__).parent / "softmax.cu", macros)


def _launch(kernel: str, rows: int, length: int, *arguments: Any) -> None:
    source = softmax_source(length, kind(arguments[0]))
    blocks = -(-rows * 32 * row_warps(length) // ROW_THREADS)
    launch(source, kernel, blocks, ROW_THREADS, *arguments, np.int64(rows), np.int64(length))


def softmax(x: Array, xp: Any) -> Array:
    """Softmax along the last axis, of 1 to `MAX_LENGTH` values, of C-contiguous x.

    x is float32 or bfloat16.
    """
    out = xp.empty_like(x)
    _launch("softmax", x.size // x.shape[-1], x.shape[-1], x, out)
    return out


def softmax_grad(g: Array, out: Array, xp: Any) -> Array:
    """Gradient of softmax, whose output is ``out``; arrays as there."""
    gx = xp.empty_like(out)
    _launch("softmax_grad", out.size // out.shape[-1], out.shape[-1], g, out, gx)
    return gx


def attend(scores: Array, scale: float, causal: bool, xp: Any) -> Array:
    """Products in place to probabilities; (..., T, 2): rows' largest scores and inverse sums.

    Scores are q k^T, float32 (..., T, S), C-contiguous; causal, query t sees the keys up to
    t + S - T.
    """
    stats = xp.empty((*scores.shape[:-1], 2), dtype=np.float32)
    queries, keys = scores.shape[-2:]
    hidden = np.int64(queries if causal else 0)
    rows = scores.size // keys
    _launch("attend", rows, keys, scores, stats, np.float32(scale), hidden)
    return stats


def attend_grad(
    scores: Array, d: Array, stats: Array, row_sums: Array, scale: float, causal: bool
) -> None:
    """Products in place to probabilities, and d = g v^T in place to the gradient of q k^T.

    ``stats`` are from `attend`, C-contiguous; ``row_sums``, (..., T, 1), are the sums over rows of
    g times the output.
    """
    queries, keys = scores.shape[-2:]
    hidden = np.int64(queries if causal else 0)
    rows = scores.size // keys
    _launch("attend_grad", rows, keys, scores, d, stats, row_sums, np.float32(scale), hidden)
