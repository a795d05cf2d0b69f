"""Flatten."""

from __future__ import annotations

import math

from extensor.autograd.tensor import ExTensor
from extensor.nn.checks import check_size
from extensor.nn.module import Module
from extensor.ops.arguments import tensors_only

__all__ = ["Flatten"]


class Flatten(Module):
    """Joins all axes from ``start`` on: (N, C, H, W) -> (N, C H W).

    Raises:
        ValueError: if ``start`` is negative; when called, for an input of fewer axes.
    """

    def __init__(self, start: int = 1) -> None:
        self.start = check_size("start", start, 0)

    def forward(self, x: ExTensor) -> ExTensor:
        """The same values with fewer axes."""
        tensors_only("Flatten", x)
        if x.ndim <= self.start:
            raise ValueError(
                f"Flatten: wanted an input of more than {self.start} axes, got shape {x.shape}"
            )
        return x.reshape((*x.shape[: self.start], math.prod(x.shape[self.start :])))

    def extra_repr(self) -> str:
        """The first axis joined, if it is not the default."""
        return "" if self.start == 1 else f"start={self.start}"
