"""Transposing, slicing and reshaping quantized arrays without decoding them.

Codes and scales move together. Cutting through a block is an error that says what to do instead;
nothing is decoded silently.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from extensor.quant.array import QuantArray, tile_extent

__all__ = ["as_matrix", "reshape", "slice_blocks", "take", "transpose", "unstack"]

Array = Any
_INSTEAD = "call .dequantize() first, and quantize the result again"


def _map_parts(q: QuantArray, change: Callable[[str, Array], Array]) -> dict[str, Array]:
    """Apply ``change(name, part)`` to every stored array that has the tensor's axes."""
    return {
        name: part.copy() if isinstance(part, np.ndarray) and not part.flags.c_contiguous else part
        for name, part in (
            (name, change(name, part)) for name, part in q.parts.items() if name != "tensor_scale"
        )
    }


def _tile_rows(q: QuantArray) -> int:
    return q.spec.tile[0] if isinstance(q.spec.tile, tuple) else 1


def transpose(q: QuantArray, axes: tuple[int, ...]) -> QuantArray:
    """Permute the axes; the block axis is permuted with them.

    Raises:
        ValueError: if tiles of several rows would lose their row axis before the block axis.
    """
    ndim = len(q.shape)
    axis = axes.index(q.spec.axis)
    if _tile_rows(q) > 1 and axes[(axis - 1) % ndim] != (q.spec.axis - 1) % ndim:
        raise ValueError(
            f"transposing to {axes} would separate the row axis of tile {q.spec.tile} from its "
            f"block axis {q.spec.axis}; {_INSTEAD}"
        )
    # Views: a matrix product transposes back, which then costs nothing.
    parts = {name: part.transpose(axes) for name, part in q.parts.items() if name != "tensor_scale"}
    shape = tuple(q.shape[a] for a in axes)
    return dataclasses.replace(q, **parts, shape=shape, spec=q.spec.replace(axis=axis))


def take(q: QuantArray, index: Array, axis: int) -> QuantArray:
    """Slices at positions along an axis that no block extends over; the index's axes replace it.

    Raises:
        ValueError: for the block axis, or one that tiles of several rows extend over.
    """
    if axis == q.spec.axis or (q.spec.tile != "tensor" and tile_extent(q.spec, q.shape)[axis] > 1):
        raise ValueError(
            f"taking along axis {axis} would cut blocks {q.spec.tile} along axis {q.spec.axis}; "
            f"{_INSTEAD}"
        )

    def rows(name: str, part: Array) -> Array:
        if q.spec.tile == "tensor" and name != "codes":  # one scale, which every slice keeps
            return part.reshape((*part.shape[:axis], *(1,) * index.ndim, *part.shape[axis + 1 :]))
        return part.take(index, axis=axis)

    shape = (*q.shape[:axis], *index.shape, *q.shape[axis + 1 :])
    moved = q.spec.axis + (index.ndim - 1 if q.spec.axis > axis else 0)
    parts = _map_parts(q, rows)
    return dataclasses.replace(q, **parts, shape=shape, spec=q.spec.replace(axis=moved))


def slice_blocks(q: QuantArray, key: tuple[slice | int, ...]) -> QuantArray:
    """Slice with one entry per axis: any slice off the block axis, whole blocks on it.

    Raises:
        ValueError: if the slice would cut a block, step over elements of the block axis, or drop an
            axis that blocks extend over.
        IndexError: if an integer is out of range.
    """
    new_shape, kept = _sliced_axes(q, key)
    along, length = key[q.spec.axis], q.shape[q.spec.axis]
    assert isinstance(along, slice)  # integers were refused above
    if q.outlier_index is not None and along.indices(length)[:2] != (0, length):
        raise ValueError(f"slicing the rows of the outlier codec; {_INSTEAD}")
    parts = _map_parts(q, lambda name, part: part[_stored_slices(q, key, name, part.shape)])
    spec = q.spec.replace(axis=kept.index(q.spec.axis))
    return dataclasses.replace(q, **parts, shape=tuple(new_shape), spec=spec)


def _sliced_axes(q: QuantArray, key: tuple[slice | int, ...]) -> tuple[list[int], list[int]]:
    """The shape after slicing and the axes that stay; refuses what would break blocks."""
    spec, shape = q.spec, q.shape
    extent = list(tile_extent(spec, shape))
    if spec.tile == "tensor":  # one scale for the tensor, which any slice keeps
        extent = [1] * len(shape)
        extent[spec.axis] = max(shape[spec.axis], 1)
    if spec.super_block is not None:
        extent[spec.axis] = spec.super_block
    if spec.transform:
        extent[spec.axis] = math.lcm(extent[spec.axis], spec.transform.size)
    new_shape, kept = [], []
    for axis, (entry, length) in enumerate(zip(key, shape, strict=True)):
        if isinstance(entry, slice):
            start, stop, step = entry.indices(length)
            new_shape.append(len(range(start, stop, step)))
            kept.append(axis)
            _check_slice(axis, start, max(stop, start), step, length, extent[axis])
        elif extent[axis] > 1 or axis == spec.axis:
            raise ValueError(
                f"an integer index on axis {axis} would take one element out of blocks of "
                f"{extent[axis]}; {_INSTEAD}"
            )
        elif not -length <= entry < length:
            raise IndexError(f"index {entry} is out of range for axis {axis} of length {length}")
    if _tile_rows(q) > 1 and len(kept) < len(shape):
        raise ValueError(f"an integer index on a tensor in tiles {spec.tile}; {_INSTEAD}")
    return new_shape, kept


def _stored_slices(
    q: QuantArray, key: tuple[slice | int, ...], name: str, stored: tuple[int, ...]
) -> tuple[slice | int, ...]:
    """What a slice of the tensor is in one of its stored arrays, of shape ``stored``."""
    spec, extent = q.spec, list(tile_extent(q.spec, q.shape))
    if name.startswith("super_") and spec.super_block is not None:
        extent[spec.axis] = spec.super_block
    chosen: list[slice | int] = []
    for axis, (entry, length) in enumerate(zip(key, q.shape, strict=True)):
        if isinstance(entry, int):
            chosen.append(entry if stored[axis] == length else 0)
            continue
        start, stop, step = entry.indices(length)
        if (start, stop, step) == (0, length, 1):
            chosen.append(slice(None))
        elif axis == spec.axis and name == "codes":
            bits = spec.row.element.bits
            end = None if stop == length else stop * bits // 8  # the last block keeps its padding
            chosen.append(slice(start * bits // 8, end))
        elif extent[axis] == 1 or name == "codes":
            chosen.append(entry)
        elif spec.tile == "tensor":
            chosen.append(slice(None))
        else:
            chosen.append(slice(start // extent[axis], -(-stop // extent[axis])))
    return tuple(chosen)


def _check_slice(axis: int, start: int, stop: int, step: int, length: int, extent: int) -> None:
    if extent == 1:
        return
    if step != 1:
        raise ValueError(f"a step of {step} on axis {axis} would break blocks; {_INSTEAD}")
    if start % extent or (stop % extent and stop != length):
        raise ValueError(
            f"slice {start}:{stop} on axis {axis} cuts blocks of {extent}; slice at multiples of "
            f"{extent}, or {_INSTEAD}"
        )


def reshape(q: QuantArray, shape: tuple[int, ...]) -> QuantArray:
    """Reshape the other axes; the block axis must stay whole.

    With tiles of several rows, the row axis may stay as it is, or be split or merged at multiples
    of those rows.

    Raises:
        ValueError: if the new shape splits or merges the block axis (or cuts a tile's rows).
    """
    before = math.prod(q.shape[: q.spec.axis])
    length = q.shape[q.spec.axis]
    rows = _tile_rows(q)
    matches = [
        axis
        for axis, n in enumerate(shape)
        if n == length
        and math.prod(shape[:axis]) == before
        and math.prod(shape) == math.prod(q.shape)
        and (rows == 1 or _keeps_tiles(q, shape, axis))
    ]
    if not matches:
        raise ValueError(
            f"reshaping {q.shape} to {shape} does not keep the block axis {q.spec.axis} (length "
            f"{length}, tile {q.spec.tile}) whole; {_INSTEAD}"
        )
    same = len(shape) - len(q.shape) + q.spec.axis  # among axes of length 1: as far from the end
    axis = same if same in matches else matches[0]

    def change(_: str, part: Array) -> Array:
        stored = list(shape)
        stored[axis] = part.shape[q.spec.axis]
        if rows > 1 and part.shape[q.spec.axis - 1] != q.shape[q.spec.axis - 1]:
            stored[axis - 1] = -(-shape[axis - 1] // rows)
        if q.spec.tile == "tensor" and (part is q.scales or part is q.zero_points):
            stored = [1] * len(shape)
        return part.reshape(stored)

    parts = _map_parts(q, change)
    return dataclasses.replace(q, **parts, shape=shape, spec=q.spec.replace(axis=axis))


def _keeps_tiles(q: QuantArray, shape: tuple[int, ...], axis: int) -> bool:
    """Whether tiles of several rows stay whole, with the block axis at ``axis``."""
    if axis == 0 or q.spec.axis == 0:
        return False
    old, new = q.shape[q.spec.axis - 1], shape[axis - 1]
    return old == new or (old % _tile_rows(q) == 0 and new % _tile_rows(q) == 0)


def as_matrix(q: QuantArray) -> QuantArray | None:
    """View (..., K), blocked along the last axis, as (rows, K); None if tiles forbid it."""
    shape = math.prod(q.shape[:-1]), q.shape[-1]
    if q.shape == shape:
        return q
    whole = _tile_rows(q) == 1 or _keeps_tiles(q, shape, 1)
    return reshape(q, shape) if whole else None


def unstack(q: QuantArray) -> list[QuantArray]:
    """View a stack (..., R, K), blocked along its last axis, as a list of matrices (R, K)."""
    spec, shape = q.spec.replace(axis=1), q.shape[-2:]
    stacks = {
        name: part.reshape((math.prod(part.shape[:-2]), *part.shape[-2:]))
        for name, part in q.parts.items()
        if name != "tensor_scale"
    }

    def at(index: int) -> QuantArray:
        # A scale of the whole tensor is the scale of each matrix.
        parts = {name: part[min(index, len(part) - 1)] for name, part in stacks.items()}
        return dataclasses.replace(q, **parts, shape=shape, spec=spec)

    return [at(index) for index in range(math.prod(q.shape[:-2]))]
