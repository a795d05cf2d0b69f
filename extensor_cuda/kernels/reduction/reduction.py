"""Gradients as integers under a block's exponent on the GPU, to the generic methods' bytes.

A float32 array is flat, C-contiguous and in whole blocks of 32 values. `pack` reads a value once
and writes what travels; `unpack` reads what came and writes the mean.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.backends.protocol.reduction import PeerRows
from extensor.random import Stream
from extensor_cuda.runtime.capture import random_arguments
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = [
    "add_limbs", "block_max", "fixed_point", "fixed_point_mean", "limb_total", "pack", "repack",
    "source", "unpack",
]  # fmt: skip

Array = Any
Rows = Array | PeerRows
_THREADS, _EACH, _RUN, _BLOCK = 256, 4, 8, 32  # as in reduction.cu


@cache
def source(bits: int) -> Source:
    """The program, for mxint codes of so many bits."""
    return Source.read(
        Path(__file__).parent / "reduction.cu", {"REDUCTION_BITS": bits, "COMMON_MUL_WIDE": 1}
    )


def _run(kernel: str, size: int, *arguments: Any, bits: int = 0) -> None:
    if size:
        blocks = -(-size // (_THREADS * (_RUN if bits else _EACH)))
        launch(source(bits or 8), kernel, blocks, _THREADS, *arguments)


def block_max(x: Array, xp: Any) -> Array:
    """The bits of each block's greatest magnitude: uint32."""
    out = xp.empty(x.size // _BLOCK, np.uint32)
    _run("block_max", x.size, x, out, np.int64(x.size))
    return out


def fixed_point(x: Array, anchors: Array, xp: Any) -> Array:
    """int64, truncated toward zero in the unit of each block's anchor."""
    out = xp.empty(x.size, np.int64)
    _run("fixed_point", x.size, x, anchors, out, np.int64(x.size))
    return out


def add_limbs(limbs: Array, x: Array, before: Array, after: Array) -> None:
    """Add to sums of digits, int32 (3, x.size), in place."""
    _run("add_limbs", x.size, limbs, x, before, after, np.int64(x.size))


def limb_total(limbs: Array, before: Array, after: Array, xp: Any) -> Array:
    """The sums as int64 under the anchors ``after``."""
    size = limbs.shape[1]
    out = xp.empty(size, np.int64)
    _run("limb_total", size, limbs, before, after, out, np.int64(size))
    return out


def fixed_point_mean(total: Array, anchors: Array, divisor: float, xp: Any) -> Array:
    """float32, rounded once from float64."""
    out = xp.empty(total.size, np.float32)
    size = np.int64(total.size)
    _run("fixed_point_mean", total.size, total, anchors, out, size, np.float64(divisor))
    return out


def pack(
    x: Array,
    bits: int,
    stream: Stream | None,
    first_block: int,
    residual: Array | None,
    out: Array,
) -> None:
    """Codes and exponents of each part into uint8 (parts, bytes). One launch."""
    parts, pitch = out.shape
    sizes = (np.int64(n) for n in (x.size, x.size // parts, pitch))
    _run("mxint_pack", x.size, x, residual, out, *sizes, *_rounding(stream, first_block), bits=bits)


def unpack(packed: Rows, bits: int, divisor: float, add: bool, out: Array) -> None:
    """The mean of what `pack` gave, into float32: of rows added up, or one after the other."""
    parts, pitch = packed.shape
    values = _values(pitch, bits)
    numbers = (*(np.int64(n) for n in (out.size, values, pitch)), np.int32(parts if add else 1))
    first = 0 if add or not isinstance(packed, PeerRows) else packed.first * values
    numbers = (*numbers, *_quotient(divisor), np.uint32(first // (_THREADS * _RUN)))
    _run("mxint_unpack", out.size, *_there(packed), out, *numbers, bits=bits)


def repack(
    packed: Rows,
    bits: int,
    divisor: float,
    stream: Stream | None,
    first_block: int,
    residual: Array | None,
    out: Array,
) -> None:
    """The mean of all rows of `pack`, packed into uint8 (1, bytes), or so rounded, into float32."""
    parts, pitch = packed.shape
    size = _values(pitch, bits)
    outs = (out, None) if out.dtype == np.uint8 else (None, out)
    sizes = np.int64(size), np.int64(pitch), np.int32(parts)
    numbers = (*_quotient(divisor), *_rounding(stream, first_block))
    _run("mxint_repack", size, *_there(packed), residual, *outs, *sizes, *numbers, bits=bits)


def _there(packed: Rows) -> tuple[Array | None, Array | None]:
    """Rows after each other, or where each one is."""
    return (None, packed.addresses) if isinstance(packed, PeerRows) else (packed, None)


def _values(pitch: int, bits: int) -> int:
    return pitch * _BLOCK // (_BLOCK * bits // 8 + 1)


def _rounding(stream: Stream | None, first_block: int) -> list[Any]:
    return [np.uint32(stream is not None), *random_arguments(stream), np.uint32(first_block)]


def _quotient(divisor: float) -> tuple[np.float64, np.float64]:
    """A factor and a divisor; of powers of two the factor is exact, and saves the division."""
    if math.frexp(divisor)[0] == 0.5:
        return np.float64(1.0 / divisor), np.float64(1.0)
    return np.float64(1.0), np.float64(divisor)
