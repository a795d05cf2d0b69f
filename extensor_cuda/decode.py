"""Products of few rows of activations with packed weights, on tensor cores of sm_80 and later.

Four programs, three of them for Hopper alone. E2M1 weights: `w4a16_sm90_ring.cu` for 3 to 16 tokens
and more than 4224 rows of weights (x passes by in a ring), `w4a16_sm90_resident.cu` for fewer of
either (x lies in shared memory). `w4w8a16_sm90_wgmma.cu` (wgmma with weights from registers) for
more tokens, and for INT4 and INT8 in rows, or groups of multiples of 128. `w4w8a16_sm80.cu` takes
all else.

Weights are read once, packed, and become bfloat16 on the way to the tensor core, exactly: elements
of MXFP4 and NVFP4 times their scales, codes of INT4 and INT8 less their zero points (whose sums are
multiplied by the float scales). float32 activations are three bfloat16 numbers each, exactly. Sums
are float32 that is cut (K 2**-22 S, as in `extensor_cuda.gemm`); those of parts of K are added
in order, so that a result depends on shapes and values alone. With S = sum |x| |w| over K and n
groups of float scales (of 128 elements, where they have more), the result is off by up to

    (K 2**-22 + (parts + n + 8) 2**-24) S

plus what underflows: of float32 activations 2**-133 times the weights, and 2**-118 a term; and up
to 2**-123 of x a term under E8M0 scales below 2**-117.
"""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from extensor.quant.array import QuantArray, tile_extent
from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.weight_only import (
    w4a16_sm90_resident,
    w4a16_sm90_ring,
    w4w8a16_sm90_wgmma,
)
from extensor_cuda.kernels.weight_only.program import FLOATS, PARTS, is_scaled, program
from extensor_cuda.runtime import driver
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = [
    "MOST_TOKENS",
    "decode_source",
    "product",
    "reason",
    "stretches",
]

Array = Any

MOST_TOKENS = 64
"""Rows of bfloat16 activations, or three times the rows of float32 ones."""
_ROWS, _THREADS, _BLOCKS = 64, 128, 1056  # as in w4w8a16_sm80.cu; blocks that fill a large GPU
# By tiles of 8 tokens: elements of K in shared memory, segments copied ahead, blocks of an SM.
_PIECE = {1: 512, 2: 512, 4: 256, 8: 256}
_DEPTH = {1: 4, 2: 4, 4: 4, 8: 2}
_RESIDENT = {1: 8, 2: 6, 4: 3, 8: 2}
_SOURCE = Path(__file__).parent / "kernels" / "weight_only" / "w4w8a16_sm80.cu"


def reason(x: Array, w: QuantArray, capability: str) -> str | None:
    """Why there is no such product of x (M, K) and w (N, K); None if there is.

    Args:
        x: activations.
        w: weights.
        capability: compute capability of the GPU, such as "90".
    """
    if int(capability) < 80:
        return f"compute capability {capability}; the kernel is for 80 and later"
    if x.ndim != 2 or len(w.shape) != 2 or w.spec.axis != 1:
        return "not two matrices, the weights blocked along the last axis"
    if x.dtype.name not in FLOATS:
        return f"{x.dtype} activations; the kernel takes float32 and bfloat16"
    tokens = x.shape[0] * PARTS[x.dtype.name]
    if not 1 <= tokens <= MOST_TOKENS:
        return f"{x.shape[0]} rows of {x.dtype}; the kernel takes 1 to {MOST_TOKENS} tokens"
    if 0 in w.shape or max(*w.shape, x.shape[1]) > 1 << 30:
        return f"weights of shape {w.shape}"
    return _weight_reason(w)


def _weight_reason(w: QuantArray) -> str | None:
    spec, element = w.spec, w.spec.row.element
    if spec.row.outliers or spec.transform:
        return "the outlier codec" if spec.row.outliers else "a Hadamard transform to undo"
    rows, length = tile_extent(spec, w.shape)
    if rows > 1 and not (spec.tile == "tensor" or rows >= w.shape[0]):
        return f"tiles {spec.tile}"
    if not spec.has_float_scales:
        if element.bits != 4 or length not in (16, 32, 64, 128):
            return f"{spec.format} in blocks of {length}; the kernel has E2M1 in 16, 32, 64, 128"
        return None if rows == 1 else f"tiles {spec.tile}"
    if element.is_float:
        return f"{element.name} under float scales"
    if length < w.shape[1] and length % 32:
        return f"groups of {length}; the kernel has multiples of 32"
    return None


def stretches(lines: int, columns: int, segment: int) -> tuple[int, int]:
    """How many stretches K is cut into, and the elements of one, for N = lines and K = columns."""
    segments = -(-columns // segment)
    wanted = max(_BLOCKS // -(-lines // _ROWS), 1)
    each = -(-segments // min(wanted, segments))
    return -(-segments // each), each * segment


def _lane(spec: QuantSpec, shape: tuple[int, ...]) -> int:
    """Neighbouring elements of a row in a lane: 16 bytes, if four lanes' share a group's scale."""
    widest = 128 // spec.row.element.bits
    _, length = tile_extent(spec, shape)
    if not is_scaled(spec) or length >= shape[1]:
        return widest
    return next(n for n in (32, 16, 8) if n <= widest and length % (4 * n) == 0)


@lru_cache(maxsize=1024)
def _source(spec: QuantSpec, shape: tuple[int, ...], rows: int, dtype: str, out: str) -> Source:
    tiles = next(n for n in (1, 2, 4, 8) if 8 * n >= rows * PARTS[dtype])
    length, lane = tile_extent(spec, shape)[1], _lane(spec, shape)
    return program(
        _SOURCE, spec, shape, dtype, out,
        WEIGHT_ONLY_GROUP=length // (4 * lane) if is_scaled(spec) and length < shape[1] else 0,
        WEIGHT_ONLY_LANE_ELEMENTS=lane,
        WEIGHT_ONLY_X_ELEMENTS=_PIECE[tiles],
        WEIGHT_ONLY_DEPTH=_DEPTH[tiles],
        WEIGHT_ONLY_TILES=tiles,
        WEIGHT_ONLY_MIN_CTAS=_RESIDENT[tiles],
    )  # fmt: skip


def decode_source(w: QuantArray, rows: int, dtype: str, out: str) -> Source:
    """The program for weights and that many rows of activations of a dtype."""
    return _source(w.spec, w.shape, rows, dtype, out)


@lru_cache(maxsize=256)
def _counters(xp: Any, device: int, stream: int, count: int) -> Array:
    """Zeros that each launch leaves as it found them; one stream's launches follow each other."""
    return xp.zeros(count, dtype=np.uint32)


def _zeros(xp: Any, count: int) -> Array:
    """Counters for one launch; those of a graph are its own, and set to zero by it."""
    runtime, stream = xp.cuda.runtime, xp.cuda.get_current_stream().ptr
    if runtime.streamIsCapturing(stream):
        return xp.zeros(count, dtype=np.uint32)
    return _counters(xp, runtime.getDevice(), stream, count)


def product(x: Array, w: QuantArray, out_dtype: str, xp: Any) -> Array:
    """X w^T of operands that `reason` covers, float32 or bfloat16 (M, N); does not wait.

    Args:
        x: (M, K).
        w: (N, K), blocked along K.
        out_dtype: "float32" or "bfloat16".
        xp: cupy.
    """
    x, codes, scales = (xp.ascontiguousarray(a) for a in (x, w.codes, w.scales))
    x, codes, scales = (a.copy() if a.data.ptr % 16 else a for a in (x, codes, scales))
    out = xp.empty(
        (len(x), w.shape[0]), dtype=ml_dtypes.bfloat16 if out_dtype == "bfloat16" else "float32"
    )
    on_hopper = driver.capability(xp.cuda.runtime.getDevice()) == "90"
    tokens, zeros = len(x) * PARTS[x.dtype.name], partial(_zeros, xp)
    if on_hopper and w4a16_sm90_ring.taken(w, tokens):
        w4a16_sm90_ring.product(x, w, codes, scales, out, zeros, xp)
    elif on_hopper and w4a16_sm90_resident.taken(w, tokens):
        w4a16_sm90_resident.product(x, w, codes, scales, out, zeros, xp)
    elif on_hopper and w4w8a16_sm90_wgmma.taken(w):
        w4w8a16_sm90_wgmma.product(x, w, codes, scales, out, zeros, xp)
    else:
        _launch(x, w, codes, scales, out, xp)
    return out


def _launch(x: Array, w: QuantArray, codes: Array, scales: Array, out: Array, xp: Any) -> None:
    (rows, columns), lines = x.shape, w.shape[0]
    source = decode_source(w, rows, x.dtype.name, out.dtype.name)
    macros = dict(source.macros)
    splits, stretch = stretches(lines, columns, 4 * int(macros["WEIGHT_ONLY_LANE_ELEMENTS"]))
    count = -(-lines // _ROWS)
    zeros = w.zero_points
    if macros["CODEC_FLOAT_SCALES"] == "1" and len(scales) < lines:  # one scale for all rows
        scales = scales.repeat(lines, axis=0)
        zeros = None if zeros is None else zeros.repeat(lines, axis=0)
    null = np.uint64(0)
    sums = xp.empty((splits, rows * int(macros["WEIGHT_ONLY_X_PARTS"]), lines), dtype=np.float32)
    launch(
        source,
        "decode_product",
        count * splits,
        _THREADS,
        x,
        codes,
        scales,
        null if zeros is None else xp.ascontiguousarray(zeros),
        null if w.tensor_scale is None else w.tensor_scale,
        sums,
        _zeros(xp, count),
        out,
        np.int32(rows),
        np.int32(lines),
        np.int32(columns),
        *(np.int64(n) for n in (codes.shape[1], scales.shape[1])),
        np.int32(splits),
        np.int32(stretch),
    )
