"""Products of activations with packed weights: decoded on the way, or expanded first.

Up to 64 tokens: `extensor_cuda.decode`, which reads the packed weights once. Beyond, on Hopper,
weights of 4 bits are decoded by the warps of the GEMM that multiply (`extensor_cuda.decoded`);
others are expanded to bfloat16, exactly, and multiplied by it (`extensor_cuda.bf16`), as are those
under float scales of groups for many rows: values of MX and NVFP4, codes of INT4, INT8 and FP8 less
their zero points. Float scales stay apart, since their products with
codes take more bits than bfloat16 has: one for all of K multiplies the finished sum, those of
groups along K multiply each group's sum as it is added to float32 registers. float32 activations
are three bfloat16 matrices, one below the other, whose products are added, so that nothing but
sums is rounded: with S = sum |x| |w| over K and n groups of float scales (0 without), the result is
off by up to (K 2**-22 + n 2**-24 + 2**-20) S plus what underflows: where scales are floats, 2**-126
a group times its scale; of weights that are decoded, up to 2**-123 of x a term under E8M0 scales
below 2**-117.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from extensor.backends.unsupported import Unsupported
from extensor.quant.array import QuantArray, tile_extent
from extensor_cuda import decode, decoded, dense
from extensor_cuda.bf16 import is_float_scaled, multiply_packed
from extensor_cuda.expansion import Expansion
from extensor_cuda.kernels.gemm.gemm_sm90 import STAGE_OF_BF16, Split, empty_rows
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.scaled import pitched

__all__ = ["product", "reason"]

Array = Any

_OUT = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
DECODED = "tensor cores, weights decoded on the way"
EXPANDED = "bf16 tensor cores, weights expanded"


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
    if not is_float_scaled(w.spec):
        plan = kernels.plan_of(w.spec, w.shape, decoding=True)
        return plan.reason if isinstance(plan, Unsupported) else None
    if w.spec.row.outliers or w.spec.transform:
        return "the outlier codec" if w.spec.row.outliers else "a Hadamard transform to undo"
    _, length = tile_extent(w.spec, w.shape)
    if length < w.shape[1] and length != 32 and length % STAGE_OF_BF16:
        return f"groups of {length}; the kernel has 32 and multiples of {STAGE_OF_BF16}"
    return f"weights of shape {w.shape}" if 0 in w.shape else None


def product(x: Array, w: QuantArray, out_dtype: str, xp: Any) -> tuple[Array, str] | str:
    """X w^T of operands that `reason` covers, float32 or bfloat16 (M, N), and the way it was taken.

    Many rows wait for the GPU the first time that MX or NVFP4 weights are seen, so multiply once
    before a capture; and each time if weights that are expanded have values beyond bfloat16's.

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
    single = x.dtype.name == "bfloat16"
    bits = pitched(x.view(np.uint16), xp) if single else dense.thirds(x, xp)
    dtype, way = out_dtype if single else "float32", EXPANDED
    if decoded.taken(w, len(bits)):
        out, way = decoded.multiply(bits, w, dtype, xp), DECODED
    else:
        expanded = multiply_packed(Expansion(bits, "bf16"), w, dtype, xp)
        if expanded is None:
            return "values that bfloat16 does not hold"
        out = expanded
    if not single:
        parts, out = pitched(out, xp), empty_rows(xp, len(x), w.shape[0], _OUT[out_dtype])
        dense.add_parts(parts, Split(3, 0), out, None, xp)
    return xp.ascontiguousarray(out), way
