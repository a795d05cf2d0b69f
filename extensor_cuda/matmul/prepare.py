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

The decision is taken once, in `prepare`; a `GemmPreparation` carries it on. A format that is stored
in another way needs one row here and, if need be, one kernel. Nothing here waits for the GPU.

The fused kernel's power of two comes from the largest magnitude that the same tensor of the same
layer had the last time (delayed scaling), with `AMAX_MARGIN` binades to grow; the first time
another pass looks for it. So no value depends on the amax state, only which of E5M2 and bfloat16
is multiplied. Values below 2**-126 or so that bfloat16 cuts are warned of when counts are read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from extensor.backends.protocol import CastSpec
from extensor.backends.unsupported import Unsupported
from extensor.quant.array import tile_extent
from extensor.quant.scale_rules import E8M0_NAN
from extensor.quant.spec import REBASE_TILE, QuantSpec
from extensor.random import Stream
from extensor_cuda.kernels.gemm.config import ROWS_PER_SCALE
from extensor_cuda.kernels.gemm.gemm_sm90 import MOST_TERMS
from extensor_cuda.kernels.prepare import float_scaled_operand, quantize_operand
from extensor_cuda.kernels.prepare.cast_bf16 import round_to_bf16
from extensor_cuda.kernels.prepare.quantize_operand import Side
from extensor_cuda.kernels.quantize import quantize as quantizer
from extensor_cuda.matmul import tuned
from extensor_cuda.matmul.expand import expand
from extensor_cuda.matmul.operand import GemmOperand, Scale
from extensor_cuda.matmul.rebase import held_by, is_mxfp4
from extensor_cuda.quantize import input_gap
from extensor_cuda.runtime import driver
from extensor_cuda.runtime.counters import Counters, OperandCounts

__all__ = [
    "BF16",
    "EXPANDED",
    "FLOAT_SCALES",
    "FUSED",
    "PREPARERS",
    "GemmPreparation",
    "Preparer",
    "prepare",
    "run_batch",
]

Array = Any
Spec = QuantSpec | CastSpec
Streams = Sequence[Stream | None]
Prepared = list[tuple[GemmOperand, OperandCounts | None]]
State = dict[str, Any] | None

_SLOTS = 2 * quantizer.SLOTS
_BEHIND = 64  # floats that may be read behind the last row's: a tile's width


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
    """

    name: str
    path: str
    casts: bool
    compact: bool
    supports: Callable[[Array, Any], Any]
    run: Callable[[Array, Sequence[Any], Streams, Any, State], Prepared]


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

    def run(self) -> Prepared:
        """Make the operands."""
        return self.preparer.run(self.x, self.plans, self.streams, self.xp, self.amax_state)


def prepare(
    x: Array,
    specs: Sequence[Spec],
    streams: Streams,
    work: int,
    xp: Any,
    amax_state: State = None,
) -> GemmPreparation | Unsupported:
    """Decide how operands of x are made: by the first preparer that supports all specs.

    Args:
        x: contiguous matrix, in a dtype that the quantizers read.
        specs: one, or one along its rows and one down its columns; resolved.
        streams: one per spec, given exactly under stochastic rounding.
        work: M N K of the product; 0 where its other operand is of another kind.
        xp: cupy.
        amax_state: the tensor's own, from the call before; None: nothing is known of it.
    """
    capability = driver.capability(xp.cuda.runtime.getDevice())
    casts, why = isinstance(specs[0], CastSpec), []
    if not casts and (gap := _input_gap(x, specs, streams)) is not None:
        return gap
    for preparer in PREPARERS:
        if preparer.casts != casts:
            continue
        plans = _plans(preparer, x, specs, work, capability)
        if isinstance(plans, Unsupported):
            why.append(plans.reason)
            continue
        path = f"{preparer.path}: {why[0]}" if preparer.path == "expanded" else preparer.path
        key = _batch_key(specs, x.dtype.name) if preparer is FUSED else None
        return GemmPreparation(x, plans, streams, preparer, path, key, amax_state, xp)
    return Unsupported(why[-1] if why else "operands of another kind")


def _input_gap(x: Array, specs: Sequence[Spec], streams: Streams) -> Unsupported | None:
    for spec, stream in zip(specs, streams, strict=True):
        assert isinstance(spec, QuantSpec)
        if (gap := input_gap(x, spec, stream)) is not None:
            return gap
    return None


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


# --- made at once by the fused kernel ---


def _fused_supports(x: Array, spec: QuantSpec) -> QuantSpec | Unsupported:
    if x.strides != (x.shape[-1] * x.itemsize, x.itemsize) or x.strides[0] % 16 or x.data.ptr % 16:
        return Unsupported(
            f"strides {x.strides}; the kernel reads contiguous rows, multiples of 16 bytes"
        )
    return _fused_spec(spec, x.dtype.name, tuple(x.shape))


@lru_cache(maxsize=4096)
def _fused_spec(spec: QuantSpec, dtype: str, shape: tuple[int, ...]) -> QuantSpec | Unsupported:
    element = spec.row.element
    if element.bits == 6:
        return Unsupported(f"FP8 holds {spec.format}; operands made at once are MXFP4 or bfloat16")
    if not (spec.is_mx and spec.tile == (1, 32)) or element.bits > 8:
        return Unsupported(
            f"{spec.row.name} in tiles {spec.tile}; the kernel makes MX formats in (1, 32)"
        )
    if spec.transform or spec.scale_window is not None or spec.row.outliers:
        return Unsupported("a transform, a scale window or outliers")
    if dtype not in quantizer.INPUTS or len(shape) != 2 or max(shape) > 1 << 30:
        return Unsupported(f"{dtype} array of shape {shape}")
    if spec.rebased and spec.dialect_row.inf_byte_in(element) != E8M0_NAN:
        return Unsupported(f"the infinities of dialect {spec.dialect}")
    plan = quantizer.plan_of(spec.replace(rebased=False), shape)
    return plan if isinstance(plan, Unsupported) else spec


@lru_cache(maxsize=1024)
def _transposes(first: QuantSpec, second: QuantSpec) -> bool:
    """Whether two specs differ in their axis alone."""
    return first.replace(axis=second.axis) == second


@lru_cache(maxsize=1024)
def _batches(specs: tuple[QuantSpec, ...]) -> bool:
    """Whether several matrices under these specs are one launch: MXFP4, rounded to nearest."""
    together = len(specs) == 1 or _transposes(specs[0], specs[1])
    return together and all(is_mxfp4(s) and s.rounding != "stochastic" for s in specs)


def _batch_key(specs: Sequence[Any], dtype: str) -> Hashable | None:
    key = tuple(specs)
    return (key, dtype) if _batches(key) else None


def _fused(
    x: Array, specs: Sequence[QuantSpec], streams: Streams, xp: Any, state: State
) -> Prepared:
    if len(specs) == 2 and not _transposes(specs[0], specs[1]):
        sides = zip(specs, streams, strict=True)
        return [_fused(x, [spec], [stream], xp, None)[0] for spec, stream in sides]
    if specs[0].rebased:
        return _rebased(x, specs, streams, xp)
    if is_mxfp4(specs[0]):
        return _mxfp4(x, specs, streams, xp, state)
    return _wide(x, specs, streams, xp)


def _empty(x: Array, axis: int, dtype: Any, xp: Any) -> Array:
    """What an operand's codes, or its values as bfloat16, are written to."""
    rows, k = x.shape if axis == 1 else x.shape[::-1]
    padded = -(-k // 16) * 16  # whole chunks are written
    return xp.empty((rows, padded), dtype=dtype)[:, :k]


def _mxfp4(
    x: Array, specs: Sequence[QuantSpec], streams: Streams, xp: Any, state: State
) -> Prepared:
    """MXFP4 as E5M2 under one power of two."""
    counters = Counters(len(specs) * _SLOTS, xp)
    held = xp.empty(len(specs), dtype=np.uint64)
    exponent = xp.empty(1, dtype=xp.int32)
    sides: list[Side] = []
    made: Prepared = []
    for i, (spec, stream) in enumerate(zip(specs, streams, strict=True)):
        start, stop = i * _SLOTS, (i + 1) * _SLOTS
        out = _empty(x, spec.axis, xp.uint8, xp)
        flag = held[i : i + 1].view(np.uint32)[0]
        sides.append(Side(spec, stream, out, flag, counters.array[start:stop]))
        counts = OperandCounts(counters, (start, stop), x.size)
        made.append((_e5m2_operand(x, sides[i], exponent, xp), counts))
    quantize_operand.launch_fused(x, sides, exponent, _amax_state(x, specs[0], xp, state))
    return made


def _e5m2_operand(x: Array, side: Side, exponent: Array, xp: Any) -> GemmOperand:
    """An operand that remembers what it was made from: the same values as bfloat16 on request."""
    spec, stream = side.spec, side.stream

    def make_bf16(guards: Sequence[Array]) -> GemmOperand:
        guards = guards or [xp.ones((), dtype=np.uint32)] * 2
        out = _empty(x, spec.axis, xp.uint16, xp)
        quantize_operand.launch_fused(x, [Side(spec, stream, out)], guards=guards)
        return GemmOperand(out, "bf16")

    return GemmOperand(side.out, "e5m2", Scale(exponent), flag=side.flag, make_bf16=make_bf16)


def _amax_state(x: Array, spec: QuantSpec, xp: Any, state: State) -> Array:
    """What was left of the tensor the last time; the first time, a pass finds its maximum."""
    state = {} if state is None else state
    if "amax" not in state:
        state["amax"] = xp.zeros(5, dtype=xp.uint32)
        quantize_operand.find_amax(x, spec, state["amax"])
    return state["amax"]


def _wide(x: Array, specs: Sequence[QuantSpec], streams: Streams, xp: Any) -> Prepared:
    """Other MX formats as bfloat16, and flags for values that it cuts."""
    # Two more counters make the flags, so that one array is all that has to be zero.
    counters = Counters(len(specs) * (_SLOTS + 1), xp)
    held = counters.array[len(specs) * _SLOTS :]
    sides: list[Side] = []
    made: Prepared = []
    for i, (spec, stream) in enumerate(zip(specs, streams, strict=True)):
        start, stop = i * _SLOTS, (i + 1) * _SLOTS
        out, flag = _empty(x, spec.axis, xp.uint16, xp), held[i : i + 1].view(np.uint32)[0]
        sides.append(Side(spec, stream, out, flag, counters.array[start:stop]))
        counts = OperandCounts(counters, (start, stop), x.size, flag)
        made.append((GemmOperand(out, "bf16"), counts))
    quantize_operand.launch_fused(x, sides)
    return made


def _rebased(x: Array, specs: Sequence[QuantSpec], streams: Streams, xp: Any) -> Prepared:
    """MXFP8 with a power of two for each 128 x 128, and counts that include what changed."""
    counters = Counters(2 * len(specs) * _SLOTS, xp)  # saturated and flushed; changed and flushed
    sides: list[Side] = []
    made: Prepared = []
    for i, (spec, stream) in enumerate(zip(specs, streams, strict=True)):
        start, middle, stop = (2 * i * _SLOTS, (2 * i + 1) * _SLOTS, 2 * (i + 1) * _SLOTS)
        out, blocks = _empty(x, spec.axis, xp.uint8, xp), _tile_scales(x, spec, xp)
        sides.append(Side(spec, stream, out, None, counters.array[start:], blocks))
        scale = Scale(blocks=blocks, group_k=REBASE_TILE)
        operand = GemmOperand(out, spec.row.element.name, scale)
        changed = counters, (middle, stop)
        made.append((operand, OperandCounts(counters, (start, middle), x.size, rebased=changed)))
    quantize_operand.launch_fused(x, sides)
    return made


def _tile_scales(x: Array, spec: QuantSpec, xp: Any) -> Array:
    """Where the scales of 128 x 128 go: float32 (tiles along K, pitch).

    One for every `ROWS_PER_SCALE` rows, as the GEMM reads them, and what it may read behind the
    last.
    """
    rows, k = x.shape if spec.axis == 1 else x.shape[::-1]
    pitch = -(-rows // REBASE_TILE) * (REBASE_TILE // ROWS_PER_SCALE) + _BEHIND
    return xp.empty((-(-k // REBASE_TILE), pitch), dtype=np.float32)


def run_batch(preparations: Sequence[GemmPreparation], xp: Any) -> list[Prepared]:
    """Run preparations of one ``batch_key`` in one launch: what ``run`` of each gives."""
    specs, first = preparations[0].plans, preparations[0].x
    count, per_matrix = len(preparations), len(specs)
    counters = Counters(count * per_matrix * _SLOTS, xp)
    flags, exponents = xp.empty(count * per_matrix, np.uint32), xp.empty(count, np.int32)
    table = np.zeros(count, quantize_operand.MATRIX)
    tiles, made = 0, []
    for i, preparation in enumerate(preparations):
        x, exponent, row = preparation.x, exponents[i : i + 1], table[i]
        state = _amax_state(x, specs[0], xp, preparation.amax_state)
        row["x"], row["history"] = x.data.ptr, state.data.ptr
        row["exponent"], row["start"] = exponent.data.ptr, tiles
        row["rows"], row["columns"] = x.shape
        tiles += quantize_operand.tiles_of(x, wide=False)
        mine: Prepared = []
        for spec in specs:
            at = i * per_matrix + len(mine)
            out, flag = _empty(x, spec.axis, xp.uint8, xp), flags[at]
            name = "along" if spec.axis == 1 else "down"
            row[name], row[f"{name}_flag"] = out.data.ptr, flag.data.ptr
            row[f"{name}_counts"] = counters.array[at * _SLOTS :].data.ptr
            counts = OperandCounts(counters, (at * _SLOTS, (at + 1) * _SLOTS), x.size)
            mine.append((_e5m2_operand(x, Side(spec, None, out, flag), exponent, xp), counts))
        made.append(mine)
    axes = [spec.axis for spec in specs]
    source = quantize_operand.fused_source(
        specs[0], first.dtype.name, 1 in axes, 0 in axes, False, many=True
    )
    held = table.view(np.uint8)
    there = counters.capture.persistent(held) if counters.capture else xp.asarray(held)
    quantize_operand.launch_batch(source, there, count, tiles, first.itemsize)
    return made


# --- 8-bit formats under float scales ---


def _float_scaled_supports(x: Array, spec: QuantSpec) -> QuantSpec | Unsupported:
    if x.ndim != 2 or not x.size or max(x.shape) > 1 << 30:
        return Unsupported(f"shape {x.shape}")
    return _float_scaled_spec(spec, tuple(x.shape))


@lru_cache(maxsize=4096)
def _float_scaled_spec(spec: QuantSpec, shape: tuple[int, ...]) -> QuantSpec | Unsupported:
    element, k = spec.row.element, shape[spec.axis]
    if not spec.has_float_scales or spec.row.outliers or element.bits != 8:
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
    if not element.is_float and k > MOST_TERMS:
        return Unsupported(f"K = {k}, beyond {MOST_TERMS}")
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
        done = quantizer.quantize_raw(x, plan, stream, xp)
        q, counters = done.q, done.counters
        assert q is not None and counters is not None
        flags = xp.zeros(2, dtype=np.uint32)  # FP8, and bfloat16, does not hold every value
        kind, _ = held_by(plan.spec)
        operand = expand(q, kind, flags[1:] if kind == "bf16" else flags[:1], xp)
        if kind != "bf16":

            def make_bf16(guards: Sequence[Array], q: Any = q, flags: Any = flags) -> GemmOperand:
                return expand(q, "bf16", flags[1:], xp, guards)

            operand = GemmOperand(
                operand.codes,
                kind,
                operand.scale,
                flag=flags[:1].reshape(()),
                make_bf16=make_bf16,
            )
        cut = flags[1:].reshape(())
        made.append((operand, OperandCounts(counters, (0, _SLOTS), plan.count, cut)))
    return made


# --- not quantized ---


def _bf16_supports(x: Array, spec: CastSpec) -> CastSpec | Unsupported:
    return spec if spec.dtype == "bfloat16" else Unsupported(f"{spec.dtype} operands")


def _bf16(x: Array, specs: Sequence[CastSpec], streams: Streams, xp: Any, state: State) -> Prepared:
    bits = round_to_bf16(x, xp)
    return [(GemmOperand(bits, "bf16", transposed=spec.axis == 0), None) for spec in specs]


FUSED = Preparer("fused", "fused kernel", False, True, _fused_supports, _fused)
FLOAT_SCALES = Preparer(
    "float scales", "scaled kernel", False, False, _float_scaled_supports, _float_scaled
)
EXPANDED = Preparer("expanded", "expanded", False, False, _expanded_supports, _expanded)
BF16 = Preparer("bf16", "fused kernel", True, True, _bf16_supports, _bf16)
PREPARERS = (FUSED, FLOAT_SCALES, EXPANDED, BF16)
"""In the order in which they are asked."""
