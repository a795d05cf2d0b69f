"""Draws dropout's mask on the GPU: the CPU's bits, new ones in each replay of a step."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.backends.generic.nn import dropout_factor, dropout_threshold
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["dropout_mask", "source"]

Array = Any
_THREADS, _WORDS = 256, 8  # as in dropout.cu


@cache
def source() -> Source:
    """The program."""
    return Source.read(Path(__file__).parent / "dropout.cu", {})


def dropout_mask(draws: Array, shape: tuple[int, ...], p: float, xp: Any) -> Array:
    """Float32 of a shape: 0 with probability p in [0, 1), else 1 / (1 - p); does not wait.

    ``draws`` is int64 (2,): the seed, and how often it was drawn from before.
    """
    mask = xp.empty(shape, dtype=np.float32)
    if size := math.prod(shape):
        blocks = -(-size // (_WORDS * _THREADS))
        numbers = np.int64(size), np.uint32(dropout_threshold(p)), dropout_factor(p)
        launch(source(), "dropout_mask", blocks, _THREADS, draws, mask, *numbers)
    return mask
