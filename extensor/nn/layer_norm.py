"""LayerNorm."""

from __future__ import annotations

import math

import numpy as np

from extensor.autograd.tensor import ExTensor
from extensor.nn.checks import check_size
from extensor.nn.module import Module
from extensor.nn.parameter import Parameter
from extensor.ops.arguments import tensors_only
from extensor.ops.norm import layer_norm

__all__ = ["LayerNorm"]


class LayerNorm(Module):
    """(x - mean) / sqrt(var + eps) weight + bias over the last axes (arXiv 1607.06450).

    Args:
        shape: the length of the last axis, or the lengths of the last axes.
        eps: above 0.
        bias: whether there is one.

    Attributes:
        weight, bias: float32 of ``shape``, ones and zeros at first; the latter None without bias.
        narrow: whether the result is rounded to bfloat16; `apply_recipe` decides it.

    Raises:
        ValueError: for lengths below 1 or an eps not above 0; when called, for an input whose
            last axes are not ``shape``.
    """

    def __init__(self, shape: int | tuple[int, ...], eps: float = 1e-5, bias: bool = True) -> None:
        lengths = shape if isinstance(shape, tuple) else (shape,)
        self.shape = tuple(check_size("shape", n) for n in lengths)
        if not self.shape or not 0.0 < eps < math.inf:
            raise ValueError(
                f"LayerNorm: wanted at least one axis and eps above 0, got {shape!r} and {eps!r}"
            )
        self.eps = eps
        self.weight = Parameter(np.ones(self.shape, np.float32))
        self.bias = Parameter(np.zeros(self.shape, np.float32)) if bias else None
        self.narrow = False
        self._zeros: ExTensor | None = None  # stands for a bias, made once on the weight's device

    def forward(self, x: ExTensor) -> ExTensor:
        """The same shape."""
        tensors_only("LayerNorm", x)
        count = len(self.shape)
        if x.shape[-count:] != self.shape:
            raise ValueError(
                f"LayerNorm: wanted an input of shape (..., {', '.join(map(str, self.shape))}), "
                f"got {x.shape}"
            )
        return layer_norm(x, self.weight, self._shift(), self.eps, self.narrow)

    def _shift(self) -> ExTensor:
        if self.bias is not None:
            return self.bias
        like = self.weight
        if (
            self._zeros is None
            or self._zeros.backend is not like.backend
            or self._zeros.dtype is not like.dtype
        ):
            self._zeros = ExTensor.zeros_like(like)
        return self._zeros

    def extra_repr(self) -> str:
        """Its shape."""
        return f"{self.shape}, eps={self.eps}"
