"""Keys of ``x[...]``: tensors in them become raw arrays, and positions are checked.

cupy wraps a position beyond one end around to the other; here it is an error, as in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from extensor.autograd.node import TensorState
from extensor.backends.protocol import Backend

__all__ = ["check_bounds", "check_positions", "raw_key"]


def raw_key(key: Any) -> Any:
    """An indexing key with raw arrays in place of tensors and lists.

    Raises:
        TypeError: for a float tensor or array.
    """
    if isinstance(key, tuple):
        return tuple(raw_key(part) for part in key)
    if isinstance(key, list):
        key = np.asarray(key)
    elif isinstance(key, TensorState):
        key = key.data
    kind = getattr(getattr(key, "dtype", None), "kind", "i")
    if kind not in "iub":
        raise TypeError(
            f"index: expected integers, slices, None, ... or integer or bool tensors, got {key!r}"
        )
    return key


def check_positions(backend: Backend, shape: tuple[int, ...], key: Any) -> None:
    """Refuse a raw key with positions beyond the ends of a tensor; waits for a device once.

    Raises:
        IndexError: naming them; while a step is recorded, afterwards.
    """
    if backend.xp is np:
        return  # numpy looks by itself
    parts = key if isinstance(key, tuple) else (key,)
    kinds = [getattr(getattr(part, "dtype", None), "kind", "") for part in parts]
    taken = [
        0 if part is None or part is ... else part.ndim if kind == "b" else 1
        for part, kind in zip(parts, kinds, strict=True)
    ]
    axis, found = 0, []
    for part, kind, axes in zip(parts, kinds, taken, strict=True):
        if part is ...:
            axis += len(shape) - sum(taken)
        elif kind in ("i", "u") and axis < len(shape):
            found.append((part, shape[axis], axis))
        axis += axes
    check_bounds(backend, found)


def check_bounds(backend: Backend, parts: Sequence[tuple[Any, int, int]], name: str = "") -> None:
    """Refuse integer arrays with positions beyond an axis; waits for a device once.

    Args:
        backend: of the tensor; an array may be the host's.
        parts: (array, length of the axis, its number).
        name: what an error begins with.

    Raises:
        IndexError: naming them; while a step is recorded, afterwards.
    """

    def error() -> IndexError:
        held = [(int(i.min()), int(i.max()), n, axis) for i, n, axis in parts if i.size]
        outside = (h for h in held if h[0] < -h[2] or h[1] >= h[2])
        low, high, n, axis = next(outside, held[-1])
        return IndexError(
            f"{name}expected positions in {-n}..{n - 1} along axis {axis}, got {low}..{high}"
        )

    there = []
    for index, length, _ in parts:
        signed = index if index.dtype.kind == "i" else index.astype(np.int64)
        bad = (signed < -length) | (signed >= length)
        if isinstance(bad, backend.xp.ndarray):
            there.append(bad)
        elif bad.any():
            raise error()
    if there:
        bad = backend.xp.concatenate([b.ravel() for b in there]) if there[1:] else there[0]
        backend.refuse(bad, error)
