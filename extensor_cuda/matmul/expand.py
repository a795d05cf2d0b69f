"""Packed matrices as GEMM operands: expanded to FP8 or bfloat16, rebased, or read as they are.

Bfloat16 holds every NVFP4 value but for the tensor scale, and every MX value that a quantizer
makes, from 2**-133 up. Whether all of an MX matrix is held is read on the host the first time that
the matrix is seen, and remembered: nothing waits after that. A value that is not held would be NaN,
never another number; where only a scale's range is in the way, `expand` takes the largest one out.

Codes of INT4, INT8 and FP8, less their zero points, are numbers of 8 bits, which bfloat16 holds;
products with their float scales it does not hold. So the scales stay beside the codes for the
product to multiply sums by: the finished one, or that of each group along K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from extensor.quant.array import QuantArray, coded_length, tile_extent
from extensor_cuda.kernels.gemm.block_scales import Stored, block_scales
from extensor_cuda.kernels.gemm.config import K_OF_BF16_STAGE
from extensor_cuda.kernels.gemm.gemm_sm90 import Packed
from extensor_cuda.kernels.prepare import expand as kernel
from extensor_cuda.kernels.prepare import rebase as rebasing
from extensor_cuda.matmul.operand import GemmOperand, Part, Scale, aligned, bf16_rows, pitched
from extensor_cuda.matmul.rebase import held_by
from extensor_cuda.runtime.compile import Source

__all__ = [
    "FITS_BF16",
    "Inexact",
    "as_bf16",
    "bf16_program",
    "exact_bf16",
    "expand",
    "float_scaled",
    "float_scales",
    "largest_scale",
    "packed_bf16",
    "rebase_mxfp4",
    "rebase_mxfp8",
    "scale_group_k",
]

Array = Any

FITS_BF16: WeakKeyDictionary[QuantArray, bool] = WeakKeyDictionary()
"""Whether bfloat16 holds all of a stored matrix as it is."""


def expand(
    q: QuantArray,
    kind: str,
    flag: Array | None,
    xp: Any,
    guards: Sequence[Array] = (),
    part: Part = None,
    largest: Array | None = None,
    memory: Array | None = None,
) -> GemmOperand:
    """The values of a packed matrix, contraction contiguous; does not wait.

    Args:
        q: MX or NVFP4 in tiles (n, 16 to 128), along either axis.
        kind: "bf16", or what `held_by` says.
        flag: uint32 (1,), raised where the kind does not hold a value.
        xp: cupy.
        guards: two flags; nothing is written unless one is set. None: always.
        part: which rows of the operand.
        largest: `largest_scale` of an MX matrix, where the caller has it.
        memory: where bfloat16 goes, see `GemmOperand.bf16`.
    """
    axis, mx = q.spec.axis, q.spec.is_mx
    lift = 0 if kind == "bf16" else held_by(q.spec)[1]
    source = kernel.expand_source(q.spec, kind, lift)
    k = coded_length(q.spec, q.shape)
    start, stop = part or (0, q.shape[1 - axis])
    n, pitch = stop - start, -(-k // 16) * 16
    codes, scales = (aligned(of, xp) for of in (q.codes, q.scales))
    if part is not None:
        assert isinstance(q.spec.tile, tuple)
        first, last = start // q.spec.tile[0], -(-stop // q.spec.tile[0])
        codes = codes[start:stop] if axis == 1 else codes[:, start:stop]
        scales = scales[first:last] if axis == 1 else scales[:, first:last]
    out = bf16_rows(xp, n, k, memory) if kind == "bf16" else xp.empty((n, pitch), np.uint8)
    factor = xp.empty(1, dtype=np.float32)
    exponent = None
    if mx:
        largest = largest_scale(q, xp) if largest is None else largest
        exponent = xp.empty(1, dtype=np.int32)
    chunks = pitch // 16
    threads = n * chunks
    if axis == 0:
        threads = -(-n // 32) * -(-chunks // 4) * 32
    heads = largest, None if mx else q.tensor_scale
    made = exponent, factor, flag, *(guards or (None, None))
    kernel.expand(source, threads, Packed(codes, scales), out, n, heads, made)
    return GemmOperand(out[:, :k], kind, Scale(exponent, factor))


def largest_scale(q: QuantArray, xp: Any) -> Array:
    """The largest scale byte of an MX matrix that is not NaN, uint32 (1,); does not wait."""
    largest = xp.zeros(1, dtype=np.uint32)
    kernel.anchor(kernel.expand_source(q.spec, "bf16", 0), aligned(q.scales, xp), largest)
    return largest


@dataclass(frozen=True, eq=False)
class Inexact:
    """How many values of a rebased operand are not those that are stored.

    Attributes:
        counts: uint32 (rows, 2) on the device: values changed, and those of them that became zero.
        size: of the operand.
    """

    counts: Array
    size: int

    def shares(self) -> tuple[float, float]:
        """Changed and flushed, of all values. Waits for the GPU."""
        changed, flushed = (int(n) for n in self.counts.get().sum(axis=0, dtype=np.int64))
        return changed / self.size, flushed / self.size


def rebase_mxfp8(q: QuantArray, xp: Any) -> tuple[GemmOperand, Inexact]:
    """A packed matrix with an exponent for each row, and what that changed; does not wait.

    It is MXFP8 (rows, K) in tiles (n, 16 to 128) along its last axis.
    """
    rows, k = q.shape[0], coded_length(q.spec, q.shape)
    codes, scales = aligned(q.codes, xp), xp.ascontiguousarray(q.scales)
    out = xp.empty(codes.shape, dtype=np.uint8)
    exponents, counts = xp.empty(rows, dtype=np.int32), xp.empty((rows, 2), dtype=np.uint32)
    rebasing.rebase_mxfp8(rebasing.mxfp8_source(q.spec), codes, scales, out, exponents, counts)
    operand = GemmOperand(out[:, :k], q.spec.row.element.name, Scale(exponents))
    return operand, Inexact(counts, rows * k)


def rebase_mxfp4(q: QuantArray, flag: Array, xp: Any, integers: bool = False) -> GemmOperand:
    """MXFP4 with an exponent a row, as E5M2 or integers; raises ``flag`` if one is too wide."""
    assert isinstance(q.spec.tile, tuple)
    (rows, k), block = q.shape, q.spec.tile[1]
    codes, scales = aligned(q.codes, xp, 8), xp.ascontiguousarray(q.scales)
    out = xp.empty((rows, scales.shape[1] * block), dtype=xp.uint8)
    exponents = xp.empty(rows, dtype=xp.int32)
    source = rebasing.mxfp4_source(block, integers)
    rebasing.rebase_mxfp4(source, codes, scales, flag, out, exponents)
    return GemmOperand(out[:, :k], "s8" if integers else "e5m2", Scale(exponents))


def float_scaled(q: QuantArray, xp: Any) -> GemmOperand:
    """FP8 or INT8 (rows, K) under float scales, blocked along K, read where it lies."""
    rows, k = q.shape
    shared, _ = tile_extent(q.spec, q.shape)
    zeros = None
    if q.zero_points is not None:
        zeros = q.zero_points[:, 0].astype(np.int32).repeat(shared)[:rows]
    element = q.spec.row.element
    kind = element.name if element.is_float else "s8"
    scale = Scale(grid=q.scales.T, group_k=scale_group_k(q), rows=shared)
    return GemmOperand(pitched(q.codes[:, :k], xp), kind, scale, zeros)


def scale_group_k(q: QuantArray) -> int:
    """Elements along K that share a float scale; 0: all, or the scales are no floats."""
    _, length = tile_extent(q.spec, q.shape)
    return length if q.spec.has_float_scales and length < q.shape[1] else 0


def bf16_program(q: QuantArray) -> Source:
    """The program that expands a packed matrix to the numbers that its codes are."""
    whole_rows = q.codes.shape[1] * 8 % (16 * q.spec.row.element.bits) == 0
    return kernel.expand_source(q.spec, "bf16", 0, True, whole_rows)


def float_scales(q: QuantArray, xp: Any) -> Scale:
    """Factors of rows or of the tensor, or float scales of groups as the GEMM reads them."""
    group, (shared, _) = scale_group_k(q), tile_extent(q.spec, q.shape)
    if group:
        stored = Stored(q.scales.T, q.scales.shape[1], min(shared, q.shape[0]))
        blocks = block_scales([stored], xp, max(K_OF_BF16_STAGE // group, 1))[0]
        return Scale(blocks=blocks, group_k=group)
    if not q.spec.has_float_scales:
        return Scale(factor=q.tensor_scale)
    factor = q.scales[:, 0].astype(np.float32)
    whole = shared == 1 or len(factor) == 1
    return Scale(factor=factor if whole else factor.repeat(shared)[: q.shape[0]])


def packed_bf16(
    q: QuantArray, xp: Any, flag: Array | None, ready: int | None = None, tiles: int = 0
) -> tuple[GemmOperand, Packed]:
    """Expand the first ``ready`` rows, or all; and what the others are expanded from.

    ``tiles``: of rows, which a GEMM that expands the others counts.
    """
    n, k = q.shape[0], coded_length(q.spec, q.shape)
    codes, zeros, scales = aligned(q.codes, xp), None, None
    if not q.spec.has_float_scales:
        scales = aligned(q.scales, xp)
    elif q.zero_points is not None:
        zeros = xp.ascontiguousarray(q.zero_points)
    packed, scale = Packed(codes, scales, zeros), float_scales(q, xp)
    chunks, rows = -(-k // 16), n
    if ready is not None:
        rows = ready
        packed = packed._replace(ready=ready, counts=xp.empty(1 + tiles, dtype=np.uint32))
    out = xp.empty((n, 16 * chunks), dtype=np.uint16)
    made = None, None, flag, None, None
    kernel.expand(bf16_program(q), rows * chunks, packed, out, rows, made=made)
    return GemmOperand(out[:, :k], "bf16", scale), packed


def as_bf16(q: QuantArray, xp: Any, flag: Array | None = None) -> GemmOperand:
    """The numbers of a packed matrix, contraction contiguous; does not wait.

    It is MX or NVFP4, or INT4, INT8 or FP8 in groups of 32 or a multiple of 64 along K, or one;
    along its rows. The codes have no exponent; of float scales, they have a factor for each row or
    those of groups. The flag, uint32 (1,), is raised where bfloat16 does not hold an MX value,
    which becomes NaN.
    """
    return packed_bf16(q, xp, flag)[0]


def exact_bf16(stored: Sequence[QuantArray], xp: Any) -> list[GemmOperand] | None:
    """Packed matrices as `as_bf16` has them, exactly; None if bfloat16 does not hold a value.

    Waits for the GPU the first time that an MX matrix is seen, so multiply once before a capture;
    and each time if the matrix fits only relative to its largest scale.
    """
    unknown = list(dict.fromkeys(q for q in stored if q.spec.is_mx and q not in FITS_BF16))
    raised = xp.zeros(len(unknown), dtype=np.uint32) if unknown else None
    made: list[GemmOperand | None] = []
    for q in stored:
        flag = None
        if raised is not None and q in unknown:
            at = unknown.index(q)
            flag = raised[at : at + 1]
        known_not = not FITS_BF16.get(q, True)
        made.append(None if known_not else as_bf16(q, xp, flag))
    if raised is not None:
        FITS_BF16.update(zip(unknown, (not flag for flag in raised.get()), strict=True))
    out = []
    for q, operand in zip(stored, made, strict=True):
        if operand is None or not FITS_BF16.get(q, True):
            flag = xp.zeros(1, dtype=np.uint32)
            operand = expand(q, "bf16", flag, xp)
            if int(flag[0]):
                return None
        out.append(operand)
    return out
