"""Clipping by the norm of gradients of which each rank may hold a part."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from extensor.autograd.tensor import ExTensor
from extensor.distributed.communicator import Array, Communicator
from extensor.distributed.reduction import BLOCK

__all__ = ["clip_grad_norm", "square_sum"]

LIMB_BITS = 30


def square_sum(arrays: Iterable[Array], ranks: Communicator | None = None, xp: Any = np) -> float:
    """The sum of all squares, the same bits for any order and any division of the arrays.

    Squares are added in float64 within blocks of 32 values; the blocks' sums are truncated to 2^-60
    of the largest one's power of two, and added as integers.

    Args:
        arrays: float arrays; blocks begin where they begin.
        ranks: who holds other arrays; None if nobody does.
        xp: the arrays' module, numpy or cupy.

    Returns:
        The sum; NaN or infinity if a value is.

    >>> import numpy as np
    >>> from extensor.distributed.clip import square_sum
    >>> square_sum([np.array([3.0, 4.0], np.float32)])
    25.0
    """
    parts: list[Any] = [np.zeros(1)]
    for array in arrays:
        flat = array.reshape(-1)
        whole = flat.size // BLOCK * BLOCK
        wide = flat[:whole].astype(np.float64)
        parts.append(_block_sums(xp.multiply(wide, wide, out=wide)))
        if whole < flat.size:
            last = xp.zeros(BLOCK)
            last[: flat.size - whole] = flat[whole:]
            parts.append(_block_sums(last * last))
    blocks = xp.concatenate([xp.asarray(part) for part in parts])
    largest = np.array([float(blocks.max())])  # NaN, if there is one
    bad = np.array([int(not np.isfinite(largest[0]))])
    if ranks is not None:
        ranks.all_reduce(bad, "max").wait()
        if not bad[0]:
            ranks.all_reduce(largest, "max").wait()
    if bad[0]:
        return math.nan
    exponent = math.frexp(largest[0])[1]
    scaled = xp.ldexp(blocks, LIMB_BITS - exponent)
    high = xp.trunc(scaled)
    low = xp.trunc(xp.ldexp(scaled - high, LIMB_BITS))
    limbs = np.array([int(high.astype(np.int64).sum()), int(low.astype(np.int64).sum())])
    if ranks is not None:
        ranks.all_reduce(limbs).wait()
    total = (int(limbs[0]) << LIMB_BITS) + int(limbs[1])
    return math.ldexp(total, exponent - 2 * LIMB_BITS)


def _block_sums(values: Array) -> Array:
    """The sum of each block, in one order on every device: numpy's own."""
    if isinstance(values, np.ndarray):
        return values.reshape(-1, BLOCK).sum(axis=1)
    rows = values.reshape(-1, BLOCK // 8, 8)
    eight = ((rows[:, 0] + rows[:, 1]) + rows[:, 2]) + rows[:, 3]
    four = eight[:, 0::2] + eight[:, 1::2]
    two = four[:, 0::2] + four[:, 1::2]
    return two[:, 0] + two[:, 1]


def clip_grad_norm(
    params: Iterable[ExTensor],
    max_norm: float,
    ranks: Communicator | None = None,
    shared: Iterable[ExTensor] = (),
) -> float:
    """Scale gradients in place so that their joint 2-norm is at most ``max_norm``.

    As `extensor.optim.clip_grad_norm` with ``nonfinite="return"``, but with the same bits whether
    one rank holds all gradients or each a part.

    Args:
        params: tensors; those without a gradient are skipped.
        max_norm: above 0.
        ranks: who holds the other parts; None if each rank holds all.
        shared: tensors that all ``ranks`` hold alike: they count once.

    Returns:
        The norm before clipping; where it is not finite, nothing is scaled.

    Raises:
        ValueError: for a ``max_norm`` not above 0.

    >>> from extensor.distributed import clip_grad_norm
    >>> w = et.nn.Parameter([0.0, 0.0])
    >>> (w * et.ExTensor([3.0, 4.0])).sum().backward()
    >>> clip_grad_norm([w], max_norm=1.0)
    5.0
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm: expected a number above 0, got {max_norm!r}")
    own, alike = (
        [(p.grad.data, p.backend) for p in each if p.grad is not None] for each in (params, shared)
    )
    xp = (own + alike)[0][1].xp if own or alike else np  # all are of one device
    counted = own + (alike if ranks is None or ranks.rank == 0 else [])
    norm = math.sqrt(square_sum([grad for grad, _ in counted], ranks, xp))
    if norm > max_norm and math.isfinite(norm):
        for grad, backend in own + alike:
            backend.scale_multi_tensor([grad], max_norm / norm)
    return norm
