"""Heads of attention in memory: as (B, H, T, d), or side by side as a product leaves them."""

from __future__ import annotations

from typing import Any

__all__ = ["empty_heads"]

Array = Any


def empty_heads(like: Array, xp: Any) -> Array:
    """An array (..., H, T, d) of a shape and dtype, its heads in memory as those of ``like``.

    Where the heads of a token lie side by side, they are joined to a row without a copy.
    """
    shape = like.shape
    if len(shape) < 3 or like.strides[-3] >= like.strides[-2]:
        return xp.empty(shape, dtype=like.dtype)
    side_by_side = (*shape[:-3], shape[-2], shape[-3], shape[-1])
    return xp.empty(side_by_side, dtype=like.dtype).swapaxes(-2, -3)
