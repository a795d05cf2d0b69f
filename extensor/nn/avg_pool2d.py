"""AvgPool2d."""

from __future__ import annotations

from extensor.autograd.tensor import ExTensor
from extensor.nn.module import Module
from extensor.ops.conv import Pair, int_pair
from extensor.ops.pool import avg_pool2d

__all__ = ["AvgPool2d"]


class AvgPool2d(Module):
    """The mean of each window; padding counts as zeros.

    Args:
        kernel_size: one number or (height, width), as are stride and padding.
        stride: window step; None, the kernel size.
        padding: on each side, at most half the kernel size.

    Raises:
        ValueError: for sizes out of range; when called, for an input that is not (N, C, H, W) or
            is smaller than the kernel.
    """

    def __init__(self, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> None:
        self.kernel_size = int_pair("AvgPool2d", "kernel_size", kernel_size, 1)
        self.stride = (
            self.kernel_size if stride is None else int_pair("AvgPool2d", "stride", stride, 1)
        )
        self.padding = int_pair("AvgPool2d", "padding", padding, 0)

    def forward(self, x: ExTensor) -> ExTensor:
        """(N, C, H, W) -> (N, C, Ho, Wo)."""
        return avg_pool2d(x, self.kernel_size, self.stride, self.padding)

    def extra_repr(self) -> str:
        """Its window."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"
