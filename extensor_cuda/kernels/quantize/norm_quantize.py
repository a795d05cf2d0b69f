"""RMSNorm or LayerNorm and the quantizers of what it gives, in one reading of the input.

A group of blocks shares some rows, each with its columns in shared memory: sums go round through
the cluster that it is, or in both directions through global memory, since clusters leave
multiprocessors idle. What is normalized, rounded once to bfloat16, is encoded along its rows and
down its columns without having been written. The norm's sums have orders of their own: those of
rows alone, of both directions and of `extensor_cuda.kernels.nn.norm` may differ in the last bits.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.backends.unsupported import Unsupported
from extensor.quant.array import QuantArray
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.kernels.quantize.quantize import SLOTS
from extensor_cuda.kernels.quantize.rowwise_columnwise import RowColumnPlan
from extensor_cuda.runtime import driver
from extensor_cuda.runtime.c_struct import structure
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.counters import Counters

__all__ = ["Norm", "norm_quantize", "norm_quantize_source", "unsupported"]

Array = Any

_INPUTS = {"float32": 4, "bfloat16": 2}
_TILE_ROWS, _LINE, _MAX_GROUP = 32, 1024, 32  # rows of blocks down; bytes of a block's; blocks
_SLICE, _MAX_CLUSTER = 512, 16  # rows alone: columns of a warp, blocks
# Both directions, rows alone: bytes of a tile, stages, threads.
_TILE, _STAGES, _ROW_THREADS = (32768, 65536), (6, 3), (256, 512)
_COLUMN_THREADS, _LEAD = 256, 3  # tiles that sums are ahead


@dataclass(frozen=True, eq=False)
class Norm:
    """The norm of rows.

    Attributes:
        weight: float32 (columns,), each column's factor.
        bias: likewise, each column's term; or None.
        eps: added to the variance.
        centred: LayerNorm, else RMSNorm.
    """

    weight: Array
    bias: Array | None = None
    eps: float = 1e-5
    centred: bool = False


@cache
def _parameters() -> type[ctypes.Structure]:
    """The kernel's parameter struct."""
    return structure(Path(__file__).with_name("norm.cuh").read_text(encoding="utf-8"), "Norm")


def _tile(columns: int, dtype: str, only_rows: bool) -> tuple[int, int, int]:
    """Rows and columns of a block, and how many share rows: as few idle columns as can be."""
    if not only_rows:
        tile_columns = _LINE // _INPUTS[dtype]
        return _TILE_ROWS, tile_columns, -(-columns // tile_columns)
    size = _TILE[only_rows] // _INPUTS[dtype]
    wides = [_SLICE << i for i in range(8) if _SLICE << i <= size // 4]
    tile_columns = min(
        wides, key=lambda n: (-(-columns // n) > _MAX_CLUSTER, -(-columns // n) * n, -n)
    )
    return size // tile_columns, tile_columns, -(-columns // tile_columns)


def _threads(only_rows: bool) -> int:
    """Of a block; in both directions the last warp waits for sums."""
    return _ROW_THREADS[only_rows] + (0 if only_rows else _COLUMN_THREADS + 32)


def unsupported(x: Array, norm: Norm, plan: RowColumnPlan, capability: str) -> Unsupported | None:
    """Why there is no such kernel on a GPU of this compute capability; None if there is."""
    weight, bias = norm.weight, norm.bias
    if capability != "90":
        return Unsupported(f"compute capability {capability}; blocks share memory on 90 alone")
    if x.dtype.name not in _INPUTS or any(
        a is not None and a.dtype != np.float32 for a in (weight, bias)
    ):
        return Unsupported(
            f"{x.dtype} rows, {weight.dtype} weights; expected float32 or bfloat16, under float32"
        )
    columns = x.shape[1]
    vectors = [a for a in (weight, bias) if a is not None]
    if not x.size or any(a.shape != (columns,) for a in vectors):
        return Unsupported(
            f"x {x.shape} under {[a.shape for a in vectors]}; expected ({columns},), nothing empty"
        )
    each, most = (n // _INPUTS[x.dtype.name] for n in (16, _MAX_GROUP * _LINE))
    if columns % each or columns > most:
        return Unsupported(
            f"rows of {columns} {x.dtype}; expected a multiple of {each}, up to {most}"
        )
    if any(not a.flags.c_contiguous or a.data.ptr % 16 for a in (x, *vectors)):
        return Unsupported("arrays that are not contiguous from a multiple of 16 bytes on")
    spec = plan.rowwise.spec
    if plan.rowwise.activation:
        return Unsupported(f"{plan.rowwise.activation} of what is normalized")
    if plan.rowwise.needs_tensor:
        return Unsupported(f"{spec.format} needs the largest of the whole tensor first")
    if plan.rowwise.block > _TILE_ROWS or kernels.columns_of(plan.columnwise, "bfloat16") != 4:
        return Unsupported("blocks above 32, or random bits: a thread has too many values")
    return None


@lru_cache(maxsize=256)
def norm_quantize_source(
    plan: RowColumnPlan, dtype: str, centred: bool, biased: bool, only_rows: bool, stats: bool
) -> Source:
    """The program for input of a dtype."""
    rows, columns = plan.rowwise.shape
    tile_rows, tile_columns, group = _tile(columns, dtype, only_rows)
    extra = {
        "QUANT_ROWWISE_COLUMNWISE": 1,
        "QUANT_CTA_ROWS": tile_rows,
        "QUANT_CTA_COLUMNS": tile_columns,
        "QUANT_THREAD_COLUMNS": 4,
        "CODEC_THREADS": _threads(only_rows),
        "QUANT_ROW_THREADS": _ROW_THREADS[only_rows],
        "QUANT_COLUMN_THREADS": _COLUMN_THREADS,
        "QUANT_STAGES": _STAGES[only_rows],
        "QUANT_NORM_LEAD": _LEAD,
        "QUANT_NORM": 2 if centred else 1,
        "QUANT_NORM_BIAS": int(biased),
        "QUANT_NORM_IN": list(_INPUTS).index(dtype),
        "QUANT_ONLY_ROWWISE": int(only_rows),
        "QUANT_GROUP": group,
        "QUANT_CLUSTER_DIMS": f"__cluster_dims__({group}, 1, 1)" if only_rows and group > 1 else "",
    }
    whole = rows % tile_rows == 0 and columns % tile_columns == 0
    more = tuple(extra.items())
    return kernels.quantize_source(plan.rowwise, "bfloat16", "codes", whole, stats, more)


def norm_quantize(
    x: Array,
    norm: Norm,
    plan: RowColumnPlan,
    xp: Any,
    *,
    only_rows: bool = False,
    stats: bool = True,
) -> tuple[QuantArray, QuantArray | None, Array | None, Array, Counters | None]:
    """Rows and columns of the norm of x, quantized, its means, rstds and counters; does not wait.

    x is C-contiguous (rows, columns) that `unsupported` finds nothing against; the plan is from
    `row_column_plan`. ``only_rows`` leaves the columns out; ``stats`` counts saturated and flushed
    values.
    """
    weight, bias, centred = norm.weight, norm.bias, norm.centred
    rows, columns = x.shape
    sides = (plan.rowwise,) if only_rows else (plan.rowwise, plan.columnwise)
    made = [kernels.empty_array(side, xp) for side in sides]
    rstd = xp.empty((rows, 1), dtype=np.float32)
    mean = xp.empty((rows, 1), dtype=np.float32) if centred else None
    counters = Counters(4 * SLOTS, xp) if stats else None
    tile_rows, tile_columns, group = _tile(columns, x.dtype.name, only_rows)
    device, cooperative = xp.cuda.runtime.getDevice(), group > 1 and not only_rows
    groups, posted = min(-(-rows // tile_rows), driver.multiprocessors(device) // group), None
    # As in norm_rowwise.cuh and norm_rowwise_columnwise.cuh.
    shared = _STAGES[only_rows] * (_TILE[only_rows] + 24)
    if only_rows:
        terms = -(-group * tile_columns // _SLICE // 32) * 32
        shared += 8 * tile_rows * terms * (1 + centred) + 32
    else:
        ring = 2 * _LEAD + 2
        posts = ring * (1 + centred) * group * tile_rows
        shared += (_LEAD + 1) * (4 * tile_rows * (1 + centred) + 8) + 8 * (
            ring + posts * (group == 1)
        )
        posted = xp.zeros(max(1, groups) * posts, dtype=np.uint64) if cooperative else None
    both = made[0], made[-1]
    given = _parameters()(
        x.data.ptr,
        tuple(q.codes.data.ptr for q in both),
        tuple(q.scales.data.ptr for q in both),
        None if counters is None else counters.array.data.ptr,
        None if posted is None else posted.data.ptr,
        *(None if a is None else a.data.ptr for a in (weight, bias, mean, rstd)),
        rows,
        columns,
        norm.eps,
    )
    source = norm_quantize_source(plan, x.dtype.name, centred, bias is not None, only_rows, stats)
    kernel, threads = "quantize_normed" + "_rows" * only_rows, _threads(only_rows)
    function, _ = driver.load(source, kernel, shared, device)
    if only_rows:
        most = driver.active_clusters(function, group, threads, shared, device)
        groups = min(-(-rows // tile_rows), most)
    driver.launch(function, max(1, groups) * group, threads, shared, (), given, cooperative)
    return made[0], None if only_rows else made[1], mean, rstd, counters
