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

_FLOAT32 = np.dtype(np.float32)
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


def takes(array: Array) -> bool:
    """Whether the kernels take an array: float32 and contiguous."""
    return bool(array.dtype == _FLOAT32 and array.flags.c_contiguous)


def _run(
    kernel: str,
    columns: Mapping[str, Sequence[Array | None]],
    factors: Sequence[Mapping[str, float]],
    xp: Any,
    *more: Any,
) -> None:
    """Launch on the arrays of each tensor, ``grad`` and others of `_TENSOR`'s first columns."""
    # Column by column: there are hundreds of tensors, and a GPU waits for this.
    table = np.zeros(len(factors), _TENSOR)
    for name, arrays in columns.items():
        table[name] = [0 if a is None else a.data.ptr for a in arrays]
    table["count"] = [a.size for a in columns["grad"] if a is not None]
    blocks = -(-table["count"] // PART)
    table["start"] = np.cumsum(blocks) - blocks
    same = all(mine is factors[0] for mine in factors)
    for name in factors[0] if factors else ():
        table[name] = factors[0][name] if same else [mine[name] for mine in factors]
    if count := int(blocks.sum()):
        there = xp.asarray(table.view(np.uint8))
        launch(source(), kernel, count, THREADS, there, np.int32(len(table)), *more)


def adam(
    parts: Sequence[tuple[Array, Array, Array, Array]],
    factors: Sequence[Mapping[str, float]],
    xp: Any,
) -> None:
    """`extensor.backends.training.adam` on each (weight, grad, mean, square).

    Args:
        parts: arrays that `takes` accepts, of one size in each part.
        factors: of each, as `Adam.update` makes them, and ``decay``, which times the weight is
            added to the gradient first.
        xp: cupy.
    """
    names = ("weight", "grad", "first", "second")
    _run("adam", dict(zip(names, zip(*parts, strict=True), strict=False)), factors, xp)


def sgd(
    parts: Sequence[tuple[Array, Array, Array | None]],
    factors: Sequence[Mapping[str, float]],
    xp: Any,
) -> None:
    """`extensor.backends.layers.sgd` on each (weight, grad, buffer or None).

    ``factors``: rate (the learning rate), momentum, decay and nesterov of each.
    """
    names = ("weight", "grad", "first")
    _run("sgd", dict(zip(names, zip(*parts, strict=True), strict=False)), factors, xp)


def finite(arrays: Sequence[Array], xp: Any) -> list[bool]:
    """Whether each array is without NaN and infinity; waits for the GPU once."""
    flags = xp.zeros(len(arrays), dtype=np.uint32)
    _run("finite", {"grad": arrays}, [{}] * len(arrays), xp, flags)
    return [not flag for flag in flags.get().tolist()]
