"""Where the blocks of an array are, and how their codes are packed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

Index = tuple[int, ...]


def blocks(
    shape: tuple[int, ...], axis: int, tile: object
) -> Iterator[tuple[Index, list[Index | None]]]:
    """Every block: where its scale stands, and the index of each of its positions.

    Positions that fall beyond the array (padding) are None.
    """
    if tile == "tensor":
        others = [range(n) for d, n in enumerate(shape) if d != axis]
        places: list[Index | None] = []
        for rest in itertools.product(*others):
            places += [(*rest[:axis], k, *rest[axis:]) for k in range(shape[axis])]
        if places:
            yield (0,) * len(shape), places
        return
    rows, columns = (1, max(shape[axis], 1)) if tile == "channel" else tile
    row_axis = axis - 1 if axis > 0 else len(shape) - 1
    extent = [1] * len(shape)
    extent[row_axis] = rows
    extent[axis] = columns
    counts = [(n + e - 1) // e for n, e in zip(shape, extent, strict=True)]
    for where in itertools.product(*(range(n) for n in counts)):
        corner = [w * e for w, e in zip(where, extent, strict=True)]
        found: list[Index | None] = []
        for r in range(rows):
            for c in range(columns):
                at = list(corner)
                if rows > 1:
                    at[row_axis] += r
                at[axis] += c
                inside = all(i < n for i, n in zip(at, shape, strict=True))
                found.append(tuple(at) if inside else None)
        yield where, found


def block_width(shape: tuple[int, ...], axis: int, tile: object) -> int:
    """How many elements of a block lie along the axis."""
    return tile[1] if isinstance(tile, tuple) else max(shape[axis], 1)


def pack(codes: np.ndarray, axis: int, width: int, bits: int) -> np.ndarray:
    """Lines of codes along the axis, zero-filled to whole blocks, as little-endian bytes."""
    moved = np.moveaxis(codes, axis, -1)
    length = -(-moved.shape[-1] // width) * width
    size = -(-length * bits // 8)
    out = np.zeros((*moved.shape[:-1], size), np.uint8)
    for line in np.ndindex(moved.shape[:-1]):
        number = sum(int(code) << (bits * k) for k, code in enumerate(moved[line]))
        out[line] = np.frombuffer(number.to_bytes(size, "little"), np.uint8)
    return np.moveaxis(out, -1, axis)
