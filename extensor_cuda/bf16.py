"""Packed matrices as bfloat16, each number as it is, and products with them.

Bfloat16 holds every NVFP4 value but for the tensor scale, and every MX value that a quantizer
makes, from 2**-133 up. Whether all of an MX matrix is held is read on the host the first time that
the matrix is seen, and remembered: nothing waits after that. A value that is not held would be NaN,
never another number; where only a scale's range is in the way, `extensor_cuda.expansion.expand`
takes the largest one out.

Codes of INT4, INT8 and FP8, less their zero points, are numbers of 8 bits, which bfloat16 holds;
products with their float scales it does not hold. So the scales stay beside the codes for the
product to multiply sums by: the finished one, or that of each group along K.

A product of many rows begins when the rows of b that its first tiles need are expanded; idle warps
of its blocks expand the others as it goes on. Its bits are those of the two one after the other.
There, and under scales of groups, b's rows are those of tiles, and the result is written across.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import ml_dtypes
import numpy as np

from extensor.quant.array import QuantArray, coded_length, tile_extent
from extensor.quant.spec import QuantSpec
from extensor_cuda.expansion import (
    Expansion,
    aligned,
    expand,
    expand_source,
    launch_expand,
    multiply,
)
from extensor_cuda.kernels.gemm.block_scales import Stored, block_scales
from extensor_cuda.kernels.gemm.gemm_sm90 import (
    STAGE_OF_BF16,
    TILE_M,
    Packed,
    configure,
    empty_rows,
    gemm,
)
from extensor_cuda.runtime import driver

__all__ = ["as_bf16", "every", "float_scales", "is_float_scaled", "multiply_packed", "whole"]

Array = Any

_OUT = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
_GROUP, _BESIDE = 8, 1920
"""Rows of tiles, of b, that are walked together; rows of a from which on expanding hides behind."""
_FITS: WeakKeyDictionary[QuantArray, bool] = WeakKeyDictionary()
"""Whether bfloat16 holds all of a stored matrix as it is."""


def is_float_scaled(spec: QuantSpec) -> bool:
    """INT4, INT8 and FP8: codes under plain floats."""
    return spec.has_float_scales


def every(q: QuantArray) -> int:
    """Elements along K that share a float scale; 0: all, or the scales are no floats."""
    _, length = tile_extent(q.spec, q.shape)
    return length if is_float_scaled(q.spec) and length < q.shape[1] else 0


def _source(q: QuantArray) -> Any:
    whole_rows = q.codes.shape[1] * 8 % (16 * q.spec.row.element.bits) == 0
    return expand_source(q.spec, "bf16", 0, True, whole_rows)


def float_scales(q: QuantArray, xp: Any) -> tuple[Array | None, Array | None]:
    """Factors of rows or of the tensor, and those of groups as the GEMM reads them."""
    group, (each, _) = every(q), tile_extent(q.spec, q.shape)
    if group:
        stored = Stored(q.scales.T, q.scales.shape[1], min(each, q.shape[0]))
        return None, block_scales([stored], xp, max(STAGE_OF_BF16 // group, 1))[0]
    if not is_float_scaled(q.spec):
        return q.tensor_scale, None
    factor = q.scales[:, 0].astype(np.float32)
    return (factor if each == 1 or len(factor) == 1 else factor.repeat(each)[: q.shape[0]]), None


def _begin(
    q: QuantArray, xp: Any, flag: Array | None, ready: int | None = None, tiles: int = 0
) -> tuple[Expansion, Packed]:
    """Expand the first rows, or all; and what the others are expanded from."""
    lines, k = q.shape[0], coded_length(q.spec, q.shape)
    packed = Packed(aligned(q.codes, xp))
    if is_float_scaled(q.spec):
        zeros = None if q.zero_points is None else xp.ascontiguousarray(q.zero_points)
        packed = replace(packed, zeros=zeros)
    else:
        packed = replace(packed, scales=aligned(q.scales, xp))
    factor, scales = float_scales(q, xp)
    chunks, rows = -(-k // 16), lines
    if ready is not None:
        rows = ready
        packed = replace(packed, ready=ready, counts=xp.empty(1 + tiles, dtype=np.uint32))
    out = xp.empty((lines, 16 * chunks), dtype=np.uint16)
    made = None, None, flag, None, None
    launch_expand(_source(q), rows * chunks, packed, out, rows, made=made)
    return Expansion(out[:, :k], "bf16", factor=factor, scales=scales, every=every(q)), packed


def as_bf16(q: QuantArray, xp: Any, flag: Array | None = None) -> Expansion:
    """The numbers of a packed matrix, contraction contiguous; does not wait.

    Args:
        q: MX or NVFP4, or INT4, INT8 or FP8 in groups of 32 or a multiple of 64 along K, or one;
            along its rows.
        xp: cupy.
        flag: uint32 (1,), raised where bfloat16 does not hold an MX value, which becomes NaN.

    Returns:
        Codes without an exponent; of float scales, with a factor for each row or those of groups.
    """
    return _begin(q, xp, flag)[0]


def whole(stored: Sequence[QuantArray], xp: Any) -> list[Expansion] | None:
    """Packed matrices as bfloat16, exactly; None if one has values that it does not hold.

    Waits for the GPU the first time that an MX matrix is seen, so multiply once before a capture;
    and each time if the matrix fits only relative to its largest scale.

    Args:
        stored: as for `as_bf16`.
        xp: cupy.
    """
    unknown = list(dict.fromkeys(q for q in stored if q.spec.is_mx and q not in _FITS))
    raised = xp.zeros(len(unknown), dtype=np.uint32) if unknown else None
    made: list[Expansion | None] = []
    for q in stored:
        flag = None
        if raised is not None and q in unknown:
            at = unknown.index(q)
            flag = raised[at : at + 1]
        known_not = not _FITS.get(q, True)
        made.append(None if known_not else as_bf16(q, xp, flag))
    if raised is not None:
        _FITS.update(zip(unknown, (not flag for flag in raised.get()), strict=True))
    out = []
    for q, expansion in zip(stored, made, strict=True):
        if expansion is None or not _FITS.get(q, True):
            flag = xp.zeros(1, dtype=np.uint32)
            expansion = expand(q, "bf16", flag, xp)
            if int(flag[0]):
                return None
        out.append(expansion)
    return out


def multiply_packed(a: Expansion, b: QuantArray, dtype: str, xp: Any) -> Array | None:
    """The product a b^T as "float32" or "bfloat16"; None if bfloat16 does not hold b.

    Waits where `whole` does.

    Args:
        a: bfloat16 (M, K), without scales.
        b: (N, K), as for `as_bf16`.
        dtype: of the result.
        xp: cupy.
    """
    m, n = len(a.codes), b.shape[0]
    config = configure("bf16", n, m, dtype, every=every(b))
    config = replace(config, c_down=True, group=_GROUP, expands=_source(b).macros)
    blocks = driver.multiprocessors(xp.cuda.runtime.getDevice())
    whole_groups, rest = divmod(blocks, _GROUP * -(-m // config.tile_n))
    ready = (_GROUP * whole_groups + min(_GROUP, rest)) * TILE_M  # with which blocks begin
    if m < _BESIDE or ready >= n or (b.spec.is_mx and not _FITS.get(b)):
        made = whole([b], xp)
        return None if made is None else multiply(a, made[0], dtype, xp)
    right, packed = _begin(b, xp, None, ready, -(-n // TILE_M))
    out = empty_rows(xp, m, n, _OUT[dtype])
    factors = None if right.factor is None else (right.factor, None)
    scales = None if right.scales is None else (right.scales, None)
    gemm(right.codes, a.codes, out, config, factors=factors, scales=scales, packed=packed)
    return xp.ascontiguousarray(out)
