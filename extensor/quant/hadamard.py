"""The random Hadamard transform in float32, in a fixed order of operations.

It computes x diag(s) H_d / sqrt(d) along the last axis: butterflies of strides 1, 2, 4, ..., then
one multiply by float32(1 / sqrt(d)), without fused multiply-add. The order decides the bits.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from extensor.quant.spec import HADAMARD_SIZES, TRANSFORMER_ENGINE_SIGNS, Hadamard
from extensor.random import philox4x32, philox_call

__all__ = ["SOME_SIGNS", "hadamard", "hadamard_signs", "inverse_hadamard"]

Array = Any
_SIGN_STREAM = 0x48414441

SOME_SIGNS = {size: Hadamard(size, "per_step") for size in HADAMARD_SIZES}
"""For keys of caches, in the place of signs that are drawn in each step: those never come again."""


@lru_cache(maxsize=256)
def hadamard_signs(transform: Hadamard) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The sign vector s, float32 of shape (size,), which is not to be written."""
    signs = _signs(transform)
    signs.flags.writeable = False
    return signs


def _signs(transform: Hadamard) -> np.ndarray[Any, np.dtype[np.float32]]:
    size = transform.size
    if transform.signs == "none":
        return np.ones(size, dtype=np.float32)
    if transform.signs == "fixed":
        return np.resize(np.array(TRANSFORMER_ENGINE_SIGNS, dtype=np.float32), size)
    if transform.signs == "per_step":  # 128 bits of one call, the first in the lowest
        key = transform.seed & 0xFFFFFFFF, transform.seed >> 32
        words = np.array(philox_call((0, 0, transform.step, transform.stream), key), dtype="<u4")
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:size]
        return np.where(bits, np.float32(-1), np.float32(1))
    calls = np.arange(size // 4, dtype=np.uint64)
    key = transform.seed & 0xFFFFFFFF, transform.seed >> 32
    words = np.stack(philox4x32((calls, 0, 0, _SIGN_STREAM), key), axis=-1).reshape(-1)
    return np.where(words & 1, np.float32(-1), np.float32(1))


def _with_signs(tiles: Array, transform: Hadamard, xp: Any) -> Array:
    """Multiply by the random signs. A signalling NaN becomes a quiet one, without a warning."""
    with np.errstate(invalid="ignore"):
        return tiles * xp.asarray(hadamard_signs(transform))


def _butterflies(x: Array, size: int, xp: Any) -> Array:
    """Multiply by H_size along the last axis of (..., size), then scale.

    The tiles are transposed first, so that sums and differences run along memory. Inf - Inf and
    sums beyond float32 are allowed: their block becomes NaN.
    """
    tiles = math.prod(x.shape[:-1])
    y, stride = xp.ascontiguousarray(x.reshape(tiles, size).T), 1
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        while stride < size:
            halves = y.reshape(size // (2 * stride), 2, stride, tiles)
            low, high = halves[:, 0], halves[:, 1]
            y = xp.stack([low + high, low - high], axis=1)
            stride *= 2
        y *= xp.float32(1.0 / math.sqrt(size))
        return xp.ascontiguousarray(y.reshape(size, tiles).T).reshape(x.shape)


def hadamard(x: Array, transform: Hadamard, xp: Any = np) -> Array:
    """Transform float32 (..., L) along the last axis, zero-padded to a multiple of the size."""
    size = transform.size
    x = xp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)])
    tiles = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    tiles = _with_signs(tiles, transform, xp)
    return _butterflies(tiles, size, xp).reshape(x.shape)


def inverse_hadamard(y: Array, transform: Hadamard, length: int, xp: Any = np) -> Array:
    """Undo `hadamard` up to float32 rounding, keeping the first ``length`` values."""
    size = transform.size
    tiles = _butterflies(y.reshape(*y.shape[:-1], y.shape[-1] // size, size), size, xp)
    tiles = _with_signs(tiles, transform, xp)
    return tiles.reshape(y.shape)[..., :length]
