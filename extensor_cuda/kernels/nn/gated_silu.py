"""SwiGLU's product gate sigmoid(alpha gate) up and its gradients: one launch each.

Computed in float32 and rounded once; before that within what `extensor.backends.cpu.nn` states.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor_cuda.kernels.nn.elementwise import kind
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["gated_silu", "gated_silu_grad", "source"]

Array = Any
_THREADS, _VECTOR = 256, 8  # as in gated_silu.cu


@lru_cache(maxsize=8)
def source(a: int, b: int, out: int) -> Source:
    """The program for gates, gradients and results of these kinds."""
    macros = {"NN_A": a, "NN_B": b, "NN_OUT": out}
    return Source.read(Path(__file__).parent / "gated_silu.cu", macros)


def _launch(
    name: str,
    program: Source,
    arrays: tuple[Array, ...],
    alpha: float,
    limit: float | None,
    *more: np.int64,
) -> None:
    numbers = alpha, math.inf if limit is None else limit, 0.0 if limit is None else 1.0
    count = arrays[0].size
    blocks = -(-count // (_THREADS * _VECTOR))
    told = *map(np.float32, numbers), np.int64(count), *more
    launch(program, name, blocks, _THREADS, *arrays, *told)


def gated_silu(gate: Array, up: Array, alpha: float, limit: float | None, xp: Any) -> Array:
    """Of arrays of one shape and dtype, not empty; rows that lie apart are not copied."""
    out, size = xp.empty(gate.shape, dtype=gate.dtype), gate.size
    program = source(kind(gate), kind(gate), kind(gate))
    sides, pitches = [gate, up], [size] * 3
    if not all(x.flags.c_contiguous and x.data.ptr % 16 == 0 for x in sides):
        rows = [_rows(x) for x in sides]
        if all(x is not None for x in rows):
            sides, pitches = rows, [rows[0].shape[1], *(x.strides[0] // x.itemsize for x in rows)]
        else:
            sides = [x.copy() for x in sides]
    _launch("gated_silu", program, (*sides, out), alpha, limit, *map(np.int64, pitches))
    return out


def _rows(x: Array) -> Array:
    """(rows, n) without a copy, n in eights and aligned; None of arrays that lie otherwise."""
    if x.ndim < 2 or x.shape[-1] % _VECTOR or x.data.ptr % 16:
        return None
    rows = x.reshape(-1, x.shape[-1])
    apart = rows.strides[0] % (_VECTOR * x.itemsize) == 0
    return rows if rows.data.ptr == x.data.ptr and rows.strides[1] == x.itemsize and apart else None


def gated_silu_grad(
    g: Array, gate: Array, up: Array, alpha: float, limit: float | None, xp: Any
) -> tuple[Array, Array]:
    """Gradients in gate and up, of g's dtype."""
    made = xp.empty(gate.shape, dtype=g.dtype), xp.empty(gate.shape, dtype=g.dtype)
    program = source(kind(gate), kind(g), kind(g))
    _launch("gated_silu_grad", program, (g, gate, up, *made), alpha, limit)
    return made
