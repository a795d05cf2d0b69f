"""Bytes that a quantized layer keeps for backward, computed from shapes and formats alone.

With x (M, K) of s bytes a value and w (N, K), a format of b bits whose blocks of n values have a
scale of c bits keeps (b + c / n) / 8 bytes a value:

    wgrad.x                    kept of x                                bytes a value
    a format                   its codes and scales along M             (b + c / n) / 8
    "bfloat16", x float32      x in bfloat16                            2
    "float32"                  x                                        s
    fprop.x, if requantized    its codes and scales along K, and w's    (b + c / n) / 8
    clip masks                 one bit for each value of x and of w     1 / 8

Blocks are padded to whole ones. A format that would take no fewer bytes than x leaves x as it is.

A convolution's packed patches would take kh kw / (sh sw) as much, 38 bits a value of MXFP4 under a
3 x 3 kernel. It keeps its image rounded to odd (`extensor.quant.round_to_odd`) where quantizing
reads the same of it: 12 bits a value in MXFP4, 16 in MXFP6, MXFP8 and bfloat16; else x as it is. On
a GPU it is 13 in MXFP4, 15 and 16 in MXFP6, 21 in MXFP8 E4M3, for each 32 values that are begun.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from extensor.dtypes import as_dtype
from extensor.quant.array import coded_length, stored_nbytes
from extensor.quant.recipe import LayerRecipe
from extensor.quant.round_to_odd import odd_bits, odd_nbytes
from extensor.quant.spec import QuantSpec

__all__ = ["image_bits", "kept_nbytes", "packs"]


def packs(operand: QuantSpec | str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Whether an operand, packed, takes fewer bytes than the float matrix that it is made of.

    Args:
        operand: a resolved spec, or the name of a float.
        shape: of the matrix.
        dtype: of the matrix.

    Returns:
        True also for the outlier codec, whose size is known when it is made.

    >>> import numpy as np
    >>> from extensor.quant.kept import packs
    >>> packs(et.QuantSpec("mxfp4").resolve(2), (64, 64), np.dtype("float32"))
    True
    """
    if isinstance(operand, str):
        return operand == "bfloat16" and dtype == np.float32
    if operand.row.outliers:
        return True
    return stored_nbytes(operand, shape) < math.prod(shape) * dtype.itemsize


def image_bits(
    operand: QuantSpec | str, dtype: np.dtype[Any], subnormals: bool = False
) -> int | None:
    """Bits a value that a convolution keeps of its image; None: the image as it is.

    Args:
        operand: of the slot ``wgrad.x``.
        dtype: of the image.
        subnormals: as for `extensor.quant.round_to_odd.odd_bits`.

    >>> import numpy as np
    >>> from extensor.quant.kept import image_bits
    >>> image_bits(et.QuantSpec("mxfp4"), np.dtype("float32"))
    12
    """
    if isinstance(operand, str):
        return 16 if operand == "bfloat16" and dtype == np.float32 else None
    return odd_bits(operand, dtype, subnormals)


def kept_nbytes(
    layer: LayerRecipe,
    x: tuple[int, ...],
    w: tuple[int, ...],
    dtype: str = "float32",
    device: str = "cpu",
) -> int:
    """Bytes that a layer keeps for backward under ``saved_input="packed"``.

    What `extensor.inspect.memory_ledger` finds, where nothing else keeps x; a GPU's pool gives
    multiples of 512. Where FP8 tensor cores multiply rebased MXFP8, its operand is kept with the
    scales of its tiles, about 8.1 bits a value.

    Args:
        layer: its recipe.
        x: the shape of its input, (..., K) or (N, C, H, W).
        w: the shape of its weight, (N, K) or (O, C / groups, kh, kw).
        dtype: of its input.
        device: "cpu" or "cuda".

    Returns:
        Bytes.

    Raises:
        ValueError: for the outlier codec, whose size depends on values.

    >>> from extensor.quant.kept import kept_nbytes
    >>> kept_nbytes(et.RECIPES["mxfp4_all"].layers, (32, 64), (8, 64)) * 8 / (32 * 64)
    4.25
    """
    found = as_dtype(dtype).numpy
    assert found is not None
    if len(w) == 4:
        if layer.uses_forward_operands:
            return math.prod(x) * found.itemsize
        planes = device == "cuda" and not isinstance(layer.wgrad.b, str)
        bits = image_bits(layer.wgrad.b, found, planes)
        return math.prod(x) * found.itemsize if bits is None else odd_nbytes(bits, x, planes)
    matrix = math.prod(x[:-1]), x[-1]
    if layer.uses_forward_operands:
        total = 0 if layer.requantize else math.prod(x) * found.itemsize
        for operand, shape in ((layer.fprop.a, matrix), (layer.fprop.b, w)):
            assert isinstance(operand, QuantSpec)
            along = operand.replace(axis=1).resolve(2)
            total += stored_nbytes(along, shape) if layer.requantize else 0
            if layer.clip_gradient:
                total += shape[0] * -(-coded_length(along, shape) // 8)
        return total
    operand = layer.wgrad.b
    if isinstance(operand, QuantSpec):
        operand = operand.replace(axis=0).resolve(2)
    if not packs(operand, matrix, found):
        return math.prod(x) * found.itemsize
    if isinstance(operand, str):
        return 2 * math.prod(x)
    if operand.row.outliers:
        raise ValueError(
            f"kept_nbytes: {operand.format} stores outliers one by one, so its size depends on "
            "the values; quantize an input and ask its nbytes"
        )
    return stored_nbytes(operand, matrix)
