"""Indexing, gathering and scattering by position."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.positions import check_bounds, check_positions, raw_key
from extensor.autograd.primitive import BadInput, Sample, primitive
from extensor.autograd.row_gradient import RowGradient
from extensor.autograd.tensor import ExTensor, wrap
from extensor.dtypes import bfloat16
from extensor.ops.arguments import as_tensor, axis_index, tensors_only
from extensor.quant import views
from extensor.quant.array import QuantArray

__all__ = ["gather", "scatter_add", "take"]


def _is_basic(key: Any) -> bool:
    parts = key if isinstance(key, tuple) else (key,)
    return all(
        part is None or part is ... or isinstance(part, (int, np.integer, slice)) for part in parts
    )


def _getitem(backend: Any, x: Any, key: Any) -> Any:
    try:
        check_positions(backend, x.shape, key)
        return x[key]
    except IndexError as error:
        raise IndexError(f"index of a tensor of shape {tuple(x.shape)}: {error}") from error


@primitive(
    forward=_getitem,
    vjps=(lambda g, out, x, key: apply("put", g, key=key, shape=x.shape),),
    reads="nothing",
    moves=True,
    view=True,
    samples=lambda rng: [
        Sample((rng.normal(size=(3, 4)), (1, slice(None, None, 2)))),
        Sample((rng.normal(size=(3, 4)), (..., None, -1))),
        Sample((rng.normal(size=(3, 4)), np.array([0, 2, 0]))),
        Sample((rng.normal(size=(3, 4)), (slice(None), np.array([[1, 1]])))),
        Sample((rng.normal(size=(3, 4)), np.arange(12).reshape(3, 4) % 2 == 0)),
    ],
    errors=(
        BadInput((np.zeros((2, 3)), 2), IndexError, "shape (2, 3)"),
        BadInput((np.zeros((2, 3)), np.zeros(2)), TypeError, "expected integers"),
        BadInput((np.zeros((2, 3)), (0, 0, 0)), IndexError, "too many indices"),
    ),
)
def getitem(x: ExTensor, key: Any) -> ExTensor:
    """``x[key]``: integers, slices, None, ``...``, integer and bool arrays or tensors.

    A selection by integers and slices is a view, by arrays a copy, as in numpy.

    Raises:
        IndexError: for a position or a number of axes out of range.
        TypeError: for anything else in the key.
    """
    tensors_only("getitem", x)
    simple = isinstance(key, (int, slice))
    return apply("getitem", x, key=key if simple else raw_key(key))


def _put(backend: Any, g: Any, key: Any, shape: tuple[int, ...]) -> Any:
    out = backend.xp.zeros(shape, dtype=g.dtype)
    if isinstance(key, np.ndarray):
        key = backend.xp.asarray(key)  # a host array may name positions on any device
    if _is_basic(key) or getattr(key, "dtype", None) == np.bool_:
        out[key] = g  # no position twice
    elif isinstance(key, tuple):
        backend.xp.add.at(out, key, g)
    else:
        backend.add_rows(out, key, g)
    return out


@primitive(
    name="put",
    forward=_put,
    vjps=(lambda h, out, g, key, shape: getitem(h, key),),
    reads="nothing",
    samples=lambda rng: [
        Sample((rng.normal(size=(3, 4)),), {"key": np.array([0, 2, 0]), "shape": (3, 4)}),
        Sample((rng.normal(size=(2,)),), {"key": (1, slice(None, None, 2)), "shape": (3, 4)}),
    ],
)
def _put_at(g: ExTensor, key: Any, shape: tuple[int, ...]) -> ExTensor:
    """Zeros of a shape with g added at ``key``: the transpose of getitem."""
    return apply("put", g, key=key, shape=shape)


def _positions(name: str, indices: Any, x: ExTensor) -> ExTensor:
    made = as_tensor(name, indices, None if isinstance(indices, int) else x)
    if not made.dtype.is_integer:
        raise TypeError(f"{name}: indices: expected integers, got {made.dtype.name}")
    return made


def _take(backend: Any, x: Any, index: Any, axis: int) -> Any:
    check_bounds(backend, [(index, x.shape[axis], axis)], "take: ")
    return backend.xp.take(x, index, axis=axis)


def _take_vjp(g: ExTensor, out: None, x: ExTensor, index: ExTensor, axis: int) -> ExTensor:
    if axis == 0:
        return apply("put", g, key=index.data, shape=x.shape)
    # The axes of the index, moved to the front, then x's axis.
    moved = tuple(range(axis, axis + index.ndim))
    rest = tuple(a for a in range(g.ndim) if a not in moved)
    front = g.permute((*moved, *rest))
    shape = (x.shape[axis], *(x.shape[a] for a in range(x.ndim) if a != axis))
    back = (*range(1, axis + 1), 0, *range(axis + 1, x.ndim))
    return apply("put", front, key=index.data, shape=shape).permute(back)


def _take_fused(
    backend: Any, g: Any, out: None, inputs: Sequence[Any], needs: Sequence[bool], axis: int
) -> list[Any]:
    x, index = inputs
    if axis != 0:
        graph = (wrap(g, backend), None, wrap(x, backend), wrap(index, backend))
        return [_take_vjp(*graph, axis).data, None]
    return [RowGradient(index, g, x.shape), None]


def _take_rows(backend: Any, x: Any, index: Any) -> Any:
    if not isinstance(x, QuantArray):
        return _take(backend, x, index, 0)
    check_bounds(backend, [(index, x.shape[0], 0)], "take: ")
    return backend.dequantize(views.take(x, index, 0), bfloat16.name)


@primitive(
    name="take_rows",
    forward=_take_rows,
    vjps=(partial(_take_vjp, axis=0), None),
    fused_vjp=partial(_take_fused, axis=0),
    reads="inputs",
    mixed=True,
    takes_blocked=True,
    samples=lambda rng: [Sample((rng.normal(size=(3, 4)), np.array([[0, 2], [0, 1]])))],
)
def _taken_rows(x: ExTensor, index: ExTensor) -> ExTensor:
    """Rows of a matrix; of a parameter in blocks these alone are decoded."""
    return apply("take_rows", x, index)


@primitive(
    forward=_take,
    vjps=(_take_vjp, None),
    fused_vjp=_take_fused,
    reads="inputs",
    moves=True,
    samples=lambda rng: [
        Sample((rng.normal(size=(3, 4)), np.array([[0, 2], [0, 1]]))),
        Sample((rng.normal(size=(2, 3, 4)), np.array([-1, 2, 2]), 2)),
        Sample((rng.normal(size=(2, 3, 4)), np.array([[1, 0]]), 1)),
    ],
    errors=(
        BadInput((np.zeros((2, 3)), np.array([2])), IndexError, "expected positions in -2..1"),
        BadInput((np.zeros((2, 3)), np.array([0.5])), TypeError, "expected integers"),
    ),
)
def take(x: ExTensor, indices: Any, axis: int | None = 0) -> ExTensor:
    """Whole slices of x at positions along an axis; with axis 0, rows of an embedding table.

    Args:
        x: one axis or more.
        indices: integers of any shape; negative ones count from the end.
        axis: the axis to take from; may be None for a vector.

    Returns:
        The shape of x, the axes of ``indices`` in place of ``axis``.

    Raises:
        IndexError: for a position out of range.
        TypeError, ValueError: for indices that are no integers, or a bad axis.

    Example:
        >>> et.take(et.ExTensor([[1, 2], [3, 4], [5, 6]]), et.ExTensor([2, 0])).tolist()
        [[5, 6], [1, 2]]
    """
    tensors_only("take", x)
    if axis is None and x.ndim == 1:
        axis = 0
    at = axis_index("take", axis, x.ndim)
    positions = _positions("take", indices, x)
    if at == 0 and x.ndim == 2 and x.is_blocked_parameter:
        return _taken_rows(x, positions)
    return apply("take", x, positions, axis=at)


def _check_gather(name: str, x: ExTensor, index: ExTensor, at: int) -> None:
    fits = x.ndim == index.ndim and all(
        i <= n for a, (i, n) in enumerate(zip(index.shape, x.shape, strict=True)) if a != at
    )
    if not fits:
        raise ValueError(
            f"{name}: expected indices of {x.ndim} axes, none longer than in {x.shape} but axis "
            f"{at}, got shape {index.shape}"
        )
    check_bounds(x.backend, [(index.data, x.shape[at], at)], f"{name}: ")


def _grid(xp: Any, index: Any, axis: int) -> Any:
    key = list(xp.ogrid[tuple(slice(0, n) for n in index.shape)]) if index.ndim > 1 else [None]
    key[axis] = index
    return tuple(key)


def _scatter(backend: Any, x: Any, index: Any, source: Any, axis: int) -> Any:
    out = x.copy()
    backend.xp.add.at(out, _grid(backend.xp, index, axis), source)
    return out


@primitive(
    forward=lambda backend, x, index, axis: x[_grid(backend.xp, index, axis)],
    vjps=(
        lambda g, out, x, index, axis: apply(
            "scatter_add", ExTensor.zeros(x.shape, g.dtype, device=g.device), index, g, axis=axis
        ),
        None,
    ),
    reads="inputs",
    moves=True,
    samples=lambda rng: [
        Sample((rng.normal(size=(3, 4)), np.array([[0, 3], [1, 1], [2, 0]]))),
        Sample((rng.normal(size=(3, 4)), np.array([[0, 2, 1, 1]]), 0)),
    ],
    errors=(
        BadInput((np.zeros((2, 3)), np.zeros((2, 3), int), 2), ValueError, "expected -2..1"),
        BadInput((np.zeros((2, 3)), np.zeros(2, int)), ValueError, "expected indices of 2 axes"),
        BadInput((np.zeros((2, 3)), np.full((2, 1), 3)), IndexError, "expected positions"),
    ),
)
def gather(x: ExTensor, indices: Any, axis: int = -1) -> ExTensor:
    """One value of x per position, ``out[i][j] = x[i][indices[i][j]]`` along the last axis.

    Args:
        x: any shape of one axis or more.
        indices: integers, as many axes as x, off the axis no longer than x.
        axis: the axis the positions are on.

    Returns:
        The shape of ``indices``.

    Raises:
        IndexError: for a position out of range.
        TypeError, ValueError: for indices of another dtype or shape, or a bad axis.

    Example:
        >>> et.gather(et.ExTensor([[1, 2], [3, 4]]), et.ExTensor([[1], [0]])).tolist()
        [[2], [3]]
    """
    tensors_only("gather", x)
    at = axis_index("gather", axis, x.ndim)
    index = _positions("gather", indices, x)
    _check_gather("gather", x, index, at)
    return apply("gather", x, index, axis=at)


@primitive(
    forward=_scatter,
    vjps=(
        lambda g, out, x, index, source, axis: g,
        None,
        lambda g, out, x, index, source, axis: gather(g, index, axis),
    ),
    reads="inputs",
    samples=lambda rng: [
        Sample(
            (rng.normal(size=(3, 4)), np.array([[0, 0], [1, 3], [2, 0]]), rng.normal(size=(3, 2)))
        ),
        Sample((rng.normal(size=(3,)), np.array([1, 1, 0]), rng.normal(size=(3,)), 0)),
    ],
    errors=(
        BadInput(
            (np.zeros((2, 3)), np.zeros((2, 1), int), np.zeros((2, 2))), ValueError, "of the shape"
        ),
    ),
)
def scatter_add(x: ExTensor, indices: Any, source: ExTensor, axis: int = -1) -> ExTensor:
    """Add values to a copy of x at the positions that `gather` would read; repeated ones add up.

    Args:
        x: any shape of one axis or more.
        indices: integers, as many axes as x, off the axis no longer than x.
        source: the values to add, of the shape of ``indices``.
        axis: the axis the positions are on.

    Returns:
        The shape of x.

    Raises:
        IndexError: for a position out of range.
        TypeError, ValueError: as `gather`, and for a source not of the shape of the indices.

    Example:
        >>> positions, source = et.ExTensor([0, 2, 0]), et.ExTensor([1.0, 2.0, 3.0])
        >>> et.scatter_add(et.zeros(3), positions, source).tolist()
        [4.0, 0.0, 2.0]
    """
    tensors_only("scatter_add", x, source)
    at = axis_index("scatter_add", axis, x.ndim)
    index = _positions("scatter_add", indices, x)
    _check_gather("scatter_add", x, index, at)
    if source.shape != index.shape:
        raise ValueError(
            f"scatter_add: expected a source of the shape {index.shape} of the indices, "
            f"got {source.shape}"
        )
    return apply("scatter_add", x, index, source, axis=at)
