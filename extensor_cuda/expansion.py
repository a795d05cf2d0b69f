"""Packed codes and scales -> what Hopper's tensor cores multiply, exactly: FP8 codes or bfloat16.

`kernels/expand.cu` writes the contraction contiguous, blocks along either axis, square tiles.
A tensor's scales lie relative to its largest one; FP8 holds every value of

    mxfp4                   as E5M2 while the scales span up to 28 binades
    mxfp6_e2m3              as E4M3, 11 binades
    mxfp6_e3m2              as E5M2, 23 binades
    nvfp4 by least_error    as E4M3, 12 binades below the top scale: scales are 1, 1.25, 1.5 2**e

and bfloat16 of everything, but what lies more than 110 binades below the tensor's largest scale.
What is not held raises a flag on the device.

Bfloat16 also holds every NVFP4 value but for the tensor scale, and every MX value as it is that a
quantizer makes, from 2**-133 up: so `whole` needs no anchor. Whether all of an MX matrix is held is
read on the host the first time that the matrix is seen, and remembered: nothing waits after that.
A value that is not held would be NaN, never another number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import ml_dtypes
import numpy as np

from extensor.quant.array import QuantArray, coded_length
from extensor.quant.spec import QuantSpec
from extensor_cuda import dense
from extensor_cuda.jit import Source, launch
from extensor_cuda.kernels.gemm import Flags, configure, empty_rows, gemm
from extensor_cuda.kernels.requantize import Requantized, finished, type_of

__all__ = [
    "Expansion",
    "expand",
    "expand_source",
    "join",
    "kind_of",
    "multiply",
    "scale_of",
    "whole",
]

Array = Any

_FOLDER = Path(__file__).parent / "kernels"
_THREADS, _GUARDED_BLOCKS, _ANCHOR_BLOCKS = 256, 264, 264
_OUT = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
_KINDS = ("bf16", "e5m2", "e4m3")  # as in expand.cu
# The power of two by which the largest scale is lifted, so that the largest element is in range:
# 6 * 2**13 and 28 * 2**11 in E5M2, 7.5 * 2**5 in E4M3; NVFP4's largest scale is 1.5 * 2**8, and
# 6 * 1.5 * 2**5 is 288.
_FP8 = {"e2m1": ("e5m2", 13), "e3m2": ("e5m2", 11), "e2m3": ("e4m3", 5)}
_NVFP4_LIFT = -3
_FITS: WeakKeyDictionary[QuantArray, bool] = WeakKeyDictionary()
"""Whether bfloat16 holds all of a stored matrix as it is."""


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
    """

    codes: Array
    kind: str
    exponent: Array | None = None
    factor: Array | None = None
    down: bool = False


@lru_cache(maxsize=256)
def expand_source(spec: QuantSpec, kind: str, lift: int, fixed: bool = False) -> Source:
    """The program that expands packed codes of a spec resolved for a matrix, as `expand`."""
    element = spec.row.element
    assert isinstance(spec.tile, tuple)
    macros = {
        "BITS": element.bits,
        "MANTISSA": element.mantissa_bits,
        "MIN_EXPONENT": element.min_exponent,
        "IS_FLOAT": int(element.is_float),
        "UE4M3": int(not spec.is_mx),
        "BLOCK": spec.tile[1],
        "TILE_ROWS": spec.tile[0],
        "DOWN": int(spec.axis == 0),
        "OUT": _KINDS.index(kind),
        "LIFT": lift,
        "FIXED": int(fixed),
    }
    return Source.read(_FOLDER / "expand.cu", macros)


def _blocks(threads: int, guarded: bool) -> int:
    blocks = -(-threads // _THREADS)
    return max(min(blocks, _GUARDED_BLOCKS if guarded else 1 << 16), 1)


def expand(
    q: QuantArray,
    kind: str,
    flag: Array | None,
    xp: Any,
    guards: Sequence[Array] = (),
    fixed: bool = False,
) -> Expansion:
    """The values of a packed matrix, contraction contiguous; does not wait.

    Args:
        q: MX or NVFP4 in tiles (n, 16 to 128), along either axis.
        kind: "bf16", or what `kind_of` says.
        flag: uint32 (1,), raised where the kind does not hold a value; None only if fixed.
        xp: cupy.
        guards: two flags; nothing is written unless one is set. None: always.
        fixed: bfloat16 values as they are, without an exponent, in one launch. What bfloat16 does
            not hold, which is less than relative to the largest scale, becomes NaN.
    """
    axis, mx = q.spec.axis, q.spec.is_mx
    lift = 0 if kind == "bf16" else kind_of(q.spec)[1]
    source = expand_source(q.spec, kind, lift, fixed)
    k = coded_length(q.spec, q.shape)
    lines, pitch = q.shape[1 - axis], -(-k // 16) * 16
    codes, scales = (_aligned(part, xp) for part in (q.codes, q.scales))
    out = xp.empty((lines, pitch), dtype=np.uint16 if kind == "bf16" else np.uint8)
    null = np.uint64(0)
    largest, exponent, factor = null, null, null
    if not fixed:
        factor = xp.empty(1, dtype=np.float32)
    if mx and not fixed:
        largest, exponent = xp.zeros(1, dtype=np.uint32), xp.empty(1, dtype=np.int32)
        count = scales.size
        blocks = min(-(-count // _THREADS), _ANCHOR_BLOCKS)
        launch(source, "anchor", blocks, _THREADS, scales, largest, np.int64(count))
    chunks = pitch // 16
    threads = lines * chunks
    if axis == 0:
        threads = -(-lines // 32) * -(-chunks // 4) * 32
    launch(
        source,
        "expand",
        _blocks(threads, bool(guards)),
        _THREADS,
        codes,
        scales,
        largest,
        null if mx else q.tensor_scale,
        out,
        exponent,
        factor,
        null if flag is None else flag,
        *(guards or (null, null)),
        *(np.int64(n) for n in (lines, pitch, codes.shape[1], scales.shape[1])),
    )
    if fixed:
        return Expansion(out[:, :k], kind, None, None if mx else q.tensor_scale)
    return Expansion(out[:, :k], kind, exponent if mx else None, factor)


def whole(stored: Sequence[QuantArray], xp: Any) -> list[Expansion] | None:
    """Packed matrices as bfloat16, exactly; None if one has values that it does not hold.

    Waits for the GPU the first time that an MX matrix is seen, so multiply once before a capture;
    and each time if the matrix fits only relative to its largest scale.

    Args:
        stored: MX or NVFP4, as for `expand`.
        xp: cupy.
    """
    unknown = list(dict.fromkeys(q for q in stored if q.spec.is_mx and q not in _FITS))
    raised = xp.zeros(len(unknown), dtype=np.uint32) if unknown else None
    made: list[Expansion | None] = []
    for q in stored:
        flag = None
        if raised is not None and q in unknown:
            at = unknown.index(q)
            flag = raised[at : at + 1]
        known_not = not _FITS.get(q, True)
        made.append(None if known_not else expand(q, "bf16", flag, xp, fixed=True))
    if raised is not None:
        _FITS.update(zip(unknown, (not flag for flag in raised.get()), strict=True))
    out = []
    for q, expansion in zip(stored, made, strict=True):
        if expansion is None or not _FITS.get(q, True):
            flag = xp.zeros(1, dtype=np.uint32)
            expansion = expand(q, "bf16", flag, xp)
            if int(flag[0]):
                return None
        out.append(expansion)
    return out


def _aligned(array: Array, xp: Any) -> Array:
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
        promote: as in `extensor_cuda.kernels.gemm.Config`.
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
    """The product a b^T of bfloat16 operands as "float32", "bfloat16" or quantized, unawaited."""
    if isinstance(dtype, str) and scale_of(a, b) == "none":
        return dense.multiply(dense.Dense(a.codes), dense.Dense(b.codes), dtype, xp)
    rows, columns = len(a.codes), len(b.codes)
    out = empty_rows(xp, rows, columns, _OUT[dtype]) if isinstance(dtype, str) else dtype
    join(a, b, out)
    return finished(out, xp)
