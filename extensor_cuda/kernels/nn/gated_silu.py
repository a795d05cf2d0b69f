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
    name: str, program: Source, arrays: tuple[Array, ...], alpha: float, limit: float | None
) -> None:
    numbers = alpha, math.inf if limit is None else limit, 0.0 if limit is None else 1.0
    count = arrays[0].size
    blocks = -(-count // (_THREADS * _VECTOR))
    launch(program, name, blocks, _THREADS, *arrays, *map(np.float32, numbers), np.int64(count))


def gated_silu(gate: Array, up: Array, alpha: float, limit: float | None, xp: Any) -> Array:
    """Of C-contiguous arrays of one shape and dtype, aligned to 16 bytes, not empty."""
    out = xp.empty(gate.shape, dtype=gate.dtype)
    program = source(kind(gate), kind(gate), kind(gate))
    _launch("gated_silu", program, (gate, up, out), alpha, limit)
    return out


def gated_silu_grad(
    g: Array, gate: Array, up: Array, alpha: float, limit: float | None, xp: Any
) -> tuple[Array, Array]:
    """Gradients in gate and up, of g's dtype."""
    made = xp.empty(gate.shape, dtype=g.dtype), xp.empty(gate.shape, dtype=g.dtype)
    program = source(kind(gate), kind(g), kind(g))
    _launch("gated_silu_grad", program, (g, gate, up, *made), alpha, limit)
    return made
