"""The CPU backend's quantizers: the C++ core where it covers a spec, else the generic methods."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import ml_dtypes  # noqa: F401  # registers bfloat16 with numpy
import numpy as np

from extensor.backends.generic import GenericBackend
from extensor.backends.protocol import Array
from extensor.quant.array import QuantArray, QuantStats, block_grid, coded_length, packed_length
from extensor.quant.hadamard import hadamard_signs
from extensor.quant.reference import FLOATS
from extensor.quant.scale_rules import E8M0_NAN
from extensor.quant.spec import QuantSpec
from extensor.random import Stream

__all__ = ["CpuQuantize", "place", "ready"]

_NO_STREAM = (0, 0, 0, 0)
_FLOAT32 = np.dtype(np.float32)
_INPUTS = tuple(np.dtype(name) for name in FLOATS)
# A panel of columns under a Hadamard transform is copied whole; longer ones would leave the cache.
_MAX_SPAN = 8192


class CpuQuantize(GenericBackend):
    """quantize, dequantize and operand in C++.

    Attributes:
        core: the extension module, or None.
        core_missing: why there is none; "" where there is one.
    """

    core: Any
    core_missing: str

    def quantize(
        self,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None = None,
        previous_amax: Array | None = None,
    ) -> tuple[QuantArray, QuantStats]:
        """See the protocol."""
        if self._quantize_reason(x, spec, stream, previous_amax):
            return super().quantize(x, spec, stream, previous_amax)
        placed = place(self.core, spec, x.shape)
        assert isinstance(placed, _Placed)
        codes, scales, tensor_scale, saturated, flushed = self.core.quantize(
            placed.plan,
            _as_input(x),
            placed.layout,
            placed.codes_shape,
            placed.scales_shape,
            _stream_words(stream),
        )
        q = placed.quantized(x.shape, codes, scales, tensor_scale)
        return q, QuantStats(placed.count, saturated, flushed)

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
            return "a running maximum"
        placed = place(self.core, spec, x.shape)
        assert isinstance(placed, _Placed)
        return placed.no_codes

    def dequantize(self, q: QuantArray, dtype: str = "float32") -> Array:
        """See the protocol."""
        if self._dequantize_reason(q, dtype):
            return super().dequantize(q, dtype)
        placed = place(self.core, q.spec, q.shape)
        assert isinstance(placed, _Placed)
        tensor_scale = 1.0 if q.tensor_scale is None else float(q.tensor_scale)
        codes, scales = ready(q.codes), ready(q.scales)
        return self.core.dequantize(
            placed.plan, codes, scales, tensor_scale, placed.layout, q.shape, np.dtype(dtype)
        )

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

    def operand(
        self, x: Array, spec: QuantSpec, stream: Stream | None = None
    ) -> tuple[Array, QuantStats]:
        """See the protocol."""
        if self._operand_reason(x, spec, stream):
            return super().operand(x, spec, stream)
        placed = place(self.core, spec, x.shape)
        assert isinstance(placed, _Placed)
        values, saturated, flushed = self.core.operand(
            placed.plan, _as_input(x), placed.layout, placed.coded, _stream_words(stream)
        )
        return values, QuantStats(placed.count, saturated, flushed)

    def _operand_reason(
        self, x: Array, spec: QuantSpec, stream: Stream | None = None
    ) -> str | None:
        if self.core is None:
            return self.core_missing
        if x.size == 0 or x.ndim == 0:
            return "empty array or scalar"
        if reason := self._input_reason(x, spec, stream):
            return reason
        placed = place(self.core, spec, x.shape)
        return placed if isinstance(placed, str) else None

    def quantize_pair(
        self,
        x: Array,
        specs: tuple[QuantSpec, QuantSpec],
        streams: tuple[Stream | None, Stream | None] = (None, None),
    ) -> tuple[tuple[QuantArray, QuantStats], tuple[QuantArray, QuantStats]]:
        """See the protocol."""
        if self._quantize_pair_reason(x, specs, streams):
            return super().quantize_pair(x, specs, streams)
        placed = _place_pair(self.core, specs, x.shape)
        results = self.core.quantize_pair(
            tuple(p.plan for p in placed),
            _as_input(x),
            tuple(p.layout for p in placed),
            tuple(p.codes_shape for p in placed),
            tuple(p.scales_shape for p in placed),
            tuple(_stream_words(stream) for stream in streams),
        )
        first, second = (
            (
                p.quantized(x.shape, codes, scales, tensor_scale),
                QuantStats(p.count, saturated, flushed),
            )
            for p, (codes, scales, tensor_scale, saturated, flushed) in zip(
                placed, results, strict=True
            )
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
        return next(
            (p.no_codes for p in _place_pair(self.core, specs, x.shape) if p.no_codes), None
        )

    def operand_pair(
        self,
        x: Array,
        specs: tuple[QuantSpec, QuantSpec],
        streams: tuple[Stream | None, Stream | None] = (None, None),
    ) -> tuple[tuple[Array, QuantStats], tuple[Array, QuantStats]]:
        """See the protocol."""
        if self._operand_pair_reason(x, specs, streams):
            return super().operand_pair(x, specs, streams)
        placed = _place_pair(self.core, specs, x.shape)
        results = self.core.operand_pair(
            tuple(p.plan for p in placed),
            _as_input(x),
            tuple(p.layout for p in placed),
            tuple(p.coded for p in placed),
            tuple(_stream_words(stream) for stream in streams),
        )
        first, second = (
            (values, QuantStats(p.count, saturated, flushed))
            for p, (values, saturated, flushed) in zip(placed, results, strict=True)
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
        if x.ndim != 2 or [spec.axis % 2 for spec in specs] != [1, 0]:
            return "not rows, then columns of a matrix"
        return None


def ready(x: Array) -> Array:
    """C-contiguous and aligned, copied only where it is not."""
    return x if x.flags.c_contiguous and x.flags.aligned else np.array(x, order="C")


def _as_input(x: Array) -> Array:
    """Contiguous, of a dtype that the core reads: other floats (float64) become float32."""
    if x.dtype in _INPUTS:
        return ready(x)
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes Inf: its block's rule holds
        return np.ascontiguousarray(x, dtype=_FLOAT32)


def _stream_words(stream: Stream | None) -> tuple[int, int, int, int]:
    return _NO_STREAM if stream is None else (*stream.key, *stream.counter_high)


class _Placed:
    """A spec resolved for one shape, as the core takes it (see QuantJob in kernels.hpp)."""

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

    def quantized(
        self, shape: tuple[int, ...], codes: Array, scales: Array, tensor_scale: float
    ) -> QuantArray:
        """What the core gave, with what it stands for."""
        return QuantArray(
            codes=codes,
            scales=scales,
            spec=self.spec,
            shape=tuple(shape),
            tensor_scale=(
                np.asarray(tensor_scale, _FLOAT32) if self.spec.row.tensor_scale else None
            ),
        )


def _place_pair(
    core: Any, specs: tuple[QuantSpec, QuantSpec], shape: tuple[int, ...]
) -> tuple[_Placed, _Placed]:
    first, second = (place(core, spec, shape) for spec in specs)
    assert isinstance(first, _Placed)
    assert isinstance(second, _Placed)
    return first, second


@lru_cache(maxsize=4096)
def place(core: Any, spec: QuantSpec, shape: tuple[int, ...]) -> _Placed | str:
    """The spec on arrays of ``shape``, or why the core does not cover it."""
    try:
        spec = spec.resolve(len(shape))
    except ValueError as error:
        return str(error)  # the generic method raises it
    if spec.row.outliers:
        return "the outlier codec"
    if not spec.symmetric:
        return "a zero point"
    if spec.statistic != "amax":
        return f"the {spec.statistic} statistic"
    if spec.scale_name == "float16":
        return "float16 scales"
    if spec.rule not in ("floor", "rceil", "ceil", "even", "one", "amax"):
        return f"the {spec.rule} scale rule"
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
        stochastic=spec.rounding == "stochastic",
        rbits=spec.rbits,
        # None only where `kernel_gap` leaves encoding to numpy; decoding does not read it.
        mx_inf_byte=E8M0_NAN if dialect.mx_inf_byte is None else dialect.mx_inf_byte,
        nv_zero_byte=dialect.nvfp4_zero_scale,
        nv_tiny_saturates=dialect.nvfp4_tiny_saturates,
        window=-1 if spec.scale_window is None else spec.scale_window,
        element_scale=spec.element_scale,
        signs=hadamard_signs(spec.transform).tolist() if spec.transform else [],
    )
