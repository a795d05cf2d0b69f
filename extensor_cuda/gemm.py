"""Products of blocked matrices on Hopper's tensor cores.

MXFP4 x MXFP4 is rebased to E5M2, exactly, with one exponent per row; MXFP6 and NVFP4 with scales
that FP8 holds are expanded to FP8, everything else that the decoder covers to bfloat16, exactly
(`extensor_cuda.expansion`; NVFP4 without its tensor scale, which multiplies the result). With
S = sum |a| |b| over K, the result is off the product of the exact values by up to

    FP8    (K' 34 / 32 2**-13 + (K / 512 + 3) 2**-24) S, K' = min(K, 512): the tensor core aligns
           32 products and its sum to the largest and cuts each to 13 fraction bits
           (`extensor_cuda.gemm_model`); every 512 elements the sum moves to float32. A subnormal
           code counts as large as the smallest normal: where it makes a product the largest of its
           32, the first term is up to 4 (E5M2) or 8 times (E4M3) that. The bound is for the worst
           case; most results of normal data are exact (docs/log.md)
    bf16   K 2**-22 S: a float32 sum that is cut, not rounded

plus, for a result below 2**-126, what underflows: less than 2**-126 a term. A bfloat16 output adds
2**-8 of itself. FP8 and INT8 under float scales: `extensor_cuda.scaled`, with bounds of its own.

accumulate="near" takes MXFP8 on the FP8 tensor cores, whose sums move to float32 every 128
elements. MXFP8 uses all of FP8's exponents, so that no power of two holds a row exactly: a few
small values are rounded once more (`extensor_cuda.near`), and the product says how many. It is off
that of the near-exact values by up to (K' 34 / 32 2**-13 + (K / 128 + 16) 2**-24) S, with K' =
min(K, 128), and this off the exact one by the sum over K of |da| |b| + |a| |db| + |da| |db|, with
da up to 2**-10 (E4M3) or 2**-17 (E5M2) times the largest scale of a's row.

accumulate="exact" takes MXFP4 as 8-bit integers where a row's scales span at most 3 binades: the
sum is exact and rounded once, so that it equals every other exact one, the CPU's too where its
sums stay below 2**24 units. Where they span more: bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from extensor.autograd.tensor import ExTensor
from extensor.quant.array import QuantArray
from extensor.quant.spec import QuantSpec
from extensor_cuda import scaled
from extensor_cuda.bf16 import whole
from extensor_cuda.expansion import Expansion, expand, join, kind_of, multiply
from extensor_cuda.kernels.gemm.gemm_sm90 import MOST_TERMS, configure, empty_rows, gemm
from extensor_cuda.kernels.gemm.requantize import Requantized, finished, requantized, type_of
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.near import Inexact, near
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["INT_SPAN", "SPAN", "Product", "matmul", "reason", "rebase_source", "refuse_tensors"]

Array = Any

# e2m1's 6 times 2**13 is E5M2's 49152; its 0.5 times 2**-15 is E5M2's least, 2**-16.
TOP, SPAN = 13, 28
INT_TOP, INT_SPAN = 4, 3  # 6 times 2**4 and 0.5 times 2**1 are integers of 8 bits
_SOURCE = Path(__file__).parent / "kernels" / "prepare" / "rebase_mxfp4.cu"
_PROMOTE = {"promote": 4, "fast": 0, "near": 1}  # stages of 128 elements
_OUT = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Product:
    """A product and the way it was taken.

    Attributes:
        out: (M, N), packed if it was asked for quantized.
        path: "FP8 tensor cores", "int8 tensor cores" or "bf16 tensor cores: " and why; "FP8 tensor
            cores, near-exact operands" is what is not exact before the sum.
        inexact: what near-exact operands lost, a's and b's; None of an exact one.
    """

    out: Array | QuantArray
    path: str
    inexact: tuple[Inexact | None, Inexact | None] = (None, None)


def reason(a: QuantArray, b: QuantArray, capability: str) -> str | None:
    """Why there is no such product of these operands on this GPU; None if there is.

    Args:
        a: left operand, (M, K).
        b: right operand, (N, K).
        capability: compute capability of the GPU, such as "90".

    Raises:
        TypeError: for tensors.
    """
    refuse_tensors("matmul", a, b)
    if capability != "90":
        return f"compute capability {capability}; the tensor-core kernel is for 90 (H100, H200)"
    for q in (a, b):
        if len(q.shape) != 2:
            return f"{len(q.shape)} axes; the kernel multiplies matrices"
        if q.spec.axis != 1:
            return f"blocks along axis {q.spec.axis}; the kernel wants them along the last"
    if any(_is_float_scaled(q) for q in (a, b)):
        return scaled.reason(a, b)
    for q in (a, b):
        plan = kernels.plan_of(q.spec, q.shape, decoding=True)
        if not plan:
            return plan.reason
    return None


def refuse_tensors(name: str, *given: Any) -> None:
    """Refuse ExTensors: products here take what they hold.

    Raises:
        TypeError: for one.
    """
    for x in given:
        if isinstance(x, ExTensor):
            raise TypeError(
                f"{name}: wanted what a tensor holds, got an ExTensor of {x.dtype.name}; pass "
                "q.data (and get a raw array, without a gradient), or write a @ b.T"
            )


def _is_float_scaled(q: QuantArray) -> bool:
    return q.spec.has_float_scales


@lru_cache(maxsize=16)
def rebase_source(block: int, integers: bool = False) -> Source:
    """The program that rebases MXFP4 rows of such blocks, to E5M2 or to integers of 8 bits."""
    top, span = (INT_TOP, INT_SPAN) if integers else (TOP, SPAN)
    return Source.read(
        _SOURCE, {"BLOCK": block, "TOP": top, "SPAN": span, "INTEGERS": int(integers)}
    )


def _is_mxfp4(q: QuantArray) -> bool:
    element = q.spec.row.element
    return element.bits == 4 and element.is_float and q.spec.is_mx


def _aligned(array: Array, octets: int, xp: Any) -> Array:
    array = xp.ascontiguousarray(array)
    return array if array.data.ptr % octets == 0 else array.copy()


def _rebase(q: QuantArray, flag: Array, xp: Any, integers: bool = False) -> tuple[Array, Array]:
    """Codes (rows, K) and int32 exponents (rows,); raises ``flag`` where a row does not fit."""
    assert isinstance(q.spec.tile, tuple)
    (rows, k), block = q.shape, q.spec.tile[1]
    codes, scales = _aligned(q.codes, 8, xp), _aligned(q.scales, 1, xp)
    blocks = scales.shape[1]
    out = xp.empty((rows, blocks * block), dtype=xp.uint8)
    exponents = xp.empty(rows, dtype=xp.int32)
    arrays = (codes, scales, out, exponents, flag, np.int64(blocks))
    launch(rebase_source(block, integers), "rebase", rows, 128, *arrays)
    return out[:, :k], exponents


def _as_fp4(a: QuantArray, b: QuantArray, out: Array, accumulate: str, xp: Any) -> Product | str:
    """MXFP4 x MXFP4 with an exponent a row, in FP8 or in integers; or why it does not fit."""
    integers = accumulate == "exact"
    if integers and a.shape[1] > MOST_TERMS:
        return f"K = {a.shape[1]}, beyond {MOST_TERMS}"
    flag = xp.zeros((), dtype=xp.uint32)
    (x, rows), (y, columns) = (_rebase(q, flag, xp, integers) for q in (a, b))
    if int(flag):
        return f"a row's scales span more than {INT_SPAN if integers else SPAN} binades"
    if integers:
        config = configure("s8", *out.shape, type_of(out))
    else:
        config = configure("e5m2", *out.shape, type_of(out), _PROMOTE[accumulate])
    gemm(x, y, out, config, rows, columns)
    return Product(finished(out, xp), f"{'int8' if integers else 'FP8'} tensor cores")


def _as_fp8(a: QuantArray, b: QuantArray, out: Array, accumulate: str, xp: Any) -> Product | str:
    """Formats that FP8 can hold, with one scale for a tensor; or why it does not fit."""
    kinds = [kind_of(q.spec)[0] for q in (a, b)]
    if "bf16" in kinds:
        return f"FP8 does not hold {(a, b)[kinds.index('bf16')].spec.format}"
    if accumulate == "exact":
        return "an operand is not MXFP4"
    flag = xp.zeros(1, dtype=xp.uint32)
    x, y = (expand(q, kind, flag, xp) for q, kind in zip((a, b), kinds, strict=True))
    if int(flag[0]):
        return "scales span more binades than FP8 holds"
    join(x, y, out, promote=_PROMOTE[accumulate])
    return Product(finished(out, xp), "FP8 tensor cores")


def _as_near(a: QuantArray, b: QuantArray, out: Array, xp: Any) -> Product | str:
    """MXFP8 in FP8 with an exponent a row, with its like or with what FP8 holds; or why not."""
    for q in (a, b):
        if not (q.spec.is_mxfp8 or (q.spec.is_mx and kind_of(q.spec)[0] != "bf16")):
            return f"FP8 does not hold {q.spec.format}"
    flag = None
    sides: list[tuple[Expansion, Inexact | None]] = []
    for q in (a, b):
        if q.spec.is_mxfp8:
            sides.append(near(q, xp))
        else:
            flag = xp.zeros(1, dtype=xp.uint32)
            sides.append((expand(q, kind_of(q.spec)[0], flag, xp), None))
    if flag is not None and int(flag[0]):
        return "scales span more binades than FP8 holds"
    (x, lost), (y, lost_too) = sides
    join(x, y, out, promote=_PROMOTE["near"])
    way = "FP8 tensor cores, near-exact operands"
    return Product(finished(out, xp), way, (lost, lost_too))


def matmul(
    a: QuantArray,
    b: QuantArray,
    xp: Any,
    *,
    accumulate: str = "promote",
    out_dtype: str | QuantSpec = "float32",
    out_amax: Array | None = None,
) -> Product | str:
    """The product a b^T on the tensor cores; the module's docstring has the error bounds.

    Reads a flag on the host, and so waits for the GPU: it cannot be captured in a graph. Not so
    "near" with two MXFP8 operands, nor "bf16" with operands that bfloat16 holds as they are
    and that it has multiplied before.

    Args:
        a: (M, K), blocked along K.
        b: (N, K), blocked along K.
        xp: cupy.
        accumulate: "promote": FP8 sums move to float32 every 512 elements; "fast": never, and K'
            in the bound is K; "exact": as 8-bit integers where the scales allow it, else as
            "bf16": always bfloat16 operands, twice the time and no such loss; "near": MXFP8 as
            FP8, a few of whose values change, as the result says.
        out_dtype: "float32", "bfloat16", or how the product's rows are quantized, from what would
            have been its bfloat16 values (`extensor_cuda.kernels.gemm.requantize`).
        out_amax: for a format with a scale per tensor, or under a window, what stands for the
            product's largest magnitude: float32 of shape () on the device.

    Returns:
        The product; or, as a sentence, why it has none: values that bfloat16 does not hold.

    Raises:
        ValueError: for an unknown option, operands that do not fit, or that `reason` refuses.
        TypeError: for tensors.
    """
    if accumulate not in (*_PROMOTE, "exact", "bf16") or (
        not isinstance(out_dtype, QuantSpec) and out_dtype not in _OUT
    ):
        raise ValueError(
            f"matmul: wanted accumulate 'promote', 'fast', 'near', 'exact' or 'bf16' and out_dtype "
            f"'float32', 'bfloat16' or a QuantSpec, got {accumulate!r} and {out_dtype!r}"
        )
    if refused := reason(a, b, xp.cuda.Device().compute_capability):
        raise ValueError(f"matmul: {refused}; call .dequantize() on the operands")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"matmul: wanted (M, K) and (N, K), got {a.shape} and {b.shape}")
    if accumulate == "near" and not any(q.spec.is_mxfp8 for q in (a, b)):
        raise ValueError(
            f"matmul: accumulate 'near' is for MXFP8, got {a.spec.format} and {b.spec.format}; "
            "these are exact by 'promote'"
        )
    m, n = a.shape[0], b.shape[0]
    if isinstance(out_dtype, QuantSpec):
        to: str | Requantized = requantized(out_dtype, m, n, xp, out_amax)
    elif out_amax is not None:
        raise ValueError(f"matmul: out_amax goes with a quantized result, not {out_dtype}")
    else:
        to = out_dtype
    if _is_float_scaled(a):
        return Product(*scaled.product(a, b, to, xp))
    why = "asked for"
    if accumulate != "bf16":
        out = to if isinstance(to, Requantized) else empty_rows(xp, m, n, _OUT[to])
        if accumulate == "near":
            done = _as_near(a, b, out, xp)
        else:
            attempt = _as_fp4 if _is_mxfp4(a) and _is_mxfp4(b) else _as_fp8
            done = attempt(a, b, out, accumulate, xp)
        if isinstance(done, Product):
            return done
        why = done
    sides = whole((a, b), xp)
    if sides is None:
        return "values that bfloat16 does not hold"
    return Product(multiply(sides[0], sides[1], to, xp), f"bf16 tensor cores: {why}")
