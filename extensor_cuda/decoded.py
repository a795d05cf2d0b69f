"""Products of many rows with packed weights, which the warps that multiply decode.

Each warp takes the codes of its rows of weights from shared memory, packed, and makes bfloat16 of
them in the registers that the tensor cores read: elements of MXFP4 and NVFP4 times their scales,
codes of INT4 and INT8 less their zero points, exactly, with the bounds of `extensor_cuda.decode`;
and where bfloat16 holds all values and K is not cut, with the bits of the weights expanded
beforehand (`extensor_cuda.bf16`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import ml_dtypes
import numpy as np

from extensor.quant.array import QuantArray, tile_extent
from extensor_cuda import dense
from extensor_cuda.bf16 import every, float_scales, is_float_scaled
from extensor_cuda.expansion import aligned
from extensor_cuda.kernels.gemm.gemm_sm90 import (
    STAGE_OF_BF16,
    TILE_M,
    Config,
    Split,
    empty_rows,
    gemm,
    rows_of_parts,
)

__all__ = ["multiply", "taken"]

Array = Any

_TILES = (64, 96, 128, 160, 192, 224, 256)
"""Columns of a tile."""
_BESIDE, _COLUMN = 200, 0.0015
"""What a stage of a tile takes on an H200: as so many columns beside its own (E2M1 200 to 260,
INT4 120), and so many us a column."""
_MOST_PARTS, _BYTES = 8, 3.5e6
"""Parts of K, at most; bytes of them that are moved in a us."""
_MANY = 2048
"""Rows from which on weights under scales of groups are quicker expanded first."""
_PROCESSORS = 132
_FOLDS: WeakKeyDictionary[QuantArray, bool] = WeakKeyDictionary()
"""What `_folds` has read of weights."""
_OUT = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def _beside(w: QuantArray) -> tuple[Array | None, int]:
    """What lies beside the codes, scales of E2M1 or zero points of integers, each for how many.

    0: for all of a row.
    """
    _, length = tile_extent(w.spec, w.shape)
    if not is_float_scaled(w.spec):
        return w.scales, length
    return w.zero_points, length if length < w.shape[1] else 0


def taken(w: QuantArray, rows: int) -> bool:
    """Whether weights, of which `extensor_cuda.bf16` has a product at all, are decoded.

    Args:
        w: (N, K), blocked along K.
        rows: of bfloat16 activations.
    """
    (lines, k), (tall, _), group = w.shape, tile_extent(w.spec, w.shape), every(w)
    element = w.spec.row.element
    if element.bits != 4 and (element.bits != 8 or element.is_float):
        return False
    if k % (2 * STAGE_OF_BF16) or w.codes.nbytes != lines * k * element.bits // 8:
        return False
    if group and (group < STAGE_OF_BF16 or rows >= _MANY):
        return False
    beside, length = _beside(w)
    if beside is None:
        return True
    in_words = length & (length - 1) == 0 and beside.shape[1] % 4 == 0
    return tall == 1 and (length == 0 or in_words)


def _folds(w: QuantArray) -> bool:
    """Whether no scale is NaN, or E8M0 and above 2**9; else the kernel takes more steps.

    Waits for the GPU the first time.
    """
    if w not in _FOLDS:
        _FOLDS[w] = bool(w.scales.view(np.uint8).max() <= (126 if w.spec.row.tensor_scale else 136))
    return _FOLDS[w]


def _config(w: QuantArray, rows: int, dtype: str) -> tuple[Config, Split | None]:
    beside, length = _beside(w)
    macros = {
        "CODEC_BITS": w.spec.row.element.bits,
        "CODEC_IS_FLOAT": int(w.spec.row.element.is_float),
        "CODEC_UE4M3": int(w.spec.row.tensor_scale),
        "CODEC_BLOCK": 0 if beside is None else length,
        "GEMM_ROW_ZERO_POINT": int(beside is not None and length == 0),
        "GEMM_FOLD_SCALES": int(is_float_scaled(w.spec) or _folds(w)),
    }
    group = every(w)
    tile, split = cut(w.shape[0], w.shape[1], rows, group, w.spec.row.element.bits)
    config = Config(
        "bf16",
        "bf16",
        tile,
        promote=max(group // STAGE_OF_BF16, 1) if group else 0,
        out="float32" if split else dtype,
        patches=2,
        every=group,
        c_down=True,
        split=split is not None,
        decodes=tuple((name, str(value)) for name, value in macros.items()),
    )
    return config, split


def tiles_of(bits: int, group: int) -> tuple[int, ...]:
    """Columns of tiles, fewer where the sums of groups, or wider codes, want registers, too."""
    widest = (160 if bits == 4 else 128) if group else 256
    return tuple(tile for tile in _TILES if tile <= widest)


@lru_cache(maxsize=1024)
def cut(lines: int, k: int, rows: int, group: int, bits: int) -> tuple[int, Split | None]:
    """Columns of a tile, and parts of K: the quickest by a model of 132 multiprocessors.

    So that a shape's bits are the same on every GPU.

    Args:
        lines: N.
        k: K.
        rows: M.
        group: elements along K under a float scale, or 0.
        bits: of a code.
    """
    stages, least = k // STAGE_OF_BF16, max(2, 2 * group // STAGE_OF_BF16)
    found = []
    for tile in tiles_of(bits, group):
        tiles = -(-lines // TILE_M) * -(-rows // tile)
        for wanted in range(1, _MOST_PARTS + 1):
            each = -(-stages // (wanted * least)) * least
            parts = -(-stages // each)
            rounds = -(-tiles * parts // _PROCESSORS)
            time = rounds * (each * (tile + _BESIDE) * _COLUMN + 2)
            if parts > 1:  # written and read again
                time += 4 + 8 * parts * rows * lines / _BYTES
            found.append((time, tile, Split(parts, each) if parts > 1 else None))
    return min(found, key=lambda way: way[0])[1:]


def multiply(x: Array, w: QuantArray, dtype: str, xp: Any) -> Array:
    """The product X w^T as "float32" or "bfloat16".

    Waits for the GPU the first time that MX or NVFP4 weights are seen, never after.

    Args:
        x: uint16 (M, K), bfloat16, rows a multiple of 16 bytes apart.
        w: (N, K), blocked along K, of which it is `taken`.
        dtype: of the result.
        xp: cupy.
    """
    config, split = _config(w, len(x), dtype)
    out = empty_rows(xp, len(x), w.shape[0], _OUT[dtype])
    made = out
    if split is not None:
        shape = split.parts * rows_of_parts(len(x), config), w.shape[0]
        made = empty_rows(xp, *shape, np.float32)
    (factor, scales), (beside, _) = float_scales(w, xp), _beside(w)
    gemm(
        aligned(w.codes, xp),
        x,
        made,
        config,
        factors=None if factor is None else (factor, None),
        scales=None if scales is None else (scales, None),
        split=split,
        beside=None if beside is None else aligned(beside, xp),
    )
    if split is not None:
        dense.add_parts(made, split, out, None, xp)
    return xp.ascontiguousarray(out)
