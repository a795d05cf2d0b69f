"""Rebasing packed MX rows: 8-bit codes with an exponent for each row (`rebase_mxfp*.cu`)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.quant.spec import QuantSpec
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = [
    "E5M2_LIFT",
    "E5M2_SPAN",
    "INT8_LIFT",
    "INT8_SPAN",
    "mxfp4_source",
    "mxfp8_source",
    "rebase_mxfp4",
    "rebase_mxfp8",
]

Array = Any

# e2m1's 6 times 2**13 is E5M2's 49152; its 0.5 times 2**-15 is E5M2's least, 2**-16.
E5M2_LIFT, E5M2_SPAN = 13, 28
INT8_LIFT, INT8_SPAN = 4, 3  # 6 times 2**4 and 0.5 times 2**1 are integers of 8 bits
_FOLDER = Path(__file__).parent
_THREADS = 128


@lru_cache(maxsize=16)
def mxfp4_source(block: int, integers: bool = False) -> Source:
    """The program that rebases MXFP4 rows of such blocks, to E5M2 or to integers of 8 bits."""
    lift, span = (INT8_LIFT, INT8_SPAN) if integers else (E5M2_LIFT, E5M2_SPAN)
    macros = {
        "CODEC_BLOCK": block,
        "PREPARE_TOP": lift,
        "PREPARE_SPAN": span,
        "PREPARE_INTEGERS": int(integers),
    }
    return Source.read(_FOLDER / "rebase_mxfp4.cu", macros)


def rebase_mxfp4(
    source: Source, codes: Array, scales: Array, flag: Array, out: Array, exponents: Array
) -> None:
    """Write codes (rows, K), int32 exponents (rows,); raise ``flag`` where a row does not fit."""
    rows, blocks = scales.shape
    arrays = (codes, scales, out, exponents, flag, np.int64(blocks))
    launch(source, "rebase", rows, _THREADS, *arrays)


@lru_cache(maxsize=64)
def mxfp8_source(spec: QuantSpec) -> Source:
    """The program that rebases packed rows of a resolved MXFP8 spec."""
    element = spec.row.element
    assert isinstance(spec.tile, tuple)
    macros = {
        "CODEC_MANTISSA": element.mantissa_bits,
        "CODEC_MIN_EXPONENT": element.min_exponent,
        "CODEC_MAX_CODE": element.max_magnitude_code,
        "CODEC_BLOCK": spec.tile[1],
        "CODEC_TILE_ROWS": spec.tile[0],
    }
    return Source.read(_FOLDER / "rebase_mxfp8.cu", macros)


def rebase_mxfp8(
    source: Source, codes: Array, scales: Array, out: Array, exponents: Array, counts: Array
) -> None:
    """Write codes (rows, K), exponents (rows,) and uint32 counts (rows, 2): changed, flushed."""
    arrays = (codes, scales, out, exponents, counts)
    launch(source, "rebase_mxfp8", len(out), _THREADS, *arrays, np.int64(scales.shape[1]))
