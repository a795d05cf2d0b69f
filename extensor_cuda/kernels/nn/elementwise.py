"""Sums, casts, relu, GELU and gradients of float32 and bfloat16, value by value: one launch each.

Values are computed in float32 and rounded once. With u = 2**-24, before that rounding and within
what `extensor.backends.cpu.nn` states:

    gelu       |error| <= (x^2 / 2 + 16) u |gelu(x)| + 2**-144
    gelu_grad  |error| <= (x^2 / 2 + 16) u |g| (Phi(x) + |x| density(x)) + 2**-144 (1 + |g|)

and with 2 x^2 u + 2**-16 in place of the first factor where the result is bfloat16. The others have
the CPU's bits. Bytes read and written decide the time: each array once, in vectors of 16 bytes.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from extensor.quant.array import QuantArray
from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.quantize.quantize import element_macros
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch
from extensor_cuda.runtime.memory import empty

__all__ = [
    "KINDS",
    "ROW_THREADS",
    "binary",
    "gelu_grad_of_stored",
    "kind",
    "positive_bits",
    "reads_stored",
    "relu_grad_of_bits",
    "row_warps",
    "source",
    "stored_macros",
    "unary",
]

Array = Any
KINDS = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
"""The dtypes of arrays, by the number that the kernels know them by."""
_THREADS, _PART, _VECTOR = 256, 4096, 8  # as in elementwise.cu


ROW_THREADS = 256
"""Threads of a block that works on rows."""


def row_warps(length: int) -> int:
    """How many warps of a block share a row of so many values."""
    return 1 if length <= 1024 else 8


def kind(a: Array) -> int:
    """The number of an array's dtype, one of `KINDS`."""
    return KINDS.index(a.dtype)


@lru_cache(maxsize=256)
def source(a: int, b: int, out: int, stored: QuantSpec | None = None) -> Source:
    """The program for arrays of these kinds; ``stored``: how the second is."""
    macros = {"NN_A": a, "NN_B": b, "NN_OUT": out} | stored_macros(stored)
    return Source.read(Path(__file__).parent / "elementwise.cu", macros)


def stored_macros(spec: QuantSpec | None) -> dict[str, object]:
    """What kernels know of an array in flat blocks; None: it is none."""
    if spec is None:
        return {"NN_STORED": 0}
    assert isinstance(spec.tile, tuple)
    return element_macros(spec.row.element) | {"NN_STORED": 1, "CODEC_BLOCK": spec.tile[1]}


def reads_stored(q: QuantArray) -> bool:
    """Whether kernels read an array: whole flat blocks of 8-bit codes under powers of two."""
    spec = q.spec
    plain = spec.is_mx and spec.transform is None and spec.element_scale == 1.0
    if not plain or spec.row.element.bits != 8 or len(q.shape) != 1 or spec.tile == "tensor":
        return False
    assert isinstance(spec.tile, tuple)
    rows, block = spec.tile
    return rows == 1 and block % _VECTOR == 0 and q.shape[0] % block == 0


def unary(name: str, x: Array, xp: Any, dtype: Any = None) -> Array:
    """Op ``name`` of each value of x, C-contiguous and not empty; in x's dtype unless told."""
    out = empty(xp, x.shape, x.dtype if dtype is None else dtype)
    program = source(kind(x), kind(x), kind(out))
    launch(program, name, -(-x.size // _PART), _THREADS, x, out, np.int64(x.size))
    return out


def binary(name: str, a: Array, b: Array, xp: Any, dtype: Any) -> Array:
    """Op ``name`` of every pair of values, of C-contiguous arrays of one shape, not empty."""
    out = xp.empty(a.shape, dtype=dtype)
    program = source(kind(a), kind(b), kind(out))
    launch(program, name, -(-a.size // _PART), _THREADS, a, b, out, np.int64(a.size))
    return out


def positive_bits(x: Array, xp: Any) -> Array:
    """A bit for each value, C-contiguous and not empty: whether it is positive; packbits' order."""
    out = xp.empty(-(-x.size // _VECTOR), dtype=np.uint8)
    program = source(kind(x), kind(x), kind(x))
    launch(program, "positive_bits", -(-x.size // _PART), _THREADS, x, out, np.int64(x.size))
    return out


def relu_grad_of_bits(g: Array, bits: Array, xp: Any) -> Array:
    """G, C-contiguous and not empty, where `positive_bits` are set, 0 elsewhere."""
    out = xp.empty(g.shape, dtype=g.dtype)
    program = source(kind(g), kind(g), kind(g))
    blocks = -(-g.size // _PART)
    launch(program, "relu_grad_of_bits", blocks, _THREADS, g, bits, out, np.int64(g.size))
    return out


def gelu_grad_of_stored(g: Array, q: QuantArray, xp: Any, overwrites: bool = False) -> Array:
    """The gradient of GELU at what is stored, decoded and rounded to g's dtype.

    g is C-contiguous and not empty; ``q`` is what `reads_stored` says, of as many values.
    ``overwrites``: the gradient is written over g.
    """
    out = g if overwrites else xp.empty(g.shape, dtype=g.dtype)
    program = source(kind(g), kind(g), kind(out), q.spec)
    arrays = g, q.codes, q.scales, out
    blocks = -(-g.size // _PART)
    launch(program, "gelu_grad_of_stored", blocks, _THREADS, *arrays, np.int64(g.size))
    return out
