"""Grouped products on Hopper: rows in groups, each with a matrix of its own (mixtures of experts).

One launch for all groups. Where they begin is read on the device, so that a router's counts need
not come to the host; a batch of products is groups of one size. Ways and bounds are those of
`extensor_cuda.gemm` and `extensor_cuda.scaled`.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from extensor.quant import views
from extensor.quant.array import QuantArray
from extensor_cuda import gemm as blocked
from extensor_cuda import scaled
from extensor_cuda.bf16 import whole
from extensor_cuda.expansion import Expansion, expand, kind_of, scale_of
from extensor_cuda.gemm import Product
from extensor_cuda.kernels.gemm.gemm_sm90 import configure, empty_rows, gemm

__all__ = ["batch", "matmul", "offsets_of", "reason"]

Array = Any

_OUT = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
_MOST_ROWS = 2**31 - 1  # offsets are int32


def offsets_of(sizes: Array, xp: Any) -> Array:
    """Group sizes, integers on the device -> where groups begin and end, int32 (groups + 1,)."""
    out = xp.zeros(len(sizes) + 1, dtype=np.int32)
    out[1:] = xp.cumsum(sizes).astype(np.int32)
    return out


def reason(a: QuantArray, b: QuantArray, capability: str) -> str | None:
    """Why there is no grouped product of these packed matrices on this GPU; None if there is.

    Args:
        a: (M, K).
        b: (groups N, K).
        capability: compute capability of the GPU, such as "90".
    """
    if refused := blocked.reason(a, b, capability):
        return refused
    if not a.spec.has_float_scales:
        return None
    return scaled.row_reason(a) or scaled.row_reason(b)


def batch(a: QuantArray, b: QuantArray, xp: Any) -> Product | str:
    """Of each i, a_i b_i^T: float32 (B, M, N) in one launch. Waits as `matmul`.

    Args:
        a: (B, M, K), packed and blocked along K.
        b: (B, N, K), likewise.
        xp: cupy.

    Returns:
        The product; or, as a sentence, why it has none in one launch.
    """
    (count, m, _), n = a.shape, b.shape[1]
    if count < 2 or 0 in (*a.shape, *b.shape):
        return f"a batch of {a.shape} and {b.shape}, one matrix or empty"
    if count * max(m, n) > _MOST_ROWS:
        return f"{count * max(m, n)} rows, beyond {_MOST_ROWS}"
    left, right = views.as_matrix(a), views.as_matrix(b)
    if left is None or right is None:
        tile = (a if left is None else b).spec.tile
        return f"tiles {tile} that do not divide the rows of each matrix"
    if refused := reason(left, right, xp.cuda.Device().compute_capability):
        return refused
    offsets = xp.asarray(np.arange(count + 1, dtype=np.int32) * np.int32(m))
    done = _matmul(left, right, offsets, xp, "float32")
    if isinstance(done, str):
        return done
    out: Array = done.out
    return Product(out.reshape(count, m, n), done.path)


def matmul(a: Any, b: Any, offsets: Array, xp: Any, *, out_dtype: str = "float32") -> Product:
    """For each group g, its rows of a times b_g^T. Without a gradient.

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
        TypeError: for tensors.
    """
    blocked.refuse_tensors("grouped", a, b)
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
    if not a.shape[0]:  # a rank to which no token was sent
        out = xp.empty((0, b.shape[0] // groups), dtype=_OUT[out_dtype])
        return Product(out, "nothing to multiply")
    _check_kinds(a, b, xp)
    done = _matmul(a, b, offsets, xp, out_dtype)
    if isinstance(done, str):
        raise ValueError(f"grouped: {done}; call .dequantize()")
    return done


def _matmul(a: Any, b: Any, offsets: Array, xp: Any, out_dtype: str) -> Product | str:
    """The product of operands that are taken; or why their values do not allow it."""
    out = empty_rows(xp, a.shape[0], b.shape[0] // (len(offsets) - 1), _OUT[out_dtype])
    sides = _sides(a, b, xp)
    if isinstance(sides, str):
        return sides
    left, right, why = sides
    shared = scale_of(left, right)
    if shared is None:
        return "one operand has a factor and the other an exponent"
    config = configure(left.kind, *out.shape, out_dtype, b=right.kind)
    exponents = (left.exponent, right.exponent) if shared == "exponent" else (None, None)
    factors = (left.factor, right.factor) if shared == "factor" else None
    offsets = xp.ascontiguousarray(offsets)
    gemm(left.codes, right.codes, out, config, *exponents, factors=factors, offsets=offsets)
    name = {"s8": "int8", "bf16": "bf16"}.get(left.kind, "FP8")
    return Product(xp.ascontiguousarray(out), f"{name} tensor cores{why}")


def _check_kinds(a: Any, b: Any, xp: Any) -> None:
    """Refuse operands that are neither both packed and covered nor both bfloat16."""
    stored = [isinstance(x, QuantArray) for x in (a, b)]
    if not any(stored):
        for x in (a, b):
            if x.dtype != ml_dtypes.bfloat16:
                raise ValueError(f"grouped: wanted packed or bfloat16 operands, got {x.dtype}")
    elif not all(stored):
        raise ValueError(
            "grouped: wanted two packed operands or two of bfloat16; quantize the other"
        )
    elif refused := reason(a, b, xp.cuda.Device().compute_capability):
        raise ValueError(f"grouped: {refused}; call .dequantize() on the operands")


def _sides(a: Any, b: Any, xp: Any) -> tuple[Expansion, Expansion, str] | str:
    """Both operands in element types that go together, and why it is not FP8 where it might be.

    Or why their values do not allow it.
    """
    if not isinstance(a, QuantArray):
        left, right = (Expansion(scaled.pitched(x.view(np.uint16), xp), "bf16") for x in (a, b))
        return left, right, ""
    if a.spec.has_float_scales:
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
        return "values that bfloat16 does not hold"
    return sides[0], sides[1], why
