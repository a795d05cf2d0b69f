"""RMSNorm or LayerNorm and the quantizers of what it gives, in one reading of the input.

A cluster of blocks shares some rows, each with its columns in shared memory: sums go round through
the cluster, and what is normalized, rounded once to bfloat16, is encoded along its rows and down
its columns without having been written. The norm's sums have an order of their own, so that it may
differ from `extensor_cuda.kernels.norm` in the last bits; within the same bounds.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np

from extensor.quant.array import QuantArray
from extensor_cuda.counts import Counters
from extensor_cuda.jit import Source
from extensor_cuda.kernels import hopper
from extensor_cuda.kernels import quantize as kernels
from extensor_cuda.kernels.pair import PairPlan
from extensor_cuda.kernels.quantize import SLOTS

__all__ = ["norm_quantize", "norm_quantize_source", "reason"]

Array = Any

_INPUTS = {"float32": 4, "bfloat16": 2}
_TILE, _TALL, _WARP, _STAGES = 65536, 32, 512, 3  # bytes; rows of blocks down; columns of a warp
_ROW_THREADS, _COLUMN_THREADS = (256, 512), 256  # both directions, rows alone
_MOST_CLUSTER = 16


class _Norm(ctypes.Structure):
    """As in normed.cuh."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("codes", ctypes.c_void_p * 2),
        ("scales", ctypes.c_void_p * 2),
        ("counters", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("mean", ctypes.c_void_p),
        ("rstd", ctypes.c_void_p),
        ("rows", ctypes.c_longlong),
        ("columns", ctypes.c_longlong),
        ("eps", ctypes.c_float),
    )


def _tile(columns: int, dtype: str, only_rows: bool) -> tuple[int, int, int]:
    """Rows and columns of a block, and blocks of a cluster: as few idle columns as can be."""
    size = _TILE // _INPUTS[dtype]
    widest = size // (4 if only_rows else _TALL)
    wides = [_WARP << i for i in range(8) if _WARP << i <= widest]
    wide = min(wides, key=lambda n: (-(-columns // n) > _MOST_CLUSTER, -(-columns // n) * n, -n))
    return size // wide if only_rows else _TALL, wide, -(-columns // wide)


def _threads(only_rows: bool) -> int:
    """Of a block."""
    return _ROW_THREADS[only_rows] + (0 if only_rows else _COLUMN_THREADS)


def reason(
    x: Array, weight: Array, bias: Array | None, plan: PairPlan, capability: str
) -> str | None:
    """Why there is no such kernel; None if there is.

    Args:
        x: (rows, columns).
        weight: one factor for each column.
        bias: one term for each column, or None.
        plan: of x's shape.
        capability: compute capability of the GPU, such as "90".
    """
    if capability != "90":
        return f"compute capability {capability}; blocks share memory on 90 alone"
    if x.dtype.name not in _INPUTS or any(
        a is not None and a.dtype != np.float32 for a in (weight, bias)
    ):
        return f"{x.dtype} rows, {weight.dtype} weights; wanted float32 or bfloat16, under float32"
    columns = x.shape[1]
    vectors = [a for a in (weight, bias) if a is not None]
    if not x.size or any(a.shape != (columns,) for a in vectors):
        return f"x {x.shape} under {[a.shape for a in vectors]}; wanted ({columns},), nothing empty"
    each, most = (
        16 // _INPUTS[x.dtype.name],
        _MOST_CLUSTER * _TILE // _TALL // _INPUTS[x.dtype.name],
    )
    if columns % each or columns > most:
        return f"rows of {columns} {x.dtype}; wanted a multiple of {each}, up to {most}"
    if any(not a.flags.c_contiguous or a.data.ptr % 16 for a in (x, *vectors)):
        return "arrays that are not contiguous from a multiple of 16 bytes on"
    spec = plan.along.spec
    if plan.along.activation:
        return f"{plan.along.activation} of what is normalized"
    if plan.along.needs_tensor:
        return f"{spec.format} needs the largest of the whole tensor first"
    if plan.along.block > _TALL or kernels.columns_of(plan.down, "bfloat16") != 4:
        return "blocks above 32, or random bits: a thread has too many values"
    return None


@lru_cache(maxsize=256)
def norm_quantize_source(
    plan: PairPlan, dtype: str, centred: bool, biased: bool, only_rows: bool, stats: bool
) -> Source:
    """The program for input of a dtype."""
    rows, columns = plan.along.shape
    tall, wide, cluster = _tile(columns, dtype, only_rows)
    extra = {
        "BOTH": 1,
        "TALL": tall,
        "WIDE": wide,
        "COLUMNS": 4,
        "THREADS": _threads(only_rows),
        "ROW_THREADS": _ROW_THREADS[only_rows],
        "STAGES": _STAGES,
        "NORM": 2 if centred else 1,
        "BIAS": int(biased),
        "XIN": list(_INPUTS).index(dtype),
        "ONLY_ROWS": int(only_rows),
        "CLUSTER": cluster,
        "CLUSTER_DIMS": f"__cluster_dims__({cluster}, 1, 1)" if cluster > 1 else "",
    }
    whole = rows % tall == 0 and columns % wide == 0
    return kernels.quantize_source(
        plan.along, "bfloat16", "codes", whole, stats, tuple(extra.items())
    )


def norm_quantize(
    x: Array,
    weight: Array,
    bias: Array | None,
    eps: float,
    plan: PairPlan,
    xp: Any,
    *,
    centred: bool = False,
    only_rows: bool = False,
    stats: bool = True,
) -> tuple[QuantArray, QuantArray | None, Array | None, Array, Counters | None]:
    """Rows and columns of the norm of x, quantized, its means, rstds and counters; does not wait.

    Args:
        x: C-contiguous (rows, columns) that `reason` accepts.
        weight: float32 (columns,).
        bias: likewise, or None.
        eps: added to the variance.
        plan: from `extensor_cuda.kernels.pair.pair_plan`.
        xp: cupy.
        centred: LayerNorm, else RMSNorm.
        only_rows: leave the columns out.
        stats: count saturated and flushed values.
    """
    rows, columns = x.shape
    made = []
    for side in (plan.along,) if only_rows else (plan.along, plan.down):
        codes, scales = (xp.empty(s, dtype=xp.uint8) for s in (side.codes_shape, side.scales_shape))
        made.append(QuantArray(codes, scales, side.spec, side.shape))
    rstd = xp.empty((rows, 1), dtype=np.float32)
    mean = xp.empty((rows, 1), dtype=np.float32) if centred else None
    counters = Counters(4 * SLOTS, xp) if stats else None
    tall, wide, cluster = _tile(columns, x.dtype.name, only_rows)
    terms = -(-cluster * wide // _WARP // 32) * 32  # as in normed.cuh, of each sum
    shared = _STAGES * (_TILE + 16) + 8 * tall * terms * (1 + centred) + 32
    sides = (made[0], made[-1])
    given = _Norm(
        x.data.ptr,
        tuple(q.codes.data.ptr for q in sides),
        tuple(q.scales.data.ptr for q in sides),
        None if counters is None else counters.array.data.ptr,
        *(None if a is None else a.data.ptr for a in (weight, bias, mean, rstd)),
        rows,
        columns,
        eps,
    )
    source = norm_quantize_source(plan, x.dtype.name, centred, bias is not None, only_rows, stats)
    device = xp.cuda.runtime.getDevice()
    function, _ = hopper.load(source, "quantize_normed", shared, device)
    threads = _threads(only_rows)
    most = hopper.clusters(function, cluster, threads, shared, device)
    grid = min(-(-rows // tall), most) * cluster
    hopper.launch(function, grid, threads, shared, (), given)
    return made[0], None if only_rows else made[1], mean, rstd, counters
