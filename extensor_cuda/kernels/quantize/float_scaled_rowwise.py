"""FP8, INT8 and INT4 under float scales in blocks along rows: quantized in one reading.

Groups, channels, tensors and tiles whose rows are multiples of 16
(`float_scaled_rowwise.cu`); a tensor's own scale takes a reading before. `float_scaled` covers the
rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.quant.spec import QuantSpec
from extensor.random import Stream
from extensor_cuda.kernels.quantize.quantize import CHUNK, INPUTS, THREADS, encoding_macros
from extensor_cuda.runtime.capture import random_arguments
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.counters import Counters
from extensor_cuda.runtime.launch import launch

__all__ = [
    "KERNELS",
    "RowwisePlan",
    "float_macros",
    "largest",
    "quantize",
    "rowwise_plan",
    "source_of",
]

Array = Any

_SOURCE = Path(__file__).parent / "float_scaled_rowwise.cu"
_KEPT = 4  # chunks that a thread holds
_FAR = 8192  # chunks of a block of values beyond which its threads are too few
_MOST_LANES = 32
_GROUPS, _BLOCKS, _ALL = range(3)  # as in float_scaled_rowwise.cu
KERNELS = ("quantize_groups", "quantize_blocks", "quantize_all")


@dataclass(frozen=True)
class RowwisePlan:
    """Blocks of values along rows, in chunks of 16, as a kernel here takes them.

    Attributes:
        spec: resolved.
        way: `_GROUPS`, `_BLOCKS` or `_ALL`.
        block: values that share a scale where they are neighbouring lanes', else those of a lane.
        threads: of a block of threads.
        kept: chunks that a thread holds.
        grid: blocks of threads.
        sizes: chunks; of `_BLOCKS` rows, columns, a block's, and blocks down and across.
    """

    spec: QuantSpec
    way: int
    block: int
    threads: int
    kept: int
    grid: int
    sizes: tuple[int, ...]


@lru_cache(maxsize=4096)
def rowwise_plan(
    spec: QuantSpec,
    sizes: tuple[int, int, int, int],
    each: tuple[int, int, int, int],
    blocks: tuple[int, int, int, int],
) -> RowwisePlan | None:
    """How (outer, rows, 1, columns) elements in such blocks are taken; None: not by these kernels.

    ``sizes`` are the array's, ``each`` a block's, ``blocks`` how many there are along each; the
    spec is resolved, under plain float scales.
    """
    _, rows, inner, columns = sizes
    tall, wide = each[1], each[3]
    nearest = spec.rounding == "nearest_even" and spec.ties == "even"
    if not (spec.symmetric or nearest) or inner > 1 or columns % CHUNK or wide % CHUNK:
        return None
    chunks, lanes = math.prod(sizes) // CHUNK, wide // CHUNK
    if each == sizes:
        grid = -(-chunks // (THREADS * _KEPT))
        return RowwisePlan(spec, _ALL, CHUNK, THREADS, _KEPT, grid, (chunks,))
    neat = lanes <= _MOST_LANES and lanes & (lanes - 1) == 0 and columns % wide == 0
    if tall == 1 and neat:
        kept = 1 if spec.rounding == "stochastic" else _KEPT
        grid = -(-chunks // (THREADS * kept))
        return RowwisePlan(spec, _GROUPS, wide, THREADS, kept, grid, (chunks,))
    most = min(tall, rows) * min(lanes, columns // CHUNK)
    if each[0] > 1 or most > _FAR:
        return None
    threads = min(THREADS, max(32, 1 << (most - 1).bit_length()))
    kept = min(_KEPT, -(-most // threads))
    numbers = rows, columns // CHUNK, tall, lanes, blocks[1], blocks[3]
    return RowwisePlan(spec, _BLOCKS, CHUNK, threads, kept, math.prod(blocks), numbers)


@lru_cache(maxsize=1024)
def _source(
    spec: QuantSpec, dtype: str, way: int = _ALL, block: int = CHUNK, threads: int = THREADS,
    kept: int = _KEPT,
) -> Source:  # fmt: skip
    """The program for input of a dtype; the others are fields of `RowwisePlan`."""
    sizes = {"CODEC_BLOCK": block, "CODEC_THREADS": threads, "QUANT_KEPT_CHUNKS": kept}
    return Source.read(_SOURCE, float_macros(spec, dtype) | sizes | {"QUANT_PATH": way})


def source_of(plan: RowwisePlan, dtype: str) -> Source:
    """The program for blocks that are taken so."""
    return _source(plan.spec, dtype, plan.way, plan.block, plan.threads, plan.kept)


def float_macros(spec: QuantSpec, dtype: str) -> dict[str, object]:
    """How values of a dtype become codes under float scales, for a resolved spec."""
    return encoding_macros(spec) | {
        "CODEC_IN": INPUTS.index(dtype),
        "CODEC_OUT": 0,
        "CODEC_STATS": 1,
        "CODEC_ACTIVATE": 0,
        "CODEC_UE4M3": 0,
        "CODEC_NEEDS_TENSOR": 0,
        "CODEC_HADAMARD": 0,
        "CODEC_BLOCK": CHUNK,
        "CODEC_FLOAT16_SCALES": int(spec.scale_name == "float16"),
        "CODEC_RULE_ONE": int(spec.rule == "one"),
        "CODEC_ZERO_POINTS": int(not spec.symmetric),
    }


def largest(x: Array, spec: QuantSpec, xp: Any) -> Array:
    """Of 16 n values, 16-byte aligned, uint32 (2,): bits of the largest magnitude.

    For a spec with zero points those of the largest value above zero, and of that below it.
    """
    most, chunks = xp.zeros(2, dtype=np.uint32), x.size // CHUNK
    grid = -(-chunks // (THREADS * _KEPT))
    launch(_source(spec, x.dtype.name), "largest", grid, THREADS, x, most, np.int64(chunks))
    return most


def quantize(
    plan: RowwisePlan,
    x: Array,
    stream: Stream | None,
    codes: Array,
    scales: Array,
    counters: Counters,
    xp: Any,
    zeros: Array | None = None,
    most: Array | None = None,
) -> None:
    """Codes, scales and counts, without waiting.

    x is C-contiguous from a multiple of 16 bytes on; codes, written likewise, lie as x does. There
    is a scale for each block, and a zero point (int8) where the spec has them. ``most`` is what
    `largest` finds, if it is known.
    """
    if most is None and plan.way == _ALL:
        most = largest(x, plan.spec, xp)
    arrays = x, codes, scales, zeros, most, counters.array
    numbers = map(np.uint32 if plan.way == _BLOCKS else np.int64, plan.sizes)
    launched = source_of(plan, x.dtype.name), KERNELS[plan.way], plan.grid, plan.threads
    launch(*launched, *arrays, *random_arguments(stream), *numbers)
