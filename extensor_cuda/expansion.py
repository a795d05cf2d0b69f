"""Packed codes and scales -> what Hopper's tensor cores multiply, exactly: FP8 codes or bfloat16.

`kernels/prepare/expand.cu` writes the contraction contiguous, blocks along either axis, square
tiles. A tensor's scales lie relative to its largest one; FP8 holds every value of

    mxfp4                   as E5M2 while the scales span up to 28 binades
    mxfp6_e2m3              as E4M3, 11 binades
    mxfp6_e3m2              as E5M2, 23 binades
    nvfp4 by least_error    as E4M3, 12 binades below the top scale: scales are 1, 1.25, 1.5 2**e

and bfloat16 of everything, but what lies more than 110 binades below the tensor's largest scale.
What is not held raises a flag on the device. Of bfloat16 values as they are: `extensor_cuda.bf16`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from extensor.quant.array import QuantArray, coded_length
from extensor.quant.spec import QuantSpec
from extensor_cuda import dense
from extensor_cuda.kernels.gemm.gemm_sm90 import Flags, Packed, configure, empty_rows, gemm
from extensor_cuda.kernels.gemm.requantize import Requantized, finished, type_of
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = [
    "Expansion",
    "aligned",
    "expand",
    "expand_source",
    "join",
    "kind_of",
    "launch_expand",
    "multiply",
    "scale_of",
]

Array = Any

_FOLDER = Path(__file__).parent / "kernels" / "prepare"
_THREADS, _GUARDED_BLOCKS, _ANCHOR_BLOCKS = 256, 264, 264
_MOST_THREADS = 1 << 31  # of 16 elements each
_ALL = 1 << 30  # elements or rows that share a scale: all there are
_OUT = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
_KINDS = ("bf16", "e5m2", "e4m3")  # as in expand.cu
# The power of two by which the largest scale is lifted, so that the largest element is in range:
# 6 * 2**13 and 28 * 2**11 in E5M2, 7.5 * 2**5 in E4M3; NVFP4's largest scale is 1.5 * 2**8, and
# 6 * 1.5 * 2**5 is 288.
_FP8 = {"e2m1": ("e5m2", 13), "e3m2": ("e5m2", 11), "e2m3": ("e4m3", 5)}
_NVFP4_LIFT = -3


def kind_of(spec: QuantSpec) -> tuple[str, int]:
    """The element type that operands of a spec have, and how far their scales are lifted."""
    if spec.is_mx:
        return _FP8.get(spec.row.element.name, ("bf16", 0))
    return ("e4m3", _NVFP4_LIFT) if spec.rule == "least_error" else ("bf16", 0)


@dataclass(frozen=True, eq=False)
class Expansion:
    """A matrix's values: the codes' times two to the exponent, or times the factor: one number.

    Attributes:
        codes: (rows, K), rows a multiple of 16 bytes apart: uint8, or uint16 for bfloat16.
        kind: their element type: "bf16", "e5m2", "e4m3" or "s8".
        exponent: int32 (1,); None if the factor is no power of two, or where it is 0.
        factor: float32, (1,) or one for each row; None if it is not known, or 1.
        down: whether codes are (K, rows); with bfloat16.
        scales: instead of exponent and factor, with bfloat16: float32 (groups along K, pitch), the
            columns beyond the rows undefined.
        every: elements of K in a group.
    """

    codes: Array
    kind: str
    exponent: Array | None = None
    factor: Array | None = None
    down: bool = False
    scales: Array | None = None
    every: int = 0


@lru_cache(maxsize=256)
def expand_source(
    spec: QuantSpec, kind: str, lift: int, fixed: bool = False, whole: bool = True
) -> Source:
    """The program that expands packed codes of a spec resolved for a matrix, as `expand`.

    ``whole``: rows of codes are a multiple of 16 elements; always those of MX and NVFP4.
    """
    element = spec.row.element
    rows, length = spec.tile if isinstance(spec.tile, tuple) else (1, _ALL)
    if spec.tile == "tensor":
        rows = _ALL
    macros = {
        "CODEC_BITS": element.bits,
        "CODEC_MANTISSA": element.mantissa_bits,
        "CODEC_MIN_EXPONENT": element.min_exponent,
        "CODEC_IS_FLOAT": int(element.is_float),
        "CODEC_MAX_CODE": element.max_magnitude_code,
        "CODEC_UE4M3": int(spec.row.tensor_scale),
        "CODEC_FLOAT_SCALES": int(_is_scaled(spec)),
        "CODEC_WHOLE": int(whole),
        "CODEC_BLOCK": length,
        "CODEC_TILE_ROWS": rows,
        "PREPARE_COLUMNWISE": int(spec.axis == 0),
        "CODEC_EXPAND_TO": _KINDS.index(kind),
        "CODEC_LIFT": lift,
        "CODEC_FIXED": int(fixed),
    }
    return Source.read(_FOLDER / "expand.cu", macros)


def _is_scaled(spec: QuantSpec) -> bool:
    return spec.has_float_scales


def _blocks(threads: int, guarded: bool) -> int:
    blocks = -(-threads // _THREADS)
    return max(min(blocks, _GUARDED_BLOCKS if guarded else 1 << 16), 1)


def expand(
    q: QuantArray,
    kind: str,
    flag: Array | None,
    xp: Any,
    guards: Sequence[Array] = (),
) -> Expansion:
    """The values of a packed matrix, contraction contiguous; does not wait.

    Args:
        q: MX or NVFP4 in tiles (n, 16 to 128), along either axis.
        kind: "bf16", or what `kind_of` says.
        flag: uint32 (1,), raised where the kind does not hold a value.
        xp: cupy.
        guards: two flags; nothing is written unless one is set. None: always.
    """
    axis, mx = q.spec.axis, q.spec.is_mx
    lift = 0 if kind == "bf16" else kind_of(q.spec)[1]
    source = expand_source(q.spec, kind, lift)
    k = coded_length(q.spec, q.shape)
    lines, pitch = q.shape[1 - axis], -(-k // 16) * 16
    codes, scales = (aligned(part, xp) for part in (q.codes, q.scales))
    out = xp.empty((lines, pitch), dtype=np.uint16 if kind == "bf16" else np.uint8)
    factor = xp.empty(1, dtype=np.float32)
    largest = exponent = None
    if mx:
        largest, exponent = xp.zeros(1, dtype=np.uint32), xp.empty(1, dtype=np.int32)
        count = scales.size
        blocks = min(-(-count // _THREADS), _ANCHOR_BLOCKS)
        launch(source, "anchor", blocks, _THREADS, scales, largest, np.int64(count))
    chunks = pitch // 16
    threads = lines * chunks
    if axis == 0:
        threads = -(-lines // 32) * -(-chunks // 4) * 32
    heads = largest, None if mx else q.tensor_scale
    made = exponent, factor, flag, *(guards or (None, None))
    launch_expand(source, threads, Packed(codes, scales), out, lines, heads, made)
    return Expansion(out[:, :k], kind, exponent, factor)


def launch_expand(
    source: Source,
    threads: int,
    packed: Packed,
    out: Array,
    rows: int,
    heads: Sequence[Array | None] = (None, None),
    made: Sequence[Array | None] = (None,) * 5,
) -> None:
    """Launch expand.cu on so many rows of ``out``; does not wait.

    Args:
        source: from `expand_source`.
        threads: that have work.
        packed: what is expanded.
        out: (rows or more, pitch).
        rows: how many.
        heads: the largest scale, and the tensor's scale.
        made: what becomes of exponent, factor and flag; two guards.

    Raises:
        ValueError: for more than the kernel counts in 32 bits.
    """
    if threads >= _MOST_THREADS:
        raise ValueError(
            f"expand: wanted less than 2**35 elements, got {out.shape}; multiply parts of its rows"
        )
    null, counts = np.uint64(0), packed.counts
    blocks = packed.zeros if packed.scales is None else packed.scales
    pitches = out.shape[1], packed.codes.shape[1], 0 if blocks is None else blocks.shape[1]
    parts = packed.codes, packed.scales, *heads, out, *made, packed.zeros
    launch(
        source,
        "expand",
        _blocks(threads, made[-1] is not None),
        _THREADS,
        *(null if part is None else part for part in parts),
        *(np.int64(n) for n in (rows, *pitches)),
        null if counts is None else counts,
        np.int64(0 if counts is None else counts.size),
    )


def aligned(array: Array, xp: Any) -> Array:
    """The array, contiguous, at a multiple of 16 bytes."""
    array = xp.ascontiguousarray(array)
    return array if array.data.ptr % 16 == 0 else array.copy()


def scale_of(a: Expansion, b: Expansion) -> str | None:
    """What two operands share: "exponent", "factor", or "none" where neither has any.

    None if one has a factor alone and the other an exponent alone.
    """
    scaled = [side for side in (a, b) if side.exponent is not None or side.factor is not None]
    names = ("exponent", "factor") if scaled else ("none",)
    shared = (n for n in names if all(getattr(side, n) is not None for side in scaled))
    return next(shared, None) if scaled else "none"


def join(
    a: Expansion,
    b: Expansion,
    out: Array,
    flags: Flags | None = None,
    runs: Array | None = None,
    promote: int | None = None,
    bias: Array | None = None,
) -> None:
    """Launch out = a b^T + bias of operands with a shared `scale_of`; FP8 with FP8, bf16 with bf16.

    Args:
        a: left operand.
        b: right operand.
        out: (M, N) float32 or bfloat16, rows a multiple of 16 bytes apart; or a `Requantized`.
        flags: on the device, whether to run.
        runs: counts the launches that ran.
        promote: as in `extensor_cuda.kernels.gemm.gemm_sm90.Config`.
        bias: float32 (N,), added to the float32 sum; None: none.
    """
    config = configure(a.kind, *out.shape, type_of(out), promote, b=b.kind)
    config = replace(config, down=(a.down, b.down))
    shared = scale_of(a, b)
    assert shared is not None
    exponents = (a.exponent, b.exponent) if shared == "exponent" else (None, None)
    factors = (a.factor, b.factor) if shared == "factor" else None
    codes = a.codes, b.codes
    gemm(*codes, out, config, *exponents, bias, flags=flags, runs=runs, factors=factors)


def multiply(a: Expansion, b: Expansion, dtype: str | Requantized, xp: Any) -> Any:
    """The product a b^T of bfloat16 operands as "float32", "bfloat16" or quantized, unawaited.

    Scales along K may be b's, where a has none of its own and the result is not quantized.
    """
    if isinstance(dtype, str) and scale_of(a, b) == "none" and b.scales is None:
        return dense.multiply(dense.Dense(a.codes), dense.Dense(b.codes), dtype, xp)
    rows, columns = len(a.codes), len(b.codes)
    out = empty_rows(xp, rows, columns, _OUT[dtype]) if isinstance(dtype, str) else dtype
    if b.scales is None:
        join(a, b, out)
    else:
        assert isinstance(dtype, str)
        config = configure("bf16", columns, rows, dtype, every=b.every)
        gemm(b.codes, a.codes, out, config, scales=(b.scales, None))
    return finished(out, xp)
