"""Masks a gradient in a Hadamard transform's domain and takes it back, in one reading.

The bits are those of `extensor.quant.reference.masked` and `extensor.quant.hadamard`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.quant.spec import Hadamard
from extensor_cuda.kernels.quantize.quantize import exact_float, sign_words
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["source", "straight_through"]

Array = Any
_THREADS, _CHUNK = 256, 16  # as in straight_through.cu


@lru_cache(maxsize=8)
def source(size: int, masked: bool) -> Source:
    """The program for transforms of a size."""
    macros = {
        "ST_SIZE": size,
        "ST_FACTOR": exact_float(float(np.float32(1 / math.sqrt(size)))),
        "ST_MASKED": int(masked),
    }
    return Source.read(Path(__file__).parent / "straight_through.cu", macros)


def straight_through(
    g: Array, mask: Array | None, transform: Hadamard, length: int, xp: Any
) -> Array:
    """Float32 (rows, length) of a gradient (rows, coded), C-contiguous and aligned to 16 bytes.

    The mask is uint8 (rows, coded / 8), C-contiguous, a bit a value.
    """
    rows, coded = g.shape
    out = xp.empty((rows, length), dtype=np.float32)
    blocks = -(-rows * (coded // _CHUNK) // _THREADS)
    numbers = map(np.int64, (rows, coded, length))
    program = source(transform.size, mask is not None)
    launch(
        program, "straight_through", blocks, _THREADS, g, mask, out, *numbers,
        *sign_words(transform),
    )  # fmt: skip
    return out
