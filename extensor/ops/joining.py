"""Joining, splitting, repeating, rolling and padding along axes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.creation import ShapeLike, as_shape
from extensor.autograd.primitive import BadInput, Sample, composite, primitive
from extensor.autograd.tensor import ExTensor
from extensor.ops.arguments import axis_index, tensors_only
from extensor.ops.shape import broadcast_to, expand_dims, ravel, reshape

__all__ = ["cat", "concatenate", "pad", "repeat", "roll", "split", "stack", "tile"]


def _parts(name: str, tensors: Any) -> list[ExTensor]:
    parts = list(tensors) if isinstance(tensors, (list, tuple)) else []
    if not parts:
        raise ValueError(f"{name}: expected a list of one tensor or more, got {tensors!r}")
    tensors_only(name, *parts)
    return parts


def _span(inputs: Sequence[Any], index: int, axis: int) -> slice:
    start = sum(x.shape[axis] for x in inputs[:index])
    return slice(start, start + inputs[index].shape[axis])


def _concatenate_vjp(index: int, g: ExTensor, out: None, *inputs: ExTensor, axis: int) -> ExTensor:
    return g[(*(slice(None),) * axis, _span(inputs, index, axis))]


@primitive(
    forward=lambda backend, *arrays, axis: backend.xp.concatenate(arrays, axis=axis),
    vjp_at=_concatenate_vjp,
    reads="nothing",
    moves=True,
    samples=lambda rng: [
        Sample(([rng.normal(size=(2, 3)), rng.normal(size=(2, 1))], 1)),
        Sample(([rng.normal(size=(2, 3)), rng.normal(size=(1, 3)), rng.normal(size=(2, 3))],)),
    ],
    errors=(
        BadInput(([],), ValueError, "one tensor or more"),
        BadInput(([np.zeros((2, 3)), np.zeros((2, 4))], 0), ValueError, "equal but for axis 0"),
    ),
)
def concatenate(tensors: Sequence[ExTensor], axis: int | None = 0) -> ExTensor:
    """Join tensors along an axis they have.

    Args:
        tensors: one or more, of one shape but for ``axis``.
        axis: the axis to join along; None joins the flattened values.

    Returns:
        The promoted dtype; along ``axis`` the lengths add up.

    Raises:
        TypeError, ValueError: for no tensors, shapes that differ off the axis, or a bad axis.

    Example:
        >>> et.concatenate([et.ExTensor([1, 2]), et.ExTensor([3])]).tolist()
        [1, 2, 3]
    """
    parts = _parts("concatenate", tensors)
    if axis is None:
        parts, axis = [ravel(part) for part in parts], 0
    at = axis_index("concatenate", axis, parts[0].ndim)
    rests = {(*p.shape[:at], -1, *p.shape[at + 1 :]) for p in parts}
    if len(rests) > 1:
        raise ValueError(
            f"concatenate: expected shapes equal but for axis {at}, got "
            f"{', '.join(str(p.shape) for p in parts)}"
        )
    return apply("concatenate", *parts, axis=at)


cat = concatenate


@composite(
    samples=lambda rng: [Sample(([rng.normal(size=(2, 3)), rng.normal(size=(2, 3))], 1))],
    errors=(BadInput(([np.zeros(2), np.zeros(3)],), ValueError, "equal shapes"),),
)
def stack(tensors: Sequence[ExTensor], axis: int = 0) -> ExTensor:
    """Join tensors of one shape along a new axis.

    Args:
        tensors: one or more, of one shape.
        axis: the place of the new axis in the result.

    Returns:
        The promoted dtype; ``axis`` has the length ``len(tensors)``.

    Raises:
        TypeError, ValueError: for no tensors, shapes that differ, or a bad axis.

    Example:
        >>> et.stack([et.ExTensor([1, 2]), et.ExTensor([3, 4])], axis=1).tolist()
        [[1, 3], [2, 4]]
    """
    parts = _parts("stack", tensors)
    if len({p.shape for p in parts}) > 1:
        raise ValueError(
            f"stack: expected equal shapes, got {', '.join(str(p.shape) for p in parts)}"
        )
    at = axis_index("stack", axis, parts[0].ndim + 1)
    return concatenate([expand_dims(p, at) for p in parts], at)


MAX_EMPTY_PARTS = 1 << 16
"""Parts of an axis without elements, which any number divides."""


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(4, 3)), 2)), Sample((rng.normal(size=(2, 5)), [1, 4], 1))
    ],
    errors=(
        BadInput((np.zeros((4, 3)), 3), ValueError, "divides"),
        BadInput((np.zeros((4, 3)), [3, 2]), ValueError, "ascending"),
    ),
)  # fmt: skip
def split(x: ExTensor, sections: ShapeLike, axis: int = 0) -> list[ExTensor]:
    """Split x along an axis.

    Args:
        x: one axis or more.
        sections: the number of equal parts, or the ascending positions at which to cut.
        axis: the axis to split.

    Returns:
        The parts, in order.

    Raises:
        TypeError, ValueError: if a number of parts does not divide the axis, positions do not
            ascend, or the axis is bad.

    Example:
        >>> [part.tolist() for part in et.split(et.arange(5), [2, 3])]
        [[0, 1], [2], [3, 4]]
    """
    tensors_only("split", x)
    at = axis_index("split", axis, x.ndim)
    length = x.shape[at]
    if isinstance(sections, (tuple, list)):
        cuts = [0, *sections, length]
        if sorted(cuts) != cuts:
            raise ValueError(
                f"split: expected ascending positions in 0..{length}, got {list(sections)}"
            )
    else:
        (count,) = as_shape(sections, "split")
        if count == 0 or length % count or count > max(length, MAX_EMPTY_PARTS):
            raise ValueError(
                f"split: expected a number that divides {length}, {MAX_EMPTY_PARTS} at most of "
                f"an empty axis, got {sections}"
            )
        cuts = [i * (length // count) for i in range(count + 1)]
    before = (slice(None),) * at
    return [x[(*before, slice(a, b))] for a, b in itertools.pairwise(cuts)]


@composite(
    samples=lambda rng: [
        Sample((rng.normal(size=(2, 3)), (2, 1, 2)), expected=None),
        Sample((np.array([1.0, 2.0]), 2), expected=np.array([1.0, 2.0, 1.0, 2.0])),
    ],
    errors=(BadInput((np.zeros(3), -1), ValueError, "0 or more"),),
)
def tile(x: ExTensor, repeats: int | Sequence[int]) -> ExTensor:
    """Repeat the whole of x along each axis.

    Args:
        x: any shape.
        repeats: how often, for each axis, counted from the last.

    Returns:
        The values of x, each axis as many times as long.

    Raises:
        TypeError, ValueError: for counts that are no ints or negative.

    Example:
        >>> et.tile(et.ExTensor([1, 2]), 2).tolist()
        [1, 2, 1, 2]
    """
    tensors_only("tile", x)
    times = as_shape(repeats if isinstance(repeats, int) else tuple(repeats), "tile")
    ndim = max(len(times), x.ndim)
    times = (1,) * (ndim - len(times)) + times
    shape = (1,) * (ndim - x.ndim) + x.shape
    pairs = tuple(n for size in shape for n in (1, size))
    wide = tuple(n for count, size in zip(times, shape, strict=True) for n in (count, size))
    total = tuple(count * size for count, size in zip(times, shape, strict=True))
    return reshape(broadcast_to(reshape(x, pairs), wide), total)


@composite(
    samples=lambda rng: [
        Sample((np.array([1.0, 2.0]), 2), expected=np.array([1.0, 1.0, 2.0, 2.0])),
        Sample((rng.normal(size=(2, 3)), 2, 1)),
        Sample((rng.normal(size=(2, 3)), np.array([2, 0, 1]), 1)),
    ],
    errors=(
        BadInput((np.zeros(3), -1), ValueError, "0 or more"),
        BadInput((np.zeros(3), np.array([1, 2])), ValueError, "one count for each of 3"),
    ),
)
def repeat(x: ExTensor, repeats: int | ExTensor, axis: int | None = None) -> ExTensor:
    """Repeat each value along an axis.

    Args:
        x: any shape.
        repeats: how often; a tensor of counts has one for each position along the axis.
        axis: the axis to repeat along; None repeats the values of ``x.ravel()``.

    Returns:
        The values of x, ``axis`` as long as the counts add up to.

    Raises:
        TypeError, ValueError: for counts that are no integers, negative, or (a vector of them) not
            as many as there are values, and for a bad axis.

    Example:
        >>> et.repeat(et.ExTensor([1, 2]), 2).tolist()
        [1, 1, 2, 2]
    """
    tensors_only("repeat", x)
    flat = ravel(x) if axis is None else x
    at = 0 if axis is None else axis_index("repeat", axis, x.ndim)
    before, size, after = flat.shape[:at], flat.shape[at], flat.shape[at + 1 :]
    if isinstance(repeats, ExTensor):
        counts = as_shape(repeats.tolist() if repeats.ndim else repeats.item(), "repeat")
        if len(counts) not in (1, size):
            raise ValueError(f"repeat: expected one count for each of {size}, got {len(counts)}")
        if len(counts) != 1:
            places = ExTensor(np.repeat(np.arange(size), np.asarray(counts, int)), device=x.device)
            return flat.take(places, at)
        repeats = counts[0]
    (count,) = as_shape(repeats, "repeat")
    wide = broadcast_to(expand_dims(flat, at + 1), (*before, size, count, *after))
    return reshape(wide, (*before, size * count, *after))


@composite(
    samples=lambda rng: [
        Sample((np.arange(4.0), 1), expected=np.array([3.0, 0.0, 1.0, 2.0])),
        Sample((rng.normal(size=(2, 3)), -1, 1)),
        Sample((rng.normal(size=(2, 3)), (1, -1), (0, 1))),
    ],
    errors=(
        BadInput((np.zeros((2, 3)), 1, 2), ValueError, "expected -2..1"),
        BadInput((np.zeros((2, 3)), (1, 2), 1), ValueError, "as many shifts as axes"),
    ),
)
def roll(
    x: ExTensor, shift: int | Sequence[int], axis: int | Sequence[int] | None = None
) -> ExTensor:
    """Shift x along axes; values that leave one end enter at the other.

    Args:
        x: any shape.
        shift: places to move, one for all axes or one for each.
        axis: one or several; None moves the values of ``x.ravel()``.

    Returns:
        The shape of x.

    Raises:
        TypeError, ValueError: for shifts that are no ints, or not as many as axes, or a bad axis.

    Example:
        >>> et.roll(et.ExTensor([1, 2, 3, 4]), 1).tolist()
        [4, 1, 2, 3]
    """
    tensors_only("roll", x)
    if axis is None:
        return reshape(roll(ravel(x), shift, 0), x.shape)
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    shifts = tuple(shift) if isinstance(shift, (tuple, list)) else (shift,) * len(axes)
    if len(shifts) != len(axes):
        raise ValueError(f"roll: expected as many shifts as axes, got {shift!r} and {axis!r}")
    moved = x
    for places, one in zip(shifts, axes, strict=True):
        if not isinstance(places, (int, np.integer)):
            raise TypeError(f"roll: shift: expected ints, got {shift!r}")
        at = axis_index("roll", one, x.ndim)
        size = x.shape[at]
        cut = -places % size if size else 0
        if cut:
            before = (slice(None),) * at
            parts = [moved[(*before, slice(cut, None))], moved[(*before, slice(0, cut))]]
            moved = concatenate(parts, at)
    return moved


@primitive(
    forward=lambda backend, x, widths, value: backend.xp.pad(x, widths, constant_values=value),
    vjps=(
        lambda g, out, x, widths, value: g[
            tuple(slice(b, b + n) for (b, _), n in zip(widths, x.shape, strict=True))
        ],
    ),
    reads="nothing",
    moves=True,
    samples=lambda rng: [
        Sample((rng.normal(size=(2, 3)), ((1, 0), (0, 2)))),
        Sample((rng.normal(size=(2, 3)), 1), {"value": 2.0}),
    ],
    errors=(
        BadInput((np.zeros((2, 3)), ((1, 1),)), ValueError, "for each of 2 axes"),
        BadInput((np.zeros((2, 3)), -1), ValueError, "0 or more"),
    ),
)
def pad(x: ExTensor, widths: int | Sequence[Sequence[int]], value: float = 0.0) -> ExTensor:
    """Add values around x.

    Args:
        x: any shape.
        widths: (before, after) for each axis, or one width for all sides.
        value: the value to add.

    Returns:
        The values of x in the middle of a larger shape.

    Raises:
        TypeError, ValueError: for another number of pairs, or negative widths.

    Example:
        >>> et.pad(et.ExTensor([1, 2]), ((1, 2),)).tolist()
        [0, 1, 2, 0, 0]
    """
    tensors_only("pad", x)
    each = [(widths, widths)] * x.ndim if isinstance(widths, int) else list(widths)
    if len(each) != x.ndim or any(len(w) != 2 for w in each):
        raise ValueError(f"pad: expected (before, after) for each of {x.ndim} axes, got {widths!r}")
    sizes = tuple(as_shape(tuple(w), "pad") for w in each)
    return apply("pad", x, widths=sizes, value=value)
