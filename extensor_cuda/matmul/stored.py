"""The product of two packed matrices as they are stored.

MXFP4 x MXFP4 is rebased to E5M2, exactly, with one exponent per row; MXFP6 and NVFP4 with scales
that FP8 holds are expanded to FP8, everything else that the decoder covers to bfloat16, exactly
(NVFP4 without its tensor scale, which multiplies the result). FP8 and INT8 under float scales are
read as they are. `extensor_cuda.matmul.product` has the bounds.

accumulate="rebased" takes MXFP8 on the FP8 tensor cores, whose sums move to float32 every 128
elements. MXFP8 uses all of FP8's exponents, so that no power of two holds a row exactly: a few
small values are rounded once more (`extensor_cuda.matmul.rebase`), and the product says how many.
It is off that of the rebased values by up to (K' 34 / 32 2**-13 + (K / 128 + 16) 2**-24) S, with
K' = min(K, 128), and this off the exact one by the sum over K of |da| |b| + |a| |db| + |da| |db|,
with da up to 2**-10 (E4M3) or 2**-17 (E5M2) times the largest scale of a's row.

accumulate="exact" takes MXFP4 as 8-bit integers where a row's scales span at most 3 binades: the
sum is exact and rounded once, so that it equals every other exact one, the CPU's too where its
sums stay below 2**24 units. Where they span more: bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from extensor.autograd.tensor import ExTensor
from extensor.backends.unsupported import Unsupported
from extensor.quant.array import QuantArray, tile_extent
from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.gemm.gemm_sm90 import MAX_TERMS
from extensor_cuda.kernels.gemm.requantize import Requantized, finished, requantized, type_of
from extensor_cuda.kernels.quantize import quantize as quantizer
from extensor_cuda.matmul import tuned
from extensor_cuda.matmul.expand import (
    Inexact,
    as_bf16,
    exact_bf16,
    expand,
    float_scaled,
    rebase_mxfp4,
    rebase_mxfp8,
)
from extensor_cuda.matmul.operand import RESULT_DTYPES, GemmOperand
from extensor_cuda.matmul.partition import configure
from extensor_cuda.matmul.product import (
    Product,
    empty_result,
    float_scaled_product,
    multiply,
    product,
)
from extensor_cuda.matmul.rebase import E5M2_SPAN, INT8_SPAN, held_by, is_mxfp4
from extensor_cuda.runtime.capture import current_capture

__all__ = [
    "BEYOND_BF16",
    "TOO_WIDE",
    "capability_of",
    "matmul",
    "multiply_stored",
    "refuse_tensors",
    "stored_gap",
    "stored_product",
]

Array = Any

_PROMOTE = {"promote": 4, "fast": 0, "rebased": 1}  # stages of 128 elements
TOO_WIDE = Unsupported("scales span more binades than FP8 holds")
BEYOND_BF16 = Unsupported("values that bfloat16 does not hold")


def capability_of(xp: Any) -> str:
    """The compute capability of the current GPU, such as "90"."""
    return str(xp.cuda.Device().compute_capability)


def stored_gap(a: QuantArray, b: QuantArray, capability: str) -> Unsupported | None:
    """Why there is no such product of (M, K) and (N, K) on this GPU; None if there is.

    ``capability`` is the GPU's compute capability, such as "90". Raises TypeError for tensors.
    """
    refuse_tensors("matmul", a, b)
    if (refused := tuned.hopper_gap(capability)) is not None:
        return refused
    for q in (a, b):
        if len(q.shape) != 2:
            return Unsupported(f"{len(q.shape)} axes; the kernel multiplies matrices")
        if (axis := q.spec.axis) != 1:
            return Unsupported(f"blocks along axis {axis}; the kernel reads them along the last")
    scaled = a.spec.has_float_scales or b.spec.has_float_scales
    for q in (a, b):
        gap = _float_scaled_gap(q) if scaled else quantizer.plan_of(q.spec, q.shape, decoding=True)
        if isinstance(gap, Unsupported):
            return gap
    same = a.spec.row.element.is_float == b.spec.row.element.is_float
    return Unsupported("an INT8 operand and an FP8 one") if scaled and not same else None


def _float_scaled_gap(q: QuantArray) -> Unsupported | None:
    element = q.spec.row.element
    if not q.spec.has_float_scales or q.spec.kernel_gap:
        return Unsupported(f"{q.spec.row.name}, whose scales are no plain floats")
    if element.bits != 8:
        return Unsupported(f"{element.name} under float scales; the kernel has e4m3, e5m2 and int8")
    if q.spec.transform:
        return Unsupported("a Hadamard transform to undo")
    if 0 in q.shape:
        return Unsupported("an empty array")
    _, length = tile_extent(q.spec, q.shape)
    if length < q.shape[1] and (length != 128 or not element.is_float):
        return Unsupported(
            f"tiles {q.spec.tile} of {element.name}; the kernel has one scale along K, or FP8 "
            "with one for each 128"
        )
    if not element.is_float and q.shape[1] > MAX_TERMS:
        return Unsupported(f"K = {q.shape[1]}, beyond {MAX_TERMS}, where int32 sums could overflow")
    return None


def refuse_tensors(name: str, *given: Any) -> None:
    """Refuse ExTensors with a TypeError: products here take what they hold."""
    for x in given:
        if isinstance(x, ExTensor):
            raise TypeError(
                f"{name}: expected what a tensor holds, got an ExTensor of {x.dtype.name}; pass "
                "q.data (and get a raw array, without a gradient), or write a @ b.T"
            )


def matmul(
    a: QuantArray,
    b: QuantArray,
    xp: Any,
    *,
    accumulate: str = "promote",
    out_dtype: str | QuantSpec = "float32",
    out_amax: Array | None = None,
) -> Product | Unsupported:
    """The product a b^T on the tensor cores; `extensor_cuda.matmul.product` has the error bounds.

    Reads a flag on the host, and so waits for the GPU: it cannot be captured in a graph. Not so
    "rebased" with two MXFP8 operands, nor "bf16" with operands that bfloat16 holds as they are
    and that it has multiplied before.

    Args:
        a: (M, K), blocked along K.
        b: (N, K), blocked along K.
        xp: cupy.
        accumulate: "promote": FP8 sums move to float32 every 512 elements; "fast": never, and K'
            in the bound is K; "exact": as 8-bit integers where the scales allow it, else as
            "bf16": always bfloat16 operands, twice the time and no such loss; "rebased": MXFP8 as
            FP8, a few of whose values change, as the result says.
        out_dtype: "float32", "bfloat16", or how the product's rows are quantized, from what would
            have been its bfloat16 values (`extensor_cuda.kernels.gemm.requantize`).
        out_amax: for a format with a scale per tensor, or under a window, what stands for the
            product's largest magnitude: float32 of shape () on the device.

    Returns:
        The product; or why it has none: values that bfloat16 does not hold.

    Raises:
        ValueError: for an unknown option, operands that do not fit, or that `stored_gap` refuses.
        TypeError: for tensors.
    """
    if accumulate not in (*_PROMOTE, "exact", "bf16") or (
        not isinstance(out_dtype, QuantSpec) and out_dtype not in RESULT_DTYPES
    ):
        raise ValueError(
            "matmul: expected accumulate 'promote', 'fast', 'rebased', 'exact' or 'bf16' and "
            f"out_dtype 'float32', 'bfloat16' or a QuantSpec, got {accumulate!r} and {out_dtype!r}"
        )
    if (gap := stored_gap(a, b, capability_of(xp))) is not None:
        raise ValueError(f"matmul: {gap.reason}; call .dequantize() on the operands")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"matmul: expected (M, K) and (N, K), got {a.shape} and {b.shape}")
    if accumulate == "rebased" and not any(q.spec.is_mxfp8 for q in (a, b)):
        raise ValueError(
            f"matmul: accumulate 'rebased' is for MXFP8, got {a.spec.format} and {b.spec.format}; "
            "these are exact by 'promote'"
        )
    if isinstance(out_dtype, QuantSpec):
        to = requantized(out_dtype, a.shape[0], b.shape[0], xp, out_amax)
        return multiply_stored(a, b, xp, accumulate, to)
    if out_amax is not None:
        raise ValueError(f"matmul: out_amax goes with a quantized result, not {out_dtype}")
    return multiply_stored(a, b, xp, accumulate, out_dtype)


def multiply_stored(
    a: QuantArray, b: QuantArray, xp: Any, accumulate: str, to: str | Requantized
) -> Product | Unsupported:
    """The product of operands that are supported; or why their values do not allow it."""
    if a.spec.has_float_scales:
        return float_scaled_product(float_scaled(a, xp), float_scaled(b, xp), to, xp)
    why = Unsupported("asked for")
    if accumulate != "bf16":
        # Before the flag is read: what the host does after it, the GPU waits for.
        out = empty_result(xp, a.shape[0], b.shape[0], to)
        sides = _fp8_operands(a, b, accumulate, xp)
        if not isinstance(sides, Unsupported):
            left, right, path, inexact = sides
            promote = None if left.kind == "s8" else _PROMOTE[accumulate]
            config = configure(left.kind, *out.shape, type_of(out), promote, b=right.kind)
            multiply(left, right, out, config)
            return Product(finished(out, xp), path, inexact)
        why = sides
    wide = exact_bf16((a, b), xp)
    if wide is None:
        return BEYOND_BF16
    return _bf16_product(wide, f"bf16 tensor cores: {why.reason}", to, xp)


def stored_product(a: QuantArray, b: QuantArray, xp: Any) -> Product | Unsupported:
    """The float32 product in bfloat16, whatever the values, so that a captured step can make it.

    Raises:
        ValueError: for MX values that bfloat16 does not hold; of a captured step, later.
    """
    gap = stored_gap(a, b, capability_of(xp))
    if gap is None and a.spec.has_float_scales:
        gap = Unsupported("float scales, whose product does not wait in any case")
    if gap is not None:
        return gap
    flags = xp.zeros(2, dtype=np.uint32)
    wide = [as_bf16(q, xp, flags[i : i + 1]) for i, q in enumerate((a, b))]
    if (capture := current_capture()) is not None:
        capture.watch(flags != 0, _beyond_bf16)
    elif flags.get().any():
        raise _beyond_bf16()
    return _bf16_product(wide, "bf16 tensor cores: whatever the values", "float32", xp)


def _beyond_bf16() -> ValueError:
    return ValueError(
        "a layer's stored operand holds values below 2**-133 or above 2**127, which bfloat16 does "
        "not; look for a layer whose weights or inputs vanish or overflow"
    )


def _bf16_product(
    wide: Sequence[GemmOperand], path: str, to: str | Requantized, xp: Any
) -> Product:
    a, b = wide
    if not isinstance(to, Requantized) and a.scale.is_absent and b.scale.is_absent:
        return Product(product(a, b, to, xp), path)
    out = empty_result(xp, a.shape[0], b.shape[0], to)
    multiply(a, b, out)
    return Product(finished(out, xp), path)


Operands = tuple[GemmOperand, GemmOperand, str, tuple[Inexact | None, Inexact | None]]


def _fp8_operands(a: QuantArray, b: QuantArray, accumulate: str, xp: Any) -> Operands | Unsupported:
    """Both matrices in 8 bits, the path in words, and what rebasing lost; or why they do not fit.

    Waits for the GPU where a flag has to be read.
    """
    if accumulate != "rebased" and is_mxfp4(a.spec) and is_mxfp4(b.spec):
        return _mxfp4_operands(a, b, accumulate == "exact", xp)
    rebases = [accumulate == "rebased" and q.spec.is_mxfp8 for q in (a, b)]
    for q, rebased in zip((a, b), rebases, strict=True):
        if not rebased and (held_by(q.spec)[0] == "bf16" or (any(rebases) and not q.spec.is_mx)):
            return Unsupported(f"FP8 does not hold {q.spec.format}")
    if accumulate == "exact":
        return Unsupported("an operand is not MXFP4")
    flag = None if all(rebases) else xp.zeros(1, dtype=xp.uint32)
    (left, lost), (right, lost_too) = (
        rebase_mxfp8(q, xp) if rebased else (expand(q, held_by(q.spec)[0], flag, xp), None)
        for q, rebased in zip((a, b), rebases, strict=True)
    )
    if flag is not None and int(flag[0]):
        return TOO_WIDE
    path = "FP8 tensor cores, rebased operands" if any(rebases) else "FP8 tensor cores"
    return left, right, path, (lost, lost_too)


def _mxfp4_operands(a: QuantArray, b: QuantArray, exact: bool, xp: Any) -> Operands | Unsupported:
    """The same of MXFP4 with an exponent a row: as integers if the product is to be exact."""
    if exact and a.shape[1] > MAX_TERMS:
        return Unsupported(f"K = {a.shape[1]}, beyond {MAX_TERMS}")
    flag = xp.zeros((), dtype=xp.uint32)
    left, right = (rebase_mxfp4(q, flag, xp, exact) for q in (a, b))
    if int(flag):
        span = INT8_SPAN if exact else E5M2_SPAN
        return Unsupported(f"a row's scales span more than {span} binades")
    return left, right, f"{'int8' if exact else 'FP8'} tensor cores", (None, None)
