"""How a matrix becomes GEMM operands: an ordered table of preparers, the first that fits decides.

    preparer            makes of                                  a GEMM operand in
    fused kernel        MXFP4                                     E5M2 under one power of two, or
                                                                  bfloat16 where that is too narrow
                        MXFP8 that is rebased                     FP8, a scale for each 128 x 128
                        MXFP8, MXINT8                             bfloat16
    float scales        8-bit formats under float scales          FP8 or INT8, the scales beside
    from packed storage everything else that has a quantizer      FP8 where it holds the format
                        (`extensor_cuda.matmul.rebase`)           (or bfloat16), else bfloat16
    bf16                what is not quantized, rounded once       bfloat16

What is kept of a matrix for backward is the operand, where it has 8 bits a value and its codes are
all that it needs. An operand in E5M2 or from packed storage needs the packed codes as well, for
values that FP8 does not hold, and one in bfloat16 is larger than these: then they are kept, 4.25
bits a value of MXFP4, 8.25 of MXFP8, and expanded in the backward pass.

The decision is taken once, in `prepare`; a `GemmPreparation` carries it on. A format that is stored
in another way needs one row here and, if need be, one kernel. Nothing here waits for the GPU.

Values below 2**-126 or so that bfloat16 cuts are warned of when counts are read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from extensor.backends.protocol import CastSpec
from extensor.backends.unsupported import Unsupported
from extensor.quant.array import QuantArray, tile_extent
from extensor.quant.spec import QuantSpec
from extensor.random import Stream
from extensor_cuda.kernels.gemm.gemm_sm90 import MAX_TERMS
from extensor_cuda.kernels.prepare import float_scaled_operand
from extensor_cuda.kernels.prepare.cast_bf16 import round_to_bf16
from extensor_cuda.kernels.quantize import quantize as quantizer
from extensor_cuda.matmul import fused, tuned
from extensor_cuda.matmul.expand import expand, largest_scale
from extensor_cuda.matmul.operand import GemmOperand, Part, Prepared, Scale
from extensor_cuda.matmul.rebase import held_by
from extensor_cuda.quantize import dialect_gap, input_gap
from extensor_cuda.runtime import driver
from extensor_cuda.runtime.counters import Counters, OperandCounts
from extensor_cuda.runtime.memory import lasting

__all__ = [
    "BF16",
    "EXPANDED",
    "FLOAT_SCALES",
    "FUSED",
    "PREPARERS",
    "GemmPreparation",
    "PackedMatrix",
    "Preparer",
    "packed_operand",
    "prepare",
    "run_batch",
]

Array = Any
Spec = QuantSpec | CastSpec
Streams = Sequence[Stream | None]
State = dict[str, Any] | None

_SLOTS = 2 * quantizer.SLOTS
_BATCHED = 1 << 22
"""Values of the largest matrix whose operands are made in one launch with others': a launch gap is
short beside more of them, and all operands of a batch live at once."""


@dataclass(frozen=True)
class Preparer:
    """One way to make GEMM operands: a row of `PREPARERS`.

    Attributes:
        name: its row in the tuning table (`extensor_cuda.matmul.tuned.PATHS`).
        path: what `CudaBackend.path` says of it.
        casts: whether it takes `CastSpec`, and no `QuantSpec`.
        compact: whether one launch makes all operands from one reading, in 16 bits a value or
            fewer.
        supports: what ``run`` needs of one spec of x, or why there is no such operand.
        run: makes operands of x, one for each plan that ``supports`` gave.
        plan_of_pack: the quantizer's plan of what is kept, for a spec and a shape; None: the
            operand itself is kept.
    """

    name: str
    path: str
    casts: bool
    compact: bool
    supports: Callable[[Array, Any], Any]
    run: Callable[[Array, Sequence[Any], Streams, Any, State], Prepared]
    plan_of_pack: Callable[[Any, tuple[int, ...]], quantizer.Plan | None] = lambda plan, shape: None


@dataclass(frozen=True, eq=False)
class GemmPreparation:
    """How operands of a matrix will be made: see `extensor.backends.protocol.Preparation`."""

    x: Array
    plans: Sequence[Any]
    streams: Streams
    preparer: Preparer
    path: str
    batch_key: Hashable | None
    amax_state: State
    xp: Any

    @property
    def compact(self) -> bool:
        """Whether the operands are worth keeping for the backward GEMM."""
        return self.preparer.compact

    @property
    def keeps_second(self) -> bool:
        """Whether what `run` gives is kept: see the protocol."""
        return self._plan_of_pack() is None

    @property
    def packs_second(self) -> bool:
        """Whether `run_packing` can make both operands of two specs."""
        key = tuple(self.plans)
        return self.preparer is FUSED and fused.packs_columns(key, self.x.dtype.name)

    def run_packing(self) -> list[tuple[GemmOperand | PackedMatrix, OperandCounts | None]]:
        """The first operand, and the second as it is kept; the matrix is read once."""
        first, (q, counters) = fused.run_packing(
            self.x, self.plans, self.streams, self.xp, self.amax_state
        )
        plan = self.preparer.plan_of_pack(self.plans[1], tuple(self.x.shape))
        assert plan is not None
        return [first, _flagged(q, counters, (_SLOTS, 2 * _SLOTS), plan.count, self.xp)]

    def run(self) -> Prepared:
        """Make the operands."""
        return self.preparer.run(self.x, self.plans, self.streams, self.xp, self.amax_state)

    def pack(self) -> tuple[GemmOperand | PackedMatrix, OperandCounts | None] | None:
        """What is kept of the only operand: itself, or packed codes that are expanded to it."""
        plan = self._plan_of_pack()
        if plan is None:
            return self.run()[0]
        matrix, counts = _packed(self.x, plan, self.streams[0], self.xp)
        return matrix, counts

    def _plan_of_pack(self) -> quantizer.Plan | None:
        return self.preparer.plan_of_pack(self.plans[0], tuple(self.x.shape))


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """A packed matrix, and two flags: that FP8, and that bfloat16, does not hold every value."""

    q: QuantArray
    flags: Array
    xp: Any

    @property
    def arrays(self) -> Sequence[Array]:
        """See `extensor.backends.protocol.PackedOperand`."""
        return (*self.q.parts.values(), self.flags)

    def operand(self) -> GemmOperand:
        """The operand in FP8 where that holds the format, else in bfloat16."""
        q, flags, xp = self.q, self.flags, self.xp
        kind, _ = held_by(q.spec)
        largest = largest_scale(q, xp) if q.spec.is_mx else None
        flag = flags[1:] if kind == "bf16" else flags[:1]
        operand = expand(q, kind, flag, xp, largest=largest)
        if kind == "bf16":
            return operand

        def make_bf16(
            source: None, guards: Sequence[Array], part: Part = None, memory: Array | None = None
        ) -> GemmOperand:
            return expand(q, "bf16", flags[1:], xp, guards, part, largest, memory)

        return replace(operand, flag=flags[:1].reshape(()), make_bf16=make_bf16)


def _packed(
    x: Array, plan: quantizer.Plan, stream: Stream | None, xp: Any
) -> tuple[PackedMatrix, OperandCounts]:
    """The packed codes of x, and what the quantizer counted."""
    done = quantizer.quantize_raw(x, plan, stream, xp)
    assert done.q is not None and done.counters is not None
    return _flagged(done.q, done.counters, (0, _SLOTS), plan.count, xp)


def _flagged(
    q: QuantArray, counters: Counters, part: tuple[int, int], count: int, xp: Any
) -> tuple[PackedMatrix, OperandCounts]:
    """Packed codes with flags, and what a part of the counters counted of so many values."""
    with lasting():  # the counts, which are read later, hold one of them
        flags = xp.zeros(2, dtype=np.uint32)
    cut = flags[1:].reshape(())
    return PackedMatrix(q, flags, xp), OperandCounts(counters, part, count, cut)


def prepare(
    x: Array, specs: Sequence[Spec], streams: Streams, work: int, xp: Any, amax_state: State = None
) -> GemmPreparation | Unsupported:
    """Decide how operands of x are made: by the first preparer that supports all specs.

    X is a contiguous matrix, in a dtype that the quantizers read. The specs, resolved, are one, or
    one along its rows and one down its columns, each with a stream, given exactly under stochastic
    rounding. ``work`` is M N K of the product; 0 where its other operand is of another kind. The
    amax state is the tensor's own, from the call before; None: nothing is known of it.
    """
    capability = driver.capability(xp.cuda.runtime.getDevice())
    casts, why = isinstance(specs[0], CastSpec), []
    for spec, stream in () if casts else zip(specs, streams, strict=True):
        assert isinstance(spec, QuantSpec)
        if (gap := input_gap(x, spec, stream)) is not None:
            return gap
    for preparer in PREPARERS:
        if preparer.casts != casts:
            continue
        plans = _plans(preparer, x, specs, work, capability)
        if isinstance(plans, Unsupported):
            why.append(plans.reason)
            continue
        path = f"{preparer.path}: {why[0]}" if preparer.path == "expanded" else preparer.path
        batches = preparer is FUSED and x.size <= _BATCHED
        key = fused.batch_key(specs, x.dtype.name) if batches else None
        return GemmPreparation(x, plans, streams, preparer, path, key, amax_state, xp)
    return Unsupported(why[-1] if why else "operands of another kind")


def _plans(
    preparer: Preparer, x: Array, specs: Sequence[Spec], work: int, capability: str
) -> list[Any] | Unsupported:
    """What a preparer needs of each spec; or why it does not take one of them."""
    if (refused := tuned.refusal(preparer.name, work, capability)) is not None:
        return refused
    plans = []
    for spec in specs:
        plan = preparer.supports(x, spec)
        if isinstance(plan, Unsupported):
            return plan
        plans.append(plan)
    return plans


def packed_operand(q: QuantArray, work: int, xp: Any) -> GemmOperand | Unsupported:
    """The operand of a matrix in an MX format or NVFP4 whose codes are there already.

    It is refused where `prepare` would refuse the matrix in float32, for the product's ``work``.
    """
    if (gap := dialect_gap(q.spec)) is not None:
        return gap
    capability = driver.capability(xp.cuda.runtime.getDevice())
    plans = fused.spec_for(q.spec, "float32", q.shape), quantizer.plan_of(q.spec, q.shape)
    refused = None
    for way, plan in zip((FUSED, EXPANDED), plans, strict=True):
        if way is FUSED and q.shape[1] * 4 % 16:
            continue  # `fused.supports` wants rows of multiples of 16 bytes
        gap = plan if isinstance(plan, Unsupported) else tuned.refusal(way.name, work, capability)
        if gap is None:
            return PackedMatrix(q, xp.zeros(2, dtype=np.uint32), xp).operand()
        refused = gap
    assert refused is not None
    return refused


def run_batch(preparations: Sequence[GemmPreparation], xp: Any) -> list[Prepared]:
    """Run preparations of one ``batch_key`` in one launch: what ``run`` of each gives."""
    states = [one.amax_state for one in preparations]
    return fused.run_batch([one.x for one in preparations], preparations[0].plans, states, xp)


# --- 8-bit formats under float scales ---


def _float_scaled_supports(x: Array, spec: QuantSpec) -> QuantSpec | Unsupported:
    if x.ndim != 2 or not x.size or max(x.shape) > 1 << 30:
        return Unsupported(f"shape {x.shape}")
    return _float_scaled_spec(spec, tuple(x.shape))


@lru_cache(maxsize=4096)
def _float_scaled_spec(spec: QuantSpec, shape: tuple[int, ...]) -> QuantSpec | Unsupported:
    element, k = spec.row.element, shape[spec.axis]
    if not spec.has_float_scales or spec.kernel_gap or element.bits != 8:
        return Unsupported(f"{spec.format}; the kernel makes 8-bit codes under float scales")
    plain = spec.symmetric and spec.scale_name == "float32" and spec.rule == "amax"
    if not plain or spec.statistic != "amax" or spec.transform or spec.element_scale != 1.0:
        return Unsupported(
            f"{spec.rule} rule, {spec.statistic} statistic, {spec.scale_name} scales, zero points"
        )
    if spec.ties != "even" or (element.is_float and spec.zero_sign != "kept"):
        return Unsupported(f"the rounding of dialect {spec.dialect}")
    extent = tile_extent(spec, shape)
    length, rows = extent[spec.axis], extent[1 - spec.axis]
    if length < k and (length != 128 or not element.is_float):
        return Unsupported(
            f"tiles {spec.tile} of {element.name}; the kernel has 128 along the contraction, of FP8"
        )
    if spec.rounding == "stochastic" and (rows > 1 or spec.rbits != 32):
        return Unsupported(f"stochastic rounding in tiles {spec.tile} with {spec.rbits} bits")
    if not element.is_float and k > MAX_TERMS:
        return Unsupported(f"K = {k}, beyond {MAX_TERMS}")
    return spec


def _float_scaled(
    x: Array, specs: Sequence[QuantSpec], streams: Streams, xp: Any, state: State
) -> Prepared:
    amax = float_scaled_operand.shared_amax(x, specs, xp)
    made: Prepared = []
    for spec, stream in zip(specs, streams, strict=True):
        codes, scales, counters = float_scaled_operand.quantize(x, spec, stream, amax, xp)
        extent, element = tile_extent(spec, x.shape), spec.row.element
        length, rows = extent[spec.axis], extent[1 - spec.axis]
        grid = scales.T if spec.axis == 1 else scales
        scale = Scale(grid=grid, group_k=length if len(grid) > 1 else 0, rows=rows)
        operand = GemmOperand(codes, element.name if element.is_float else "s8", scale)
        made.append((operand, OperandCounts(counters, (0, _SLOTS), x.size)))
    return made


# --- from packed storage ---


def _expanded_supports(x: Array, spec: QuantSpec) -> quantizer.Plan | Unsupported:
    if x.ndim != 2 or max(x.shape) > 1 << 30 or x.size > 1 << 34:
        return Unsupported(f"shape {x.shape}")
    return quantizer.plan_of(spec, tuple(x.shape))


def _expanded(
    x: Array, plans: Sequence[quantizer.Plan], streams: Streams, xp: Any, state: State
) -> Prepared:
    made: Prepared = []
    for plan, stream in zip(plans, streams, strict=True):
        matrix, counts = _packed(x, plan, stream, xp)
        made.append((matrix.operand(), counts))
    return made


# --- not quantized ---


def _bf16_supports(x: Array, spec: CastSpec) -> CastSpec | Unsupported:
    return spec if spec.dtype == "bfloat16" else Unsupported(f"{spec.dtype} operands")


def _bf16(x: Array, specs: Sequence[CastSpec], streams: Streams, xp: Any, state: State) -> Prepared:
    bits = round_to_bf16(x, xp)
    return [(GemmOperand(bits, "bf16", transposed=spec.axis == 0), None) for spec in specs]


FUSED = Preparer(
    "fused", "fused kernel", False, True, fused.supports, fused.run, fused.plan_of_pack
)
FLOAT_SCALES = Preparer(
    "float scales", "scaled kernel", False, False, _float_scaled_supports, _float_scaled
)
EXPANDED = Preparer(
    "expanded", "expanded", False, False, _expanded_supports, _expanded, lambda plan, shape: plan
)
BF16 = Preparer("bf16", "fused kernel", True, True, _bf16_supports, _bf16)
PREPARERS = (FUSED, FLOAT_SCALES, EXPANDED, BF16)
"""In the order in which they are asked."""
