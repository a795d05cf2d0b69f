"""The CPU backend's quantizers: the C++ core where it covers a spec, else the generic methods."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes  # noqa: F401  # registers bfloat16 with numpy
import numpy as np

from extensor.backends.cpu import outliers
from extensor.backends.cpu.core import (
    CpuCore,
    first_arrays,
    ready,
    runs_in_core,
    stream_words,
)
from extensor.backends.cpu.lowering import LoweredSpec, lower
from extensor.backends.protocol import Array, SpecPair, StreamPair
from extensor.backends.unsupported import Unsupported
from extensor.quant.array import QuantArray, QuantStats
from extensor.quant.hadamard import hadamard_signs
from extensor.quant.recipe_state import Counts
from extensor.quant.reference import FLOATS, check_previous, round_to
from extensor.quant.round_to_odd import OddFloats, OddPlanes
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream

__all__ = ["CpuQuantize"]

_FLOAT32 = np.dtype(np.float32)
_INPUTS = tuple(np.dtype(name) for name in FLOATS)

LoweredPair = tuple[LoweredSpec, LoweredSpec]


class CpuQuantize(CpuCore):
    """Quantizers and decoders."""

    def _choose_fake_quantize(
        self, x: Array, spec: QuantSpec, stream: Stream | None = None
    ) -> LoweredSpec | Unsupported:
        if self.core is None:
            return Unsupported(self.core_missing)
        if x.size == 0 or x.ndim == 0:
            return Unsupported("empty array or scalar")
        if x.dtype.kind != "f" and x.dtype.name != "bfloat16":
            return Unsupported(f"{x.dtype} array")
        if not spec.accepts_stream(stream):
            return Unsupported("the stream does not go with the rounding")
        return lower(self.core, spec, x.shape)

    @runs_in_core(_choose_fake_quantize)
    def fake_quantize(
        self, plan: LoweredSpec, x: Array, spec: QuantSpec, stream: Stream | None = None
    ) -> tuple[Array, Counts]:
        """See the protocol."""
        if spec.row.outliers:
            q, stats = outliers.quantize(self, x, plan.spec, stream)
            return outliers.dequantize(self, q), stats
        values, *lost = self.core.fake_quantize(
            plan.plan, _as_input(x), plan.layout, plan.coded, stream_words(stream)
        )
        return values, QuantStats(plan.count, *lost)

    def _choose_quantize(
        self,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None = None,
        previous_amax: Array | None = None,
        amax: Array | None = None,
    ) -> LoweredSpec | Unsupported:
        if amax is not None:
            return Unsupported("rows of a matrix whose largest magnitude is given")
        plan = self._choose_fake_quantize(x, spec, stream)
        if not plan:
            return plan
        if previous_amax is not None:
            try:
                check_previous(previous_amax, plan.spec, tuple(x.shape), np)
            except ValueError as error:
                return Unsupported(str(error))  # the generic method raises it
        return plan if plan.no_codes is None else plan.no_codes

    @runs_in_core(_choose_quantize)
    def quantize(
        self,
        plan: LoweredSpec,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None = None,
        previous_amax: Array | None = None,
        amax: Array | None = None,
    ) -> tuple[QuantArray, QuantStats]:
        """See the protocol."""
        if spec.row.outliers:
            return outliers.quantize(self, x, plan.spec, stream)
        return self.encode(plan, x, stream, previous_amax)

    def encode(
        self,
        plan: LoweredSpec,
        x: Array,
        stream: Stream | None = None,
        previous_amax: Array | None = None,
    ) -> tuple[QuantArray, QuantStats]:
        """The codes of an array that is quantized in blocks."""
        return self._encode(plan, x, stream, previous_amax, ())[:2]

    def _encode(
        self,
        plan: LoweredSpec,
        x: Array,
        stream: Stream | None,
        previous_amax: Array | None,
        mask_shape: tuple[int, ...],
    ) -> tuple[QuantArray, QuantStats, Array]:
        """Codes, counts and the clip mask, which is empty where its shape is."""
        *found, mask = self.core.quantize(
            plan.plan,
            _as_input(x),
            plan.layout,
            plan.codes_shape,
            plan.scales_shape,
            stream_words(stream),
            None if previous_amax is None else ready(previous_amax),
            mask_shape,
        )
        return *plan.stored(x.shape, *found), mask

    def _choose_clipped(
        self, x: Array, spec: QuantSpec, stream: Stream | None = None
    ) -> LoweredSpec | Unsupported:
        plan = self._choose_quantize(x, spec, stream)
        if not plan:
            return plan
        if not spec.clips:
            return Unsupported("a spec without a clip mask")  # the generic method raises it
        return plan if plan.no_mask is None else plan.no_mask

    @runs_in_core(_choose_clipped)
    def quantize_clipped(
        self, plan: LoweredSpec, x: Array, spec: QuantSpec, stream: Stream | None = None
    ) -> tuple[QuantArray, QuantStats, Array]:
        """See the protocol."""
        return self._encode(plan, x, stream, None, plan.mask_shape)

    def _choose_straight_through(
        self, g: Array, mask: Array | None, transform: Hadamard | None, length: int
    ) -> Any:
        if mask is None and transform is None:
            return Unsupported("neither a mask nor a transform")
        core = self.float32_core(g)
        if core and (g.ndim != 2 or (transform is None and length != g.shape[1])):
            return Unsupported("not a matrix of that length")
        return core

    @runs_in_core(_choose_straight_through)
    def straight_through(
        self, core: Any, g: Array, mask: Array | None, transform: Hadamard | None, length: int
    ) -> Array:
        """See the protocol."""
        bits = None if mask is None else ready(mask)
        signs = None if transform is None else hadamard_signs(transform)
        return core.straight_through(ready(g), bits, signs, length)

    def _choose_dequantize(
        self, q: QuantArray, dtype: str = "float32"
    ) -> LoweredSpec | Unsupported:
        if self.core is None:
            return Unsupported(self.core_missing)
        if dtype not in FLOATS:
            return Unsupported(f"{dtype} values")
        if q.spec.transform:
            return Unsupported("a Hadamard transform to undo")
        if math.prod(q.shape) == 0:
            return Unsupported("empty array")
        return lower(self.core, q.spec, q.shape)

    @runs_in_core(_choose_dequantize)
    def dequantize(self, plan: LoweredSpec, q: QuantArray, dtype: str = "float32") -> Array:
        """See the protocol."""
        if q.spec.row.outliers:
            return round_to(outliers.dequantize(self, q), dtype)
        return self.decode(plan, q, dtype)

    def decode(self, plan: LoweredSpec, q: QuantArray, dtype: str = "float32") -> Array:
        """The values of an array that is stored in blocks."""
        tensor_scale = 1.0 if q.tensor_scale is None else float(q.tensor_scale)
        points = None if q.zero_points is None else ready(q.zero_points)
        parts = ready(q.codes), ready(q.scales), points, tensor_scale
        return self.core.dequantize(plan.plan, *parts, plan.layout, q.shape, np.dtype(dtype))

    def _choose_fake_pair(
        self, x: Array, specs: SpecPair, streams: StreamPair = (None, None)
    ) -> LoweredPair | Unsupported:
        plans = []
        for spec, stream in zip(specs, streams, strict=True):
            plan = self._choose_fake_quantize(x, spec, stream)
            if not plan:
                return plan
            if spec.row.outliers:
                return Unsupported("the outlier codec, one by one")
            plans.append(plan)
        if x.ndim != 2 or [spec.axis % 2 for spec in specs] != [1, 0]:
            return Unsupported("not rows, then columns of a matrix")
        return plans[0], plans[1]

    @runs_in_core(_choose_fake_pair)
    def fake_quantize_rowwise_columnwise(
        self, plans: LoweredPair, x: Array, specs: SpecPair, streams: StreamPair = (None, None)
    ) -> tuple[tuple[Array, Counts], tuple[Array, Counts]]:
        """See the protocol."""
        results = self.core.fake_quantize_rowwise_columnwise(
            tuple(plan.plan for plan in plans),
            _as_input(x),
            tuple(plan.layout for plan in plans),
            tuple(plan.coded for plan in plans),
            tuple(stream_words(stream) for stream in streams),
        )
        first, second = (
            (values, QuantStats(plan.count, *lost))
            for plan, (values, *lost) in zip(plans, results, strict=True)
        )
        return first, second

    def _choose_pair(
        self, x: Array, specs: SpecPair, streams: StreamPair = (None, None)
    ) -> LoweredPair | Unsupported:
        plans = self._choose_fake_pair(x, specs, streams)
        if not plans:
            return plans
        gaps = [plan.no_codes for plan in plans if plan.no_codes is not None]
        return gaps[0] if gaps else plans

    @runs_in_core(_choose_pair)
    def quantize_rowwise_columnwise(
        self, plans: LoweredPair, x: Array, specs: SpecPair, streams: StreamPair = (None, None)
    ) -> tuple[tuple[QuantArray, QuantStats], tuple[QuantArray, QuantStats]]:
        """See the protocol."""
        results = self.core.quantize_rowwise_columnwise(
            tuple(plan.plan for plan in plans),
            _as_input(x),
            tuple(plan.layout for plan in plans),
            tuple(plan.codes_shape for plan in plans),
            tuple(plan.scales_shape for plan in plans),
            tuple(stream_words(stream) for stream in streams),
            (),
        )
        first, second = (
            plan.stored(x.shape, *found[:-1]) for plan, found in zip(plans, results, strict=True)
        )
        return first, second

    def _choose_clipped_pair(
        self, x: Array, specs: SpecPair, streams: StreamPair = (None, None)
    ) -> LoweredPair | Unsupported:
        plans = self._choose_pair(x, specs, streams)
        if not plans:
            return plans
        rowwise = self._choose_clipped(x, specs[0], streams[0])
        return plans if rowwise else rowwise

    @runs_in_core(_choose_clipped_pair)
    def quantize_rowwise_columnwise_clipped(
        self, plans: LoweredPair, x: Array, specs: SpecPair, streams: StreamPair = (None, None)
    ) -> tuple[tuple[QuantArray, QuantStats, Array], tuple[QuantArray, QuantStats]]:
        """See the protocol."""
        (*first, mask), (*second, _) = self.core.quantize_rowwise_columnwise(
            tuple(plan.plan for plan in plans),
            _as_input(x),
            tuple(plan.layout for plan in plans),
            tuple(plan.codes_shape for plan in plans),
            tuple(plan.scales_shape for plan in plans),
            tuple(stream_words(stream) for stream in streams),
            plans[0].mask_shape,
        )
        rowwise, columnwise = plans[0].stored(x.shape, *first), plans[1].stored(x.shape, *second)
        return (*rowwise, mask), columnwise

    @runs_in_core(first_arrays(1))
    def round_to_odd(self, core: Any, x: Array, bits: int) -> OddFloats | None:
        """See the protocol."""
        if (kept := core.round_to_odd(ready(x), bits)) is None:
            return None
        high, low = kept
        return OddFloats(high, low, x.shape, x.dtype)

    def _choose_odd_values(self, kept: OddFloats | OddPlanes) -> Any:
        if self.core is None:
            return Unsupported(self.core_missing)
        if isinstance(kept, OddPlanes):
            return Unsupported("planes of bits; the core has bytes and half bytes")
        if kept.dtype != _FLOAT32:
            return Unsupported(f"{kept.dtype} array; the core computes in float32")
        return self.core

    @runs_in_core(_choose_odd_values)
    def odd_values(self, core: Any, kept: OddFloats | OddPlanes) -> Array:
        """See the protocol."""
        assert isinstance(kept, OddFloats)
        low = None if kept.low is None else ready(kept.low)
        return core.odd_values(ready(kept.high), low, kept.shape)

    @runs_in_core(CpuCore.float32_core)
    def bfloat16_values(self, core: Any, x: Array) -> Array:
        """See the protocol."""
        return core.bfloat16_values(ready(x))


def _as_input(x: Array) -> Array:
    """Contiguous, of a dtype that the core reads: other floats (float64) become float32."""
    if x.dtype in _INPUTS:
        return ready(x)
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes Inf: its block's rule holds
        return np.ascontiguousarray(x, dtype=_FLOAT32)
