"""Steps of Adam and of gradient descent on many parameters in one launch, to the CPU's bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor_cuda.jit import Source, launch

__all__ = ["adam", "finite", "sgd", "source", "takes"]

Array = Any
THREADS, PART = 256, 16384  # as in optimizer.cu

_FLOATS = ("take1", "keep2", "take2", "widen", "eps", "rate", "keep", "decay", "momentum")
_TENSOR = np.dtype(
    [(name, np.uint64) for name in ("weight", "grad", "first", "second")]
    + [(name, np.int64) for name in ("count", "start")]
    + [(name, np.float32) for name in _FLOATS]
    + [("nesterov", np.uint32)],
)
"""`Tensor` of optimizer.cu."""


@cache
def source() -> Source:
    """The program."""
    return Source.read(Path(__file__).parent / "optimizer.cu", {})


def takes(*arrays: Array | None) -> bool:
    """Whether the kernels take these arrays: float32, each contiguous, of one size."""
    present = [a for a in arrays if a is not None]
    return all(
        a.dtype == np.float32 and a.flags.c_contiguous and a.size == present[0].size
        for a in present
    )


def _run(
    kernel: str,
    parts: Sequence[tuple[Array | None, ...]],
    factors: Sequence[Mapping[str, float]],
    xp: Any,
    *more: Any,
) -> None:
    """Launch on (weight, grad, first, second) of each part that is not empty."""
    table, start = np.zeros(len(parts), _TENSOR), 0
    for row, arrays, mine in zip(table, parts, factors, strict=True):
        for name, array in zip(("weight", "grad", "first", "second"), arrays, strict=True):
            row[name] = 0 if array is None else array.data.ptr
        row["count"], row["start"] = arrays[1].size, start  # type: ignore[union-attr]
        for name, value in mine.items():
            row[name] = value
        start += -(-int(row["count"]) // PART)
    if start:
        there = xp.asarray(table.view(np.uint8))
        launch(source(), kernel, start, THREADS, there, np.int32(len(parts)), *more)


def adam(
    parts: Sequence[tuple[Array, Array, Array, Array]],
    factors: Sequence[Mapping[str, float]],
    xp: Any,
) -> None:
    """`extensor.backends.training.adam` on each (weight, grad, mean, square).

    Args:
        parts: arrays that `takes` accepts.
        factors: of each, as `Adam.update` makes them, and ``decay``, which times the weight is
            added to the gradient first.
        xp: cupy.
    """
    _run("adam", parts, factors, xp)


def sgd(
    parts: Sequence[tuple[Array, Array, Array | None]],
    factors: Sequence[Mapping[str, float]],
    xp: Any,
) -> None:
    """`extensor.backends.layers.sgd` on each (weight, grad, buffer or None).

    ``factors``: rate (the learning rate), momentum, decay and nesterov of each.
    """
    _run("sgd", [(*part, None) for part in parts], factors, xp)


def finite(arrays: Sequence[Array], xp: Any) -> list[bool]:
    """Whether each array is without NaN and infinity; waits for the GPU once."""
    flags = xp.zeros(len(arrays), dtype=np.uint32)
    parts = [(None, array, None, None) for array in arrays]
    _run("finite", parts, [{}] * len(arrays), xp, flags)
    return [not flag for flag in flags.get().tolist()]
