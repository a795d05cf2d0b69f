"""LayerNorm and RMSNorm of float32 rows, forward and backward, one launch each.

Every sum is of at most n = length terms in some order (of rows for weight and bias), every other
operation is rounded once, so the bounds are those of `extensor.backends.generic.nn` in float32:
what tests/test_every_kernel.py states for any order of summation.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.quant.array import QuantArray
from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.nn.elementwise import (
    KINDS,
    ROW_THREADS,
    kind,
    row_warps,
    stored_macros,
)
from extensor_cuda.kernels.nn.sums import column_sums
from extensor_cuda.runtime import driver
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["MAX_LENGTH", "add_norm", "grad", "norm", "norm_source"]

Array = Any
MAX_LENGTH = 8192
"""The longest row whose values fit the registers of a block."""
_BLOCKS_EACH = 4  # of the gradient, per multiprocessor: each leaves partial sums


@lru_cache(maxsize=256)
def norm_source(
    length: int,
    centred: bool,
    narrow: int = 0,
    given: int = 0,
    adds: bool = False,
    stored: QuantSpec | None = None,
    weight: int = 0,
) -> Source:
    """The program for rows of one length: kinds of results and their gradients, x and weight.

    ``adds``: the gradient in x is added to another; ``stored``: how it reads x.
    """
    macros = stored_macros(stored) | {
        "NN_LENGTH": length,
        "NN_WARPS": row_warps(length),
        "NN_CENTRED": int(centred),
        "NN_OUT": narrow,
        "NN_IN": given,
        "NN_WEIGHT": weight,
        "NN_ADDS": int(adds),
    }
    return Source.read(Path(__file__).parent / "norm.cu", macros)


def norm(
    x: Array,
    weight: Array,
    bias: Array | None,
    eps: float,
    centred: bool,
    xp: Any,
    narrow: bool = False,
) -> tuple[Array, Array | None, Array]:
    """(x - mean) rstd weight + bias, the mean (None of RMSNorm) and rstd.

    x is float32 or bfloat16 (..., *weight.shape), C-contiguous, not empty, as is RMSNorm's weight.
    LayerNorm's weight and bias are float32. Rows have up to `MAX_LENGTH` values; twice that where
    no gradient is asked for. ``narrow`` rounds the result to bfloat16, once.
    """
    length = weight.size
    rows = x.size // length
    shape = (*x.shape[: x.ndim - weight.ndim], *(1,) * weight.ndim)
    out, rstd = xp.empty(x.shape, dtype=KINDS[narrow]), xp.empty(shape, dtype=np.float32)
    mean = xp.empty(shape, dtype=np.float32) if centred else None
    kinds = {"given": kind(x), "weight": kind(weight)}
    source, blocks = norm_source(length, centred, int(narrow), **kinds), _blocks(rows, length)
    arrays = x, weight, bias, out, mean, rstd, None, None
    numbers = np.float32(eps), np.int64(rows)
    launch(source, "normalize", blocks, ROW_THREADS, *arrays, *numbers)
    return out, mean, rstd


def add_norm(a: Array, b: Array, weight: Array, eps: float, xp: Any) -> tuple[Array, Array]:
    """The sum of arrays of one shape and dtype, rounded to it, and RMSNorm of the sum.

    Limits are those of `norm`; the norm is bfloat16 if both dtypes are.
    """
    length, rows = weight.size, a.size // weight.size
    narrow = int(a.dtype == weight.dtype == KINDS[1])
    total, out = xp.empty(a.shape, dtype=a.dtype), xp.empty(a.shape, dtype=KINDS[narrow])
    source = norm_source(length, False, narrow, given=kind(a), weight=kind(weight))
    arrays = a, weight, None, out, None, xp.empty(rows, dtype=np.float32), b, total
    numbers, blocks = (np.float32(eps), np.int64(rows)), _blocks(rows, length)
    launch(source, "normalize", blocks, ROW_THREADS, *arrays, *numbers)
    return total, out


def _blocks(rows: int, length: int) -> int:
    return -(-rows * 32 * row_warps(length) // ROW_THREADS)


def grad(
    g: Array,
    x: Array | QuantArray,
    weight: Array,
    mean: Array | None,
    rstd: Array,
    xp: Any,
    addend: Array | None = None,
) -> tuple[Array, Array, Array | None]:
    """Gradients in x, weight and bias (None of RMSNorm); g may be bfloat16, else as of `norm`.

    An ``addend``, float32 of x's shape, is added to the first. x may be in flat blocks, as
    `extensor_cuda.kernels.nn.elementwise.reads_stored` says.
    """
    length, centred = weight.size, mean is not None
    rows = g.size // length
    count = driver.multiprocessors(xp.cuda.runtime.getDevice()) * _BLOCKS_EACH
    blocks = min(_blocks(rows, length), count)
    gx = xp.empty(g.shape, dtype=np.float32)
    partial = xp.empty((2 if centred else 1, blocks, length), dtype=np.float32)
    spec = x.spec if isinstance(x, QuantArray) else None
    given = (x.codes, x.scales) if isinstance(x, QuantArray) else (x, None)
    source = norm_source(length, centred, kind(g), adds=addend is not None, stored=spec)
    addend = None if addend is None else xp.ascontiguousarray(addend)
    sums = partial[0], partial[1] if centred else None
    arrays = g, *given, weight, mean, rstd, addend, gx, *sums
    launch(source, "normalize_grad", blocks, ROW_THREADS, *arrays, np.int64(rows))
    gw, *gb = (column_sums(partial[i], xp).reshape(weight.shape) for i in range(len(partial)))
    return gx, gw, gb[0] if gb else None
