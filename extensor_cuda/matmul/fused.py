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
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from extensor.backends.unsupported import Unsupported
from extensor.quant.array import QuantArray
from extensor.quant.scale_rules import E8M0_NAN, E8M0_SEARCHES
from extensor.quant.spec import REBASE_TILE, QuantSpec
from extensor.random import Stream
from extensor_cuda.kernels.gemm.config import ROWS_PER_SCALE
from extensor_cuda.kernels.prepare import quantize_operand
from extensor_cuda.kernels.prepare.quantize_operand import Side, fused_source
from extensor_cuda.kernels.quantize import quantize as quantizer
from extensor_cuda.matmul.operand import GemmOperand, Part, Prepared, Scale, bf16_rows
from extensor_cuda.matmul.rebase import is_mxfp4
from extensor_cuda.runtime.capture import current_capture
from extensor_cuda.runtime.counters import Counters, OperandCounts
from extensor_cuda.runtime.memory import lasting

__all__ = [
    "batch_key",
    "nbytes",
    "packs_columns",
    "pitch",
    "plan_of_pack",
    "restored",
    "run",
    "run_batch",
    "run_packing",
    "spec_for",
    "supports",
]

Array = Any
Streams = Sequence[Stream | None]
State = dict[str, Any] | None

_SLOTS = 2 * quantizer.SLOTS
_BEHIND = 64  # floats that may be read behind the last row's: a tile's width
_NUMBERS = 8  # bytes behind E5M2 codes: the exponent and the flag


def supports(x: Array, spec: QuantSpec) -> QuantSpec | Unsupported:
    """The spec, or why the kernel does not make such an operand of x."""
    if x.strides != (x.shape[-1] * x.itemsize, x.itemsize) or x.strides[0] % 16 or x.data.ptr % 16:
        return Unsupported(
            f"strides {x.strides}; the kernel reads contiguous rows, multiples of 16 bytes"
        )
    return spec_for(spec, x.dtype.name, tuple(x.shape))


@lru_cache(maxsize=4096)
def spec_for(spec: QuantSpec, dtype: str, shape: tuple[int, ...]) -> QuantSpec | Unsupported:
    """The spec, or why the kernel makes no operand of any array of this dtype and shape."""
    element = spec.row.element
    if element.bits == 6:
        return Unsupported(f"FP8 holds {spec.format}; operands made at once are MXFP4 or bfloat16")
    if not (spec.is_mx and spec.tile == (1, 32)) or element.bits > 8:
        return Unsupported(
            f"{spec.row.name} in tiles {spec.tile}; the kernel makes MX formats in (1, 32)"
        )
    if spec.transform or spec.scale_window is not None or spec.kernel_gap:
        return Unsupported("a transform, a scale window or outliers")
    if spec.rule in E8M0_SEARCHES:
        return Unsupported(f"the {spec.rule} scale rule, which reads values twice")
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
    """The plan of packed storage, where the operand needs it (E5M2's) or is larger (bfloat16)."""
    if spec.rebased:
        return None
    plan = quantizer.plan_of(spec, shape)
    assert not isinstance(plan, Unsupported), plan  # as `supports` has found
    return plan


@lru_cache(maxsize=1024)
def packs_columns(specs: tuple[QuantSpec, ...], dtype: str) -> bool:
    """Whether `run_packing` makes a matrix's rows and columns: MXFP4 of bfloat16."""
    if len(specs) != 2 or specs[0].axis != 1 or not _transposes(*specs) or not is_mxfp4(specs[0]):
        return False
    return dict(fused_source(specs[0], dtype, True, True, False).macros)["CODEC_BF16X8"] == "1"


def run_packing(
    x: Array, specs: Sequence[QuantSpec], streams: Streams, xp: Any, state: State
) -> tuple[tuple[GemmOperand, OperandCounts], tuple[QuantArray, Counters]]:
    """The operand of rows with its counts, and packed columns with the counters of both.

    The columns' counters are the second half. X is read once; else as `run`.
    """
    counters = Counters(2 * _SLOTS, xp)
    rows, columns = counters.array[:_SLOTS], counters.array[_SLOTS:]
    plan = plan_of_pack(specs[1], tuple(x.shape))
    assert plan is not None
    carved, q = _carve(x, specs[0], xp), quantizer.empty_array(plan, xp)
    sides = (
        Side(specs[0], streams[0], carved.codes, carved.flag, rows),
        Side(specs[1], streams[1], q.codes, None, columns, q.scales, packed=True),
    )
    quantize_operand.launch_fused(x, sides, carved.exponent, _amax_state(x, specs[0], xp, state))
    operand = carved.operand(x, specs[0], streams[0], carved.exponent, xp)
    return (operand, OperandCounts(counters, (0, _SLOTS), x.size)), (q, counters)


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


def _sizes(x: Array, axis: int) -> tuple[int, int]:
    """Rows and K of an operand of x."""
    rows, k = x.shape if axis == 1 else x.shape[::-1]
    return rows, k


def _padded(k: int) -> int:
    """What an operand's rows hold: whole chunks of 16 are written."""
    return -(-k // 16) * 16


def _empty(x: Array, axis: int, dtype: Any, xp: Any) -> Array:
    """What an operand's codes, or its values as bfloat16, are written to."""
    rows, k = _sizes(x, axis)
    return xp.empty((rows, _padded(k)), dtype=dtype)[:, :k]


# --- FP8 operands in one allocation ---


MXFP4, REBASED = 1, 2
"""Kinds of FP8 operands in one allocation."""


def kind_of(spec: QuantSpec) -> int:
    """`MXFP4` or `REBASED`; 0: the kernel makes no FP8 operand under the spec.

    >>> from extensor_cuda.matmul.fused import kind_of
    >>> [kind_of(QuantSpec(name, axis=1).resolve(2)) for name in ("mxfp4", "mxfp8_e4m3")]
    [1, 0]
    """
    if isinstance(spec_for(spec, "bfloat16", (32, 32)), Unsupported):
        return 0
    return REBASED if spec.rebased else MXFP4 if is_mxfp4(spec) else 0


def nbytes(kind: int, rows: int, k: int) -> int:
    """Bytes of an FP8 operand (rows, K): codes, then a number and a flag, or scales of tiles.

    The sizes may be symbols.

    >>> from extensor_cuda.matmul.fused import MXFP4, nbytes
    >>> nbytes(MXFP4, 64, 100)
    7176
    """
    if kind == REBASED:
        return rows * _padded(k) + 4 * -(-k // REBASE_TILE) * pitch(rows)
    return rows * _padded(k) + _NUMBERS


def pitch(rows: int) -> int:
    """Floats from the scales of one 128 along K to those of the next.

    One for every `ROWS_PER_SCALE` rows, as the GEMM reads them, and what it may read behind the
    last.
    """
    return -(-rows // REBASE_TILE) * (REBASE_TILE // ROWS_PER_SCALE) + _BEHIND


@dataclass(frozen=True, eq=False)
class _Carved:
    """An FP8 operand's arrays in their one allocation; None where the spec has none."""

    buffer: Array
    codes: Array
    exponent: Array | None = None
    flag: Array | None = None
    blocks: Array | None = None

    @classmethod
    def of(cls, buffer: Array, spec: QuantSpec, rows: int, k: int) -> _Carved:
        width = _padded(k)
        codes = buffer[: rows * width].reshape(rows, width)[:, :k]
        behind = buffer[rows * width :]
        if spec.rebased:
            blocks = behind.view(np.float32).reshape(-1, pitch(rows))
            return cls(buffer, codes, blocks=blocks)
        numbers = behind[:8].view(np.uint32)
        return cls(buffer, codes, numbers[:1].view(np.int32), numbers[1:].reshape(()))

    def operand(
        self, x: Array, spec: QuantSpec, stream: Stream | None, exponent: Array | None, xp: Any
    ) -> GemmOperand:
        """The operand, which remembers x: the same values as bfloat16 on request."""
        if self.blocks is not None:
            scale = Scale(blocks=self.blocks, group_k=REBASE_TILE)
            return GemmOperand(self.codes, spec.row.element.name, scale, buffer=self.buffer)
        operand = _e5m2_operand(x, Side(spec, stream, self.codes, self.flag), exponent, xp)
        return replace(operand, buffer=self.buffer)


def restored(
    buffer: Array, x: Array, spec: QuantSpec, stream: Stream | None, xp: Any
) -> GemmOperand:
    """An FP8 operand again, from its ``buffer`` and what it was made of."""
    carved = _Carved.of(buffer, spec, *_sizes(x, spec.axis))
    return carved.operand(x, spec, stream, carved.exponent, xp)


# --- launches ---


def _run_one_launch(
    x: Array, specs: Sequence[QuantSpec], streams: Streams, xp: Any, state: State
) -> Prepared:
    """Operands of one launch.

    MXFP4 becomes E5M2 under one power of two; MXFP8 that is rebased has a power of two for each
    128 x 128, and counts that include what changed; other MX formats become bfloat16, with flags
    for values that it cuts.
    """
    number, rebased = len(specs), specs[0].rebased
    wide = not (rebased or is_mxfp4(specs[0]))
    each = 2 * _SLOTS if rebased else _SLOTS  # saturated and flushed; changed and flushed
    # Counters more are the flags of bfloat16, so that one array is all that has to be zero.
    counters = Counters(number * (each + wide), xp)
    carved = [] if wide else [_carve(x, spec, xp) for spec in specs]
    exponent = carved[-1].exponent if carved else None  # a launch writes one
    sides: list[Side] = []
    made: Prepared = []
    for i, (spec, stream) in enumerate(zip(specs, streams, strict=True)):
        start, middle, stop = i * each, i * each + _SLOTS, (i + 1) * each
        count, cut = counters.array[start:stop], None
        if carved:
            one = carved[i]
            sides.append(Side(spec, stream, one.codes, one.flag, count, one.blocks))
            operand = one.operand(x, spec, stream, exponent, xp)
        else:
            cut = counters.array[number * each + i :][:1].view(np.uint32)[0]
            sides.append(Side(spec, stream, _empty(x, spec.axis, xp.uint16, xp), cut, count))
            operand = GemmOperand(sides[i].out, "bf16")
        changed = (counters, (middle, stop)) if rebased else None
        made.append((operand, OperandCounts(counters, (start, middle), x.size, cut, changed)))
    amax = None if exponent is None else _amax_state(x, specs[0], xp, state)
    quantize_operand.launch_fused(x, sides, exponent, amax)
    return made


def _carve(x: Array, spec: QuantSpec, xp: Any) -> _Carved:
    rows, k = _sizes(x, spec.axis)
    return _Carved.of(xp.empty(nbytes(kind_of(spec), rows, k), dtype=np.uint8), spec, rows, k)


def _e5m2_operand(x: Array, side: Side, exponent: Array | None, xp: Any) -> GemmOperand:
    """An operand that remembers what it was made from: the same values as bfloat16 on request."""
    spec, stream = side.spec, side.stream

    def make_bf16(
        x: Array, guards: Sequence[Array], part: Part = None, memory: Array | None = None
    ) -> GemmOperand:
        guards = guards or [xp.ones((), dtype=np.uint32)] * 2
        rows, k = _sizes(x, spec.axis)
        first, last = part or (0, rows)
        out = bf16_rows(xp, last - first, k, memory)[:, :k]
        quantize_operand.launch_fused(x, [Side(spec, stream, out)], guards=guards, part=part)
        return GemmOperand(out, "bf16")

    return GemmOperand(
        side.out,
        "e5m2",
        Scale(exponent),
        flag=side.flag,
        reads_source=True,
        source=x,
        make_bf16=make_bf16,
    )


def _amax_state(x: Array, spec: QuantSpec, xp: Any, state: State) -> Array:
    """What was left of the tensor the last time; the first time, a pass finds its maximum."""
    state = {} if state is None else state
    if "amax" not in state:
        with lasting():
            state["amax"] = xp.zeros(5, dtype=xp.uint32)
        quantize_operand.find_amax(x, spec, state["amax"])
    return state["amax"]


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
    capture = current_capture()
    there = xp.asarray(held) if capture is None else capture.persistent(held)
    quantize_operand.launch_batch(source, there, count, tiles, first.itemsize)
    return made
