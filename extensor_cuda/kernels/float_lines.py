"""FP8, INT8 and INT4 under float scales in blocks along rows: quantized in one reading.

Groups, channels, tensors and tiles whose rows are multiples of 16
(`kernels/float_lines.cu`); a tensor's own scale takes a reading before. `floats` covers the rest.
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
from extensor_cuda.counts import Counters
from extensor_cuda.jit import Source, launch
from extensor_cuda.kernels.quantize import CHUNK, INPUTS, THREADS, encoding_macros
from extensor_cuda.recording import clock_of

__all__ = ["Lines", "float_macros", "largest", "lines_of", "lines_source", "quantize"]

Array = Any

_SOURCE = Path(__file__).parent / "float_lines.cu"
_KEPT = 4  # chunks that a thread holds
_FAR = 8192  # chunks of a block of values beyond which its threads are too few
_MOST_LANES = 32


@dataclass(frozen=True)
class Lines:
    """Blocks of values along rows, in chunks of 16.

    Attributes:
        spec: resolved.
        kernel: of `float_lines.cu`.
        chunks: of the array.
        blocks: how many there are.
        sizes: of "quantize_blocks": rows, columns, a block's, and blocks down and across.
        threads: of a block of threads.
        kept: chunks that a thread holds.
    """

    spec: QuantSpec
    kernel: str
    chunks: int
    blocks: int
    sizes: tuple[int, ...]
    threads: int
    kept: int


@lru_cache(maxsize=4096)
def lines_of(
    spec: QuantSpec,
    sizes: tuple[int, int, int, int],
    each: tuple[int, int, int, int],
    grid: tuple[int, int, int, int],
) -> Lines | None:
    """How (outer, rows, 1, columns) elements in such blocks are taken; None: not by these kernels.

    Args:
        spec: resolved, under plain float scales.
        sizes: of the array, of which columns are contiguous.
        each: of a block.
        grid: blocks along each.
    """
    _, rows, inner, columns = sizes
    tall, wide, blocks = each[1], each[3], math.prod(grid)
    nearest = spec.rounding == "nearest_even" and spec.ties == "even"
    if not (spec.symmetric or nearest) or inner > 1 or columns % CHUNK or wide % CHUNK:
        return None
    chunks, lanes = math.prod(sizes) // CHUNK, wide // CHUNK
    if each == sizes:
        return Lines(spec, "quantize_all", chunks, 1, (chunks,), THREADS, _KEPT)
    neat = lanes <= _MOST_LANES and lanes & (lanes - 1) == 0 and columns % wide == 0
    if tall == 1 and neat:
        kept = 1 if spec.rounding == "stochastic" else _KEPT
        return Lines(spec, "quantize_groups", chunks, blocks, (chunks,), THREADS, kept)
    most = min(tall, rows) * min(lanes, columns // CHUNK)
    if each[0] > 1 or most > _FAR:
        return None
    threads = min(THREADS, max(32, 1 << (most - 1).bit_length()))
    numbers = rows, columns // CHUNK, tall, lanes, grid[1], grid[3]
    return Lines(
        spec, "quantize_blocks", chunks, blocks, numbers, threads, min(_KEPT, -(-most // threads))
    )


@lru_cache(maxsize=1024)
def lines_source(lines: Lines, dtype: str) -> Source:
    """The program for input of a dtype."""
    macros = float_macros(lines.spec, dtype) | {"THREADS": lines.threads, "KEPT": lines.kept}
    if lines.kernel == "quantize_groups":
        macros["BLOCK"] = lines.chunks // lines.blocks * CHUNK
    return Source.read(_SOURCE, macros)


def float_macros(spec: QuantSpec, dtype: str) -> dict[str, object]:
    """How values of a dtype become codes under float scales, for a resolved spec."""
    return encoding_macros(spec) | {
        "IN": INPUTS.index(dtype),
        "OUT": 0,
        "STATS": 1,
        "ACTIVATE": 0,
        "UE4M3": 0,
        "NEEDS_TENSOR": 0,
        "HADAMARD": 0,
        "BLOCK": CHUNK,
        "HALF": int(spec.scale_name == "float16"),
        "RULE_ONE": int(spec.rule == "one"),
        "ZEROS": int(not spec.symmetric),
    }


def largest(x: Array, spec: QuantSpec, xp: Any) -> Array:
    """Of 16 n values, 16-byte aligned, uint32 (2,): bits of the largest magnitude.

    For a spec with zero points those of the largest value above zero, and of that below it.
    """
    most, chunks = xp.zeros(2, dtype=np.uint32), x.size // CHUNK
    source = lines_source(Lines(spec, "quantize_all", 0, 1, (), THREADS, _KEPT), x.dtype.name)
    launch(source, "largest", -(-chunks // (THREADS * _KEPT)), THREADS, x, most, np.int64(chunks))
    return most


def quantize(
    lines: Lines,
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

    Args:
        lines: from `lines_of`.
        x: C-contiguous float32, bfloat16 or float16, from a multiple of 16 bytes on.
        stream: names the random bits, given exactly under stochastic rounding.
        codes: uint8, to be written, from a multiple of 16 bytes on, as x lies.
        scales: float32 or float16, to be written, one for each block.
        counters: of counts.
        xp: cupy.
        zeros: int8, to be written like scales where the spec has zero points.
        most: what `largest` finds, if it is known.
    """
    source = lines_source(lines, x.dtype.name)
    blocks = -(-lines.chunks // (lines.threads * lines.kept))
    if most is None and lines.kernel == "quantize_all":
        most = largest(x, lines.spec, xp)
    words = (0, 0, 0, 0) if stream is None else (*stream.key, *stream.counter_high)
    by_block = lines.kernel == "quantize_blocks"
    number = np.uint32 if by_block else np.int64
    launch(
        source,
        lines.kernel,
        lines.blocks if by_block else blocks,
        lines.threads,
        x,
        codes,
        scales,
        np.uint64(0) if zeros is None else zeros,
        np.uint64(0) if most is None else most,
        counters.array,
        clock_of([stream]),
        *map(np.uint32, words),
        *map(number, lines.sizes),
    )
