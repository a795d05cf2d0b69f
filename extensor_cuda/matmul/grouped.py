"""Products of packed matrices in one launch: of each of a batch, or of each group of rows.

Groups of rows have a matrix each, as the experts of a mixture have. Operands and bounds are those
of `extensor_cuda.matmul.stored`; of float activations, of `extensor_cuda.matmul.weight_only` for
many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from extensor.backends.unsupported import Unsupported
from extensor.quant import views
from extensor.quant.array import QuantArray
from extensor_cuda.kernels.gemm.config import Split
from extensor_cuda.kernels.gemm.gemm_sm90 import Epilogue, Scales, empty_rows, gemm
from extensor_cuda.kernels.prepare.cast_bf16 import add_partial_sums, bf16_triple
from extensor_cuda.matmul.expand import FITS_BF16, as_bf16, exact_bf16, expand, float_scaled
from extensor_cuda.matmul.operand import RESULT_DTYPES, GemmOperand, Scale, pitched
from extensor_cuda.matmul.partition import configure
from extensor_cuda.matmul.product import Product, shared_scales
from extensor_cuda.matmul.rebase import held_by
from extensor_cuda.matmul.stored import (
    BEYOND_BF16,
    TOO_WIDE,
    capability_of,
    multiply_stored,
    refuse_tensors,
    stored_gap,
)

__all__ = [
    "block_scaled_matmul",
    "grouped_gap",
    "grouped_matmul",
    "grouped_weight_only_matmul",
    "offsets_of",
]

Array = Any

_MAX_ROWS = 2**31 - 1  # offsets are int32


def block_scaled_matmul(a: QuantArray, b: QuantArray, dtype: str, xp: Any) -> Product | Unsupported:
    """A b^T, float32 or bfloat16, of packed (M, K) and (N, K), or of each of a batch in one launch.

    Waits as `matmul` does.
    """
    if len(a.shape) == 3:
        return _batch(a, b, dtype, xp)
    gap = stored_gap(a, b, capability_of(xp))
    return multiply_stored(a, b, xp, "promote", dtype) if gap is None else gap


def offsets_of(sizes: Array, xp: Any) -> Array:
    """Group sizes, integers on the device -> where groups begin and end, int32 (groups + 1,)."""
    out = xp.zeros(len(sizes) + 1, dtype=np.int32)
    out[1:] = xp.cumsum(sizes).astype(np.int32)
    return out


def grouped_gap(a: QuantArray, b: QuantArray, capability: str) -> Unsupported | None:
    """Why there is no product of a, (M, K), with groups of rows of b; None if there is."""
    if (gap := stored_gap(a, b, capability)) is not None:
        return gap
    if not a.spec.has_float_scales:
        return None
    for q in (a, b):
        if q.scales.shape[1] > 1 or q.zero_points is not None:
            zeros = "" if q.zero_points is None else " and zero points"
            return Unsupported(
                f"expected one scale along K and no zero points, got {q.spec.format} in tiles "
                f"{q.spec.tile}{zeros}"
            )
    return None


def _batch(a: QuantArray, b: QuantArray, dtype: str, xp: Any) -> Product | Unsupported:
    """Of each i, a_i b_i^T: (B, M, N) in one launch. Waits as `matmul`."""
    (count, m, _), n = a.shape, b.shape[1]
    if count < 2 or 0 in (*a.shape, *b.shape):
        return Unsupported(f"a batch of {a.shape} and {b.shape}, one matrix or empty")
    if count * max(m, n) > _MAX_ROWS:
        return Unsupported(f"{count * max(m, n)} rows, beyond {_MAX_ROWS}")
    left, right = views.as_matrix(a), views.as_matrix(b)
    if left is None or right is None:
        tile = (a if left is None else b).spec.tile
        return Unsupported(f"tiles {tile} that do not divide the rows of each matrix")
    if (gap := grouped_gap(left, right, capability_of(xp))) is not None:
        return gap
    offsets = xp.asarray(np.arange(count + 1, dtype=np.int32) * np.int32(m))
    done = _grouped(left, right, offsets, xp, dtype)
    if isinstance(done, Unsupported):
        return done
    return Product(done.out.reshape(count, m, n), done.path)


def grouped_matmul(
    a: Any, b: Any, offsets: Array, xp: Any, *, out_dtype: str = "float32"
) -> Product:
    """For each group g, its rows of a times b_g^T, in one launch. Without a gradient.

    Where groups begin is read on the device, so that a router's counts need not come to the host.
    Packed operands read a flag on the host, as `matmul`; bfloat16 ones and FP8 under float scales
    do not wait.

    Args:
        a: (M, K), packed and blocked along K, or bfloat16; rows sorted by group.
        b: (groups N, K), likewise: the groups' matrices one below the other.
        offsets: int32 (groups + 1,) on the device: group g has the rows offsets[g] to
            offsets[g + 1] of a. They begin with 0, never fall and end with M at most; rows beyond
            the last are not written.
        xp: cupy.
        out_dtype: "float32" or "bfloat16".

    Raises:
        ValueError: if the operands do not fit, or there is no kernel for them.
        TypeError: for tensors.
    """
    refuse_tensors("grouped", a, b)
    if offsets.dtype != np.int32 or offsets.ndim != 1 or len(offsets) < 2:
        raise ValueError(
            f"grouped: expected offsets int32 (groups + 1,), got {offsets.dtype} {offsets.shape}; "
            "offsets_of(sizes) makes them"
        )
    groups = len(offsets) - 1
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[1] or b.shape[0] % groups:
        raise ValueError(
            f"grouped: expected a (M, K) and b (groups N, K) in {groups} groups, got {a.shape} and "
            f"{b.shape}"
        )
    if out_dtype not in RESULT_DTYPES:
        raise ValueError(f"grouped: expected out_dtype 'float32' or 'bfloat16', got {out_dtype!r}")
    if not a.shape[0]:  # a rank to which no token was sent
        out = xp.empty((0, b.shape[0] // groups), dtype=RESULT_DTYPES[out_dtype])
        return Product(out, "nothing to multiply")
    _check_kinds(a, b, xp)
    done = _grouped(a, b, offsets, xp, out_dtype)
    if isinstance(done, Unsupported):
        raise ValueError(f"grouped: {done.reason}; call .dequantize()")
    return done


def _grouped(a: Any, b: Any, offsets: Array, xp: Any, out_dtype: str) -> Product | Unsupported:
    """The product of operands that are supported; or why their values do not allow it."""
    out = empty_rows(xp, a.shape[0], b.shape[0] // (len(offsets) - 1), RESULT_DTYPES[out_dtype])
    sides = _grouped_operands(a, b, xp)
    if isinstance(sides, Unsupported):
        return sides
    left, right, why = sides
    scales = shared_scales(left, right)
    if scales is None:
        return Unsupported("one operand has a factor and the other an exponent")
    config = configure(left.kind, *out.shape, out_dtype, b=right.kind)
    offsets = xp.ascontiguousarray(offsets)
    gemm(left.codes, right.codes, out, config, Epilogue(scales, offsets=offsets))
    name = {"s8": "int8", "bf16": "bf16"}.get(left.kind, "FP8")
    return Product(xp.ascontiguousarray(out), f"{name} tensor cores{why}")


def grouped_weight_only_matmul(
    x: Array, weights: Sequence[QuantArray], ends: Sequence[int], xp: Any
) -> Product | Unsupported:
    """Rows of x times the packed matrix of their group, float32 (M, N), in one launch.

    Waits for the GPU the first time that a matrix is seen. X is (M, K), bfloat16 or float32, which
    takes three launches; matrices are (N, K), MX along their rows. They are copied side by side and
    expanded to bfloat16, so that for a while they take 2.5 bytes a value more.

    Args:
        x: rows, those of each group together.
        weights: a matrix for each group.
        ends: where each group's rows end.
        xp: cupy.
    """
    first = weights[0]
    if any((w.spec, w.shape) != (first.spec, first.shape) for w in weights):
        return Unsupported("matrices of several formats or shapes")
    if (gap := stored_gap(first, first, capability_of(xp))) is not None:
        return gap
    if not first.spec.is_mx:
        return Unsupported(f"{first.spec.format}, whose scales are not all of its blocks'")
    if x.ndim != 2 or x.dtype.name not in RESULT_DTYPES or not x.size:
        return Unsupported(f"{x.dtype} activations of shape {x.shape}")
    w = _side_by_side(weights, xp)
    if w is None:
        return BEYOND_BF16
    (rows, _), n, single = x.shape, first.shape[0], x.dtype == ml_dtypes.bfloat16
    offsets = xp.asarray(np.array([0, *ends], np.int32))
    config = configure("bf16", rows, n, "float32")
    bits = pitched(x.view(np.uint16), xp) if single else bf16_triple(x, xp)
    parts = empty_rows(xp, len(bits), n, np.float32)
    for start in range(0, len(bits), rows):
        part = slice(start, start + rows)
        gemm(bits[part], w.codes, parts[part], config, Epilogue(Scales(), offsets=offsets))
    out = parts
    if not single:
        out = empty_rows(xp, rows, n, np.float32)
        add_partial_sums(parts, Split(3, 0), out, None)
    return Product(xp.ascontiguousarray(out), "bf16 tensor cores, weights expanded, in groups")


def _side_by_side(weights: Sequence[QuantArray], xp: Any) -> GemmOperand | None:
    """MX matrices one below the other, as bfloat16; None if that does not hold a value."""
    first = weights[0]
    stacked = replace(
        first,
        codes=xp.concatenate([w.codes for w in weights]),
        scales=xp.concatenate([w.scales for w in weights]),
        shape=(sum(w.shape[0] for w in weights), first.shape[1]),
    )
    if all(FITS_BF16.get(w) for w in weights):
        return as_bf16(stacked, xp)
    made = exact_bf16([stacked], xp)
    if made is None or not FITS_BF16.get(stacked):  # or only beside a common exponent
        return None
    FITS_BF16.update(dict.fromkeys(weights, True))
    return made[0]


def _check_kinds(a: Any, b: Any, xp: Any) -> None:
    """Refuse operands that are neither both packed and covered nor both bfloat16."""
    stored = [isinstance(x, QuantArray) for x in (a, b)]
    if not any(stored):
        for x in (a, b):
            if x.dtype != ml_dtypes.bfloat16:
                raise ValueError(f"grouped: expected packed or bfloat16 operands, got {x.dtype}")
    elif not all(stored):
        raise ValueError(
            "grouped: expected two packed operands or two of bfloat16; quantize the other"
        )
    elif (gap := grouped_gap(a, b, capability_of(xp))) is not None:
        raise ValueError(f"grouped: {gap.reason}; call .dequantize() on the operands")


def _grouped_operands(
    a: Any, b: Any, xp: Any
) -> tuple[GemmOperand, GemmOperand, str] | Unsupported:
    """Both operands in element types that go together, and why it is not FP8 where it might be."""
    if not isinstance(a, QuantArray):
        left, right = (GemmOperand(pitched(x.view(np.uint16), xp), "bf16") for x in (a, b))
        return left, right, ""
    if a.spec.has_float_scales:
        left, right = (_by_row(float_scaled(q, xp)) for q in (a, b))
        return left, right, ""
    kinds = [held_by(q.spec)[0] for q in (a, b)]
    if "bf16" in kinds:
        why = f"FP8 does not hold {(a, b)[kinds.index('bf16')].spec.format}"
    else:
        flag = xp.zeros(1, dtype=np.uint32)
        left, right = (expand(q, kind, flag, xp) for q, kind in zip((a, b), kinds, strict=True))
        if not int(flag[0]):
            return left, right, ""
        why = TOO_WIDE.reason
    wide = exact_bf16((a, b), xp)
    return BEYOND_BF16 if wide is None else (wide[0], wide[1], f": {why}")


def _by_row(operand: GemmOperand) -> GemmOperand:
    """An operand under stored scales of rows, with these as factors."""
    return replace(operand, scale=Scale(factor=operand.scale.row_factor(operand.shape[0])))
