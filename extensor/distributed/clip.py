"""Clipping by the norm of gradients of which each rank may hold a part."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from extensor.autograd.tensor import ExTensor
from extensor.backends.registry import get as get_backend
from extensor.distributed.communicator import Array, Communicator
from extensor.optim.clip import clip_captured

__all__ = ["clip_grad_norm", "square_sum"]

LIMB_BITS = 30


def square_sum(
    arrays: Iterable[Array], ranks: Communicator | None = None, backend: Any = None
) -> float:
    """The sum of all squares, the same bits for any order and any division of the arrays.

    Squares are added in float64 within blocks of 32 values; the blocks' sums are truncated to 2^-60
    of the largest one's power of two, and added as integers.

    Args:
        arrays: float32; blocks begin where they begin.
        ranks: who holds other arrays; None if nobody does.
        backend: of the arrays; None is the CPU's.

    Returns:
        The sum; NaN or infinity if a value is.

    >>> import numpy as np
    >>> from extensor.distributed.clip import square_sum
    >>> square_sum([np.array([3.0, 4.0], np.float32)])
    25.0
    """
    backend = get_backend("cpu") if backend is None else backend
    xp = backend.xp
    sums = [backend.block_square_sums(array.reshape(-1)) for array in arrays]
    blocks = xp.concatenate([xp.zeros(1), *sums])
    largest = np.array([float(blocks.max())])  # NaN, if there is one
    bad = np.array([int(not np.isfinite(largest[0]))])
    if ranks is not None:
        ranks.all_reduce(bad, "max").wait()
        if not bad[0]:
            ranks.all_reduce(largest, "max").wait()
    if bad[0]:
        return math.nan
    exponent = math.frexp(largest[0])[1]
    # Of squares of float32, so that neither factor nor product leaves float64's range.
    scaled = blocks * math.ldexp(1.0, LIMB_BITS - exponent)
    high = xp.trunc(scaled)
    low = xp.trunc((scaled - high) * 2.0**LIMB_BITS)
    limbs = np.array([int(high.astype(np.int64).sum()), int(low.astype(np.int64).sum())])
    if ranks is not None:
        ranks.all_reduce(limbs).wait()
    total = (int(limbs[0]) << LIMB_BITS) + int(limbs[1])
    return math.ldexp(total, exponent - 2 * LIMB_BITS)


def clip_grad_norm(
    params: Iterable[ExTensor],
    max_norm: float,
    ranks: Communicator | None = None,
    shared: Iterable[ExTensor] = (),
) -> float | ExTensor:
    """Scale gradients in place so that their joint 2-norm is at most ``max_norm``.

    As `extensor.optim.clip_grad_norm` with ``nonfinite="return"``, but with the same bits whether
    one rank holds all gradients or each a part.

    Args:
        params: tensors; those without a gradient are skipped.
        max_norm: above 0.
        ranks: who holds the other parts; None if each rank holds all.
        shared: tensors that all ``ranks`` hold alike: they count once.

    Returns:
        The norm before clipping; where it is not finite, nothing is scaled. While a step is
        captured (`extensor.capture`) a tensor of shape (): the sums of squares are added in
        float64, in an order that depends on the division.

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
    backend = (own + alike)[0][1] if own or alike else None  # all are of one device
    counted = own + (alike if ranks is None or ranks.rank == 0 else [])
    if backend is not None and backend.capturing is not None:
        return _clip_captured(backend, own + alike, counted, max_norm, ranks)
    norm = math.sqrt(square_sum([grad for grad, _ in counted], ranks, backend))
    if backend is not None and norm > max_norm and math.isfinite(norm):
        backend.scale_multi_tensor([grad for grad, _ in own + alike], max_norm / norm)
    return norm


def _clip_captured(
    backend: Any, grads: list[Any], counted: list[Any], max_norm: float, ranks: Communicator | None
) -> ExTensor:
    total = backend.square_sum_multi_tensor([grad for grad, _ in counted if grad.size]).reshape(1)
    if ranks is not None:
        with ranks.beside():
            ranks.all_reduce(total).wait()
        ranks.join()
    arrays = [grad for grad, _ in grads]
    return clip_captured(backend, arrays, total.reshape(()), max_norm, "return")
