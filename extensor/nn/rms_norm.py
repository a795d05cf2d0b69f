"""RMSNorm."""

from __future__ import annotations

import math

import numpy as np

from extensor.autograd.tensor import ExTensor
from extensor.nn.checks import check_size
from extensor.nn.module import Module
from extensor.nn.parameter import Parameter
from extensor.ops.arguments import tensors_only
from extensor.ops.norm import rms_norm

__all__ = ["RMSNorm"]


class RMSNorm(Module):
    """x / sqrt(mean(x^2) + eps) weight over the last axis (arXiv 1910.07467).

    Args:
        size: the length of the last axis.
        eps: above 0.

    Attributes:
        weight: float32 (size,), ones at first.
        narrow: whether the result is rounded to bfloat16; `apply_recipe` decides it.

    Raises:
        ValueError: for a size below 1 or an eps not above 0; when called, for an input whose last
            axis is not ``size`` long.
    """

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        self.size = check_size("size", size)
        if not 0.0 < eps < math.inf:
            raise ValueError(f"RMSNorm: wanted eps above 0, got {eps!r}")
        self.eps = eps
        self.narrow = False
        self.weight = Parameter(np.ones(size, np.float32))

    def forward(self, x: ExTensor) -> ExTensor:
        """The same shape."""
        tensors_only("RMSNorm", x)
        if x.shape[-1:] != (self.size,):
            raise ValueError(f"RMSNorm: wanted an input of shape (..., {self.size}), got {x.shape}")
        return rms_norm(x, self.weight, self.eps, self.narrow)

    def extra_repr(self) -> str:
        """Its size."""
        return f"{self.size}, eps={self.eps}"
