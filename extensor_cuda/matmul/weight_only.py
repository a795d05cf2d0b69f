"""Products of float activations with packed weights: the weights decoded on the way, or expanded.

The first that supports weights and tokens is taken; a row of float32 is three tokens, exactly:

    w4a16_sm90_resident   Hopper; up to 16 tokens, E2M1
    w4w8a16_sm90_wgmma    Hopper; up to 64 tokens, E2M1, INT4 and INT8 in rows or groups of n 128
    w4w8a16_sm80          up to 64 tokens, E2M1, INT4 and INT8
    gemm_sm90, decoding   Hopper; the warps that multiply decode E2M1, INT4 and INT8 in registers
    gemm_sm90             Hopper; weights are expanded to bfloat16, exactly, before the product or
                          beside it: a product of many rows begins when the rows that its first
                          tiles need are expanded; idle warps of its blocks expand the others.
                          Its bits are those of the two one after the other

Weights become bfloat16 exactly: elements of MXFP4 and NVFP4 times their scales, codes of INT4,
INT8 and FP8 less their zero points. Float scales stay apart, since their products with codes take
more bits than bfloat16 has: one for all of K multiplies the finished sum, those of groups along K
multiply each group's sum as it is added to float32 registers. float32 activations are three
bfloat16 matrices, whose products are added, so that nothing but sums is rounded. Sums are float32
that is cut; those of splits of K are added in order, so that a result depends on shapes and values
alone. With S = sum |x| |w| over K and n groups of float scales (of 128 elements, where they have
more), the result is off by up to

    up to 64 tokens    (K 2**-22 + (splits + n + 8) 2**-24) S
    more               (K 2**-22 + n 2**-24 + 2**-20) S

plus what underflows: of float32 activations 2**-133 times the weights, and 2**-118 a term; where
scales are floats, 2**-126 a group times its scale; of weights that are decoded, up to 2**-123 of x
a term under E8M0 scales below 2**-117.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from extensor.backends.unsupported import Unsupported
from extensor.quant.array import QuantArray, tile_extent
from extensor_cuda.kernels.gemm.config import K_OF_BF16_STAGE, TILE_M, Config, Split
from extensor_cuda.kernels.gemm.gemm_sm90 import Epilogue, Packed, Scales, empty_rows, gemm
from extensor_cuda.kernels.prepare.cast_bf16 import (
    add_partial_sums,
    bf16_triple,
    empty_partial_sums,
)
from extensor_cuda.kernels.quantize import quantize as quantizer
from extensor_cuda.kernels.weight_only import (
    w4a16_sm90_resident,
    w4w8a16_sm80,
    w4w8a16_sm90_wgmma,
)
from extensor_cuda.kernels.weight_only.program import (
    FLOATS,
    TOKENS_PER_ROW,
    Arguments,
    Gate,
    below_each_other,
    taking_turns,
)
from extensor_cuda.matmul import partition
from extensor_cuda.matmul.expand import (
    FITS_BF16,
    bf16_program,
    exact_bf16,
    float_scales,
    packed_bf16,
    scale_group_k,
)
from extensor_cuda.matmul.operand import RESULT_DTYPES, GemmOperand, Scale, aligned, pitched
from extensor_cuda.matmul.product import Product, multiply, product
from extensor_cuda.runtime import driver
from extensor_cuda.runtime.counters import zeros

__all__ = [
    "DECODED",
    "EXPANDED",
    "MAX_TOKENS",
    "decodes_in_gemm",
    "few_tokens_gap",
    "weight_only_gap",
    "weight_only_gated",
    "weight_only_matmul",
    "weight_only_matmuls",
]

Array = Any

DECODED = "tensor cores, weights decoded on the way"
EXPANDED = "bf16 tensor cores, weights expanded"
MAX_TOKENS = 64
"""Rows of bfloat16 activations, or three times the rows of float32 ones."""
_EXPAND_FIRST_ROWS = 2048
"""Rows from which on weights under scales of groups are quicker expanded first."""
_SWIZZLE, _OVERLAP_ROWS = 8, 1920
"""Rows of tiles, of weights, that are walked together where a product expands them; rows of x from
which on expanding overlaps with the product."""
_CAN_FOLD: WeakKeyDictionary[QuantArray, bool] = WeakKeyDictionary()
"""What `_can_fold_scales` has read of weights."""


def weight_only_matmul(x: Array, w: QuantArray, dtype: str, xp: Any) -> Product | Unsupported:
    """X w^T, float32 or bfloat16 (M, N), and how it was computed; or why there is none.

    Many rows wait for the GPU the first time that MX or NVFP4 weights are seen, so multiply once
    before a capture; and each time if weights that are expanded have values beyond bfloat16's. X is
    (M, K), float32 or bfloat16; w is (N, K), blocked along K.
    """
    capability = driver.capability(xp.cuda.runtime.getDevice())
    few = few_tokens_gap(x, w, capability)
    if few is None:
        return Product(_few_tokens(x, w, dtype, capability, xp), DECODED)
    many = _many_tokens_gap(x, w, capability, few)
    return _many_tokens(x, w, dtype, xp) if many is None else many


def weight_only_gap(x: Array, w: QuantArray, capability: str) -> Unsupported | None:
    """Why there is no such product of x (M, K) and w (N, K) on a GPU; None if there is."""
    few = few_tokens_gap(x, w, capability)
    return few if few is None else _many_tokens_gap(x, w, capability, few)


# --- up to 64 tokens ---


def few_tokens_gap(x: Array, w: QuantArray, capability: str) -> Unsupported | None:
    """Why there is no product of few tokens of x (M, K) and w (N, K); None if there is."""
    if int(capability) < 80:
        return Unsupported(f"compute capability {capability}; the kernel is for 80 and later")
    if x.ndim != 2 or len(w.shape) != 2 or w.spec.axis != 1:
        return Unsupported("not two matrices, the weights blocked along the last axis")
    if x.dtype.name not in FLOATS:
        return Unsupported(f"{x.dtype} activations; the kernel takes float32 and bfloat16")
    if not 1 <= x.shape[0] * TOKENS_PER_ROW[x.dtype.name] <= MAX_TOKENS:
        return Unsupported(
            f"{x.shape[0]} rows of {x.dtype}; the kernel takes 1 to {MAX_TOKENS} tokens"
        )
    if 0 in w.shape or max(*w.shape, x.shape[1]) > 1 << 30:
        return Unsupported(f"weights of shape {w.shape}")
    return _weights_gap(w)


def _weights_gap(w: QuantArray) -> Unsupported | None:
    spec, element = w.spec, w.spec.row.element
    if (gap := _codec_gap(w)) is not None:
        return gap
    rows, length = tile_extent(spec, w.shape)
    if rows > 1 and not (spec.tile == "tensor" or rows >= w.shape[0]):
        return Unsupported(f"tiles {spec.tile}")
    if not spec.has_float_scales:
        if element.bits != 4 or length not in (16, 32, 64, 128):
            return Unsupported(
                f"{spec.format} in blocks of {length}; the kernel has E2M1 in 16, 32, 64, 128"
            )
        return None if rows == 1 else Unsupported(f"tiles {spec.tile}")
    if element.is_float:
        return Unsupported(f"{element.name} under float scales")
    if length < w.shape[1] and length % 32:
        return Unsupported(f"groups of {length}; the kernel has multiples of 32")
    return None


def _codec_gap(w: QuantArray) -> Unsupported | None:
    if w.spec.kernel_gap:
        return Unsupported(w.spec.kernel_gap)
    return Unsupported("a Hadamard transform to undo") if w.spec.transform else None


def _few_tokens(x: Array, w: QuantArray, dtype: str, capability: str, xp: Any) -> Array:
    """X w^T of what `few_tokens_gap` has no objection to; does not wait."""
    x, codes, scales = (aligned(part, xp) for part in (x, w.codes, w.scales))
    out = xp.empty((len(x), w.shape[0]), dtype=RESULT_DTYPES[dtype])
    given = Arguments(x, codes, scales, w, out, partial(zeros, xp), xp)
    kernel, schedule = _kernel(w, given.tokens, x.dtype.name, capability == "90")
    kernel.product(given, schedule)
    return out


def _kernel(
    w: QuantArray, tokens: int, dtype: str, hopper: bool, together: int = 1
) -> tuple[Any, Any]:
    """The kernel, and how it divides the product; so many tiles of rows of w stay together."""
    n, k = w.shape
    if hopper:
        _, block = tile_extent(w.spec, w.shape)
        if w4a16_sm90_resident.supports(w, tokens):
            schedule = partition.resident_schedule(n, k, tokens, block, together)
            if schedule is not None:
                return w4a16_sm90_resident, schedule
        if w4w8a16_sm90_wgmma.supports(w):
            bits = w.spec.row.element.bits
            return w4w8a16_sm90_wgmma, partition.wgmma_schedule(n, k, tokens, dtype, bits)
    return w4w8a16_sm80, partition.split_k_sizes(n, k, w4w8a16_sm80.segment(w))


def weight_only_matmuls(
    x: Array, weights: Sequence[QuantArray], dtype: str, xp: Any
) -> list[Array] | Unsupported:
    """X w^T of few tokens and each of two or three matrices in one launch; does not wait.

    The results are columns of one array. X is as of `weight_only_matmul`.
    """
    out = _several(x, weights, dtype, None, xp)
    if isinstance(out, Unsupported):
        return out
    rows = [w.shape[0] for w in weights]
    ends = np.cumsum(rows)
    return [out[:, end - n : end] for n, end in zip(rows, ends.tolist(), strict=True)]


def weight_only_gated(
    x: Array, weights: Sequence[QuantArray], dtype: str, gate: Gate, xp: Any
) -> Product | Unsupported:
    """SwiGLU's gate of X w^T and what it multiplies, in one launch; does not wait.

    The products are rounded to the dtype first. X is as of `weight_only_matmul`.
    """
    if len(weights) != 2 or weights[0].shape != weights[1].shape:
        return Unsupported(f"matrices {[w.shape for w in weights]}")
    out = _several(x, weights, dtype, gate, xp)
    return out if isinstance(out, Unsupported) else Product(out, DECODED)


def _several(
    x: Array, weights: Sequence[QuantArray], dtype: str, gate: Gate | None, xp: Any
) -> Array | Unsupported:
    """X times matrices that lie below each other for one kernel."""
    first, capability = weights[0], driver.capability(xp.cuda.runtime.getDevice())
    if (gap := few_tokens_gap(x, first, capability)) is not None:
        return gap
    if not first.spec.is_mx or capability != "90" or not 2 <= len(weights) <= 3:
        return Unsupported(f"{len(weights)} matrices in {first.spec.format} on {capability}")
    if any((w.spec, w.shape[1]) != (first.spec, first.shape[1]) for w in weights):
        return Unsupported("matrices of several formats or lengths")
    rows = [w.shape[0] for w in weights]
    if any(n % 16 for n in rows):
        return Unsupported(f"{rows} rows, not multiples of 16")
    given = [replace(w, codes=aligned(w.codes, xp), scales=aligned(w.scales, xp)) for w in weights]
    whole = replace(given[0], shape=(sum(rows), first.shape[1]))
    tokens, sides = len(x) * TOKENS_PER_ROW[x.dtype.name], 1 if gate is None else 2
    kernel, schedule = _kernel(whole, tokens, x.dtype.name, True, sides)
    if kernel is not w4a16_sm90_resident:
        return Unsupported("a kernel of one matrix")
    out = xp.empty((len(x), sum(rows) // sides), dtype=RESULT_DTYPES[dtype])
    lie = below_each_other(given) if gate is None else taking_turns(*given)
    held = aligned(x, xp), whole.codes, whole.scales, whole, out
    kernel.product(Arguments(*held, partial(zeros, xp), xp, lie, gate), schedule)
    return out


# --- more ---


def _many_tokens_gap(
    x: Array, w: QuantArray, capability: str, few: Unsupported
) -> Unsupported | None:
    if capability != "90" or x.ndim != 2 or len(w.shape) != 2 or w.spec.axis != 1:
        return few
    if x.dtype.name not in RESULT_DTYPES or not x.size:
        return Unsupported(f"{x.dtype} activations of shape {x.shape}")
    if not w.spec.has_float_scales:
        plan = quantizer.plan_of(w.spec, w.shape, decoding=True)
        return plan if isinstance(plan, Unsupported) else None
    if (gap := _codec_gap(w)) is not None:
        return gap
    _, length = tile_extent(w.spec, w.shape)
    if length < w.shape[1] and length != 32 and length % K_OF_BF16_STAGE:
        return Unsupported(
            f"groups of {length}; the kernel has 32 and multiples of {K_OF_BF16_STAGE}"
        )
    return Unsupported(f"weights of shape {w.shape}") if 0 in w.shape else None


def _many_tokens(x: Array, w: QuantArray, dtype: str, xp: Any) -> Product | Unsupported:
    """X w^T by the Hopper GEMM, of float32 x as three products that are added."""
    single = x.dtype.name == "bfloat16"
    bits = pitched(x.view(np.uint16), xp) if single else bf16_triple(x, xp)
    inner, path = dtype if single else "float32", EXPANDED
    if decodes_in_gemm(w, len(bits)):
        out, path = _decoding(bits, w, inner, xp), DECODED
    else:
        expanded = _expanding(bits, w, inner, xp)
        if expanded is None:
            return Unsupported("values that bfloat16 does not hold")
        out = expanded
    if not single:
        parts, out = pitched(out, xp), empty_rows(xp, len(x), w.shape[0], RESULT_DTYPES[dtype])
        add_partial_sums(parts, Split(3, 0), out, None)
    return Product(xp.ascontiguousarray(out), path)


def _scales_or_zero_points(w: QuantArray) -> tuple[Array | None, int]:
    """Scales of E2M1 or zero points of integers, and how many codes share one; 0: all of a row."""
    _, length = tile_extent(w.spec, w.shape)
    if not w.spec.has_float_scales:
        return w.scales, length
    return w.zero_points, length if length < w.shape[1] else 0


def decodes_in_gemm(w: QuantArray, rows: int) -> bool:
    """Whether the GEMM decodes weights in registers, for so many rows of bfloat16 activations.

    `weight_only_gap` has no objection to the weights.
    """
    (n, k), (shared, _), group = w.shape, tile_extent(w.spec, w.shape), scale_group_k(w)
    element = w.spec.row.element
    if element.bits != 4 and (element.bits != 8 or element.is_float):
        return False
    if k % (2 * K_OF_BF16_STAGE) or w.codes.nbytes != n * k * element.bits // 8:
        return False
    if group and (group < K_OF_BF16_STAGE or rows >= _EXPAND_FIRST_ROWS):
        return False
    table, length = _scales_or_zero_points(w)
    if table is None:
        return True
    in_words = length & (length - 1) == 0 and table.shape[1] % 4 == 0
    return shared == 1 and (length == 0 or in_words)


def _can_fold_scales(w: QuantArray) -> bool:
    """Whether no scale is NaN, or E8M0 and above 2**9; else the kernel takes more steps.

    Waits for the GPU the first time.
    """
    if w not in _CAN_FOLD:
        _CAN_FOLD[w] = bool(
            w.scales.view(np.uint8).max() <= (126 if w.spec.row.tensor_scale else 136)
        )
    return _CAN_FOLD[w]


def _decoding_config(w: QuantArray, rows: int, dtype: str) -> tuple[Config, Split | None]:
    table, length = _scales_or_zero_points(w)
    element, group = w.spec.row.element, scale_group_k(w)
    macros = {
        "CODEC_BITS": element.bits,
        "CODEC_IS_FLOAT": int(element.is_float),
        "CODEC_UE4M3": int(w.spec.row.tensor_scale),
        "CODEC_BLOCK": 0 if table is None else length,
        "GEMM_ROW_ZERO_POINT": int(table is not None and length == 0),
        "GEMM_FOLD_SCALES": int(w.spec.has_float_scales or _can_fold_scales(w)),
    }
    decodes = tuple((name, str(value)) for name, value in macros.items())
    tile, split = partition.decoding_schedule(w.shape[0], w.shape[1], rows, group, element.bits)
    out = "float32" if split else dtype
    return _decoding_program(tile, group, out, split is not None, decodes), split


@lru_cache(maxsize=1024)
def _decoding_program(
    tile: int, group: int, out: str, split: bool, decodes: tuple[tuple[str, str], ...]
) -> Config:
    promote = max(group // K_OF_BF16_STAGE, 1) if group else 0
    config = Config.of("bf16", out=out, decodes=decodes, out_transposed=True, split_k=split)
    return config.replace(tile_n=tile, promote=promote, epilogue_tiles=2, scale_group_k=group)


def _scales(scale: Scale) -> Scales:
    """Of weights, which are the GEMM's a."""
    return Scales(
        factors=None if scale.factor is None else (scale.factor, None),
        blocks=None if scale.blocks is None else (scale.blocks, None),
    )


def _decoding(x: Array, w: QuantArray, dtype: str, xp: Any) -> Array:
    """X w^T of bfloat16 bits and weights that the GEMM decodes.

    Waits for the GPU the first time that MX or NVFP4 weights are seen, never after.
    """
    config, split = _decoding_config(w, len(x), dtype)
    out = empty_rows(xp, len(x), w.shape[0], RESULT_DTYPES[dtype])
    to = out if split is None else empty_partial_sums(len(x), w.shape[0], split, config, xp)
    scales, (table, _) = _scales(float_scales(w, xp)), _scales_or_zero_points(w)
    packed = None if table is None else Packed(None, aligned(table, xp))
    codes = aligned(w.codes, xp)
    gemm(codes, x, to, config, Epilogue(scales, split=split, packed=packed))
    if split is not None:
        add_partial_sums(to, split, out, None)
    return xp.ascontiguousarray(out)


def _expanding(x: Array, w: QuantArray, dtype: str, xp: Any) -> Array | None:
    """X w^T of bfloat16 bits and weights as `as_bf16`; None if bfloat16 does not hold them."""
    m, n = len(x), w.shape[0]
    base = partition.configure("bf16", n, m, dtype, scale_group_k=scale_group_k(w))
    config = _expanding_program(base, bf16_program(w).macros, _SWIZZLE)
    ready = partition.ready_rows(m, config, driver.multiprocessors(xp.cuda.runtime.getDevice()))
    if m < _OVERLAP_ROWS or ready >= n or (w.spec.is_mx and not FITS_BF16.get(w)):
        made = exact_bf16([w], xp)
        return None if made is None else _expanded_first(x, made[0], dtype, xp)
    right, packed = packed_bf16(w, xp, None, ready, -(-n // TILE_M))
    out = empty_rows(xp, m, n, RESULT_DTYPES[dtype])
    gemm(right.codes, x, out, config, Epilogue(_scales(right.scale), packed=packed))
    return xp.ascontiguousarray(out)


@lru_cache(maxsize=256)
def _expanding_program(base: Config, macros: tuple[tuple[str, str], ...], swizzle: int) -> Config:
    return base.replace(out_transposed=True, swizzle=swizzle, expands=macros)


def _expanded_first(x: Array, w: GemmOperand, dtype: str, xp: Any) -> Array:
    """X w^T of bfloat16 bits and weights in bfloat16, under scales of any kind."""
    activations = GemmOperand(x, "bf16")
    if w.scale.is_absent:
        out: Any = product(activations, w, dtype, xp)
        return out
    m, n = len(x), w.shape[0]
    out = empty_rows(xp, m, n, RESULT_DTYPES[dtype])
    if w.scale.blocks is None:
        multiply(activations, w, out)
    else:
        config = partition.configure("bf16", n, m, dtype, scale_group_k=w.scale.group_k)
        gemm(w.codes, x, out, config, Epilogue(_scales(w.scale)))
    return xp.ascontiguousarray(out)
