"""GroupNorm and InstanceNorm."""

from __future__ import annotations

import math

import numpy as np

from extensor.autograd.tensor import ExTensor
from extensor.nn.checks import check_size
from extensor.nn.module import Module
from extensor.nn.parameter import Parameter
from extensor.ops.arguments import tensors_only

__all__ = ["GroupNorm", "InstanceNorm"]


class GroupNorm(Module):
    """(x - mean) / sqrt(var + eps) weight + bias per sample and channel group (arXiv 1803.08494).

    Args:
        groups: how many groups of neighbouring channels; a divisor of ``channels``.
        channels: C, 1 or more.
        eps: above 0.

    Attributes:
        weight, bias: float32 (C,), ones and zeros at first.

    Raises:
        ValueError: for arguments out of range; when called, for an input that is not (N, C, ...).
    """

    def __init__(self, groups: int, channels: int, eps: float = 1e-5) -> None:
        self.groups = check_size("groups", groups)
        self.channels = check_size("channels", channels)
        if channels % groups or not 0.0 < eps < math.inf:
            raise ValueError(
                f"GroupNorm: wanted groups that divide channels and eps above 0, got {groups}, "
                f"{channels} and {eps!r}"
            )
        self.eps = eps
        self.weight = Parameter(np.ones(channels, np.float32))
        self.bias = Parameter(np.zeros(channels, np.float32))

    def forward(self, x: ExTensor) -> ExTensor:
        """The same shape."""
        name = type(self).__name__
        tensors_only(name, x)
        if x.ndim < 2 or x.shape[1] != self.channels:
            raise ValueError(
                f"{name}: wanted an input of shape (N, {self.channels}, ...), got {x.shape}"
            )
        grouped = x.reshape((x.shape[0], self.groups, math.prod(x.shape[1:]) // self.groups))
        centred = grouped - grouped.mean(axis=2, keepdims=True)
        variance = centred.square().mean(axis=2, keepdims=True)
        normal = (centred * (variance + self.eps).rsqrt()).reshape(x.shape)
        across = (1, self.channels, *([1] * (x.ndim - 2)))
        return normal * self.weight.reshape(across) + self.bias.reshape(across)

    def extra_repr(self) -> str:
        """Its sizes."""
        return f"{self.groups}, {self.channels}, eps={self.eps}"


class InstanceNorm(GroupNorm):
    """`GroupNorm` with every channel its own group (arXiv 1607.08022)."""

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__(channels, channels, eps)
