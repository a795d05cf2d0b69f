"""Updates of a weight in blocks that is its own master, where a backend has multi-tensor updates.

The blocks are decoded to float32, the kernel moves these, and they are rounded stochastically into
blocks again. One weight at a time is held in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from extensor.autograd.tensor import ExTensor
from extensor.backends.row_sums import RowSums
from extensor.optim.multi_tensor import MultiTensorOptimizer, backend_of, stream_numbers
from extensor.optim.params import MASTER, Array, Gradient, ParamState
from extensor.quant.array import QuantArray
from extensor.random import Stream

__all__ = ["moved_blocks", "packed_blocks", "takes_blocks"]


def takes_blocks(optimizer: MultiTensorOptimizer, member: ParamState, grad: Gradient) -> bool:
    """Whether a parameter in blocks is moved by a backend's multi-tensor update.

    Args:
        optimizer: the one it belongs to.
        member: the parameter and its state.
        grad: its gradient, not given by rows.
    """
    if not member.param.is_blocked or MASTER in member.arrays or isinstance(grad, RowSums):
        return False
    return backend_of(optimizer, [(member, grad)]) is member.param.backend


def moved_blocks(
    optimizer: MultiTensorOptimizer,
    member: ParamState,
    grad: Gradient,
    factors: Sequence[Mapping[str, float]],
    **how: Any,
) -> Array:
    """The float32 values of a parameter after an update; its state moves where it lies.

    Args:
        optimizer: the one it belongs to.
        member: one that `takes_blocks`.
        grad: its gradient.
        factors: of the update, one mapping.
        how: more for `Optimizer.update_multi_tensor`.
    """
    assert not isinstance(grad, RowSums)
    backend = member.param.backend
    values = backend.dequantize(member.param.data)
    wide = backend.xp.ascontiguousarray(backend.cast(grad.data, np.dtype(np.float32)))
    parts = [(values, wide, member.arrays)]
    numbers = stream_numbers([(member, grad)])
    optimizer.update_multi_tensor(backend, parts, factors, numbers=numbers, **how)
    return values


def packed_blocks(param: ExTensor, values: Array, stream: Stream | None) -> QuantArray:
    """Values in a parameter's blocks: rounded stochastically with a stream, else to nearest."""
    spec = param.data.spec
    rounding = "nearest_even" if stream is None else "stochastic"
    rounded = spec.replace(rounding=rounding)
    packed = param.backend.pack(values.reshape(param.shape), rounded, stream)
    return replace(packed, spec=spec)
