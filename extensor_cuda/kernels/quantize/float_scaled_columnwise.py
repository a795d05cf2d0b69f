"""Quantizes to FP8, INT8 and INT4 under float scales in blocks down a matrix's columns.

Groups of 16 to 128, tiles of 128 x 128, columns and matrices, without zero points
(`float_scaled_columnwise.cu`); the scale of a column or of all takes a reading before. Codes are
written as the matrix lies or transposed, as a GEMM reads what it contracts along the first axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.quant.spec import QuantSpec
from extensor.random import Stream
from extensor_cuda.kernels.quantize.float_scaled_rowwise import float_macros, largest
from extensor_cuda.kernels.quantize.quantize import THREADS
from extensor_cuda.runtime.capture import random_arguments
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.counters import Counters
from extensor_cuda.runtime.launch import launch

__all__ = ["ColumnwisePlan", "columnwise_plan", "columnwise_source", "quantize"]

Array = Any

_SOURCE = Path(__file__).parent / "float_scaled_columnwise.cu"
_SIDE = 128  # as in float_scaled_columnwise.cu
_TALL = (16, 32, 64, 128)
_BLOCKS, _COLUMNS, _ALL = range(3)  # what has a scale: what it is of is found before but for blocks


@dataclass(frozen=True)
class ColumnwisePlan:
    """Blocks of values down the columns of a matrix.

    Attributes:
        spec: resolved.
        given: what has a scale: a block of some rows, a column, or all.
        tall: rows of a block of values.
        tiles: whether that is of 128 columns.
        transposed: whether codes are written along the columns.
    """

    spec: QuantSpec
    given: int
    tall: int
    tiles: bool
    transposed: bool


@lru_cache(maxsize=4096)
def columnwise_plan(
    spec: QuantSpec, shape: tuple[int, int], extent: tuple[int, int], transposed: bool
) -> ColumnwisePlan | None:
    """How a matrix blocked along axis 0 is taken; None: not by these kernels.

    ``extent`` is of a block of values: its rows and columns. The spec is resolved, under plain
    float scales, of 8 bits if codes are transposed.
    """
    (rows, columns), (tall, wide) = shape, extent
    random = spec.rounding == "stochastic"
    if not spec.symmetric or columns % 4 or max(shape) > 1 << 30:
        return None
    if wide == 1 and tall >= rows:
        return ColumnwisePlan(spec, _COLUMNS, _SIDE, False, transposed)
    if wide >= columns and tall >= rows:
        whole = rows * columns % 16 == 0 and (
            not random or ((tall, wide) == shape and rows % 16 == 0)
        )
        return ColumnwisePlan(spec, _ALL, _SIDE, False, transposed) if whole else None
    if tall in _TALL and (wide == 1 or (tall, wide) == (_SIDE, _SIDE)):
        return ColumnwisePlan(spec, _BLOCKS, tall, wide > 1, transposed)
    return None


@lru_cache(maxsize=1024)
def columnwise_source(plan: ColumnwisePlan, dtype: str) -> Source:
    """The program for input of a dtype."""
    macros = float_macros(plan.spec, dtype) | {
        "QUANT_AMAX_GIVEN": plan.given,
        "QUANT_BLOCK_ROWS": plan.tall,
        "QUANT_SQUARE_TILES": int(plan.tiles),
        "QUANT_TRANSPOSED": int(plan.transposed),
    }
    return Source.read(_SOURCE, macros)


def quantize(
    plan: ColumnwisePlan,
    x: Array,
    stream: Stream | None,
    codes: Array,
    scales: Array,
    counters: Counters,
    xp: Any,
    most: Array | None = None,
) -> None:
    """Codes, scales and counts, without waiting.

    As `float_scaled_rowwise.quantize`, of a matrix. Transposed codes are (columns, pitch), with
    rows up to a multiple of 16.
    """
    source, (rows, columns) = columnwise_source(plan, x.dtype.name), x.shape
    sizes = np.int64(rows), np.int64(columns)
    blocks = -(-rows // _SIDE) * -(-columns // _SIDE)
    if plan.given == _COLUMNS:
        most = xp.zeros(columns, dtype=np.uint32)
        launch(source, "largest_of_columns", blocks, THREADS, x, most, *sizes)
    elif plan.given == _ALL and most is None:
        most = largest(x, plan.spec, xp)
    arrays = x, codes, scales, most, counters.array
    numbers = *random_arguments(stream), *sizes, np.int64(codes.shape[1])
    launch(source, "quantize_panels", blocks, THREADS, *arrays, *numbers)
