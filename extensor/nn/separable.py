"""Depthwise and separable convolutions."""

from __future__ import annotations

from extensor.autograd.creation import Seed
from extensor.autograd.tensor import ExTensor
from extensor.nn import init
from extensor.nn.conv2d import Conv2d
from extensor.nn.module import Module
from extensor.ops.conv import Pair

__all__ = ["SeparableConv2d", "depthwise_conv2d"]


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
        stride: window step.
        padding: zeros on each side.
        dilation: spacing of the kernel's elements.
        multiplier: kernels for each channel, 1 or more.
        bias: whether there is one.
        rng: draws the initial weights.

    Raises:
        ValueError: for sizes out of range.
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
        in_channels, out_channels: C and O, 1 or more.
        kernel_size, stride, padding, dilation: of the depthwise convolution; see `Conv2d`.
        bias: whether both have biases.
        rng: draws the initial weights.

    Attributes:
        depthwise, pointwise: the two `Conv2d`.

    Raises:
        ValueError: as `Conv2d`.
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
        """(N, C, H, W) -> (N, O, Ho, Wo)."""
        out: ExTensor = self.pointwise(self.depthwise(x))
        return out
