"""The CPU backend's convolutions and pooling in float32, patches quantized or not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from extensor.backends.cpu.core import (
    CpuCore,
    first_arrays,
    ready,
    runs_in_core,
    stream_words,
)
from extensor.backends.cpu.lowering import LoweredSpec, follows_maxima, lower
from extensor.backends.generic.conv_pool import check_max_windows
from extensor.backends.protocol import Array, FirstSpec, Window
from extensor.backends.unsupported import Unsupported
from extensor.quant.array import QuantStats
from extensor.quant.recipe_state import Counts
from extensor.quant.scale_rules import E8M0_SEARCHES
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream

__all__ = ["CpuConvPool"]

_LONGEST_BLOCK = 512  # along the pixels: a chunk of the patches holds whole blocks


class CpuConvPool(CpuCore):
    """Convolutions, of floats or with quantized patches, and max pooling."""

    def _choose_quantized_conv2d(
        self,
        x: Array,
        w: Array,
        spec: QuantSpec,
        stream: Stream | None,
        shape: tuple[int, ...],
        window: Window,
        bias: Array | None = None,
    ) -> LoweredSpec | Unsupported:
        arrays = (x, w) if bias is None else (x, w, bias)
        if spec.rounding == "stochastic":
            return Unsupported("stochastic rounding of patches that are blocked along their taps")
        return self._lower_taps(arrays, x, spec, shape, window)

    def _choose_quantized_conv2d_grad_w(
        self,
        g: Array,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None,
        shape: tuple[int, ...],
        window: Window,
        first: FirstSpec | None = None,
    ) -> LoweredSpec | Unsupported:
        if isinstance(first, Hadamard):
            return Unsupported("patches that are transformed along their taps and not rounded")
        if first is not None:
            before = self._lower_taps((g, x), x, first, shape, window)
            if not before:
                return before
            if before.spec.tile == "tensor" or before.spec.rounding == "stochastic":
                return Unsupported("patches first rounded at random, or under one scale for all")
            if spec.rebased or before.spec.rebased:
                return Unsupported("rebased patches that were rounded along their taps first")
        if isinstance(spec.tile, tuple) and spec.tile[1] > _LONGEST_BLOCK:
            return Unsupported(f"blocks of {spec.tile} along the pixels")
        if spec.tile == "channel" and not follows_maxima(spec):
            return Unsupported("one scale for a row of patches that needs more than its maximum")
        return self._lower_patches((g, x), x, spec, shape, window)

    def _lower_taps(
        self,
        arrays: tuple[Array, ...],
        x: Array,
        spec: QuantSpec,
        shape: tuple[int, ...],
        window: Window,
    ) -> LoweredSpec | Unsupported:
        """`_lower_patches` along their taps."""
        if spec.transform and (spec.tile == "tensor" or not spec.is_mx):
            return Unsupported("a scale of all patches under a Hadamard transform of their taps")
        return self._lower_patches(arrays, x, spec, shape, window)

    def _lower_patches(
        self,
        arrays: tuple[Array, ...],
        x: Array,
        spec: QuantSpec,
        shape: tuple[int, ...],
        window: Window,
    ) -> LoweredSpec | Unsupported:
        """How x's patches are quantized on the way, or why the core does not."""
        if not (core := self.float32_core(*arrays)):
            gap: Unsupported = core
            return gap
        if spec.scale_window is not None:
            return Unsupported("a scale window, which depends on all blocks")
        if spec.tile == "tensor" and not follows_maxima(spec):
            return Unsupported("one scale for all patches that needs more than their maximum")
        if isinstance(spec.tile, tuple) and spec.tile[0] > 1:
            return Unsupported(f"tiles of {spec.tile[0]} rows")
        return lower(core, spec, _patch_shape(x, shape, window))

    @runs_in_core(_choose_quantized_conv2d)
    def quantized_conv2d(
        self,
        plan: LoweredSpec,
        x: Array,
        w: Array,
        spec: QuantSpec,
        stream: Stream | None,
        shape: tuple[int, ...],
        window: Window,
        bias: Array | None = None,
    ) -> tuple[Array, Counts]:
        """See the protocol."""
        where = (shape, _placement(window), x.shape[1] // shape[1])
        start = None if bias is None else ready(bias)
        y, *lost = self.core.quantized_conv2d(
            plan.plan, _blocks(plan), ready(x), ready(w), *where, start
        )
        return y, QuantStats(plan.count, *lost)

    @runs_in_core(_choose_quantized_conv2d_grad_w)
    def quantized_conv2d_grad_w(
        self,
        plan: LoweredSpec,
        g: Array,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None,
        shape: tuple[int, ...],
        window: Window,
        first: FirstSpec | None = None,
    ) -> tuple[Array, Counts]:
        """See the protocol."""
        where = (shape, _placement(window), x.shape[1] // shape[1])
        before, count = None, plan.count
        if isinstance(first, QuantSpec):
            taps = self._lower_taps((g, x), x, first, shape, window)
            assert taps
            before, count = (taps.plan, _blocks(taps)), taps.layout[4] * plan.layout[4]
        gw, *lost = self.core.quantized_conv2d_grad_w(
            plan.plan, _blocks(plan), ready(g), ready(x), *where, stream_words(stream), before
        )
        return gw, QuantStats(count, *lost)

    def _choose_clipped_conv2d_grad_x(
        self,
        g: Array,
        w: Array,
        x: Array,
        spec: QuantSpec,
        window: Window,
        clips: bool = True,
    ) -> LoweredSpec | Unsupported:
        if not clips:
            return Unsupported("a transform alone, without clipping")
        searched = spec.is_mx and spec.rule in E8M0_SEARCHES
        if not spec.clips or not (searched or follows_maxima(spec)):
            return Unsupported("clipped values by a rule that needs more of a block")
        if spec.rounding == "stochastic":
            return Unsupported("patches that are rounded stochastically along their taps")
        shape = (len(w), x.shape[1], *window.kernel)
        return self._lower_taps((g, w, x), x, spec, shape, window)

    @runs_in_core(_choose_clipped_conv2d_grad_x)
    def clipped_conv2d_grad_x(
        self,
        plan: LoweredSpec,
        g: Array,
        w: Array,
        x: Array,
        spec: QuantSpec,
        window: Window,
        clips: bool = True,
    ) -> Array:
        """See the protocol."""
        where = (window.kernel, _placement(window))
        return self.core.clipped_conv2d_grad_x(
            plan.plan, _blocks(plan), ready(g), ready(w), ready(x), *where
        )

    def _choose_conv2d(
        self, x: Array, w: Array, window: Window, groups: int, bias: Array | None = None
    ) -> Any:
        core = self.float32_core(x, w) if bias is None else self.float32_core(x, w, bias)
        return core and _conv_core(core, x.shape, w.shape, groups)

    @runs_in_core(_choose_conv2d)
    def conv2d(
        self, core: Any, x: Array, w: Array, window: Window, groups: int, bias: Array | None = None
    ) -> Array:
        """See the protocol."""
        start = None if bias is None else ready(bias)
        return core.conv2d(ready(x), ready(w), _placement(window), groups, start)

    def _choose_conv2d_grad_x(
        self, g: Array, w: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> Any:
        return (core := self.float32_core(g, w)) and _conv_core(core, shape, w.shape, groups)

    @runs_in_core(_choose_conv2d_grad_x)
    def conv2d_grad_x(
        self, core: Any, g: Array, w: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> Array:
        """See the protocol."""
        return core.conv2d_grad_x(ready(g), ready(w), shape, _placement(window), groups)

    def _choose_conv2d_grad_w(
        self, g: Array, x: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> Any:
        return (core := self.float32_core(g, x)) and _conv_core(core, x.shape, shape, groups)

    @runs_in_core(_choose_conv2d_grad_w)
    def conv2d_grad_w(
        self, core: Any, g: Array, x: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> Array:
        """See the protocol."""
        return core.conv2d_grad_w(ready(g), ready(x), shape, _placement(window), groups)

    @runs_in_core(first_arrays(1))
    def max_pool2d(self, core: Any, x: Array, window: Window) -> tuple[Array, Array]:
        """See the protocol."""
        check_max_windows(window, x.shape[2:])
        values, index = core.max_pool2d(ready(x), window.kernel, _placement(window))
        return values, index

    def _choose_max_pool2d_grad(
        self, g: Array, index: Array, shape: tuple[int, ...], window: Window | None = None
    ) -> Any:
        core = self.float32_core(g)
        if core and index.dtype != np.int32:
            return Unsupported(f"{index.dtype} positions, not int32")
        return core

    @runs_in_core(_choose_max_pool2d_grad)
    def max_pool2d_grad(
        self,
        core: Any,
        g: Array,
        index: Array,
        shape: tuple[int, ...],
        window: Window | None = None,
    ) -> Array:
        """See the protocol."""
        return core.max_pool2d_grad(ready(g), ready(index), shape)


def _blocks(plan: LoweredSpec) -> tuple[int, int, bool]:
    """A block's length, a row's with its padding, and whether all patches share one scale."""
    return plan.tile_length, plan.layout[4], plan.spec.tile == "tensor"


def _placement(window: Window) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    return window.stride, window.padding, window.dilation


def _conv_core(core: Any, x: tuple[int, ...], w: tuple[int, ...], groups: int) -> Any:
    """The core if it convolves arrays of these shapes, else `Unsupported`."""
    if len(x) != 4 or len(w) != 4:
        return Unsupported("not images")
    if groups < 1 or x[1] % groups or w[0] % groups:
        return Unsupported("channels that the groups do not divide")
    return core


def _patch_shape(x: Array, shape: tuple[int, ...], window: Window) -> tuple[int, ...]:
    """The shape of x's patches; see `Backend.quantized_conv2d`."""
    ho, wo = window.output_size(x.shape[2:])
    matrix = (math.prod(shape[1:]), x.shape[0] * ho * wo)
    groups = x.shape[1] // shape[1]
    return matrix if groups == 1 else (groups, *matrix)
