"""Quantization specs in the C++ core's terms: which it covers, and how an array lies in blocks."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, final

import numpy as np

from extensor.backends.protocol import Array
from extensor.backends.unsupported import Unsupported
from extensor.quant.array import QuantArray, QuantStats, block_grid, coded_length, packed_length
from extensor.quant.hadamard import SOME_SIGNS, hadamard_signs
from extensor.quant.scale_rules import E8M0_NAN, E8M0_SEARCHES
from extensor.quant.spec import Hadamard, QuantSpec

__all__ = ["LoweredSpec", "follows_maxima", "lower"]

# A column tile under a Hadamard transform is copied whole; longer ones would leave the cache.
_MAX_SPAN = 8192


@final
class LoweredSpec:
    """A spec resolved for one shape, as the core takes it (see QuantJob in kernels.hpp).

    Attributes:
        spec: the resolved spec.
        plan: the core's plan of it.
        layout: (outer, rows, length, inner, coded, tile rows, tile length).
        coded: the shape of the values that are coded, padded by a transform.
        count: how many these are.
        tile_length: elements of a block along the axis.
        scales_shape, codes_shape: of the stored arrays.
        no_codes: why the core has values but no packed codes; None if it has both.
        mask_shape: of the clip mask, a bit a value along the axis.
        no_mask: why the core makes none; None if it does.
    """

    def __init__(
        self, core: Any, spec: QuantSpec, shape: tuple[int, ...], layout: list[int]
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.plan = _plan(core, spec)
        coded = list(shape)
        coded[spec.axis] = coded_length(spec, shape)
        self.coded = tuple(coded)
        self.count = math.prod(coded)
        self.tile_length = layout[6]
        self.scales_shape = block_grid(spec, shape)
        codes = list(shape)
        codes[spec.axis] = packed_length(spec, shape)
        self.codes_shape = tuple(codes)
        tile_length, columns, tiles = layout[6], layout[3] > 1, self.scales_shape[spec.axis]
        mask = list(self.coded)
        mask[spec.axis] = -(-mask[spec.axis] // 8)
        self.mask_shape = tuple(mask)
        self.no_mask: Unsupported | None = None
        if columns or layout[5] > 1 or tile_length % 16:
            self.no_mask = Unsupported("a clip mask of columns, or of tiles not (1, 16 n)")
        # Columnwise blocks are packed one by one, so each must fill whole bytes.
        self.no_codes: Unsupported | None = None
        if columns and tiles > 1 and tile_length * spec.row.element.bits % 8:
            self.no_codes = Unsupported(
                f"columnwise blocks of {tile_length} do not fill whole bytes"
            )

    def with_signs(self, transform: Hadamard) -> LoweredSpec:
        """The same with other signs of the transform."""
        copy = object.__new__(LoweredSpec)
        copy.__dict__.update(self.__dict__)
        copy.spec = self.spec.with_signs(transform)
        copy.plan = self.plan.with_signs(hadamard_signs(transform))
        return copy

    def stored(
        self,
        shape: tuple[int, ...],
        codes: Array,
        scales: Array,
        zero_points: Array | None,
        tensor_scale: float,
        *lost: int,
    ) -> tuple[QuantArray, QuantStats]:
        """What the core gave, with what it stands for."""
        q = QuantArray(
            codes=codes,
            scales=scales,
            spec=self.spec,
            shape=tuple(shape),
            tensor_scale=(
                np.asarray(tensor_scale, np.float32) if self.spec.row.tensor_scale else None
            ),
            zero_points=zero_points,
        )
        return q, QuantStats(self.count, *lost)


def lower(core: Any, spec: QuantSpec, shape: tuple[int, ...]) -> LoweredSpec | Unsupported:
    """The spec on arrays of ``shape``, or why the core does not cover it."""
    transform = spec.transform
    if transform is None or transform.signs != "per_step":
        return _lower(core, spec, shape)
    # Signs of each step would be looked up in vain.
    found = _lower(core, spec.drawn_from or spec.with_signs(SOME_SIGNS[transform.size]), shape)
    return found.with_signs(transform) if found else found


@lru_cache(maxsize=4096)
def _lower(core: Any, spec: QuantSpec, shape: tuple[int, ...]) -> LoweredSpec | Unsupported:
    try:
        spec = spec.resolve(len(shape))
    except ValueError as error:
        return Unsupported(str(error))  # the generic method raises it
    if spec.row.outliers and shape[spec.axis] >= 1 << 31:
        return Unsupported("rows of 2**31 values or more")
    if spec.kernel_gap and not spec.row.outliers:
        return Unsupported(spec.kernel_gap)
    if spec.rebased and (gap := _rebased_gap(spec, shape)) is not None:
        return gap
    layout = _layout(spec, shape)
    if isinstance(layout, Unsupported):
        return layout
    if math.prod(block_grid(spec, shape)) >= 1 << 32:
        return Unsupported("2**32 blocks or more")
    tile_rows, tile_length, columns = layout[5], layout[6], layout[3] > 1
    per_call = 128 // spec.rbits
    if spec.rounding == "stochastic" and tile_rows > 1 and tile_length % per_call:
        return Unsupported(f"stochastic tiles whose rows of {tile_length} split a random draw")
    if spec.transform and columns and math.lcm(tile_length, spec.transform.size) > _MAX_SPAN:
        return Unsupported(f"a columnwise Hadamard transform in blocks of {tile_length}")
    return LoweredSpec(core, spec, shape, layout)


def follows_maxima(spec: QuantSpec) -> bool:
    """Whether a block's scale follows from its largest magnitude, and that of the whole array."""
    searched = spec.rule in (*E8M0_SEARCHES, "four_over_six", "least_error")
    return spec.statistic == "amax" and spec.symmetric and not searched and not spec.eden


def _rebased_gap(spec: QuantSpec, shape: tuple[int, ...]) -> Unsupported | None:
    """Why the core does not rebase an array; None if it does."""
    if spec.transform or spec.scale_window is not None or not follows_maxima(spec):
        return Unsupported("rebased scales that do not follow from the maxima of blocks alone")
    if spec.dialect_row.inf_byte_in(spec.row.element) != E8M0_NAN:
        return Unsupported("rebased blocks in which an infinity is a number")
    if spec.axis < len(shape) - 2:
        return Unsupported("rebased tiles of axes that are not the last two")
    return None


def _layout(spec: QuantSpec, shape: tuple[int, ...]) -> list[int] | Unsupported:
    """(outer, rows, length, inner, coded, tile rows, tile length), or why there is none."""
    axis, last = spec.axis, len(shape) - 1
    coded = coded_length(spec, shape)
    before, after = shape[:axis], math.prod(shape[axis + 1 :])
    if spec.tile == "channel":
        rows, columns = 1, coded
    elif spec.tile == "tensor":
        rows, columns = math.prod(before) if axis == last else after, coded
        if axis != last and before:
            return Unsupported("one scale per tensor, along an axis in the middle")
    else:
        assert isinstance(spec.tile, tuple)
        rows, columns = spec.tile
    if spec.rebased and (axis == last or after == 1):  # tiles lie in matrices, which stay apart
        lines = before[-1] if axis == last and before else 1
        return [math.prod(before) // max(lines, 1), lines, shape[axis], 1, coded, rows, columns]
    if axis == last:
        if rows == 1 or spec.tile == "tensor":
            return [1, math.prod(before), shape[axis], 1, coded, rows, columns]
        return [math.prod(before[:-1]), before[-1], shape[axis], 1, coded, rows, columns]
    if after == 1:  # contiguous after all; tiles have one column
        if rows > 1 and spec.tile != "tensor" and len(shape) != 2:
            return Unsupported("tiles of several rows along an axis in the middle")
        return [1, math.prod(before), shape[axis], 1, coded, 1, columns]
    if rows > 1 and len(shape) != 2 and spec.tile != "tensor":
        return Unsupported("tiles of several rows along an axis in the middle")
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
        stochastic=spec.rounding == "stochastic" and not spec.eden,
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
        rebased=spec.rebased,
        eden=spec.eden,
        signs=hadamard_signs(spec.transform).tolist() if spec.transform else [],
    )
