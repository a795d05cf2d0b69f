"""The CPU backend's quantizers: the C++ core where it covers a spec, else the generic methods."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import ml_dtypes  # noqa: F401  # registers bfloat16 with numpy
import numpy as np

from extensor.backends import cpu_outliers
from extensor.backends.cpu_core import CoreBackend, ready
from extensor.backends.protocol import Array
from extensor.quant.array import QuantArray, QuantStats, block_grid, coded_length, packed_length
from extensor.quant.hadamard import hadamard_signs
from extensor.quant.recipe_state import Counts
from extensor.quant.reference import FLOATS, check_previous, rebase, round_to
from extensor.quant.spec import QuantSpec
from extensor.random import Stream

__all__ = ["CpuQuantize", "covered", "place"]

_NO_STREAM = (0, 0, 0, 0)
_FLOAT32 = np.dtype(np.float32)
_INPUTS = tuple(np.dtype(name) for name in FLOATS)
# A panel of columns under a Hadamard transform is copied whole; longer ones would leave the cache.
_MAX_SPAN = 8192


class CpuQuantize(CoreBackend):
    """Quantizers, each in C++ where its ``_..._reason`` gives None."""

    def quantize(
        self,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None = None,
        previous_amax: Array | None = None,
    ) -> tuple[QuantArray, QuantStats]:
        """See the protocol."""
        if spec.rebased:
            return rebase(*self.quantize(x, spec.replace(rebased=False), stream, previous_amax))
        if self._quantize_reason(x, spec, stream, previous_amax):
            return super().quantize(x, spec, stream, previous_amax)
        if spec.row.outliers:
            return cpu_outliers.quantize(self, x, spec.resolve(x.ndim), stream)
        return self.store(x, spec, stream, previous_amax)

    def store(
        self,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None = None,
        previous_amax: Array | None = None,
    ) -> tuple[QuantArray, QuantStats]:
        """Blocks of an array that the core covers, coded."""
        placed = covered(self.core, spec, x.shape)
        found = self.core.quantize(
            placed.plan,
            _as_input(x),
            placed.layout,
            placed.codes_shape,
            placed.scales_shape,
            _stream_words(stream),
            None if previous_amax is None else ready(previous_amax),
        )
        return placed.stored(x.shape, *found)

    def _quantize_reason(
        self,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None = None,
        previous_amax: Array | None = None,
    ) -> str | None:
        if reason := self._operand_reason(x, spec, stream):
            return reason
        if previous_amax is not None:
            try:
                check_previous(previous_amax, spec.resolve(x.ndim), tuple(x.shape), np)
            except ValueError as error:
                return str(error)  # the generic method raises it
        return covered(self.core, spec, x.shape).no_codes

    def dequantize(self, q: QuantArray, dtype: str = "float32") -> Array:
        """See the protocol."""
        if self._dequantize_reason(q, dtype):
            return super().dequantize(q, dtype)
        if q.spec.row.outliers:
            return round_to(cpu_outliers.dequantize(self, q), dtype)
        return self.decode(q, dtype)

    def decode(self, q: QuantArray, dtype: str = "float32") -> Array:
        """Blocks of an array that the core covers, decoded."""
        placed = covered(self.core, q.spec, q.shape)
        tensor_scale = 1.0 if q.tensor_scale is None else float(q.tensor_scale)
        points = None if q.zero_points is None else ready(q.zero_points)
        parts = ready(q.codes), ready(q.scales), points, tensor_scale
        return self.core.dequantize(placed.plan, *parts, placed.layout, q.shape, np.dtype(dtype))

    def _dequantize_reason(self, q: QuantArray, dtype: str = "float32") -> str | None:
        if self.core is None:
            return self.core_missing
        if dtype not in FLOATS:
            return f"{dtype} values"
        if q.spec.transform:
            return "a Hadamard transform to undo"
        if math.prod(q.shape) == 0:
            return "empty array"
        placed = place(self.core, q.spec, q.shape)
        return placed if isinstance(placed, str) else None

    def fake_quantize(
        self, x: Array, spec: QuantSpec, stream: Stream | None = None
    ) -> tuple[Array, Counts]:
        """See the protocol."""
        if spec.rebased:
            q, stats = self.quantize(x, spec, stream)
            return self.dequantize(q), stats
        if self._operand_reason(x, spec, stream):
            return super().fake_quantize(x, spec, stream)
        if spec.row.outliers:
            q, stats = cpu_outliers.quantize(self, x, spec.resolve(x.ndim), stream)
            return cpu_outliers.dequantize(self, q), stats
        placed = covered(self.core, spec, x.shape)
        values, *lost = self.core.fake_quantize(
            placed.plan, _as_input(x), placed.layout, placed.coded, _stream_words(stream)
        )
        return values, QuantStats(placed.count, *lost)

    def _operand_reason(
        self, x: Array, spec: QuantSpec, stream: Stream | None = None
    ) -> str | None:
        if self.core is None:
            return self.core_missing
        if x.size == 0 or x.ndim == 0:
            return "empty array or scalar"
        if spec.rebased:
            return "rebased tiles, whose codes numpy looks up after the core has made them"
        if reason := self._input_reason(x, spec, stream):
            return reason
        placed = place(self.core, spec, x.shape)
        return placed if isinstance(placed, str) else None

    def quantize_rowwise_columnwise(
        self,
        x: Array,
        specs: tuple[QuantSpec, QuantSpec],
        streams: tuple[Stream | None, Stream | None] = (None, None),
    ) -> tuple[tuple[QuantArray, QuantStats], tuple[QuantArray, QuantStats]]:
        """See the protocol."""
        if self._quantize_pair_reason(x, specs, streams):
            return super().quantize_rowwise_columnwise(x, specs, streams)
        placed = _covered_pair(self.core, specs, x.shape)
        results = self.core.quantize_rowwise_columnwise(
            tuple(p.plan for p in placed),
            _as_input(x),
            tuple(p.layout for p in placed),
            tuple(p.codes_shape for p in placed),
            tuple(p.scales_shape for p in placed),
            tuple(_stream_words(stream) for stream in streams),
        )
        first, second = (
            p.stored(x.shape, *found) for p, found in zip(placed, results, strict=True)
        )
        return first, second

    def _quantize_pair_reason(
        self,
        x: Array,
        specs: tuple[QuantSpec, QuantSpec],
        streams: tuple[Stream | None, Stream | None] = (None, None),
    ) -> str | None:
        if reason := self._operand_pair_reason(x, specs, streams):
            return reason
        first, second = _covered_pair(self.core, specs, x.shape)
        return first.no_codes or second.no_codes

    def fake_quantize_rowwise_columnwise(
        self,
        x: Array,
        specs: tuple[QuantSpec, QuantSpec],
        streams: tuple[Stream | None, Stream | None] = (None, None),
    ) -> tuple[tuple[Array, Counts], tuple[Array, Counts]]:
        """See the protocol."""
        if self._operand_pair_reason(x, specs, streams):
            return super().fake_quantize_rowwise_columnwise(x, specs, streams)
        placed = _covered_pair(self.core, specs, x.shape)
        results = self.core.fake_quantize_rowwise_columnwise(
            tuple(p.plan for p in placed),
            _as_input(x),
            tuple(p.layout for p in placed),
            tuple(p.coded for p in placed),
            tuple(_stream_words(stream) for stream in streams),
        )
        first, second = (
            (values, QuantStats(p.count, *lost))
            for p, (values, *lost) in zip(placed, results, strict=True)
        )
        return first, second

    def _operand_pair_reason(
        self,
        x: Array,
        specs: tuple[QuantSpec, QuantSpec],
        streams: tuple[Stream | None, Stream | None] = (None, None),
    ) -> str | None:
        for spec, stream in zip(specs, streams, strict=True):
            if reason := self._operand_reason(x, spec, stream):
                return reason
            if spec.row.outliers:
                return "the outlier codec, one by one"
        if x.ndim != 2 or [spec.axis % 2 for spec in specs] != [1, 0]:
            return "not rows, then columns of a matrix"
        return None


def _as_input(x: Array) -> Array:
    """Contiguous, of a dtype that the core reads: other floats (float64) become float32."""
    if x.dtype in _INPUTS:
        return ready(x)
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes Inf: its block's rule holds
        return np.ascontiguousarray(x, dtype=_FLOAT32)


def _stream_words(stream: Stream | None) -> tuple[int, int, int, int]:
    return _NO_STREAM if stream is None else (*stream.key, *stream.counter_high)


class _Placed:
    """A spec resolved for one shape, as the core reads it (QuantJob in quantize/kernels.hpp)."""

    def __init__(self, core: Any, spec: QuantSpec, shape: tuple[int, ...], layout: list[int]):
        self.spec = spec
        self.layout = layout
        self.plan = _plan(core, spec)
        coded = list(shape)
        coded[spec.axis] = coded_length(spec, shape)
        self.coded = tuple(coded)
        self.count = math.prod(coded)
        self.scales_shape = block_grid(spec, shape)
        codes = list(shape)
        codes[spec.axis] = packed_length(spec, shape)
        self.codes_shape = tuple(codes)
        tile_length, columns, tiles = layout[6], layout[3] > 1, self.scales_shape[spec.axis]
        # Blocks down columns are packed one by one, so each must fill whole bytes.
        self.no_codes = None
        if columns and tiles > 1 and tile_length * spec.row.element.bits % 8:
            self.no_codes = f"blocks of {tile_length} down columns do not fill whole bytes"

    def stored(
        self,
        shape: tuple[int, ...],
        codes: Array,
        scales: Array,
        zero_points: Array | None,
        tensor_scale: float,
        saturated: int,
        flushed: int,
    ) -> tuple[QuantArray, QuantStats]:
        """What the core gave, with what it stands for."""
        q = QuantArray(
            codes=codes,
            scales=scales,
            spec=self.spec,
            shape=tuple(shape),
            tensor_scale=(
                np.asarray(tensor_scale, _FLOAT32) if self.spec.row.tensor_scale else None
            ),
            zero_points=zero_points,
        )
        return q, QuantStats(self.count, saturated, flushed)


def covered(core: Any, spec: QuantSpec, shape: tuple[int, ...]) -> _Placed:
    """The spec on arrays of ``shape``, which the core is known to cover."""
    placed = place(core, spec, shape)
    assert isinstance(placed, _Placed)
    return placed


def _covered_pair(
    core: Any, specs: tuple[QuantSpec, QuantSpec], shape: tuple[int, ...]
) -> tuple[_Placed, _Placed]:
    return covered(core, specs[0], shape), covered(core, specs[1], shape)


@lru_cache(maxsize=4096)
def place(core: Any, spec: QuantSpec, shape: tuple[int, ...]) -> _Placed | str:
    """The spec on arrays of ``shape``, or why the core does not cover it."""
    try:
        spec = spec.resolve(len(shape))
    except ValueError as error:
        return str(error)  # the generic method raises it
    if spec.row.outliers and shape[spec.axis] >= 1 << 31:
        return "rows of 2**31 values or more"
    layout = _layout(spec, shape)
    if isinstance(layout, str):
        return layout
    if math.prod(block_grid(spec, shape)) >= 1 << 32:
        return "2**32 blocks or more"
    tile_rows, tile_length, columns = layout[5], layout[6], layout[3] > 1
    per_call = 128 // spec.rbits
    if spec.rounding == "stochastic" and tile_rows > 1 and tile_length % per_call:
        return f"stochastic tiles whose rows of {tile_length} split a random draw"
    if spec.transform and columns and math.lcm(tile_length, spec.transform.size) > _MAX_SPAN:
        return f"a Hadamard transform down columns in blocks of {tile_length}"
    return _Placed(core, spec, shape, layout)


def _layout(spec: QuantSpec, shape: tuple[int, ...]) -> list[int] | str:
    """(outer, rows, length, inner, coded, tile rows, tile length), or why there is none."""
    axis, last = spec.axis, len(shape) - 1
    coded = coded_length(spec, shape)
    before, after = shape[:axis], math.prod(shape[axis + 1 :])
    if spec.tile == "channel":
        rows, columns = 1, coded
    elif spec.tile == "tensor":
        rows, columns = math.prod(before) if axis == last else after, coded
        if axis != last and before:
            return "one scale per tensor, along an axis in the middle"
    else:
        assert isinstance(spec.tile, tuple)
        rows, columns = spec.tile
    if axis == last:
        if rows == 1 or spec.tile == "tensor":
            return [1, math.prod(before), shape[axis], 1, coded, rows, columns]
        return [math.prod(before[:-1]), before[-1], shape[axis], 1, coded, rows, columns]
    if after == 1:  # contiguous after all; tiles have one column
        if rows > 1 and spec.tile != "tensor" and len(shape) != 2:
            return "tiles of several rows along an axis in the middle"
        return [1, math.prod(before), shape[axis], 1, coded, 1, columns]
    if rows > 1 and len(shape) != 2 and spec.tile != "tensor":
        return "tiles of several rows along an axis in the middle"
    return [math.prod(before), 1, shape[axis], after, coded, rows, columns]


def _plan(core: Any, spec: QuantSpec) -> Any:
    dialect = spec.dialect_row
    return core.Plan(
        element=spec.row.element.name,
        scale=spec.scale_name,
        rule=spec.rule,
        ties=spec.ties,
        zeros=spec.zero_sign,
        order=dialect.nvfp4_order,
        statistic=spec.statistic,
        stochastic=spec.rounding == "stochastic",
        symmetric=spec.symmetric,
        rbits=spec.rbits,
        mx_inf_byte=dialect.inf_byte_in(spec.row.element),
        mx_least_divisor=dialect.mx_least_divisor,
        nv_zero_byte=dialect.nvfp4_zero_scale,
        nv_least_byte=dialect.nvfp4_least_scale,
        nv_tiny_saturates=dialect.nvfp4_tiny_saturates,
        percentile=spec.percentile,
        decay=spec.decay,
        window=-1 if spec.scale_window is None else spec.scale_window,
        element_scale=spec.element_scale,
        signs=hadamard_signs(spec.transform).tolist() if spec.transform else [],
    )
