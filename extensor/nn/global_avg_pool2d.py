"""GlobalAvgPool2d."""

from __future__ import annotations

from extensor.autograd.tensor import ExTensor
from extensor.nn.module import Module
from extensor.ops.arguments import tensors_only

__all__ = ["GlobalAvgPool2d"]


class GlobalAvgPool2d(Module):
    """The mean of each channel: (N, C, H, W) -> (N, C).

    Raises:
        ValueError: when called, for an input that is not (N, C, H, W).
    """

    def forward(self, x: ExTensor) -> ExTensor:
        """(N, C, H, W) -> (N, C)."""
        tensors_only("GlobalAvgPool2d", x)
        if x.ndim != 4:
            raise ValueError(
                f"GlobalAvgPool2d: wanted an input of shape (N, C, H, W), got {x.shape}"
            )
        return x.mean(axis=(2, 3))
