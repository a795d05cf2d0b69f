"""Launches `expand.cu`: packed codes and scales -> FP8 or bfloat16, contraction contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.gemm.gemm_sm90 import Packed
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["anchor", "expand", "expand_several", "expand_source"]

Array = Any

_SOURCE = Path(__file__).parent / "expand.cu"
_THREADS, _GUARDED_BLOCKS, _ANCHOR_BLOCKS = 256, 264, 264
_MAX_THREADS = 1 << 31  # of 16 elements each
_ALL = 1 << 30  # elements or rows that share a scale: all there are
_KINDS = ("bf16", "e5m2", "e4m3")  # as in expand.cu


@lru_cache(maxsize=256)
def expand_source(
    spec: QuantSpec, kind: str, lift: int, fixed: bool = False, whole: bool = True
) -> Source:
    """The program that expands packed codes of a spec resolved for a matrix.

    Args:
        spec: of the codes.
        kind: what they become, of `_KINDS`.
        lift: binades that scales are lifted by, relative to the largest.
        fixed: scales are taken as they are, not relative to the largest.
        whole: rows of codes are a multiple of 16 elements; always those of MX and NVFP4.
    """
    element = spec.row.element
    rows, length = spec.tile if isinstance(spec.tile, tuple) else (1, _ALL)
    if spec.tile == "tensor":
        rows = _ALL
    macros = {
        "CODEC_BITS": element.bits,
        "CODEC_MANTISSA": element.mantissa_bits,
        "CODEC_MIN_EXPONENT": element.min_exponent,
        "CODEC_IS_FLOAT": int(element.is_float),
        "CODEC_MAX_CODE": element.max_magnitude_code,
        "CODEC_UE4M3": int(spec.row.tensor_scale),
        "CODEC_FLOAT_SCALES": int(spec.has_float_scales),
        "CODEC_WHOLE": int(whole),
        "CODEC_BLOCK": length,
        "CODEC_TILE_ROWS": rows,
        "PREPARE_COLUMNWISE": int(spec.axis == 0),
        "CODEC_EXPAND_TO": _KINDS.index(kind),
        "CODEC_LIFT": lift,
        "CODEC_FIXED": int(fixed),
    }
    return Source.read(_SOURCE, macros)


def anchor(source: Source, scales: Array, largest: Array) -> None:
    """Raise ``largest``, uint32 (1,), to the largest scale; does not wait."""
    count = scales.size
    blocks = min(-(-count // _THREADS), _ANCHOR_BLOCKS)
    launch(source, "anchor", blocks, _THREADS, scales, largest, np.int64(count))


def expand(
    source: Source,
    threads: int,
    packed: Packed,
    out: Array,
    rows: int,
    heads: Sequence[Array | None] = (None, None),
    made: Sequence[Array | None] = (None,) * 5,
) -> None:
    """Expand so many rows of packed storage to ``out``, (rows or more, pitch); does not wait.

    The source is from `expand_source`, and so many threads have work. ``heads`` are the largest
    scale and the tensor's scale; ``made`` is what becomes of exponent, factor and flag, and two
    guards.

    Raises:
        ValueError: for more than the kernel counts in 32 bits.
    """
    if threads >= _MAX_THREADS:
        raise ValueError(
            f"expand: expected less than 2**35 elements, got {out.shape}; multiply parts of its "
            "rows"
        )
    counts, codes = packed.counts, packed.codes
    assert codes is not None
    scales = packed.zeros if packed.scales is None else packed.scales
    pitches = out.shape[1], codes.strides[0], 0 if scales is None else scales.strides[0]
    parts = codes, packed.scales, *heads, out, *made, packed.zeros
    most = _GUARDED_BLOCKS if made[-1] is not None else 1 << 16
    blocks = max(min(-(-threads // _THREADS), most), 1)
    numbers = (
        *map(np.int64, (rows, *pitches)),
        counts,
        np.int64(0 if counts is None else counts.size),
    )
    launch(source, "expand", blocks, _THREADS, *parts, *numbers)


def expand_several(
    source: Source, table: Array, like: Packed, rows: int, out: Array, flags: Array | None
) -> None:
    """Expand MX matrices of so many rows, one below the other in ``out``; does not wait.

    ``table`` has the addresses of their codes, then of their scales, which are as far apart as
    those of ``like``; a flag, uint32, is raised for each that bfloat16 does not hold.

    Raises:
        ValueError: for more than the kernel counts in 32 bits.
    """
    matrices, pitch = table.size // 2, out.shape[1]
    threads = out.size // 16
    if threads >= _MAX_THREADS:
        raise ValueError(f"expand: expected less than 2**35 elements, got {out.shape}")
    assert like.codes is not None and like.scales is not None
    pitches = like.codes.strides[0], like.scales.strides[0]
    numbers = *map(np.int32, (matrices, rows, pitch)), *map(np.int64, pitches)
    blocks = min(-(-threads // _THREADS), 1 << 16)
    launch(source, "expand_several", blocks, _THREADS, table, out, flags, *numbers)
