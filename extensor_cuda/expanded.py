"""Packed matrices as operands of Hopper's tensor cores, exactly: FP8 codes or bfloat16.

What no quantizer writes as an operand at once (`extensor_cuda.operands`) is quantized to packed
storage by the fused kernels, under any tile, transform, rounding or rule that they have, and
expanded from there: to FP8 where that can hold the format (`extensor_cuda.expansion` has the
table), to bfloat16 otherwise; NVFP4's tensor scale multiplies the result.

Where FP8 does not hold every value, which is decided on the device, both operands are bfloat16
instead: both ways are launched and one of them ends at once. That a value was cut to bfloat16 is
warned of when the counts are read. The bounds of a product are those of `extensor_cuda.gemm`.
Nothing waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from extensor.backends.unsupported import Unsupported
from extensor.quant.array import QuantArray
from extensor.quant.spec import QuantSpec
from extensor.random import Stream
from extensor_cuda import tuned
from extensor_cuda.dense import Dense
from extensor_cuda.expansion import Expansion, expand, join, kind_of, scale_of
from extensor_cuda.kernels.gemm.gemm_sm90 import Flags, empty_rows
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.operands import LEAST_WORK, Operand
from extensor_cuda.runtime.counters import OperandCounts

__all__ = ["Expanded", "joinable", "make", "multiply", "reason"]

Array = Any

_OUT = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


@dataclass(frozen=True, eq=False)
class Expanded:
    """A matrix as a product takes it, and what it was made of.

    Attributes:
        best: in the element type of its format.
        flags: uint32 (2,): set where that, and where bfloat16, does not hold every value.
        q: the packed matrix.
    """

    best: Expansion
    flags: Array
    q: QuantArray

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, K)."""
        rows, k = self.best.codes.shape
        return rows, k

    def values(self, xp: Any) -> Array:
        """The values as float32, still transformed."""
        made = self.wide((), xp)
        return (made.codes.astype(xp.uint32) << 16).view(xp.float32) * made.factor

    def wide(self, guards: Sequence[Array], xp: Any) -> Expansion:
        """As bfloat16; not written unless one of two flags is set, if they are given."""
        if self.best.kind == "bf16":
            return self.best
        return expand(self.q, "bf16", self.flags[1:], xp, guards)


def reason(x: Array, spec: QuantSpec, work: int, capability: str) -> str | None:
    """Why x, blocked by a resolved spec, is not made such an operand; None if it is.

    Args:
        x: contiguous matrix, in a dtype that the quantizers read.
        spec: how it is quantized.
        work: M N K of the product.
        capability: compute capability of the GPU, such as "90".
    """
    if refused := tuned.refusal("expanded", work, capability, LEAST_WORK):
        return refused
    if x.ndim != 2 or max(x.shape) > 1 << 30 or x.size > 1 << 34:
        return f"shape {x.shape}"
    plan = kernels.plan_of(spec, tuple(x.shape))
    return plan.reason if isinstance(plan, Unsupported) else None


def make(
    x: Array, specs: Sequence[QuantSpec], streams: Sequence[Stream | None], xp: Any
) -> list[tuple[Expanded, OperandCounts]]:
    """Operands of x under each spec, and their counts; does not wait.

    Args:
        x: contiguous matrix that `reason` covers.
        specs: resolved.
        streams: one per spec, given exactly under stochastic rounding.
        xp: cupy.
    """
    made = []
    for spec, stream in zip(specs, streams, strict=True):
        plan = kernels.plan_of(spec, tuple(x.shape))
        assert isinstance(plan, kernels.Plan), plan
        done = kernels.quantize_raw(x, plan, stream, xp)
        assert done.q is not None
        flags = xp.zeros(2, dtype=np.uint32)
        kind, _ = kind_of(plan.spec)
        flag = flags[1:] if kind == "bf16" else flags[:1]
        best = expand(done.q, kind, flag, xp)
        assert done.counters is not None
        part = (0, 2 * kernels.SLOTS)
        counts = OperandCounts(done.counters, part, plan.count, flags[1:].reshape(()))
        made.append((Expanded(best, flags, done.q), counts))
    return made


def _wide(a: Any, guards: Sequence[Array], xp: Any) -> Expansion:
    """Any operand as bfloat16."""
    if isinstance(a, Dense):
        return Expansion(a.bits, "bf16", down=a.down)
    if isinstance(a, Expanded):
        return a.wide(guards, xp)
    held = guards or [xp.ones((), dtype=np.uint32)] * 2
    return Expansion(a.wide(held, xp), "bf16")


def _fp8(a: Any) -> tuple[Expansion, Array] | None:
    """An operand as FP8 and the flag that says whether it is; None if it never is."""
    if isinstance(a, Operand):
        return Expansion(a.codes, "e5m2", a.exponent), a.flag
    if isinstance(a, Expanded) and a.best.kind != "bf16":
        return a.best, a.flags[:1].reshape(())
    return None


def joinable(a: Any, b: Any) -> bool:
    """Whether two operands, of this module or of `operands` and `dense`, have a product here."""
    return all(isinstance(side, (Expanded, Operand, Dense)) for side in (a, b))


def multiply(
    a: Any,
    b: Any,
    dtype: str,
    xp: Any,
    falls: Array | None = None,
    bias: Array | None = None,
) -> Array:
    """The product a b^T + bias of operands that `joinable` joins; does not wait.

    Args:
        a: left operand, (M, K).
        b: right operand, (N, K).
        dtype: of the result: "float32" or "bfloat16".
        xp: cupy.
        falls: uint32 of shape (): counts the products that ran in bfloat16 although FP8 was tried.
        bias: float32 (N,), added to the float32 sum; None: none.
    """
    out = empty_rows(xp, a.shape[0], b.shape[0], _OUT[dtype])
    left, right = _fp8(a), _fp8(b)
    # An operand made at once has an exponent alone, NVFP4 a factor alone: as bfloat16 they join.
    if left and right and scale_of(left[0], right[0]):
        guards = left[1], right[1]
        join(left[0], right[0], out, Flags(*guards, 0), bias=bias)
        wide = _wide(a, guards, xp), _wide(b, guards, xp)
        join(*wide, out, Flags(*guards, 1), falls, bias=bias)
    else:
        join(_wide(a, (), xp), _wide(b, (), xp), out, bias=bias)
    return xp.ascontiguousarray(out)
