"""An update of one parameter by the array module, or by a backend's kernel for one tensor.

On the CPU a parameter is walked in segments that fit the cache together with their state, so that
an update of a dozen numpy calls reads main memory once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np

from extensor.autograd.mode import no_grad
from extensor.autograd.tensor import ExTensor
from extensor.backends.row_sums import RowSums
from extensor.dtypes import bfloat16, float32
from extensor.optim.multi_tensor import MultiTensorOptimizer, has_kernel
from extensor.optim.params import MASTER, Array, Gradient, ParamState, Segment, wide_dtype
from extensor.optim.states import STATES, WEIGHT_SLOT, state_stream
from extensor.random import Stream

__all__ = ["OneTensorOptimizer", "step_one", "values_of_weight"]

SEGMENT = 1 << 15
"""Elements in a segment on the CPU: six float32 arrays of it, 768 KiB, fit a level-2 cache."""

KERNEL_SEGMENT = 1 << 20
"""Elements where a kernel makes the whole update in one pass: enough for its threads."""


class OneTensorOptimizer(MultiTensorOptimizer, Protocol):
    """What the update of one parameter needs of its optimizer; see `extensor.optim.Optimizer`."""

    squares: ClassVar[tuple[str, ...]]

    def prepare(
        self, xp: Any, whole: Segment, options: Mapping[str, Any]
    ) -> tuple[Array, Mapping[str, Any]]:
        """Compute what needs a whole tensor."""
        ...

    def update(self, backend: Any, part: Segment, options: Mapping[str, Any], step: int) -> None:
        """Move one flat segment, in place."""
        ...


def step_one(
    optimizer: OneTensorOptimizer, member: ParamState, grad: Gradient, options: Mapping[str, Any]
) -> None:
    """Update one parameter in place.

    Args:
        optimizer: the one it belongs to.
        member: the parameter and its state.
        grad: its gradient, finite and of its shape; rows only on the CPU, of an optimizer whose
            `prepare` does nothing.
        options: those of its group.
    """
    param, xp, cast = member.param, member.param.backend.xp, member.param.backend.cast
    member.step += 1
    if isinstance(grad, ExTensor) and _moves_in_place(optimizer, member, grad):
        _move_in_place(optimizer, member, grad, options)
        return
    kind, wide = STATES[optimizer.states], wide_dtype(param)
    state = {
        slot: kind.unpack(param.backend, stored, slot in optimizer.squares).astype(wide, copy=False)
        for slot, stored in member.arrays.items()
        if slot != MASTER
    }
    master = member.arrays.get(MASTER)
    own = master is None and param.dtype.numpy != wide  # the parameter is its own master
    flat = values_of_weight(param, wide) if master is None else master
    read: Callable[[int, int], Array]
    if isinstance(grad, RowSums):
        read = partial(grad.segment, dtype=flat.dtype)
    else:
        whole = Segment(
            flat.reshape(param.shape),
            cast(grad.data, flat.dtype),
            {slot: a.reshape(param.shape) for slot, a in state.items()},
        )
        g, options = optimizer.prepare(xp, whole, options)
        g = g.reshape(-1)

        def read(begin: int, end: int) -> Array:
            return g[begin:end]

    most = KERNEL_SEGMENT if optimizer.multi_tensor else SEGMENT
    length = min(most, flat.size) if xp is np else flat.size
    one, two = xp.empty(length, flat.dtype), xp.empty(length, flat.dtype)
    for begin in range(0, flat.size, max(length, 1)):
        part = slice(begin, begin + length)
        weight = flat[part]
        segment = Segment(
            weight,
            read(begin, begin + weight.size),
            {slot: a[part] for slot, a in state.items()},
            (one[: weight.size], two[: weight.size]),
        )
        optimizer.update(param.backend, segment, options, member.step)
    for place, (slot, values) in enumerate(state.items()):
        stream = state_stream(member.step, member.index, place)
        member.arrays[slot] = kind.pack(param.backend, values, stream, slot in optimizer.squares)
    _write(param, flat, state_stream(member.step, member.index, WEIGHT_SLOT) if own else None)


def _moves_in_place(optimizer: OneTensorOptimizer, member: ParamState, grad: ExTensor) -> bool:
    """Whether one call of a kernel makes the whole update on the arrays as they are."""
    param = member.param
    return (
        has_kernel(optimizer)
        and optimizer.states == float32.name
        and param.dtype is float32
        and param.size <= KERNEL_SEGMENT
        and member.takes_multi_tensor(grad)
        and bool(getattr(param.data.flags, "writeable", True))  # a GPU's arrays have no such flag
    )


def _move_in_place(
    optimizer: OneTensorOptimizer, member: ParamState, grad: ExTensor, options: Mapping[str, Any]
) -> None:
    """The update of a small float32 parameter, for which Python takes longer than the kernel."""
    param, xp = member.param, member.param.backend.xp
    weight = param.data.reshape(-1)
    scratch = xp.empty((2, weight.size), weight.dtype)
    segment = Segment(weight, grad.data.reshape(-1), member.arrays, tuple(scratch))
    optimizer.update(param.backend, segment, options, member.step)
    param._count_write()


def values_of_weight(param: ExTensor, dtype: Any) -> Array:
    """A parameter's values as a flat array; its own memory where it has the dtype, if it can be."""
    if param.is_blocked:
        return param.backend.dequantize(param.data).reshape(-1)
    return param.backend.cast(_flat_view(param.data), dtype)


def _write(param: ExTensor, flat: Array, stream: Stream | None) -> None:
    """Round flat values into a parameter: stochastically with a stream, else to nearest."""
    data, backend = param.data, param.backend
    with no_grad():
        if param.is_blocked:
            rounding = "nearest_even" if stream is None else "stochastic"
            rounded = data.spec.replace(rounding=rounding)
            packed = backend.pack(flat.reshape(param.shape), rounded, stream)
            param.assign_(replace(packed, spec=data.spec))
            return
        if stream is not None:
            flat = STATES[bfloat16.name].pack(backend, flat, stream, square=False)
        param.assign_(backend.cast(flat.reshape(param.shape), data.dtype))


def _flat_view(data: Array) -> Array:
    """The parameter's own memory as a vector where that may be written to, else a copy."""
    ours = data.flags.c_contiguous and getattr(data.flags, "writeable", True)
    return data.reshape(-1) if ours else data.reshape(-1).copy()
