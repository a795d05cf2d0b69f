"""RMSNorm or LayerNorm and the quantizers of what it gives, in one reading of the input.

A cluster of blocks shares 32 rows: each sums its columns, the sums go round through the cluster's
shared memory, and what is normalized, rounded once to bfloat16, is encoded along its rows and down
its columns without having been written. The norm's sums have an order of their own, so that it may
differ from `extensor_cuda.kernels.norm` in the last bits; within the same bounds.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from extensor.quant.array import QuantArray
from extensor_cuda.counts import Counters
from extensor_cuda.jit import Source, launch
from extensor_cuda.kernels import quantize as kernels
from extensor_cuda.kernels.pair import PairPlan
from extensor_cuda.kernels.quantize import SLOTS, THREADS

__all__ = ["norm_quantize", "norm_quantize_source", "reason"]

Array = Any

_WIDE, _TALL, _MOST_CLUSTER = 512, 32, 8  # as in both.cuh, of bfloat16
_INPUTS = ("float32", "bfloat16")


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
    rows, columns = x.shape
    most = _WIDE * _MOST_CLUSTER
    if rows % _TALL or columns % _WIDE or columns > most:
        return f"{rows} rows of {columns}; wanted multiples of {_TALL}, of {_WIDE} up to {most}"
    vectors = [a for a in (weight, bias) if a is not None]
    if not x.size or any(a.shape != (columns,) for a in vectors):
        return f"x {x.shape} under {[a.shape for a in vectors]}; wanted ({columns},), nothing empty"
    if any(not a.flags.c_contiguous or a.data.ptr % 16 for a in (x, *vectors)):
        return "arrays that are not contiguous from a multiple of 16 bytes on"
    spec = plan.along.spec
    if plan.along.needs_tensor:
        return f"{spec.format} needs the largest of the whole tensor first"
    if plan.along.block > _TALL or kernels.columns_of(plan.down, "bfloat16") != 4:
        return "blocks above 32, or random bits: a thread has too many values"
    return None


@lru_cache(maxsize=256)
def norm_quantize_source(
    plan: PairPlan, dtype: str, centred: bool, only_rows: bool, stats: bool
) -> Source:
    """The program for input of a dtype."""
    cluster = plan.along.length // _WIDE
    extra = {
        "BOTH": 1,
        "TALL": _TALL,
        "COLUMNS": 4,
        "RESIDENT": 2,
        "NORM": 2 if centred else 1,
        "XIN": _INPUTS.index(dtype),
        "ONLY_ROWS": int(only_rows),
        "CLUSTER": cluster,
        "CLUSTER_DIMS": f"__cluster_dims__({cluster}, 1, 1)" if cluster > 1 else "",
    }
    return kernels.quantize_source(
        plan.along, "bfloat16", "codes", True, stats, tuple(extra.items())
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
    null = np.uint64(0)
    made = []
    for side in (plan.along,) if only_rows else (plan.along, plan.down):
        codes, scales = (xp.empty(s, dtype=xp.uint8) for s in (side.codes_shape, side.scales_shape))
        made.append(QuantArray(codes, scales, side.spec, side.shape))
    rstd = xp.empty((rows, 1), dtype=np.float32)
    mean = xp.empty((rows, 1), dtype=np.float32) if centred else None
    counters = Counters(4 * SLOTS, xp) if stats else None
    parts = [getattr(q, name) for name in ("codes", "scales") for q in (made[0], made[-1])]
    launch(
        norm_quantize_source(plan, x.dtype.name, centred, only_rows, stats),
        "quantize_both",
        rows // _TALL * (columns // _WIDE),
        THREADS,
        x,
        *parts,
        *(null,) * 3,
        null if counters is None else counters.array,
        null,
        *(np.uint32(0),) * 8,
        weight,
        null if bias is None else bias,
        null if mean is None else mean,
        rstd,
        np.float32(eps),
        np.int64(rows),
        np.int64(columns),
    )
    return made[0], None if only_rows else made[1], mean, rstd, counters
