"""Attention of a new token to a decoder's cache, as functions like those of `extensor_cuda.nn`."""

from __future__ import annotations

from functools import partial
from typing import Any

from extensor.backends.protocol import TokenMemory
from extensor.backends.unsupported import Unsupported
from extensor_cuda.dispatch import Call
from extensor_cuda.kernels.attention import cached
from extensor_cuda.runtime.capture import current_capture
from extensor_cuda.runtime.counters import zeros

__all__ = ["cached_attention"]

Array = Any


def cached_attention(
    xp: Any,
    q: Array,
    k: Array,
    v: Array,
    memory: TokenMemory,
    scale: float,
    turn: tuple[Array, Array] | None = None,
) -> Call:
    """See the protocol. A replay reads how many tokens the cache holds at that time."""
    if (gap := cached.gap(q, k, v, turn)) is not None:
        return gap
    held = memory.keys, memory.values
    if any(a.dtype != q.dtype for a in held):
        return Unsupported(f"arrays of {q.dtype} beside a cache of {held[0].dtype}")
    length: Any = int(memory.length[0])
    if (capture := current_capture()) is not None:
        length = memory.length_in(capture)
    return lambda: cached.attend(q, (k, v), held, length, scale, partial(zeros, xp), xp, turn)
