"""BatchNorm2d."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from extensor.autograd.mode import no_grad
from extensor.autograd.tensor import ExTensor
from extensor.nn.checks import check_size
from extensor.nn.module import Module
from extensor.nn.parameter import Buffer, Parameter
from extensor.ops.arguments import tensors_only
from extensor.ops.norm import batch_norm

__all__ = ["BatchNorm2d"]


class BatchNorm2d(Module):
    """(x - mean) / sqrt(var + eps) weight + bias, per channel (arXiv 1502.03167).

    In training, mean and variance (over count) are the batch's, and the running ones move by
    ``momentum`` towards the batch's mean and its variance over count - 1. In evaluation the
    running ones are used.

    Args:
        channels: C, 1 or more.
        eps: above 0.
        momentum: in [0, 1].

    Attributes:
        weight, bias: float32 (C,), ones and zeros at first.
        running_mean, running_var: buffers, float32 (C,), zeros and ones at first.

    Raises:
        ValueError: for arguments out of range; when called, for an input that is not (N, C, H, W),
            or in training has only one value per channel.
    """

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        self.channels = check_size("channels", channels)
        if not 0.0 < eps < math.inf or not 0.0 <= momentum <= 1.0:
            raise ValueError(
                f"BatchNorm2d: wanted eps above 0 and momentum in [0, 1], got {eps!r} and "
                f"{momentum!r}"
            )
        self.eps, self.momentum = eps, momentum
        self.weight = Parameter(np.ones(channels, np.float32))
        self.bias = Parameter(np.zeros(channels, np.float32))
        self.running_mean = Buffer(np.zeros(channels, np.float32))
        self.running_var = Buffer(np.ones(channels, np.float32))

    def forward(self, x: ExTensor) -> ExTensor:
        """The same shape."""
        tensors_only("BatchNorm2d", x)
        if x.ndim != 4 or x.shape[1] != self.channels:
            raise ValueError(
                f"BatchNorm2d: wanted an input of shape (N, {self.channels}, H, W), got {x.shape}"
            )
        if self.training:
            count = x.size // self.channels
            if count < 2:
                raise ValueError(
                    f"BatchNorm2d: wanted two values or more per channel in training, got shape "
                    f"{x.shape}; use a larger batch, or eval()"
                )

            def move(mean: Any, variance: Any) -> None:
                self._move(self.running_mean, mean, 1.0)
                self._move(self.running_var, variance, count / (count - 1))

            return batch_norm(x, self.weight, self.bias, self.eps, move)
        scale = (self.running_var + self.eps).rsqrt() * self.weight
        shift = self.bias - self.running_mean * scale
        return x * self._across(scale) + self._across(shift)

    def _across(self, tensor: ExTensor) -> ExTensor:
        return tensor.reshape((1, self.channels, 1, 1))

    def _move(self, running: Buffer, batch: Any, correction: float) -> None:
        """Running = (1 - momentum) running + momentum correction batch."""
        with no_grad():
            moved = running.data * (1.0 - self.momentum)
            moved += batch.astype(moved.dtype) * (self.momentum * correction)
            running.assign_(moved)

    def extra_repr(self) -> str:
        """Its size and options."""
        return f"{self.channels}, eps={self.eps}, momentum={self.momentum}"
