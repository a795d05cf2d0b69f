"""Operands that the fused kernel makes at once: quantized and written as the GEMM reads them.

A matrix is read once, and no packed storage is written. MXFP4 becomes E5M2 under one power of two,
MXFP8 that is rebased its own codes under a power of two for each 128 x 128, other MX formats
bfloat16. The power of two of MXFP4 comes from the largest magnitude that the same tensor of the
same layer had the last time (delayed scaling), with `AMAX_MARGIN` binades to grow; the first time
another pass looks for it. So no value depends on the amax state, only whether E5M2 or bfloat16 is
multiplied. Nothing waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from extensor.backends.unsupported import Unsupported
from extensor.quant.scale_rules import E8M0_NAN
from extensor.quant.spec import REBASE_TILE, QuantSpec
from extensor.random import Stream
from extensor_cuda.kernels.gemm.config import ROWS_PER_SCALE
from extensor_cuda.kernels.prepare import quantize_operand
from extensor_cuda.kernels.prepare.quantize_operand import Side
from extensor_cuda.kernels.quantize import quantize as quantizer
from extensor_cuda.matmul.operand import GemmOperand, Prepared, Scale
from extensor_cuda.matmul.rebase import is_mxfp4
from extensor_cuda.runtime.counters import Counters, OperandCounts
from extensor_cuda.runtime.memory import lasting

__all__ = ["batch_key", "plan_of_pack", "run", "run_batch", "supports"]

Array = Any
Streams = Sequence[Stream | None]
State = dict[str, Any] | None

_SLOTS = 2 * quantizer.SLOTS
_BEHIND = 64  # floats that may be read behind the last row's: a tile's width


def supports(x: Array, spec: QuantSpec) -> QuantSpec | Unsupported:
    """The spec, or why the kernel does not make such an operand of x."""
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
    if spec.transform or spec.scale_window is not None or spec.kernel_gap:
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
    one_launch = len(specs) == 1 or _transposes(specs[0], specs[1])
    return one_launch and all(is_mxfp4(s) and s.rounding != "stochastic" for s in specs)


def batch_key(specs: Sequence[Any], dtype: str) -> Hashable | None:
    """What matrices that go in one launch have in common; None: each is a launch of its own."""
    key = tuple(specs)
    return (key, dtype) if _batches(key) else None


def plan_of_pack(spec: QuantSpec, shape: tuple[int, ...]) -> quantizer.Plan | None:
    """The plan of packed storage, where the operand's codes are not all that it needs: E5M2's."""
    if spec.rebased or not is_mxfp4(spec):
        return None
    plan = quantizer.plan_of(spec, shape)
    assert not isinstance(plan, Unsupported), plan  # as `supports` has found
    return plan


def run(x: Array, specs: Sequence[QuantSpec], streams: Streams, xp: Any, state: State) -> Prepared:
    """Operands of a contiguous matrix under one spec, or one of rows and one of columns.

    It is one that `supports` each spec, which is resolved and has a stream, given exactly under
    stochastic rounding. The state is the tensor's amax state, from the call before; None: nothing
    is known of it.
    """
    if len(specs) == 2 and not _transposes(specs[0], specs[1]):
        sides = zip(specs, streams, strict=True)
        return [run(x, [spec], [stream], xp, None)[0] for spec, stream in sides]
    return _run_one_launch(x, specs, streams, xp, state)


def _empty(x: Array, axis: int, dtype: Any, xp: Any) -> Array:
    """What an operand's codes, or its values as bfloat16, are written to."""
    rows, k = x.shape if axis == 1 else x.shape[::-1]
    padded = -(-k // 16) * 16  # whole chunks are written
    return xp.empty((rows, padded), dtype=dtype)[:, :k]


def _run_one_launch(
    x: Array, specs: Sequence[QuantSpec], streams: Streams, xp: Any, state: State
) -> Prepared:
    """Operands of one launch.

    MXFP4 becomes E5M2 under one power of two; MXFP8 that is rebased has a power of two for each
    128 x 128, and counts that include what changed; other MX formats become bfloat16, with flags
    for values that it cuts.
    """
    number, rebased = len(specs), specs[0].rebased
    mxfp4 = is_mxfp4(specs[0]) and not rebased
    wide = not (mxfp4 or rebased)
    each = 2 * _SLOTS if rebased else _SLOTS  # saturated and flushed; changed and flushed
    # Counters more are the flags of bfloat16, so that one array is all that has to be zero.
    counters = Counters(number * (each + wide), xp)
    flags = counters.array[number * each :] if wide else xp.empty(number, dtype=np.uint64)
    exponent = xp.empty(1, dtype=xp.int32) if mxfp4 else None
    sides: list[Side] = []
    made: Prepared = []
    for i, (spec, stream) in enumerate(zip(specs, streams, strict=True)):
        start, middle, stop = i * each, i * each + _SLOTS, (i + 1) * each
        out = _empty(x, spec.axis, xp.uint16 if wide else xp.uint8, xp)
        flag = None if rebased else flags[i : i + 1].view(np.uint32)[0]
        blocks = _tile_scales(x, spec, xp) if rebased else None
        sides.append(Side(spec, stream, out, flag, counters.array[start:stop], blocks))
        if exponent is not None:
            operand = _e5m2_operand(x, sides[i], exponent, xp)
        elif rebased:
            scale = Scale(blocks=blocks, group_k=REBASE_TILE)
            operand = GemmOperand(out, spec.row.element.name, scale)
        else:
            operand = GemmOperand(out, "bf16")
        changed = (counters, (middle, stop)) if rebased else None
        cut = flag if wide else None
        made.append((operand, OperandCounts(counters, (start, middle), x.size, cut, changed)))
    amax = _amax_state(x, specs[0], xp, state) if mxfp4 else None
    quantize_operand.launch_fused(x, sides, exponent, amax)
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
        with lasting():
            state["amax"] = xp.zeros(5, dtype=xp.uint32)
        quantize_operand.find_amax(x, spec, state["amax"])
    return state["amax"]


def _tile_scales(x: Array, spec: QuantSpec, xp: Any) -> Array:
    """Where the scales of 128 x 128 go: float32 (tiles along K, pitch).

    One for every `ROWS_PER_SCALE` rows, as the GEMM reads them, and what it may read behind the
    last.
    """
    rows, k = x.shape if spec.axis == 1 else x.shape[::-1]
    pitch = -(-rows // REBASE_TILE) * (REBASE_TILE // ROWS_PER_SCALE) + _BEHIND
    return xp.empty((-(-k // REBASE_TILE), pitch), dtype=np.float32)


def run_batch(
    xs: Sequence[Array], specs: Sequence[QuantSpec], states: Sequence[State], xp: Any
) -> list[Prepared]:
    """Operands of several matrices of one `batch_key` in one launch: what `run` of each gives."""
    count, per_matrix, first = len(xs), len(specs), xs[0]
    counters = Counters(count * per_matrix * _SLOTS, xp)
    flags, exponents = xp.empty(count * per_matrix, np.uint32), xp.empty(count, np.int32)
    table = np.zeros(count, quantize_operand.MATRIX)
    tiles, made = 0, []
    for i, (x, state) in enumerate(zip(xs, states, strict=True)):
        exponent, row = exponents[i : i + 1], table[i]
        amax = _amax_state(x, specs[0], xp, state)
        row["x"], row["amax_state"] = x.data.ptr, amax.data.ptr
        row["exponent"], row["start"] = exponent.data.ptr, tiles
        row["rows"], row["columns"] = x.shape
        tiles += quantize_operand.tiles_of(x, wide=False)
        mine: Prepared = []
        for spec in specs:
            at = i * per_matrix + len(mine)
            out, flag = _empty(x, spec.axis, xp.uint8, xp), flags[at]
            name = "rowwise" if spec.axis == 1 else "columnwise"
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
