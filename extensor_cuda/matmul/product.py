"""The product a b^T + bias of two `GemmOperand`, and the one fallback from FP8 to bfloat16.

Sums are float32. With S = sum |a| |b| over K, a product is off that of the operands' values by up
to

    FP8                    (K' 34 / 32 2**-13 + (K / 512 + 3) 2**-24) S, K' = min(K, 512): the
                           tensor core aligns 32 products and its sum to the largest and cuts each
                           to 13 fraction bits (`extensor_cuda.matmul.accumulator`); every 512
                           elements the sum moves to float32. A subnormal code counts as large as
                           the smallest normal: where it makes a product the largest of its 32, the
                           first term is up to 4 (E5M2) or 8 times (E4M3) that. The bound is for the
                           worst case; most results of normal data are exact
                           (docs/log/products-on-a-gpu.md)
    FP8, scales of 128     (128 34 / 32 2**-13 + (K / 128 + 2) 2**-24) S: 1D and 2D block scaling
                           (arXiv 2412.19437, section 3.3) and rebased MXFP8, where the sum of each
                           128 is multiplied by both scales as it moves to float32
    bf16                   K 2**-22 S: a float32 sum that is cut, not rounded. Parts of K, which the
                           shape alone decides, are added in order, which cuts less. Under a
                           factor each part is rounded twice, by 2**-24 each time
    INT8                   2**-22 of the result: the sum is exact in int32, zero points are taken
                           off in 64 bits, and it is rounded to float32 and by each scale

plus, for a result below 2**-126, what underflows: less than 2**-126 a term. A bfloat16 result adds
2**-8 of itself.

Where an operand's flag says that FP8 does not hold every value, both operands are bfloat16
instead. That is decided on the device: both products are launched and one of them ends at once, so
that nothing waits for the GPU. `FallbackCounter` counts those that ran in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from extensor.backends.unsupported import Unsupported
from extensor_cuda.kernels.gemm.block_scales import Stored, block_scales
from extensor_cuda.kernels.gemm.config import ROWS_PER_SCALE, Config, Split
from extensor_cuda.kernels.gemm.gemm_sm90 import Epilogue, Flags, Scales, Zeros, empty_rows, gemm
from extensor_cuda.kernels.gemm.requantize import Requantized, finished, type_of
from extensor_cuda.kernels.prepare.cast_bf16 import add_partial_sums, empty_partial_sums
from extensor_cuda.matmul.fallback_count import FallbackCounter, SharedCounter
from extensor_cuda.matmul.operand import RESULT_DTYPES, GemmOperand
from extensor_cuda.matmul.partition import configure, configure_split_k
from extensor_cuda.runtime.memory import ALLOCATORS

__all__ = [
    "Product",
    "empty_result",
    "float_scaled_product",
    "multiply",
    "product",
    "shared_scales",
    "values_of",
]

Array = Any

_ALWAYS = Flags()
_PART_ROWS = 128
"""Rows of an operand's parts are a multiple of it."""


@dataclass(frozen=True)
class Product:
    """A product and how it was computed.

    Attributes:
        out: (M, N), packed if a quantized result was requested.
        path: in words: which tensor cores, and why not faster ones.
        inexact: `extensor_cuda.matmul.expand.Inexact` of rebased operands, a's and b's; None of an
            exact one.
    """

    out: Any
    path: str
    inexact: tuple[Any, Any] = (None, None)


def empty_result(xp: Any, m: int, n: int, to: str | Requantized) -> Array | Requantized:
    """What a product (m, n) is written to: "float32" or "bfloat16", or what is given."""
    return to if isinstance(to, Requantized) else empty_rows(xp, m, n, RESULT_DTYPES[to])


def values_of(operand: Any, xp: Any) -> Array:
    """The float32 values (rows, K) of an operand; an array of values stays what it is."""
    return operand.values(xp) if isinstance(operand, GemmOperand) else operand


def product(
    a: Any,
    b: Any,
    dtype: str,
    xp: Any,
    bias: Array | None = None,
    fallback: FallbackCounter | SharedCounter | None = None,
) -> Array | Unsupported:
    """The product a b^T + bias of (M, K) and (N, K), summed in float32, without waiting.

    The result is "float32" or "bfloat16"; the bias, float32 (N,), is added to the float32 sum.
    ``fallback`` counts the products that ran in bfloat16 although FP8 was tried.
    """
    if not (isinstance(a, GemmOperand) and isinstance(b, GemmOperand)):
        return Unsupported("an operand that no kernel prepared")
    if a.scale.form != b.scale.form or (a.kind == "s8") != (b.kind == "s8"):
        return Unsupported(f"{a.kind} and {b.kind} operands whose scales do not go together")
    if bias is not None:
        bias = xp.ascontiguousarray(bias)  # kernels read it in order
    to = "bfloat16" if dtype == "bfloat16" else "float32"
    if a.scale.form == "number":
        return _guarded(a, b, to, xp, bias, fallback)
    if a.scale.form == "grid":
        return float_scaled_product(a, b, to, xp, bias).out
    out = empty_rows(xp, a.shape[0], b.shape[0], RESULT_DTYPES[to])
    config = configure(a.kind, *out.shape, to, b=b.kind, blocks=(ROWS_PER_SCALE, ROWS_PER_SCALE))
    scales = Scales(blocks=(a.scale.blocks, b.scale.blocks))
    gemm(a.codes, b.codes, out, config, Epilogue(scales, bias))
    return xp.ascontiguousarray(out)


def shared_scales(a: GemmOperand, b: GemmOperand) -> Scales | None:
    """The exponents or the factors of two operands; None if one has each alone."""
    x, y = a.scale, b.scale
    scaled = [side for side in (x, y) if not side.is_absent]
    if all(side.exponent is not None for side in scaled):
        return Scales((x.exponent, y.exponent))
    if all(side.factor is not None for side in scaled):
        return Scales(factors=(x.factor, y.factor))
    return None


def multiply(
    a: GemmOperand,
    b: GemmOperand,
    out: Array | Requantized,
    config: Config | None = None,
    bias: Array | None = None,
    flags: Flags = _ALWAYS,
    split: Split | None = None,
) -> None:
    """Launch out = a b^T + bias of operands with `shared_scales`; FP8 with FP8, bf16 with bf16.

    Out is (M, N) with rows a multiple of 16 bytes apart, or a `Requantized`. Without a config, that
    for the size is taken; splits of K go with a config that splits.
    """
    scales = shared_scales(a, b)
    assert scales is not None
    if config is None:
        config = configure(a.kind, a.shape[0], b.shape[0], type_of(out), b=b.kind)
    if config.layout.transposed != (lie := (a.transposed, b.transposed)):
        config = config.replace(transposed=lie)
    epilogue = Epilogue(scales, bias, flags=flags, split=split)
    gemm(a.codes, b.codes, out, config, epilogue)


def _guarded(
    a: GemmOperand,
    b: GemmOperand,
    dtype: str,
    xp: Any,
    bias: Array | None,
    fallback: FallbackCounter | SharedCounter | None,
) -> Array:
    """The product of operands under a number each: in FP8 with the fallback, or in bfloat16."""
    (m, k), n = a.shape, b.shape[0]
    config, split = None, None
    # An operand made at once has an exponent alone, NVFP4 a factor alone: as bfloat16 they join.
    if "bf16" in (a.kind, b.kind) or shared_scales(a, b) is None:
        a, b = a.bf16(), b.bf16()
    if a.splits_k and b.splits_k:
        lie = (a.transposed, b.transposed)
        config, split = configure_split_k(a.kind, m, n, k, dtype, lie, b.kind)
    out = empty_rows(xp, m, n, RESULT_DTYPES[dtype])
    to = out if split is None or config is None else empty_partial_sums(m, n, split, config, xp)
    start = bias if split is None else None
    flags = _ALWAYS if a.kind == "bf16" else Flags(a.flag, b.flag, 0)
    multiply(a, b, to, config, start, flags, split)
    if a.kind != "bf16":
        _fall_back(a, b, to, start, split, fallback, xp)
    if split is not None:
        add_partial_sums(to, split, out, bias)
    return xp.ascontiguousarray(out)


def _fall_back(
    a: GemmOperand,
    b: GemmOperand,
    to: Array,
    bias: Array | None,
    split: Split | None,
    fallback: FallbackCounter | SharedCounter | None,
    xp: Any,
) -> None:
    """The same product in bfloat16, which ends at once unless an operand's flag is set.

    Large operands are written over their codes, half by half: else their memory, twice the codes',
    would be taken whether the product runs or not. What uses such an operand again falls back, too.
    """
    assert a.flag is not None and b.flag is not None
    guards, runs = (a.flag, b.flag), None if fallback is None else fallback.array
    flags = Flags(*guards, 1, runs)
    if split is not None:  # the same splits: a stage holds half as many terms
        config = configure("bf16", a.shape[0], b.shape[0], to.dtype.name).replace(split_k=True)
        more = Split(split.count, 2 * split.stages)
        multiply(a.bf16(guards), b.bf16(guards), to, config, bias, flags, more)
        return
    of_a, of_b = (None if a.codes is b.codes else _memory_of(side, xp) for side in (a, b))
    left = None
    for start, stop in _parts(b, of_b):
        right = b.bf16(guards, (start, stop), of_b)
        for first, last in _parts(a, of_a):
            if left is None or of_a is not None:
                left = a.bf16(guards, (first, last), of_a)
            added = None if bias is None else bias[start:stop]
            multiply(left, right, to[first:last, start:stop], None, added, flags)
            flags = Flags(*guards, 1)  # one run is counted
    for own, other in ((a.flag, b.flag), (b.flag, a.flag)):
        if (of_a if own is a.flag else of_b) is not None:
            xp.bitwise_or(own, other, out=own)  # the codes are gone where the fallback ran


def _memory_of(operand: GemmOperand, xp: Any) -> Array | None:
    """The memory of a large operand's codes, bytes: the fallback writes its parts there."""
    (rows, k), apart = operand.shape, operand.codes.strides[0]
    if 2 * rows * k <= ALLOCATORS.fallback or rows < 2 * _PART_ROWS:
        return None
    return xp.lib.stride_tricks.as_strided(operand.codes, (rows * apart,), (1,))


def _parts(operand: GemmOperand, memory: Array | None) -> Iterator[tuple[int, int]]:
    """Parts of an operand's rows that fit in so much memory in bfloat16; None: one of all."""
    rows = operand.shape[0]
    step = rows if memory is None else rows // (2 * _PART_ROWS) * _PART_ROWS
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


# --- float scales as they are stored ---


def float_scaled_product(
    a: GemmOperand, b: GemmOperand, to: str | Requantized, xp: Any, bias: Array | None = None
) -> Product:
    """The product of FP8 or INT8 operands under stored float scales; does not wait.

    One scale a row, or one for the tensor, multiplies the finished sum: rows first, then columns.
    Of scales along K those of each 128 multiply the sum of these.
    """
    m, n = a.shape[0], b.shape[0]
    out = empty_result(xp, m, n, to)
    if _is_by_row(a) and _is_by_row(b):
        config = configure(a.kind, m, n, type_of(out), b=b.kind)
        factors = a.scale.row_factor(m), b.scale.row_factor(n)
        scales = Scales(factors=factors, zeros=_zeros(a, b, xp))
        path = "int8 tensor cores" if a.kind == "s8" else "FP8 tensor cores"
    else:
        (of_a, row), (of_b, column) = _stored(a), _stored(b)
        rows, columns = block_scales((of_a, of_b), xp)
        config = configure(a.kind, m, n, type_of(out), b=b.kind, blocks=(row, column))
        scales = Scales(blocks=(rows, columns))
        path = "FP8 tensor cores, scaled every 128"
    gemm(a.codes, b.codes, out, config, Epilogue(scales, bias))
    return Product(finished(out, xp), path)


def _is_by_row(operand: GemmOperand) -> bool:
    """Whether one scale holds for all of K."""
    assert operand.scale.grid is not None
    return bool(operand.scale.grid.shape[0] == 1)


def _stored(operand: GemmOperand) -> tuple[Stored, int]:
    """Scales of each 128 along K, for the kernel to lay out, and of how many rows."""
    (rows, k), scale = operand.shape, operand.scale
    alike = scale.rows % 128 == 0 or scale.rows >= rows
    rows_per_scale = ROWS_PER_SCALE if alike else 1
    groups = -(-min(scale.rows, rows) // rows_per_scale)
    return Stored(scale.grid, -(-k // 128), groups), rows_per_scale


def _zeros(a: GemmOperand, b: GemmOperand, xp: Any) -> Zeros | None:
    if a.zeros is None and b.zeros is None:
        return None
    row, column = (
        xp.zeros(side.shape[0], dtype=np.int32) if side.zeros is None else side.zeros
        for side in (a, b)
    )
    row_sum, column_sum = (side.codes.view(np.int8).sum(axis=1, dtype=np.int32) for side in (a, b))
    return Zeros(row, row_sum - np.int32(a.shape[1]) * row, column, column_sum)
