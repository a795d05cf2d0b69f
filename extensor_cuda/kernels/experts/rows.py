"""Launches of `route.cu` and `rows.cu`: tokens' rows to the places of their experts, and back."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor_cuda.kernels.nn.elementwise import kind
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = [
    "MAX_EXPERTS",
    "from_places",
    "gate",
    "route",
    "route_source",
    "rows_source",
    "to_places",
]

Array = Any
MAX_EXPERTS = 256
_ROUTE_THREADS, _THREADS, _VECTOR = 1024, 256, 8


@lru_cache(maxsize=64)
def route_source(experts: int) -> Source:
    """The program that sorts choices of so many experts."""
    return Source.read(Path(__file__).parent / "route.cu", {"EXPERTS_COUNT": experts})


@lru_cache(maxsize=8)
def rows_source(bias: bool, weight: int) -> Source:
    """The program that moves rows: whether experts have biases, and the kind of weights."""
    macros = {"EXPERTS_BIAS": int(bias), "EXPERTS_WEIGHT": weight}
    return Source.read(Path(__file__).parent / "rows.cu", macros)


def route(chosen: Array, experts: int, xp: Any) -> tuple[Array, Array, Array]:
    """Choices of experts, int64, in order of these: offsets, the choice at each place, places.

    Choices of one expert stay in order. All are int32; expert e has the places offsets[e] to
    offsets[e + 1].
    """
    count = chosen.size
    offsets = xp.empty(experts + 1, dtype=np.int32)
    source, places = (xp.empty(count, dtype=np.int32) for _ in range(2))
    arrays = chosen, offsets, source, places
    launch(route_source(experts), "route", 1, _ROUTE_THREADS, *arrays, np.int32(count))
    return offsets, source, places


def _blocks(rows: int, vectors: int) -> int:
    return -(-rows * vectors // _THREADS)


def to_places(x: Array, source: Array, active: int, xp: Any) -> Array:
    """Bfloat16 rows of tokens (T, K) -> those of choices at their places."""
    places, width = len(source), x.shape[1]
    out, vectors = xp.empty((places, width), dtype=x.dtype), width // _VECTOR
    numbers = map(np.int32, (places, vectors, active))
    blocks = _blocks(places, vectors)
    launch(rows_source(False, 0), "to_places", blocks, _THREADS, x, source, out, *numbers)
    return out


def gate(
    x: Array,
    source: Array,
    chosen: Array,
    biases: Array | None,
    alpha: float,
    limit: float | None,
    xp: Any,
) -> Array:
    """Gates and what they multiply (places, 2 N) -> (places, N); biases: addresses of both each."""
    places, width = len(x), x.shape[1] // 2
    out, vectors = xp.empty((places, width), dtype=x.dtype), width // _VECTOR
    numbers = alpha, math.inf if limit is None else limit, 0.0 if limit is None else 1.0
    told = *map(np.int32, (places, vectors)), *map(np.float32, numbers)
    made, arrays = rows_source(biases is not None, 0), (x, source, chosen, biases, out)
    launch(made, "gate", _blocks(places, vectors), _THREADS, *arrays, *told)
    return out


def from_places(
    x: Array, places: Array, chosen: Array, weights: Array, biases: Array | None, xp: Any
) -> Array:
    """Rows of choices (places, N) -> sums of each token's, times its weights, in their dtype."""
    (tokens, active), width = weights.shape, x.shape[1]
    out, vectors = xp.empty((tokens, width), dtype=weights.dtype), width // _VECTOR
    numbers = map(np.int32, (tokens, vectors, active))
    arrays = x, places, chosen, weights, biases, out
    made = rows_source(biases is not None, kind(weights))
    launch(made, "from_places", _blocks(tokens, vectors), _THREADS, *arrays, *numbers)
    return out
