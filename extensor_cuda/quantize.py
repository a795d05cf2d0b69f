"""Quantizing and decoding on the GPU: the fused kernel that does each, or why there is none.

`plan_of` chooses the kernels of a spec and a shape; all plans are used in one way. The functions
below it take the array module and the arguments of the protocol's method of their name. They give
the kernel's call, ready to run, or `Unsupported`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, final

import numpy as np

from extensor.backends.unsupported import Unsupported
from extensor.quant import reference
from extensor.quant.array import QuantArray
from extensor.quant.rebase import rebase_tiles
from extensor.quant.round_to_odd import OddPlanes
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream
from extensor_cuda.dispatch import FLOATS, Call, contiguous, dtype_gap, unless
from extensor_cuda.kernels.quantize import dequantize as decoder
from extensor_cuda.kernels.quantize import float_scaled
from extensor_cuda.kernels.quantize import odd_planes as odd
from extensor_cuda.kernels.quantize import quantize as fused
from extensor_cuda.kernels.quantize import rowwise_columnwise as paired
from extensor_cuda.kernels.quantize import straight_through as through
from extensor_cuda.runtime.counters import Counters, OperandCounts

__all__ = [
    "QuantizePlan",
    "dequantize",
    "dialect_gap",
    "fake_quantize",
    "fake_quantize_rowwise_columnwise",
    "gelu_and_pack",
    "input_gap",
    "odd_values",
    "pack",
    "plan_of",
    "quantize",
    "quantize_clipped",
    "quantize_rowwise_columnwise",
    "quantize_rowwise_columnwise_clipped",
    "readable",
    "round_to_odd",
    "straight_through",
]

Array = Any
SpecPair = tuple[QuantSpec, QuantSpec]
StreamPair = tuple[Stream | None, Stream | None]


@final
@dataclass(frozen=True)
class QuantizePlan:
    """The kernels of a spec on arrays of one shape; x is what `readable` gives.

    Attributes:
        plan: the kernels' own.
        encoder: the module that quantizes.
        decoder: the module that decodes.
    """

    plan: fused.Plan | float_scaled.FloatPlan
    encoder: Any
    decoder: Any

    def quantize(
        self, x: Array, stream: Stream | None, xp: Any, amax: Array | None = None
    ) -> tuple[QuantArray, OperandCounts]:
        """Codes, scales and counts, without waiting; ``amax`` for `quantize.quantize` alone."""
        more = () if amax is None else (amax,)
        return self.encoder.quantize(x, self.plan, stream, xp, *more)

    def fake_quantize(
        self, x: Array, stream: Stream | None, xp: Any
    ) -> tuple[Array, OperandCounts]:
        """The decoded values and counts, without waiting."""
        return self.encoder.fake_quantize(x, self.plan, stream, xp)

    def dequantize(self, q: QuantArray, xp: Any, dtype: str) -> Array:
        """Codes and scales -> values, without waiting."""
        if isinstance(self.plan, fused.Plan):
            return decoder.dequantize(q, self.plan, xp, dtype)
        return reference.round_to(self.decoder.dequantize(q, self.plan, xp), dtype)


@lru_cache(maxsize=4096)
def plan_of(
    spec: QuantSpec, shape: tuple[int, ...], decoding: bool = False
) -> QuantizePlan | Unsupported:
    """The kernels that quantize or decode an array of a shape, or why there are none."""
    if spec.has_float_scales:
        plan = float_scaled.plan_of(spec, shape, decoding)
        return QuantizePlan(plan, float_scaled, float_scaled) if plan else plan
    blocks = fused.plan_of(spec, shape, decoding)
    return QuantizePlan(blocks, fused, decoder) if blocks else blocks


@lru_cache(maxsize=1024)
def dialect_gap(spec: QuantSpec) -> Unsupported | None:
    """What of a spec's dialect no kernel has; None if nothing."""
    dialect = spec.dialect_row
    if spec.row.element.is_float and spec.zero_sign != "kept":
        return Unsupported(f"zeros' signs of dialect {dialect.name}")
    if spec.is_mx and (dialect.mx_inf_byte is None or dialect.mx_least_divisor != -127):
        return Unsupported(f"special blocks of dialect {dialect.name}")
    two_levels = spec.rule == "amax" and spec.row.tensor_scale
    if two_levels and dialect.nvfp4_order != "transformer_engine":
        return Unsupported(f"the order of operations of dialect {dialect.name}")
    return None


def input_gap(x: Array, spec: QuantSpec, stream: Stream | None) -> Unsupported | None:
    """Why no kernel quantizes x by a spec, whatever its shape; None where one may."""
    if x.dtype.kind != "f" and x.dtype.name != "bfloat16":
        return Unsupported(f"{x.dtype} array")
    if not spec.accepts_stream(stream):
        return Unsupported("the stream does not go with the rounding")
    return dialect_gap(spec)


def readable(xp: Any, x: Array) -> Array:
    """C-contiguous, in a dtype that kernels read; float64 becomes float32 as everywhere."""
    if x.dtype.name not in fused.INPUTS:
        x = x.astype(xp.float32)
    return xp.ascontiguousarray(x)


# --- the protocol's methods ---


def quantize(
    xp: Any,
    x: Array,
    spec: QuantSpec,
    stream: Stream | None = None,
    previous_amax: Array | None = None,
    amax: Array | None = None,
) -> Call:
    """See the protocol. Does not wait for the GPU."""
    if (gap := input_gap(x, spec, stream)) is not None:
        return gap
    if previous_amax is not None:
        return Unsupported("a running maximum")
    if spec.rebased:
        blocks = fused.plan_of(spec.replace(rebased=False), tuple(x.shape))
        if not blocks:
            return blocks
        return lambda: _quantize_rebased(readable(xp, x), blocks, stream, xp)
    plan = plan_of(spec, tuple(x.shape))
    return (lambda: plan.quantize(readable(xp, x), stream, xp, amax)) if plan else plan


def pack(xp: Any, x: Array, spec: QuantSpec, stream: Stream | None = None) -> Call:
    """See the protocol. Does not wait for the GPU."""
    if (gap := input_gap(x, spec, stream)) is not None:
        return gap
    if not isinstance(plan := fused.plan_of(spec, tuple(x.shape)), fused.Plan):
        return plan
    return lambda: fused.quantize_raw(readable(xp, x), plan, stream, xp, stats=False).q


def gelu_and_pack(xp: Any, x: Array, spec: QuantSpec) -> Call:
    """See the protocol. Does not wait for the GPU."""
    if x.dtype.name != "bfloat16" or not x.flags.c_contiguous or not spec.is_mx:
        return Unsupported(f"{spec.format} of {x.dtype}; the kernel packs bfloat16 in MX formats")
    if (gap := input_gap(x, spec, None)) is not None:
        return gap
    plan = fused.plan_of(spec, (x.size,), False, "gelu")
    if not isinstance(plan, fused.Plan):
        return plan
    if plan.needs_tensor or not fused.is_whole(plan, x.data.ptr, "bfloat16"):
        return Unsupported("a scale window, or values that are no whole blocks")
    return lambda: fused.quantize_beside(x, plan, None, xp)


def quantize_clipped(xp: Any, x: Array, spec: QuantSpec, stream: Stream | None = None) -> Call:
    """See the protocol. One reading of x. Does not wait for the GPU."""
    if (gap := input_gap(x, spec, stream)) is not None:
        return gap
    if not spec.clips:
        return Unsupported("a spec without clip masks")
    plan = fused.plan_of(spec, tuple(x.shape))
    if not plan:
        return plan
    if (gap := fused.clip_gap(plan)) is not None:
        return gap
    return lambda: fused.quantize_clipped(readable(xp, x), plan, stream, xp)


def fake_quantize(xp: Any, x: Array, spec: QuantSpec, stream: Stream | None = None) -> Call:
    """See the protocol. Does not wait for the GPU."""
    if (gap := input_gap(x, spec, stream)) is not None:
        return gap
    if not spec.rebased:
        plan = plan_of(spec, tuple(x.shape))
        return (lambda: plan.fake_quantize(readable(xp, x), stream, xp)) if plan else plan
    blocks = fused.plan_of(spec.replace(rebased=False), tuple(x.shape))
    if not blocks:
        return blocks

    def rebased() -> tuple[Array, OperandCounts]:
        q, counts = _quantize_rebased(readable(xp, x), blocks, stream, xp)
        return decoder.dequantize(q, blocks, xp), counts

    return rebased


def _quantize_rebased(
    x: Array, plan: fused.Plan, stream: Stream | None, xp: Any
) -> tuple[QuantArray, OperandCounts]:
    """MXFP8 whose blocks share a scale with the 128 x 128 tile around them."""
    done = fused.quantize_raw(x, plan, stream, xp)
    assert done.q is not None and done.counters is not None
    q, changed, flushed = rebase_tiles(done.q, xp)
    lost = Counters(2, xp)
    lost.array[0] += changed.astype(np.uint64)
    lost.array[1] += flushed.astype(np.uint64)
    part = (0, 2 * fused.SLOTS)
    counts = OperandCounts(done.counters, part, plan.count, rebased=(lost, (0, 2)))
    return q, counts


def dequantize(xp: Any, q: QuantArray, dtype: str = "float32") -> Call:
    """See the protocol. Square tiles are decoded as blocks, each with its tile's scale."""
    spec, tile = q.spec, q.spec.tile
    side = tile[0] if isinstance(tile, tuple) and not spec.has_float_scales else 1
    if side > 1:
        spec = spec.replace(tile=(1, side))
    plan = plan_of(spec, q.shape, decoding=True)
    if not plan:
        return plan

    def decode() -> Array:
        blocks = q if side == 1 else replace(q, spec=spec, scales=_by_rows(xp, q, side))
        return plan.dequantize(blocks, xp, dtype)

    return decode


def _by_rows(xp: Any, q: QuantArray, side: int) -> Array:
    """The scales of square tiles, for each of their rows along the block axis."""
    axis = (q.spec.axis - 1) % len(q.shape)
    rows = xp.repeat(q.scales, side, axis=axis)
    return rows[(slice(None),) * axis + (slice(q.shape[axis]),)]


def _rowwise_columnwise_plan(
    x: Array, specs: SpecPair, streams: StreamPair
) -> paired.RowColumnPlan | Unsupported:
    for spec, stream in zip(specs, streams, strict=True):
        if (gap := input_gap(x, spec, stream)) is not None:
            return gap
    return paired.row_column_plan(specs, tuple(x.shape))


def quantize_rowwise_columnwise(
    xp: Any, x: Array, specs: SpecPair, streams: StreamPair = (None, None)
) -> Call:
    """See the protocol. One reading of x. Does not wait for the GPU."""
    plan = _rowwise_columnwise_plan(x, specs, streams)
    return (lambda: paired.quantize(readable(xp, x), plan, streams, xp)) if plan else plan


def quantize_rowwise_columnwise_clipped(
    xp: Any, x: Array, specs: SpecPair, streams: StreamPair = (None, None)
) -> Call:
    """See the protocol. Does not wait for the GPU."""
    plan = _rowwise_columnwise_plan(x, specs, streams)
    if not plan:
        return plan
    if plan.swapped or not specs[0].clips:
        return Unsupported("a clip mask of columns, or a spec without clip masks")
    return lambda: paired.quantize_clipped(readable(xp, x), plan, streams, xp)


def fake_quantize_rowwise_columnwise(
    xp: Any, x: Array, specs: SpecPair, streams: StreamPair = (None, None)
) -> Call:
    """See the protocol. One reading of x. Does not wait for the GPU."""
    plan = _rowwise_columnwise_plan(x, specs, streams)
    return (lambda: paired.fake_quantize(readable(xp, x), plan, streams, xp)) if plan else plan


def straight_through(
    xp: Any, g: Array, mask: Array | None, transform: Hadamard | None, length: int
) -> Call:
    """See the protocol. One launch."""
    if transform is None or not g.size or not length:
        return Unsupported("a gradient without a transform, or empty")
    if g.dtype != np.float32 or g.data.ptr % 16:
        return Unsupported("a gradient that is not float32, or not aligned to 16 bytes")

    def call() -> Array:
        rows = xp.ascontiguousarray(g)
        bits = None if mask is None else xp.ascontiguousarray(mask)
        return through.straight_through(rows, bits, transform, length, xp)

    return call


def round_to_odd(xp: Any, x: Array, bits: int) -> Call:
    """See the protocol. Does not wait for the GPU."""
    return unless(dtype_gap((x,), FLOATS), lambda: odd.odd_planes(contiguous(xp, x), bits, xp))


def odd_values(xp: Any, kept: OddPlanes) -> Call:
    """See the protocol. One launch."""
    return (lambda: odd.odd_values(kept, xp)) if kept.nbytes else Unsupported("an empty array")
