"""A weight under another spec: unchanged or exact where possible, else rounded again.

MXFP4 becomes NVFP4 without loss where a tensor's block exponents, zeros aside, span 18 binades or
fewer: NVFP4's e4m3 block scales hold the powers of two from 2**-9 to 2**8, and the tensor scale
moves them. Two blocks of 16 repeat the scale of a block of 32. Every other change decodes, and
quantizes under the new spec; whether it was exact is found by comparing all values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from extensor.backends.registry import get as get_backend
from extensor.quant.array import QuantArray
from extensor.quant.scale_rules import E8M0_NAN
from extensor.quant.spec import QuantSpec

__all__ = ["mxfp4_to_nvfp4", "requantize", "smallest_float"]

Array = npt.NDArray[Any]
Stored = Array | QuantArray

_LEAST, _LARGEST = -9, 8  # exponents of the powers of two in e4m3
_NAN = 0x7F


def requantize(value: Stored, spec: QuantSpec) -> QuantArray:
    """A weight under another spec.

    Args:
        value: a float array, or a blocked one.
        spec: of the result.

    Returns:
        The weight; exact where it can be, which `compare` tells.

    >>> from extensor.io.stored import requantize
    >>> q = et.randn(4, 64, seed=0).to_mxfp4()
    >>> nv = requantize(q.data, et.QuantSpec("nvfp4"))
    >>> bool((et.ExTensor(nv).dequantize() == q.dequantize()).all())
    True
    """
    if isinstance(value, QuantArray):
        spec = spec.resolve(len(value.shape))
        if value.spec == spec:
            return value
        same = (spec.row.tensor_scale, spec.axis, spec.tile) == (True, value.spec.axis, (1, 16))
        mx = value.spec.is_mx and value.spec.tile == (1, 32) and not value.spec.transform
        if same and mx and value.spec.row.element == spec.row.element:
            exact = mxfp4_to_nvfp4(value, spec)
            if exact is not None:
                return exact
        value = get_backend("cpu").dequantize(value)
    values = np.asarray(value).astype(np.float32, copy=False)
    made: QuantArray = get_backend("cpu").quantize(values, spec.resolve(values.ndim))[0]
    return made


def mxfp4_to_nvfp4(q: QuantArray, spec: QuantSpec) -> QuantArray | None:
    """MXFP4 as NVFP4 with the same values; None where the exponents span too much.

    Args:
        q: MXFP4 in blocks of 32.
        spec: NVFP4 in blocks of 16 along the same axis, resolved.

    >>> from extensor.io.stored import mxfp4_to_nvfp4
    >>> q = et.randn(4, 64, seed=0).to_mxfp4().data
    >>> mxfp4_to_nvfp4(q, et.QuantSpec("nvfp4").resolve(2)).scales.shape
    (4, 4)
    """
    axis, length = q.spec.axis, q.shape[q.spec.axis]
    codes = np.moveaxis(q.codes, axis, -1)
    scales = np.moveaxis(q.scales, axis, -1)
    used = (codes & 0x77).reshape(*scales.shape, 16).any(axis=-1)
    nan = scales == E8M0_NAN
    exponents = scales.astype(np.int32) - 127
    counted = exponents[used & ~nan]
    top = int(counted.max()) if counted.size else _LARGEST
    if counted.size and int(counted.min()) - (top - _LARGEST) < _LEAST:
        return None
    shifted = np.clip(exponents - (top - _LARGEST), _LEAST, _LARGEST).astype(np.float32)
    stored = np.exp2(shifted).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    stored = np.where(used, stored, 0).astype(np.uint8)
    stored[nan] = _NAN
    blocks = -(-length // 16)
    new = {
        "scales": np.repeat(stored, 2, axis=-1)[..., :blocks],
        "codes": codes[..., : blocks * 8],
    }
    parts: dict[str, Any] = {
        n: np.ascontiguousarray(np.moveaxis(part, -1, axis)) for n, part in new.items()
    }
    tensor_scale = np.asarray(np.ldexp(np.float32(1), top - _LARGEST), np.float32)
    return dataclasses.replace(q, **parts, spec=spec, tensor_scale=tensor_scale)


def smallest_float(value: Stored) -> Array:
    """A weight's values in bfloat16 where that is exact, in float16 else, in float32 else.

    Args:
        value: a blocked weight, or a dense one, which is given back.

    >>> from extensor.io.stored import smallest_float
    >>> smallest_float(et.ones((4, 64)).to_mxfp4().data).dtype
    dtype(bfloat16)
    """
    if not isinstance(value, QuantArray):
        return value
    values: Array = get_backend("cpu").dequantize(value)
    with np.errstate(over="ignore"):
        for dtype in (ml_dtypes.bfloat16, np.float16):
            short = values.astype(dtype)
            wide = short.astype(np.float32)
            if bool(((wide == values) | (values != values)).all()):
                return short
    return values
