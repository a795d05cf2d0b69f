"""Convolution and pooling of images (N, C, H, W)."""

from __future__ import annotations

from typing import Protocol

from extensor.backends.protocol.core import Array, Window
from extensor.quant.recipe_state import Counts
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream

__all__ = ["ConvPoolMethods", "FirstSpec"]

FirstSpec = QuantSpec | Hadamard
"""What is done to patches before they are quantized: quantized and decoded, or transformed."""


class ConvPoolMethods(Protocol):
    """Convolutions, of floats or with quantized patches, and max pooling."""

    def conv2d(
        self, x: Array, w: Array, window: Window, groups: int, bias: Array | None = None
    ) -> Array:
        """(N, C, H, W), (O, C / groups, kh, kw) -> (N, O, Ho, Wo), plus a bias (O,) if given."""
        ...

    def conv2d_grad_x(
        self, g: Array, w: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> Array:
        """Gradient of conv2d in x, of ``shape`` (N, C, H, W)."""
        ...

    def conv2d_grad_w(
        self, g: Array, x: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> Array:
        """Gradient of conv2d in w, of ``shape`` (O, C / groups, kh, kw)."""
        ...

    def quantized_conv2d(
        self,
        x: Array,
        w: Array,
        spec: QuantSpec,
        stream: Stream | None,
        shape: tuple[int, ...],
        window: Window,
        bias: Array | None = None,
    ) -> tuple[Array, Counts]:
        """The convolution of x's patches, quantized by ``spec``, with the values w, plus a bias.

        The patches are a matrix (C / groups * kh * kw, N * Ho * Wo), or one of each group,
        (groups, ...); w is (O, K) or (groups, O / groups, K), as `fake_quantize` gives it, K being
        the patches' length after it. ``shape`` is that of the weights. Gives (N, O, Ho, Wo).
        """
        ...

    def quantized_conv2d_grad_w(
        self,
        g: Array,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None,
        shape: tuple[int, ...],
        window: Window,
        first: FirstSpec | None = None,
    ) -> tuple[Array, Counts]:
        """The gradient in the weights, of ``shape``, from quantized patches, and what it counted.

        Patches as for `quantized_conv2d`; g is (O, M) or (groups, O / groups, M), as
        `fake_quantize` gives it, M being N * Ho * Wo after it. ``first``, of one group, is applied
        to the patches before, along their own axis; the gradient is then (O, K), K being their
        length after it.
        """
        ...

    def clipped_conv2d_grad_x(
        self,
        g: Array,
        w: Array,
        x: Array,
        spec: QuantSpec,
        window: Window,
        clips: bool = True,
    ) -> Array:
        """The gradient of x, (N, C, H, W), where the patches' quantizer clipped nothing.

        g is (O, N * Ho * Wo) and w (O, K), values; ``spec`` quantizes x's patches along their own
        axis to a length of K. The gradient of a patch's values, transformed as the spec says, is
        zero where they were clipped (not without ``clips``); then it leaves the transform's domain.
        """
        ...

    def max_pool2d(self, x: Array, window: Window) -> tuple[Array, Array]:
        """(N, C, H, W) -> maxima and their int32 flat positions in H * W, both (N, C, Ho, Wo).

        The first maximum in row-major window order wins; NaN wins over everything; padding never
        wins.
        """
        ...

    def max_pool2d_grad(
        self, g: Array, index: Array, shape: tuple[int, ...], window: Window | None = None
    ) -> Array:
        """Scatter-add of g (N, C, Ho, Wo) to the positions in ``index``, giving ``shape``.

        ``window`` is that of the maxima, where it is known.
        """
        ...
