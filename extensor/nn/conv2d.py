"""Conv2d."""

from __future__ import annotations

import math

from extensor.autograd.creation import Seed
from extensor.autograd.tensor import ExTensor
from extensor.nn import init
from extensor.nn.checks import check_size
from extensor.nn.gemm_layer import GemmLayer
from extensor.nn.parameter import Parameter
from extensor.ops.arguments import tensors_only
from extensor.ops.conv import Pair, conv2d, int_pair
from extensor.ops.prequantized import prequantized_conv2d
from extensor.ops.quantized import quantized_conv2d

__all__ = ["Conv2d"]


class Conv2d(GemmLayer):
    """2-D convolution (cross-correlation) with zero padding.

    Depthwise: ``groups=in_channels``. Separable: a depthwise one, then one of kernel size 1.

    Args:
        in_channels: C, a multiple of ``groups``.
        out_channels: O, a multiple of ``groups``.
        kernel_size: one number or (height, width), as are stride, padding and dilation.
        stride: window step.
        padding: zeros on each side.
        dilation: spacing of the kernel's elements.
        groups: channel groups convolved separately.
        bias: whether there is one.
        rng: draws the initial weights, uniform in +-1 / sqrt(C / groups kh kw); see `init.as_rng`.

    Attributes:
        weight: float32 (O, C / groups, kh, kw), or flattened (O, C / groups kh kw) and blocked
            along the latter by `quantize_model`; bias: float32 (O,), or None.
        quant: the layer's place in a recipe; None computes in the dtype of the operands.

    Raises:
        ValueError: for sizes out of range; when called, for an input that is not (N, C, H, W) or
            is smaller than the kernel.
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
                f"groups: wanted a divisor of in_channels {in_channels} and out_channels "
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
        """(N, C, H, W) -> (N, O, Ho, Wo)."""
        tensors_only("Conv2d", x)
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"Conv2d: wanted an input of shape (N, {self.in_channels}, H, W), got {x.shape}"
            )
        options = (self.stride, self.padding, self.dilation, self.groups)
        if self.quant is None:
            return conv2d(x, self.weight, self.bias, *options)
        if self.weight.is_blocked:
            y = prequantized_conv2d(x, self.weight, self.quant, self.kernel_size, *options)
            return y if self.bias is None else y + self.bias.reshape((1, -1, 1, 1))
        return quantized_conv2d(x, self.weight, self.quant, *options, self.bias)

    def extra_repr(self) -> str:
        """Its sizes, and the options that are not the defaults."""
        options = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        for name, default in (("stride", (1, 1)), ("padding", (0, 0)), ("dilation", (1, 1))):
            if getattr(self, name) != default:
                options.append(f"{name}={getattr(self, name)}")
        options += [f"groups={self.groups}"] if self.groups > 1 else []
        options += ["bias=False"] if self.bias is None else []
        return ", ".join(options)
