"""Operands of training's products: quantized to MXFP4 and written as FP8 at once, on Hopper.

A matrix is read once and quantized along its rows, down its columns or both; what is written are
E5M2 codes under one power of two (`kernels/prepare/quantize_operand.cu`), contraction contiguous,
and no packed
storage. The power of two comes from the largest magnitude that the same tensor of the same layer
had the last time, with four binades to grow; the first time another pass looks for it.

The product of two such operands runs on the FP8 tensor cores with the bound that
`extensor_cuda.gemm` states, unless a block lies outside the window of 29 binades: that is decided
on the device, where both ways are launched and one of them ends at once. The other way quantizes
the same values with the same random bits to bfloat16, which holds them exactly. So no value depends
on what was known of the tensor, only the way. Nothing here waits for the GPU.

MXFP8 under a spec with ``rebased`` is written as its own FP8 codes, a power of two for each square
of 128 x 128 (`extensor_cuda.near`). Other MX formats are quantized to bfloat16 at once. It holds
their values exactly but for those below 2**-126 or so; that one was cut is warned of when the
counts are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from extensor.backends.unsupported import Unsupported
from extensor.quant.scale_rules import E8M0_NAN
from extensor.quant.spec import REBASE_TILE, QuantSpec
from extensor.random import Stream
from extensor_cuda import tuned
from extensor_cuda.dense import Dense, add_parts, empty_parts
from extensor_cuda.gemm import SPAN, TOP
from extensor_cuda.kernels.gemm.gemm_sm90 import (
    Flags,
    Split,
    configure,
    configure_parts,
    empty_rows,
    gemm,
)
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.near import Square, squares
from extensor_cuda.runtime.capture import clock_of
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.counters import Counters, OperandCounts
from extensor_cuda.runtime.launch import launch

__all__ = [
    "LEAST_WORK",
    "Operand",
    "joinable_specs",
    "make",
    "make_each",
    "multiply",
    "operand_source",
    "reason",
]

Array = Any
Streams = Sequence[Stream | None]

LEAST_WORK = 1 << 30
"""M N K below which a product is left to cupy: launches take longer than it."""
_MARGIN = 4  # binades that a tensor may grow between two steps
_COLUMNS, _GUARDED_BLOCKS, _AMAX_BLOCKS = 128, 264, 1056
_MATRIX = np.dtype(
    [(name, np.uint64) for name in ("x", "history", "along", "down", "exponent")]
    + [(f"{side}_flag", np.uint64) for side in ("along", "down")]
    + [(f"{side}_counts", np.uint64) for side in ("along", "down")]
    + [(name, np.int64) for name in ("rows", "columns", "start")]
    + [(f"{side}_scales", np.uint64) for side in ("along", "down")]
)
"""`Matrix` of quantize_operand.cu."""
_FOLDER = Path(__file__).parent / "kernels" / "prepare"
_OUT = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


@dataclass(frozen=True, eq=False)
class Operand:
    """A matrix as a product takes it: (rows, K), whatever the axis that it was blocked along.

    Attributes:
        codes: uint8, E5M2, rows a multiple of 16 bytes apart.
        exponent: int32 (1,): the values are the codes' times two to it.
        flag: uint32 of shape (): set where a block lies outside the window.
        x, spec, stream: what it was made of.
    """

    codes: Array
    exponent: Array
    flag: Array
    x: Array
    spec: QuantSpec
    stream: Stream | None

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, K)."""
        rows, k = self.codes.shape
        return rows, k

    def wide(self, guards: Sequence[Array], xp: Any) -> Array:
        """The values as bfloat16 bits, (rows, K); not written unless one of two flags is set."""
        rows, k = self.shape
        out = xp.empty((rows, -(-k // 16) * 16), dtype=xp.uint16)
        _launch(self.x, [self.spec], [self.stream], [out], xp, guards=guards)
        return out[:, :k]


def reason(x: Array, spec: QuantSpec, work: int, capability: str) -> str | None:
    """Why x, blocked by a resolved spec, is not made such an operand; None if it is.

    Args:
        x: matrix.
        spec: how it is quantized.
        work: M N K of the product.
        capability: compute capability of the GPU, such as "90".
    """
    if refused := tuned.refusal("made at once", work, capability, LEAST_WORK):
        return refused
    if x.strides != (x.shape[-1] * x.itemsize, x.itemsize) or x.strides[0] % 16 or x.data.ptr % 16:
        return f"strides {x.strides}; the kernel reads contiguous rows, multiples of 16 bytes"
    return _reason(spec, x.dtype.name, tuple(x.shape))


@lru_cache(maxsize=4096)
def _reason(spec: QuantSpec, dtype: str, shape: tuple[int, ...]) -> str | None:
    element = spec.row.element
    if not (spec.is_mx and spec.tile == (1, 32)) or element.bits > 8:
        return f"{spec.row.name} in tiles {spec.tile}; the kernel makes MX formats in (1, 32)"
    if spec.transform or spec.scale_window is not None or spec.row.outliers:
        return "a transform, a scale window or outliers"
    if dtype not in kernels.INPUTS or len(shape) != 2 or max(shape) > 1 << 30:
        return f"{dtype} array of shape {shape}"
    if spec.rebased and spec.dialect_row.inf_byte_in(element) != E8M0_NAN:
        return f"the infinities of dialect {spec.dialect}"
    plan = kernels.plan_of(spec.replace(rebased=False), shape)
    return plan.reason if isinstance(plan, Unsupported) else None


@lru_cache(maxsize=256)
def operand_source(
    spec: QuantSpec,
    dtype: str,
    along: bool,
    down: bool,
    wide: bool,
    stats: bool = True,
    many: bool = False,
) -> Source:
    """The program that makes operands.

    Args:
        spec: resolved for a matrix; its axis does not matter.
        dtype: of the input.
        along: whether rows are made.
        down: whether columns are.
        wide: bfloat16 values instead of E5M2 codes.
        stats: whether saturated and flushed values are counted.
        many: several matrices in one launch.
    """
    plan = kernels.plan_of(spec.replace(axis=1, rebased=False), (256, 256))
    assert isinstance(plan, kernels.Plan), plan
    common = kernels.quantize_source(plan, dtype, "values" if wide else "codes", True, stats)
    macros = dict(common.macros) | {
        "ALONG": int(along),
        "DOWN_TOO": int(down),
        "WIDE": int(wide),
        "NEAR": int(spec.rebased),
        "MANY": int(many),
        "LIFT": TOP,  # TOP is the element's largest value here
        "SPAN": SPAN,
        "MARGIN": _MARGIN,
        "RESIDENT": _resident(spec, dtype, wide),
    }
    return Source.read(_FOLDER / "quantize_operand.cu", macros)


def _resident(spec: QuantSpec, dtype: str, wide: bool) -> int:
    """Blocks of threads of a multiprocessor: as many as leave them registers without spilling."""
    if spec.rebased and dtype != "float32":
        return 3 if spec.rounding == "stochastic" else 4
    return 4 if wide else 5 if dtype == "float32" else 3


def _tile_rows(x: Array, wide: bool) -> int:
    """Rows of a tile, as in quantize_operand.cu: half as many as a block has threads."""
    return 128 if x.itemsize == 2 and not wide else 64


def _tiles(x: Array, wide: bool) -> int:
    rows, columns = x.shape
    return -(-rows // _tile_rows(x, wide)) * -(-columns // _COLUMNS)


def _launch(
    x: Array,
    specs: Sequence[QuantSpec],
    streams: Streams,
    outs: Sequence[Array],
    xp: Any,
    exponent: Array | None = None,
    flags_of: Sequence[Array] = (),
    counts_of: Sequence[Array] = (),
    history: Array | None = None,
    guards: Sequence[Array] = (),
    scales_of: Sequence[Array] = (),
) -> None:
    """Run the kernel for one spec or two, of rows (axis 1) and of columns (axis 0)."""
    null = np.uint64(0)
    place = {spec.axis: i for i, spec in enumerate(specs)}
    wide = outs[0].itemsize == 2
    source = operand_source(
        specs[0], x.dtype.name, 1 in place, 0 in place, wide, not (wide and guards)
    )
    codes = [outs[place[axis]] if axis in place else null for axis in (1, 0)]
    flags, counts, scales = (
        [given[place[axis]] if given and axis in place else null for axis in (1, 0)]
        for given in (flags_of, counts_of, scales_of)
    )
    words: list[int] = []
    for axis in (1, 0):
        stream = streams[place[axis]] if axis in place else None
        words += (0, 0, 0, 0) if stream is None else (*stream.key, *stream.counter_high)
    rows, columns = x.shape
    tiles = -(-rows // REBASE_TILE) * -(-columns // _COLUMNS) if scales_of else _tiles(x, wide)
    launch(
        source,
        "operands",
        min(tiles, _GUARDED_BLOCKS) if guards else tiles,
        2 * _tile_rows(x, wide),
        x,
        null if history is None else history,
        *codes,
        null if exponent is None else exponent,
        *flags,
        *scales,
        *counts,
        *(guards or (null, null)),
        clock_of(streams),
        *(np.uint32(word) for word in words),
        np.int64(rows),
        np.int64(columns),
    )


def make(
    x: Array,
    specs: Sequence[QuantSpec],
    streams: Streams,
    xp: Any,
    memory: dict[str, Array] | None = None,
) -> list[tuple[Operand | Dense | Square, OperandCounts]]:
    """Operands of x under one spec, or under one along rows and one down columns, and their counts.

    Does not wait.

    Args:
        x: contiguous matrix that `reason` covers.
        specs: resolved; two differ in their axis alone.
        streams: one per spec, given exactly under stochastic rounding.
        xp: cupy.
        memory: the tensor's own, from the call before; None: nothing is known of it.
    """
    if specs[0].rebased:
        return _make_near(x, specs, streams, xp)
    wide = not _is_mxfp4(specs[0])
    slots = 2 * kernels.SLOTS
    parts = [(i * slots, (i + 1) * slots) for i in range(len(specs))]
    # Of wide operands two more counters make the flags, so that one array is all that has to be
    # zero; the others' are written whatever they held.
    counters = Counters(len(specs) * (slots + wide), xp)
    flags = counters.array[len(specs) * slots :] if wide else xp.empty(len(specs), dtype=np.uint64)
    flags = [flags[i : i + 1].view(np.uint32)[0] for i in range(len(specs))]
    counts = [counters.array[start:stop] for start, stop in parts]
    outs = [_empty(x, spec, xp) for spec in specs]
    if wide:
        _launch(x, specs, streams, outs, xp, flags_of=flags, counts_of=counts)
        return [
            (Dense(out), OperandCounts(counters, part, x.size, flag))
            for out, part, flag in zip(outs, parts, flags, strict=True)
        ]
    exponent = xp.empty(1, dtype=xp.int32)
    history = _history(x, specs[0], xp, memory)
    _launch(x, specs, streams, outs, xp, exponent, flags, counts, history)
    return [
        (Operand(out, exponent, flag, x, spec, stream), OperandCounts(counters, part, x.size))
        for out, flag, spec, stream, part in zip(outs, flags, specs, streams, parts, strict=True)
    ]


def _make_near(
    x: Array, specs: Sequence[QuantSpec], streams: Streams, xp: Any
) -> list[tuple[Operand | Dense | Square, OperandCounts]]:
    """The same of MXFP8 near-exactly, as FP8 and counts that include what changed."""
    slots, sides = 2 * kernels.SLOTS, range(len(specs))
    counters = Counters(2 * len(specs) * slots, xp)  # saturated and flushed; changed and flushed
    counts = [counters.array[2 * i * slots :] for i in sides]
    outs, grids = [_empty(x, spec, xp) for spec in specs], [squares(x, spec, xp) for spec in specs]
    _launch(x, specs, streams, outs, xp, counts_of=counts, scales_of=grids)
    return [
        (
            Square(outs[i], grids[i], specs[i].row.element.name),
            OperandCounts(
                counters,
                (2 * i * slots, (2 * i + 1) * slots),
                x.size,
                rebased=(counters, ((2 * i + 1) * slots, 2 * (i + 1) * slots)),
            ),
        )
        for i in sides
    ]


def _empty(x: Array, spec: QuantSpec, xp: Any) -> Array:
    """What an operand's codes, or its values as bfloat16, are written to."""
    rows, k = x.shape if spec.axis == 1 else x.shape[::-1]
    padded = -(-k // 16) * 16  # whole chunks are written
    octets = xp.uint8 if spec.rebased or _is_mxfp4(spec) else xp.uint16
    return xp.empty((rows, padded), dtype=octets)[:, :k]


def joinable_specs(specs: Sequence[QuantSpec]) -> bool:
    """Whether `make_each` makes operands under these specs: MXFP4, rounded to nearest."""
    return all(_is_mxfp4(spec) and spec.rounding != "stochastic" for spec in specs)


def make_each(
    xs: Sequence[Array], specs: Sequence[QuantSpec], xp: Any, memories: Sequence[dict[str, Array]]
) -> list[list[tuple[Operand, OperandCounts]]]:
    """What `make` gives of each of several matrices of one dtype, in one launch.

    Args:
        xs: contiguous matrices that `reason` covers.
        specs: resolved, that `joinable_specs` covers.
        xp: cupy.
        memories: as for `make`, of each.
    """
    slots, each = 2 * kernels.SLOTS, len(specs)
    counters = Counters(len(xs) * each * slots, xp)
    flags, exponents = xp.empty(len(xs) * each, np.uint32), xp.empty(len(xs), np.int32)
    table = np.zeros(len(xs), _MATRIX)
    tiles, made = 0, []
    for i, (x, memory) in enumerate(zip(xs, memories, strict=True)):
        exponent = exponents[i : i + 1]
        row = table[i]
        row["x"], row["history"] = x.data.ptr, _history(x, specs[0], xp, memory).data.ptr
        row["exponent"], row["start"] = exponent.data.ptr, tiles
        row["rows"], row["columns"] = x.shape
        tiles += _tiles(x, wide=False)
        mine: list[tuple[Operand, OperandCounts]] = []
        for spec in specs:
            at = i * each + len(mine)
            out, flag = _empty(x, spec, xp), flags[at]
            side = "along" if spec.axis == 1 else "down"
            row[side], row[f"{side}_flag"] = out.data.ptr, flag.data.ptr
            row[f"{side}_counts"] = counters.array[at * slots :].data.ptr
            counts = OperandCounts(counters, (at * slots, (at + 1) * slots), x.size)
            mine.append((Operand(out, exponent, flag, x, spec, None), counts))
        made.append(mine)
    axes = [spec.axis for spec in specs]
    source = operand_source(specs[0], xs[0].dtype.name, 1 in axes, 0 in axes, False, many=True)
    held = table.view(np.uint8)
    there = counters.capture.persistent(held) if counters.capture else xp.asarray(held)
    threads = 2 * _tile_rows(xs[0], wide=False)
    launch(source, "operands", tiles, threads, there, np.int32(len(xs)))
    return made


def _history(x: Array, spec: QuantSpec, xp: Any, memory: dict[str, Array] | None) -> Array:
    """What was left of the tensor the last time; the first time, a pass finds its maximum."""
    memory = {} if memory is None else memory
    if "history" not in memory:
        memory["history"] = xp.zeros(5, dtype=xp.uint32)
        source = operand_source(spec, x.dtype.name, True, False, False)
        vectors = x.nbytes // 16
        blocks = min(_AMAX_BLOCKS, -(-vectors // 256))
        launch(source, "largest", blocks, 256, x, memory["history"], np.int64(vectors))
    return memory["history"]


def _is_mxfp4(spec: QuantSpec) -> bool:
    return spec.row.element.bits == 4 and spec.row.element.is_float


def multiply(
    a: Operand,
    b: Operand,
    dtype: str,
    xp: Any,
    falls: Array | None = None,
    bias: Array | None = None,
) -> Array:
    """The product a b^T + bias of (M, K) and (N, K), summed in float32, without waiting.

    Args:
        a: left operand.
        b: right operand.
        dtype: of the result: "float32" or "bfloat16".
        xp: cupy.
        falls: uint32 of shape (): counts the products that ran in bfloat16.
        bias: float32 (N,), added to the float32 sum; None: none.
    """
    size, k = (a.shape[0], b.shape[0]), a.shape[1]
    out = empty_rows(xp, *size, _OUT[dtype])
    config, split = configure_parts("e5m2", *size, k, dtype)
    operands = (a.codes, b.codes)
    flags = Flags(a.flag, b.flag, 0)
    to = out if split is None else empty_parts(*size, split, config, xp)
    start = bias if split is None else None
    gemm(*operands, to, config, a.exponent, b.exponent, start, flags=flags, split=split)
    guards = (a.flag, b.flag)
    wide = (a.wide(guards, xp), b.wide(guards, xp))
    config = configure("bf16", *size, to.dtype.name)
    if split is not None:  # the same parts: a stage holds half as many terms
        config, split = replace(config, split=True), Split(split.parts, 2 * split.stages)
    gemm(*wide, to, config, bias=start, flags=Flags(*guards, 1), runs=falls, split=split)
    if split is not None:
        add_parts(to, split, out, bias, xp)
    return xp.ascontiguousarray(out)
