"""Products of activations with packed weights: few rows decode on the way, many expand first.

Up to 64 tokens: `extensor_cuda.decode`, which reads the packed weights once. Beyond, on Hopper: MX
and NVFP4 weights are expanded to bfloat16, exactly, and multiplied by the GEMM; float32 activations
are three bfloat16 matrices, one below the other, whose products are added, so that nothing but the
sum is rounded: with S = sum |x| |w| over K it is off by up to (K 2**-22 + 2**-20) S plus what
underflows. INT4 and INT8 weights under float scales fit bfloat16 only without these, which vary
along K: with many rows they are decoded to float32 and multiplied by cupy.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from extensor.quant.array import QuantArray
from extensor_cuda import decode
from extensor_cuda.expansion import Expansion, multiply, whole
from extensor_cuda.kernels import quantize as kernels
from extensor_cuda.kernels.gemm import empty_rows
from extensor_cuda.scaled import pitched

__all__ = ["product", "reason"]

Array = Any

_OUT = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
DECODED = "tensor cores, weights decoded on the way"
EXPANDED = "bf16 tensor cores, weights expanded first"


def reason(x: Array, w: QuantArray, capability: str) -> str | None:
    """Why there is no such product of x (M, K) and w (N, K); None if there is.

    Args:
        x: activations.
        w: weights.
        capability: compute capability of the GPU, such as "90".
    """
    few = decode.reason(x, w, capability)
    return few if few is None else _many_reason(x, w, capability, few)


def _many_reason(x: Array, w: QuantArray, capability: str, few: str) -> str | None:
    if capability != "90" or x.ndim != 2 or len(w.shape) != 2 or w.spec.axis != 1:
        return few
    if x.dtype.name not in _OUT or not x.size:
        return f"{x.dtype} activations of shape {x.shape}"
    if not (w.spec.is_mx or w.spec.row.tensor_scale):
        return f"{few}; {w.spec.format} does not fit bfloat16"
    plan = kernels.plan_of(w.spec, w.shape, decoding=True)
    return plan if isinstance(plan, str) else None


def _parts(x: Array, xp: Any) -> Array:
    """The bits of x as bfloat16, (M, K); of float32 in three parts that add up to it, (3 M, K)."""
    rows, k = x.shape
    if x.dtype.name == "bfloat16":
        return pitched(x.view(np.uint16), xp)
    x = xp.ascontiguousarray(x)
    out = empty_rows(xp, 3 * rows, k, np.uint16)
    rest = xp.where(xp.isfinite(x), x, np.float32(0))
    for i in range(3):
        upper = rest.view(np.uint32) & np.uint32(0xFFFF0000)
        out[i * rows : (i + 1) * rows] = (upper >> np.uint32(16)).astype(np.uint16)
        rest = rest - upper.view(np.float32)
    bits = (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    out[:rows] = xp.where(xp.isinf(x), bits, out[:rows])
    out[:rows] = xp.where(xp.isnan(x), np.uint16(0x7FC0), out[:rows])
    return out


def product(x: Array, w: QuantArray, out_dtype: str, xp: Any) -> tuple[Array, str] | str:
    """X w^T of operands that `reason` covers, float32 or bfloat16 (M, N), and the way it was taken.

    Many rows wait for the GPU the first time that MX weights are seen, so multiply once before a
    capture; and each time if their largest or least values lie beyond those of bfloat16.

    Args:
        x: (M, K), float32 or bfloat16.
        w: (N, K), blocked along K.
        out_dtype: "float32" or "bfloat16".
        xp: cupy.

    Returns:
        The product and its way; or, as a sentence, why it has none: values that bfloat16 does not
        hold.
    """
    if decode.reason(x, w, xp.cuda.Device().compute_capability) is None:
        return decode.product(x, w, out_dtype, xp), DECODED
    made = whole([w], xp)
    if made is None:
        return "values that bfloat16 does not hold"
    rows = len(x)
    parts = _parts(x, xp)
    single = len(parts) == rows
    dtype = out_dtype if single else "float32"
    out = multiply(Expansion(parts, "bf16"), made[0], dtype, xp)
    if not single:  # the smallest first
        total = out[2 * rows :] + out[rows : 2 * rows]
        total += out[:rows]
        out = total.astype(_OUT[out_dtype], copy=False)
    return xp.ascontiguousarray(out), EXPANDED
