"""Convolution and pooling of images: (N, C, H, W)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

from extensor.autograd.creation import Seed
from extensor.autograd.tensor import ExTensor
from extensor.nn import init
from extensor.nn.checks import check_images, check_size, check_width
from extensor.nn.linear import GemmLayer
from extensor.nn.module import Module
from extensor.nn.parameter import Parameter
from extensor.ops.conv_pool import Pair, avg_pool2d, conv2d, int_pair, max_pool2d
from extensor.ops.prequantized import prequantized_conv2d
from extensor.ops.quantized import quantized_conv2d

__all__ = [
    "AvgPool2d",
    "Conv2d",
    "GlobalAvgPool2d",
    "MaxPool2d",
    "SeparableConv2d",
    "depthwise_conv2d",
]


class Conv2d(GemmLayer):
    """2-D convolution (cross-correlation) with zero padding.

    Depthwise: ``groups=in_channels``. Separable: a depthwise one, then one of kernel size 1.

    Args:
        in_channels: C, a multiple of ``groups``.
        out_channels: O, a multiple of ``groups``.
        kernel_size: one number or (height, width), as are stride, padding and dilation.
        stride: step of the window.
        padding: zeros on each side.
        dilation: spacing of the kernel's elements.
        groups: channel groups convolved separately.
        bias: whether there is one.
        rng: draws the initial weights, uniform in +-1 / sqrt(C / groups kh kw); see `init.as_rng`.

    Attributes:
        weight: float32 (O, C / groups, kh, kw), or flattened (O, C / groups kh kw) and blocked
            along the latter by `quantize_model`; bias: float32 (O,), or None.
        quant: the layer under a recipe; None computes in the dtype of the operands.

    Raises:
        ValueError: for sizes out of range; when called, for an input that is not (N, C, H, W) or
            is smaller than the kernel.
        TypeError: when called, for a float64 input beside weights that are not.

    >>> conv = et.nn.Conv2d(3, 16, kernel_size=3, stride=2, padding=1, rng=0)
    >>> conv(et.zeros((8, 3, 32, 32))).shape
    (8, 16, 16, 16)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        rng: Seed = None,
    ) -> None:
        self.in_channels = check_size("in_channels", in_channels)
        self.out_channels = check_size("out_channels", out_channels)
        self.groups = check_size("groups", groups)
        if in_channels % groups or out_channels % groups:
            raise ValueError(
                f"groups: expected a divisor of in_channels {in_channels} and out_channels "
                f"{out_channels}, got {groups}"
            )
        self.kernel_size = int_pair("Conv2d", "kernel_size", kernel_size, 1)
        self.stride = int_pair("Conv2d", "stride", stride, 1)
        self.padding = int_pair("Conv2d", "padding", padding, 0)
        self.dilation = int_pair("Conv2d", "dilation", dilation, 1)
        shape = (out_channels, in_channels // groups, *self.kernel_size)
        generator, bound = init.as_rng(rng), 1.0 / math.sqrt(math.prod(shape[1:]))
        self.weight = Parameter(init.uniform(shape, bound, generator))
        self.bias = Parameter(init.uniform((out_channels,), bound, generator)) if bias else None
        self.quant = None

    def forward(self, x: ExTensor) -> ExTensor:
        """See :meth:`extensor.nn.Module.forward`: (N, C, H, W) -> (N, O, Ho, Wo)."""
        check_images("Conv2d", x, self.in_channels)
        check_width("Conv2d", x, self.weight)
        options = (self.stride, self.padding, self.dilation, self.groups)
        if self.quant is None:
            return conv2d(x, self.weight, self.bias, *options)
        if self.weight.is_blocked:
            y = prequantized_conv2d(x, self.weight, self.quant, self.kernel_size, *options)
            return y if self.bias is None else y + self.bias.reshape((1, -1, 1, 1))
        context = self._next_use(self.quant)
        return quantized_conv2d(x, self.weight, context, *options, self.bias)

    def extra_repr(self) -> str:
        """See :meth:`extensor.nn.Module.extra_repr`."""
        options = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        for name, default in (("stride", (1, 1)), ("padding", (0, 0)), ("dilation", (1, 1))):
            if getattr(self, name) != default:
                options.append(f"{name}={getattr(self, name)}")
        options += [f"groups={self.groups}"] if self.groups > 1 else []
        options += ["bias=False"] if self.bias is None else []
        return ", ".join(options)


def depthwise_conv2d(
    channels: int,
    kernel_size: Pair,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    multiplier: int = 1,
    bias: bool = True,
    rng: Seed = None,
) -> Conv2d:
    """A `Conv2d` with kernels of its own for each channel: ``groups=channels``.

    Args:
        channels: C, 1 or more; the output has ``multiplier`` times as many.
        kernel_size: see `Conv2d`, also for the next three.
        stride: step of the window.
        padding: zeros on each side.
        dilation: spacing of the kernel's elements.
        multiplier: kernels for each channel, 1 or more.
        bias: whether there is one.
        rng: draws the initial weights.

    Returns:
        The layer; its weight is (C multiplier, 1, kh, kw).

    Raises:
        ValueError: for sizes out of range.

    >>> et.nn.depthwise_conv2d(8, 3, multiplier=2).weight.shape
    (16, 1, 3, 3)
    """
    return Conv2d(
        channels,
        channels * multiplier,
        kernel_size,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=channels,
        bias=bias,
        rng=rng,
    )


class SeparableConv2d(Module):
    """A depthwise convolution, then one of kernel size 1 (arXiv 1610.02357; 1704.04861, 3.1).

    Args:
        in_channels: C, 1 or more.
        out_channels: O, 1 or more.
        kernel_size: of the depthwise convolution, as are the next three; see `Conv2d`.
        stride: step of the window.
        padding: zeros on each side.
        dilation: spacing of the kernel's elements.
        bias: whether both have biases.
        rng: draws the initial weights.

    Attributes:
        depthwise: the first `Conv2d`.
        pointwise: the second.

    Raises:
        ValueError: as `Conv2d`.

    >>> layer = et.nn.SeparableConv2d(8, 16, 3, padding=1, rng=0)
    >>> layer.depthwise.weight.shape, layer.pointwise.weight.shape
    ((8, 1, 3, 3), (16, 8, 1, 1))
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        bias: bool = True,
        rng: Seed = None,
    ) -> None:
        generator = init.as_rng(rng)
        self.depthwise = depthwise_conv2d(
            in_channels, kernel_size, stride, padding, dilation, bias=bias, rng=generator
        )
        self.pointwise = Conv2d(in_channels, out_channels, 1, bias=bias, rng=generator)

    def forward(self, x: ExTensor) -> ExTensor:
        """See :meth:`extensor.nn.Module.forward`: (N, C, H, W) -> (N, O, Ho, Wo)."""
        out: ExTensor = self.pointwise(self.depthwise(x))
        return out


class _Pool2d(Module):
    """Base of the pooling layers: the window, its stride and its padding."""

    function: ClassVar[Callable[..., ExTensor]]

    def __init__(self, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> None:
        name = type(self).__name__
        self.kernel_size = int_pair(name, "kernel_size", kernel_size, 1)
        self.stride = self.kernel_size if stride is None else int_pair(name, "stride", stride, 1)
        self.padding = int_pair(name, "padding", padding, 0)

    def forward(self, x: ExTensor) -> ExTensor:
        """See :meth:`extensor.nn.Module.forward`: (N, C, H, W) -> (N, C, Ho, Wo)."""
        return type(self).function(x, self.kernel_size, self.stride, self.padding)

    def extra_repr(self) -> str:
        """See :meth:`extensor.nn.Module.extra_repr`."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


class MaxPool2d(_Pool2d):
    """The largest value in each window; padding never wins.

    Args:
        kernel_size: one number or (height, width), as are stride and padding.
        stride: window step; None, the kernel size.
        padding: on each side, at most half the kernel size.

    Raises:
        ValueError: for sizes out of range; when called, for an input that is not (N, C, H, W) or
            is smaller than the kernel.

    >>> et.nn.MaxPool2d(2)(et.arange(16.0).reshape((1, 1, 4, 4))).tolist()
    [[[[5.0, 7.0], [13.0, 15.0]]]]
    """

    function = staticmethod(max_pool2d)


class AvgPool2d(_Pool2d):
    """The mean of each window; padding counts as zeros.

    Args:
        kernel_size: one number or (height, width), as are stride and padding.
        stride: window step; None, the kernel size.
        padding: zeros on each side, at most half the kernel size.

    Raises:
        ValueError: as `MaxPool2d`.

    >>> et.nn.AvgPool2d(2)(et.arange(16.0).reshape((1, 1, 4, 4))).tolist()
    [[[[2.5, 4.5], [10.5, 12.5]]]]
    """

    function = staticmethod(avg_pool2d)


class GlobalAvgPool2d(Module):
    """The mean of each channel: (N, C, H, W) -> (N, C).

    Raises:
        ValueError: when called, for an input that is not (N, C, H, W).

    >>> et.nn.GlobalAvgPool2d()(et.arange(8.0).reshape((1, 2, 2, 2))).tolist()
    [[1.5, 5.5]]
    """

    def forward(self, x: ExTensor) -> ExTensor:
        """See :meth:`extensor.nn.Module.forward`: (N, C, H, W) -> (N, C)."""
        check_images("GlobalAvgPool2d", x)
        return x.mean(axis=(2, 3))
