"""Floats rounded to odd and kept as bit planes: `extensor.quant.round_to_odd.odd_planes`."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.quant.round_to_odd import OddPlanes
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["odd_planes", "odd_values", "source"]

Array = Any
_THREADS, _GROUP, _ITEMS = 256, 32, 2  # as in odd_planes.cu


@lru_cache(maxsize=32)
def source(width: int, bits: int) -> Source:
    """The program for floats of a width, of which so many bits are kept."""
    macros = {"ODD_WIDTH": width, "ODD_BITS": bits}
    return Source.read(Path(__file__).parent / "odd_planes.cu", macros)


def odd_planes(x: Array, bits: int, xp: Any) -> OddPlanes:
    """Cut an array's floats: C-contiguous, float32 or bfloat16."""
    planes = xp.empty((-(-x.size // _GROUP), bits), dtype=np.uint32)
    _launch("odd_planes", (x, planes), bits, x)
    return OddPlanes(planes, tuple(x.shape), x.dtype)


def odd_values(kept: OddPlanes, xp: Any) -> Array:
    """The rounded values."""
    out = xp.empty(kept.shape, dtype=kept.dtype)
    _launch("odd_values", (kept.words, out), kept.words.shape[1], out)
    return out


def _launch(name: str, arrays: tuple[Array, Array], bits: int, floats: Array) -> None:
    program = source(8 * floats.itemsize, bits)
    blocks = -(-floats.size // (_THREADS * _ITEMS))
    launch(program, name, blocks, _THREADS, *arrays, np.int64(floats.size))
