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

from extensor_cuda.kernels.nn.elementwise import KINDS, kind
from extensor_cuda.kernels.nn.sums import column_sums
from extensor_cuda.runtime import driver
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["MOST", "grad", "norm", "norm_source"]

Array = Any
MOST = 8192
"""The longest row whose values fit the registers of a block."""
_THREADS = 256
_ALONE = 1024  # up to here a warp has a row
_BLOCKS_EACH = 4  # of the gradient, per multiprocessor: each leaves partial sums


def _warps(length: int) -> int:
    return 1 if length <= _ALONE else 8


@lru_cache(maxsize=256)
def norm_source(
    length: int, centred: bool, narrow: int = 0, given: int = 0, adds: bool = False
) -> Source:
    """The program for rows of one length: kinds of results and their gradients, and of x.

    ``adds``: the gradient in x is added to another.
    """
    macros = {"NN_LENGTH": length, "NN_WARPS": _warps(length), "NN_CENTRED": int(centred)}
    macros |= {"NN_OUT": narrow, "NN_IN": given, "NN_ADDS": int(adds)}
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

    Args:
        x: float32 or bfloat16 (..., *weight.shape), C-contiguous, not empty.
        weight: float32, up to `MOST` values; twice as many where no gradient is asked for.
        bias: likewise; None of RMSNorm.
        eps: added to the variance.
        centred: LayerNorm, else RMSNorm.
        xp: cupy.
        narrow: round the result to bfloat16, once.
    """
    length = weight.size
    rows = x.size // length
    shape = (*x.shape[: x.ndim - weight.ndim], *(1,) * weight.ndim)
    out, rstd = xp.empty(x.shape, dtype=KINDS[narrow]), xp.empty(shape, dtype=np.float32)
    mean = xp.empty(shape, dtype=np.float32) if centred else None
    null = np.uint64(0)
    launch(
        norm_source(length, centred, int(narrow), kind(x)),
        "normalize",
        -(-rows // (_THREADS // 32 // _warps(length))),
        _THREADS,
        x,
        weight,
        null if bias is None else bias,
        out,
        null if mean is None else mean,
        rstd,
        np.float32(eps),
        np.int64(rows),
    )
    return out, mean, rstd


def grad(
    g: Array,
    x: Array,
    weight: Array,
    mean: Array | None,
    rstd: Array,
    xp: Any,
    addend: Array | None = None,
) -> tuple[Array, Array, Array | None]:
    """Gradients in x, weight and bias (None of RMSNorm); g may be bfloat16, else as of `norm`.

    An ``addend``, float32 of x's shape, is added to the first.
    """
    length, centred = weight.size, mean is not None
    rows, together = x.size // length, _THREADS // 32 // _warps(length)
    count = driver.multiprocessors(xp.cuda.runtime.getDevice()) * _BLOCKS_EACH
    blocks = min(-(-rows // together), count)
    gx = xp.empty_like(x)
    partial = xp.empty((2 if centred else 1, blocks, length), dtype=np.float32)
    null = np.uint64(0)
    launch(
        norm_source(length, centred, kind(g), adds=addend is not None),
        "normalize_grad",
        blocks,
        _THREADS,
        g,
        x,
        weight,
        null if mean is None else mean,
        rstd,
        null if addend is None else xp.ascontiguousarray(addend),
        gx,
        partial[0],
        partial[1] if centred else null,
        np.int64(rows),
    )
    gw, *gb = (column_sums(partial[i], xp).reshape(weight.shape) for i in range(len(partial)))
    return gx, gw, gb[0] if gb else None
