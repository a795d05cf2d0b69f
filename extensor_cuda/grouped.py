"""Grouped products on Hopper: rows in groups, each with a matrix of its own (mixtures of experts).

One launch for all groups. Where they begin is read on the device, so that a router's counts need
not come to the host; a batch of products is groups of one size. Ways and bounds are those of
`extensor_cuda.gemm` and `extensor_cuda.scaled`.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from extensor.quant.array import QuantArray
from extensor_cuda import gemm as blocked
from extensor_cuda import scaled
from extensor_cuda.bf16 import whole
from extensor_cuda.expansion import Expansion, expand, kind_of, scale_of
from extensor_cuda.gemm import Product
from extensor_cuda.kernels.gemm import configure, empty_rows, gemm

__all__ = ["matmul", "offsets_of"]

Array = Any

_OUT = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def offsets_of(sizes: Array, xp: Any) -> Array:
    """Group sizes, integers on the device -> where groups begin and end, int32 (groups + 1,)."""
    out = xp.zeros(len(sizes) + 1, dtype=np.int32)
    out[1:] = xp.cumsum(sizes).astype(np.int32)
    return out


def matmul(a: Any, b: Any, offsets: Array, xp: Any, *, out_dtype: str = "float32") -> Product:
    """For each group g, its rows of a times b_g^T.

    Packed operands read a flag on the host, as `extensor_cuda.gemm.matmul`; bfloat16 ones and FP8
    under float scales do not wait.

    Args:
        a: (M, K), packed and blocked along K, or bfloat16; rows sorted by group.
        b: (groups N, K), likewise: the groups' matrices one below the other.
        offsets: int32 (groups + 1,) on the device: group g has the rows offsets[g] to
            offsets[g + 1] of a. They begin with 0, never fall and end with M at most; rows beyond
            the last are not written.
        xp: cupy.
        out_dtype: "float32" or "bfloat16".

    Returns:
        (M, N), and the way it was taken.

    Raises:
        ValueError: if the operands do not fit, or there is no kernel for them.
    """
    if offsets.dtype != np.int32 or offsets.ndim != 1 or len(offsets) < 2:
        raise ValueError(
            f"grouped: wanted offsets int32 (groups + 1,), got {offsets.dtype} {offsets.shape}; "
            "offsets_of(sizes) makes them"
        )
    groups = len(offsets) - 1
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[1] or b.shape[0] % groups:
        raise ValueError(
            f"grouped: wanted a (M, K) and b (groups N, K) in {groups} groups, got {a.shape} and "
            f"{b.shape}"
        )
    if out_dtype not in _OUT:
        raise ValueError(f"grouped: wanted out_dtype 'float32' or 'bfloat16', got {out_dtype!r}")
    out = empty_rows(xp, a.shape[0], b.shape[0] // groups, _OUT[out_dtype])
    left, right, why = _sides(a, b, xp)
    shared = scale_of(left, right)
    if shared is None:
        raise ValueError("grouped: one operand has a factor and the other an exponent")
    config = configure(left.kind, *out.shape, out_dtype, b=right.kind)
    exponents = (left.exponent, right.exponent) if shared == "exponent" else (None, None)
    factors = (left.factor, right.factor) if shared == "factor" else None
    offsets = xp.ascontiguousarray(offsets)
    gemm(left.codes, right.codes, out, config, *exponents, factors=factors, offsets=offsets)
    name = {"s8": "int8", "bf16": "bf16"}.get(left.kind, "FP8")
    return Product(xp.ascontiguousarray(out), f"{name} tensor cores{why}")


def _sides(a: Any, b: Any, xp: Any) -> tuple[Expansion, Expansion, str]:
    """Both operands in element types that go together, and why it is not FP8 where it might be."""
    stored = [isinstance(x, QuantArray) for x in (a, b)]
    if not any(stored):
        for x in (a, b):
            if x.dtype != ml_dtypes.bfloat16:
                raise ValueError(f"grouped: wanted packed or bfloat16 operands, got {x.dtype}")
        left, right = (Expansion(scaled.pitched(x.view(np.uint16), xp), "bf16") for x in (a, b))
        return left, right, ""
    if not all(stored):
        raise ValueError(
            "grouped: wanted two packed operands or two of bfloat16; quantize the other"
        )
    if refused := blocked.reason(a, b, xp.cuda.Device().compute_capability):
        raise ValueError(f"grouped: {refused}; call .dequantize() on the operands")
    if not (a.spec.is_mx or a.spec.row.tensor_scale):
        return (*scaled.by_row(a, b, xp), "")
    kinds = [kind_of(q.spec)[0] for q in (a, b)]
    why = (
        f": FP8 does not hold {(a, b)[kinds.index('bf16')].spec.format}" if "bf16" in kinds else ""
    )
    if not why:
        flag = xp.zeros(1, dtype=np.uint32)
        left, right = (expand(q, kind, flag, xp) for q, kind in zip((a, b), kinds, strict=True))
        if not int(flag[0]):
            return left, right, ""
        why = ": scales span more binades than FP8 holds"
    sides = whole((a, b), xp)
    if sides is None:
        raise ValueError("grouped: values that bfloat16 does not hold; call .dequantize()")
    return sides[0], sides[1], why
