"""What the programs that decode weights share on the host: macros of weights and activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.quant.array import tile_extent
from extensor.quant.spec import QuantSpec
from extensor_cuda.runtime.compile import Source

__all__ = ["FLOATS", "PARTS", "countable", "is_scaled", "program", "room"]

Array = Any

FLOATS = ("float32", "bfloat16")
"""Dtypes of activations and results, as the programs number them."""
PARTS = {"float32": 3, "bfloat16": 1}
"""Tokens, each a bfloat16 matrix's row, that a row of activations of a dtype is."""


def is_scaled(spec: QuantSpec) -> bool:
    """Whether scales are floats."""
    return spec.has_float_scales


def countable(shape: tuple[int, ...]) -> bool:
    """Whether 32 bits count tiles of 16 of N rows times 132 blocks, and 40 bits the elements."""
    return shape[0] < 1 << 28 and shape[0] * shape[1] < 1 << 40


@lru_cache(maxsize=512)
def _read(path: Path, macros: tuple[tuple[str, int], ...]) -> Source:
    return Source.read(path, dict(macros))


def program(
    path: Path, spec: QuantSpec, shape: tuple[int, ...], dtype: str, out: str, **own: int
) -> Source:
    """A program with the macros of `weights.cuh` and its own, one object for the same ones.

    Args:
        path: its file.
        spec: of weights, blocked along the last axis.
        shape: theirs.
        dtype: of activations, of `FLOATS`.
        out: a result's.
        own: the other macros.
    """
    element, scaled = spec.row.element, is_scaled(spec)
    macros = {
        "CODEC_BITS": element.bits,
        "CODEC_IS_FLOAT": int(element.is_float),
        "CODEC_FLOAT_SCALES": int(scaled),
        "CODEC_FLOAT16_SCALES": int(spec.scale_name == "float16"),
        "CODEC_UE4M3": int(spec.row.tensor_scale),
        "CODEC_BLOCK": 32 if scaled else tile_extent(spec, shape)[1],
        "WEIGHT_ONLY_X_PARTS": PARTS[dtype],
        "WEIGHT_ONLY_IN": FLOATS.index(dtype),
        "WEIGHT_ONLY_OUT": FLOATS.index(out),
    }
    return _read(path, tuple((macros | own).items()))


def room(
    slices: int,
    tokens: int,
    lines: int,
    groups: int,
    zeros: Callable[[int], Array],
    xp: Any,
) -> tuple[Any, Any]:
    """Where slices of K leave their sums, and counts of a group's slices that are done.

    Args:
        slices: of K; nulls for one.
        tokens: rows of sums.
        lines: of weights.
        groups: of blocks, each of a slice.
        zeros: makes so many counters that are zero, and that the kernel leaves so.
        xp: cupy.
    """
    if slices == 1:
        return np.uint64(0), np.uint64(0)
    return xp.empty((slices, tokens, -(-lines // 4) * 4), dtype=np.float32), zeros(groups)
