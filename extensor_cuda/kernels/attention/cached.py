"""Attention of one token of each text to a cache's keys and values: one launch, captured too.

Scores, weights and sums are float32; bfloat16 ones are multiplied on tensor cores, weights as the
sum of two bfloat16. With S keys of d values, u = 2**-24 and A = scale |q| |k|, a
result is within ((d + 8) (1 + A) + S + 96) 2 u of the sum over keys of p |v|, plus its rounding.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.backends.unsupported import Unsupported
from extensor_cuda.kernels.nn.elementwise import KINDS, kind
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["HEADS", "attend", "chunk_of", "gap", "source"]

Array = Any
HEADS = (16, 32, 64, 128)
"""Elements of a head."""
_CHUNK, _CHUNKS, _QUERIES = 64, 64, 16
_BLOCKS = 396
"""Of the kernel of bfloat16, that a GPU has at once: with more heads, each of a head's blocks makes
several of its parts. The bits are the same."""
_PROGRAMS = ("cached.cu", 256), ("cached_bf16.cu", 128)
"""Files and threads of a block, by kinds of dtypes."""


def chunk_of(capacity: int) -> int:
    """Keys of a block, by the memory's size: the same for any number of texts."""
    return _CHUNK * -(-capacity // (_CHUNK * _CHUNKS))


@lru_cache(maxsize=64)
def source(dtype: int, head: int, queries: int, chunk: int) -> Source:
    """The program for heads of a kind and size, queries that share a key, and keys of a block."""
    macros = {
        "NN_A": dtype,
        "CACHED_HEAD": head,
        "CACHED_QUERIES": queries,
        "CACHED_CHUNK": chunk,
    }
    return Source.read(Path(__file__).parent / _PROGRAMS[dtype][0], macros)


def gap(
    q: Array, k: Array, v: Array, turn: tuple[Array, Array] | None = None
) -> Unsupported | None:
    """Why the kernel does not attend from q (B, H, 1, d) to keys (B, Hkv, n, d) and values."""
    for table in turn or ():
        if table.size * 2 != q.shape[3] or table.dtype != np.float32:
            return Unsupported("angles that are not those of one position in float32")
        if not table.flags.c_contiguous or table.data.ptr % 16:
            return Unsupported("tables that are strided, or not aligned to 16 bytes")
    size, shared = q.shape[3], q.shape[1] // k.shape[1]
    if any(a.dtype != q.dtype for a in (k, v)) or q.dtype not in KINDS:
        return Unsupported(f"arrays of {q.dtype}, {k.dtype} and {v.dtype}")
    if size != v.shape[3] or size not in HEADS:
        return Unsupported(f"heads of {size} and {v.shape[3]}; the kernel has {HEADS}")
    if shared > _QUERIES:
        return Unsupported(f"{shared} queries to a key; the kernel has up to {_QUERIES}")
    for a in (q, k, v):
        strides = [step // a.itemsize for n, step in zip(a.shape, a.strides, strict=True) if n > 1]
        if strides[-1:] != [1] or any(s % 8 for s in strides[:-1]) or a.data.ptr % 16:
            return Unsupported("heads that are strided, or not aligned to 16 bytes")
    return None


def attend(
    q: Array,
    new: tuple[Array, Array],
    memory: tuple[Array, Array],
    length: int | Array,
    scale: float,
    zeros: Any,
    xp: Any,
    turn: tuple[Array, Array] | None = None,
) -> Array:
    """(B, H, 1, d), of arguments without a `gap`; does not wait.

    Args:
        q: (B, H, 1, d).
        new: the token's key and value (B, Hkv, 1, d), which are written to the memory.
        memory: keys and values (B, Hkv, capacity, d), contiguous.
        length: tokens in them, fewer than the capacity; or int64 of shape () on the device.
        scale: of scores.
        zeros: makes so many counters that are zero, and that the kernel leaves so.
        xp: cupy.
        turn: cosines and sines (1, d / 2) by which q and k are turned first; None, not at all.
    """
    (batch, heads, _, size), (_, groups, capacity, _) = q.shape, memory[0].shape
    chunk = chunk_of(capacity)
    where, given = (None, length) if isinstance(length, int) else (length, 0)
    most = -(-(given + 1 if where is None else capacity) // chunk)  # blocks of a head
    queries, blocks = heads // groups, most
    if q.dtype != np.float32:
        blocks = max(1, min(most, _BLOCKS // (batch * groups)))
    out = xp.empty(q.shape, dtype=q.dtype)
    partial = xp.empty((batch * groups, most, queries, size + 4), dtype=np.float32)
    strides = (a.strides[axis] // a.itemsize for a in (q, *new) for axis in (0, 1))
    numbers = map(np.int64, (given, capacity, groups, most, blocks, *strides))
    arrays = q, *new, *memory, where, partial, zeros(batch * groups), out
    angles = turn or (None, None)
    made, threads = source(kind(q), size, queries, chunk), _PROGRAMS[kind(q)][1]
    told = *numbers, *angles, np.float32(scale)
    launch(made, "attend_cached", batch * groups * blocks, threads, *arrays, *told)
    return out
