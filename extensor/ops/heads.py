"""Heads of attention layers: cut out of each token's vector, and put side by side again."""

from __future__ import annotations

from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, primitive
from extensor.autograd.tensor import ExTensor
from extensor.ops.arguments import tensors_only

__all__ = ["merge_heads", "split_heads"]


def _merged(backend: Any, x: Any) -> Any:
    *lead, heads, length, size = x.shape
    return x.swapaxes(-2, -3).reshape((*lead, length, heads * size))


@primitive(
    forward=lambda backend, x, heads: x.reshape(
        (*x.shape[:-1], heads, x.shape[-1] // heads)
    ).swapaxes(-2, -3),
    vjps=(lambda g, out, x, heads: apply("merge_heads", g),),
    reads="nothing",
    moves=True,
    view=True,
    samples=lambda rng: [
        Sample((x := rng.normal(size=(2, 3, 8)), 4), expected=x.reshape(2, 3, 4, 2).swapaxes(1, 2))
    ],
    errors=(
        BadInput((np.zeros((3, 8)), 3), ValueError, "a multiple of 3"),
        BadInput((np.zeros(8), 2), ValueError, "(..., T, a multiple of 2)"),
    ),
)
def split_heads(x: ExTensor, heads: int) -> ExTensor:
    """The heads of each token's vector: (..., T, heads d) as (..., heads, T, d), a view.

    Args:
        x: (..., T, heads d).
        heads: 1 or more.

    Returns:
        (..., heads, T, d), as `scaled_dot_product_attention` takes it.

    Raises:
        TypeError, ValueError: for a last axis that is no multiple of the heads.

    Example:
        >>> et.split_heads(et.ones((2, 5, 24)), heads=4).shape
        (2, 4, 5, 6)
    """
    tensors_only("split_heads", x)
    if x.ndim < 2 or heads < 1 or x.shape[-1] % heads:
        raise ValueError(
            f"split_heads: expected (..., T, a multiple of {heads}), got shape {x.shape}"
        )
    return apply("split_heads", x, heads=heads)


@primitive(
    forward=_merged,
    vjps=(lambda g, out, x: apply("split_heads", g, heads=x.shape[-3]),),
    reads="nothing",
    moves=True,
    view=True,
    samples=lambda rng: [
        Sample((x := rng.normal(size=(2, 4, 3, 2)),), expected=x.swapaxes(1, 2).reshape(2, 3, 8))
    ],
    errors=(BadInput((np.zeros((3, 8)),), ValueError, "(..., heads, T, d)"),),
)
def merge_heads(x: ExTensor) -> ExTensor:
    """Heads side by side in each token's vector: (..., heads, T, d) as (..., T, heads d).

    Args:
        x: (..., heads, T, d).

    Returns:
        (..., T, heads d), a view where the memory allows it.

    Raises:
        TypeError, ValueError: for fewer than three axes.

    Example:
        >>> et.merge_heads(et.ones((2, 4, 5, 6))).shape
        (2, 5, 24)
    """
    tensors_only("merge_heads", x)
    if x.ndim < 3:
        raise ValueError(f"merge_heads: expected (..., heads, T, d), got shape {x.shape}")
    return apply("merge_heads", x)
