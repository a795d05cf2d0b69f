"""Shapes: the same values under another shape, or with their axes in another order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.creation import as_shape
from extensor.autograd.primitive import BadInput, Sample, composite, primitive
from extensor.autograd.tensor import ExTensor
from extensor.ops.arguments import Axis, axis_index, axis_tuple, broadcasts, tensors_only
from extensor.ops.arithmetic import clone
from extensor.ops.declare import NO_TENSOR

__all__ = [
    "broadcast_to", "expand_dims", "flatten", "flip", "permute", "ravel", "reshape", "squeeze",
    "swapaxes", "transpose", "unsqueeze",
]  # fmt: skip


@primitive(
    forward=lambda backend, x, shape: x.reshape(shape),
    vjps=(lambda g, out, x, shape: g.reshape(x.shape),),
    fused_vjp=lambda backend, g, out, inputs, needs, shape: (g.reshape(inputs[0].shape),),
    reads="nothing",
    moves=True,
    view=True,
    samples=lambda rng: [
        Sample((rng.normal(size=(3, 4)), (2, 6))),
        Sample((rng.normal(size=(2, 3, 4)), (4, -1))),
        Sample((rng.normal(size=()), (1, 1))),
    ],
    errors=(
        BadInput((np.zeros((2, 3)), (4, 2)), ValueError, "expected a shape of 6 elements"),
        BadInput((np.zeros((2, 3)), (-1, -1)), ValueError, "one -1"),
        BadInput((np.zeros((2, 3)), "six"), TypeError, "tuple of ints"),
    ),
)
def reshape(x: ExTensor, shape: int | Sequence[int], *, copy: bool | None = None) -> ExTensor:
    """Reshape x to a shape of as many elements, in row-major order.

    A blocked tensor keeps its codes; its block axis must stay whole.

    Args:
        x: any shape.
        shape: an int or ints; one of them may be -1, which the others determine.
        copy: True always copies, False never does, None copies only where a view is impossible.

    Returns:
        The values of x in ``shape``.

    Raises:
        TypeError, ValueError: for a shape that is no ints, or of another number of elements, and
            for ``copy=False`` where the order of x in memory makes a view impossible.

    Example:
        >>> et.reshape(et.arange(6), (2, -1)).tolist()
        [[0, 1, 2], [3, 4, 5]]
    """
    tensors_only("reshape", x)
    requested = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    if copy is not None:
        made = reshape(x, requested)
        viewed = made._version is x._version
        if copy is False and not viewed:
            raise ValueError(f"reshape: {x.shape} as {requested} cannot be had without a copy")
        return clone(made) if copy and viewed else made
    try:
        if x.dtype.is_blocked or not x.data.size:
            requested = _resolved(x, requested)
        return apply("reshape", x, shape=requested)
    except (TypeError, ValueError):
        _resolved(x, requested)  # raises a clearer error
        raise


def _resolved(x: ExTensor, requested: tuple[Any, ...]) -> tuple[int, ...]:
    """The requested shape with its -1 filled in, checked against x's number of elements."""
    unknown = [i for i, n in enumerate(requested) if isinstance(n, (int, np.integer)) and n == -1]
    if len(unknown) > 1:
        raise ValueError(f"reshape: expected at most one -1, got {requested}")
    sizes = list(
        as_shape(tuple(1 if i in unknown else n for i, n in enumerate(requested)), "reshape")
    )
    for i in unknown:
        rest = math.prod(sizes)
        if not rest:
            raise ValueError(
                f"reshape: expected sizes other than 0 beside -1, which could be any here, got "
                f"{requested} for a tensor of shape {x.shape}; write the size out"
            )
        sizes[i] = x.size // rest
    if math.prod(sizes) != x.size:
        raise ValueError(
            f"reshape: expected a shape of {x.size} elements for a tensor of shape {x.shape}, "
            f"got {requested}"
        )
    return tuple(sizes)


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(2, 3, 4)), 1)),
        Sample((rng.normal(size=(2, 3, 4)), 0, 1)),
    ],
    errors=(BadInput((np.zeros((2, 3)), 1, 0), ValueError, "start <= end"),),
)
def flatten(x: ExTensor, start: int = 0, end: int = -1) -> ExTensor:
    """Merge neighbouring axes into one.

    Args:
        x: any shape; a tensor without axes gets one.
        start: the first axis to merge.
        end: the last axis to merge, included.

    Returns:
        The values of x with fewer axes.

    Raises:
        TypeError, ValueError: for a bad axis, or ``start`` after ``end``.

    Example:
        >>> et.flatten(et.zeros((2, 3, 4)), 1).shape
        (2, 12)
    """
    tensors_only("flatten", x)
    if x.ndim == 0:
        return reshape(x, (1,))
    first, last = axis_index("flatten", start, x.ndim), axis_index("flatten", end, x.ndim)
    if first > last:
        raise ValueError(f"flatten: expected start <= end, got {start} and {end}")
    merged = math.prod(x.shape[first : last + 1])
    return reshape(x, (*x.shape[:first], merged, *x.shape[last + 1 :]))


@composite(samples=lambda rng: [Sample((rng.normal(size=(2, 3)),))], errors=NO_TENSOR)
def ravel(x: ExTensor) -> ExTensor:
    """All values along one axis, in row-major order.

    Args:
        x: any shape.

    Returns:
        One axis, of ``x.size`` values.

    Example:
        >>> et.ravel(et.ExTensor([[1, 2], [3, 4]])).tolist()
        [1, 2, 3, 4]
    """
    tensors_only("ravel", x)
    return reshape(x, (x.size,))


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(1, 3, 1)),)), Sample((rng.normal(size=(1, 3, 1)), -1))
    ],
    errors=(BadInput((np.zeros((2, 3)), 0), ValueError, "length 1"),),
)  # fmt: skip
def squeeze(x: ExTensor, axis: Axis = None) -> ExTensor:
    """Remove axes of length 1.

    Args:
        x: any shape.
        axis: the axes to remove; all of length 1 if None.

    Returns:
        The values of x with fewer axes.

    Raises:
        TypeError, ValueError: for a bad axis, or a named axis of another length.

    Example:
        >>> et.squeeze(et.zeros((1, 3, 1)), 0).shape
        (3, 1)
    """
    tensors_only("squeeze", x)
    if axis is None:
        return reshape(x, tuple(n for n in x.shape if n != 1))
    axes = axis_tuple("squeeze", axis, x.ndim)
    for a in axes:
        if x.shape[a] != 1:
            raise ValueError(f"squeeze: expected axes of length 1, got axis {a} of shape {x.shape}")
    return reshape(x, tuple(n for a, n in enumerate(x.shape) if a not in axes))


@composite(
    samples=lambda rng: [Sample((rng.normal(size=(2, 3)), axis)) for axis in (0, 1, (-1, 0))],
    errors=(
        BadInput((np.zeros((2, 3)), 3), ValueError, "expected -3..2"),
        BadInput((np.zeros((2, 3)), (0, -4)), ValueError, "each axis once"),
    ),
)
def expand_dims(x: ExTensor, axis: int | tuple[int, ...]) -> ExTensor:
    """Insert axes of length 1.

    Args:
        x: any shape.
        axis: the place of the new axis in the result, or the places of several.

    Returns:
        The values of x with the new axes.

    Raises:
        TypeError, ValueError: for an axis that is no int, is out of range or named twice.

    Example:
        >>> et.expand_dims(et.zeros((2, 3)), (0, -1)).shape
        (1, 2, 3, 1)
    """
    tensors_only("expand_dims", x)
    count = len(axis) if isinstance(axis, (tuple, list)) else 1
    sizes = list(x.shape)
    for at in axis_tuple("expand_dims", axis, x.ndim + count):
        sizes.insert(at, 1)
    return reshape(x, tuple(sizes))


unsqueeze = expand_dims


@primitive(
    forward=lambda backend, x, shape: backend.xp.broadcast_to(x, shape),
    vjps=(lambda g, out, x, shape: g,),  # the engine sums over broadcast axes
    broadcasts=True,
    reads="nothing",
    moves=True,
    view=True,
    samples=lambda rng: [Sample((rng.normal(size=(3, 1)), (2, 3, 4)))],
    errors=(BadInput((np.zeros((2, 3)), (2, 4)), ValueError, "broadcasts to"),),
)
def broadcast_to(x: ExTensor, shape: Sequence[int]) -> ExTensor:
    """A read-only view of x repeated to a shape.

    Args:
        x: a shape that broadcasts to ``shape``.
        shape: of the result.

    Returns:
        A view; writing to it is an error.

    Raises:
        TypeError, ValueError: for a bad shape, or one that x does not broadcast to.

    Example:
        >>> et.broadcast_to(et.ExTensor([1, 2]), (2, 2)).tolist()
        [[1, 2], [1, 2]]
    """
    tensors_only("broadcast_to", x)
    requested = as_shape(tuple(shape), "broadcast_to")
    if not broadcasts(x.shape, requested):
        raise ValueError(
            f"broadcast_to: expected a shape that {x.shape} broadcasts to, got {requested}"
        )
    return x if x.shape == requested else apply("broadcast_to", x, shape=requested)


@primitive(
    forward=lambda backend, x, axes: x.transpose(axes),
    vjps=(lambda g, out, x, axes: g.permute(_inverse(axes)),),
    fused_vjp=lambda backend, g, out, inputs, needs, axes: (g.transpose(_inverse(axes)),),
    reads="nothing",
    moves=True,
    view=True,
    samples=lambda rng: [Sample((rng.normal(size=(2, 3, 4)), (2, 0, 1)))],
    errors=(BadInput((np.zeros((2, 3)), (0, 0)), ValueError, "each axis once"),),
)
def permute(x: ExTensor, axes: Sequence[int]) -> ExTensor:
    """Give x with its axes in another order; a blocked tensor keeps its codes.

    Args:
        x: any shape.
        axes: for each axis of the result its number in x.

    Returns:
        A view of x.

    Raises:
        TypeError, ValueError: unless ``axes`` names each axis once.

    Example:
        >>> et.permute(et.zeros((2, 3, 4)), (2, 0, 1)).shape
        (4, 2, 3)
    """
    tensors_only("permute", x)
    axes = (axes,) if isinstance(axes, int) else axes
    order = tuple(axis_index("permute", a, x.ndim) for a in axes)
    if sorted(order) != list(range(x.ndim)):
        raise ValueError(
            f"permute: expected each axis once for a tensor of {x.ndim} axes, got {tuple(axes)}"
        )
    return apply("permute", x, axes=order)


def _inverse(axes: tuple[int, ...]) -> tuple[int, ...]:
    inverse = [0] * len(axes)
    for i, a in enumerate(axes):
        inverse[a] = i
    return tuple(inverse)


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(2, 3, 4)),)), Sample((rng.normal(size=(2, 3, 4)), 0, -1))
    ],
    errors=(BadInput((np.zeros((2, 3, 4)), 0), ValueError, "no axes, two, or all"),),
)  # fmt: skip
def transpose(x: ExTensor, *axes: Any) -> ExTensor:
    """Reverse all axes, swap two of them, or order them as `permute`.

    Args:
        x: any shape.
        axes: none, to reverse all; two, to swap those; or all, in their new order.

    Returns:
        A view of x.

    Raises:
        ValueError: for another number of axes, or a bad axis.

    Example:
        >>> et.transpose(et.ExTensor([[1, 2], [3, 4]])).tolist()
        [[1, 3], [2, 4]]
    """
    tensors_only("transpose", x)
    if len(axes) == 1 and isinstance(axes[0], (tuple, list)):
        axes = tuple(axes[0])
    if not axes or axes == (None,):
        return permute(x, tuple(range(x.ndim))[::-1])
    if len(axes) == x.ndim and len({int(a) % x.ndim for a in axes}) == x.ndim > 2:
        return permute(x, axes)
    if len(axes) != 2:
        raise ValueError(f"transpose: expected no axes, two, or all {x.ndim} of them, got {axes}")
    return swapaxes(x, *axes)


@composite(
    samples=lambda rng: [Sample((rng.normal(size=(2, 3, 4)), 0, -1))],
    errors=(BadInput((np.zeros((2, 3)), 0, 2), ValueError, "expected -2..1"),),
)
def swapaxes(x: ExTensor, first: int, second: int) -> ExTensor:
    """Exchange two axes.

    Args:
        x: any shape.
        first: an axis.
        second: the axis to exchange it with.

    Returns:
        A view of x.

    Raises:
        TypeError, ValueError: for an axis that is no int or out of range.

    Example:
        >>> et.swapaxes(et.zeros((2, 3, 4)), 0, -1).shape
        (4, 3, 2)
    """
    tensors_only("swapaxes", x)
    order = list(range(x.ndim))
    a, b = axis_index("swapaxes", first, x.ndim), axis_index("swapaxes", second, x.ndim)
    order[a], order[b] = order[b], order[a]
    return permute(x, order)


@primitive(
    forward=lambda backend, x, axis: backend.xp.flip(x, axis),
    vjps=(lambda g, out, x, axis: g.flip(axis),),
    reads="nothing",
    moves=True,
    view=True,
    samples=lambda rng: [Sample((rng.normal(size=(2, 3)),)), Sample((rng.normal(size=(2, 3)), 1))],
    errors=(BadInput((np.zeros((2, 3)), 2), ValueError, "expected -2..1"),),
)
def flip(x: ExTensor, axis: Axis = None) -> ExTensor:
    """Reverse the order of the values along axes.

    Args:
        x: any shape.
        axis: the axes to reverse, all if None.

    Returns:
        A view of x.

    Raises:
        TypeError, ValueError: for an axis that is no int, out of range or named twice.

    Example:
        >>> et.flip(et.ExTensor([1, 2, 3])).tolist()
        [3, 2, 1]
    """
    tensors_only("flip", x)
    return apply("flip", x, axis=axis_tuple("flip", axis, x.ndim))
