"""Normalization layers: over a batch, over the last axes, over groups of channels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from extensor.autograd.mode import is_grad_enabled, no_grad
from extensor.autograd.tensor import ExTensor, wrap
from extensor.dtypes import bfloat16
from extensor.nn.checks import check_eps, check_images, check_last_axes, check_size, check_width
from extensor.nn.module import Module
from extensor.nn.parameter import Buffer, Parameter
from extensor.ops.arguments import tensors_only
from extensor.ops.norm import batch_norm, layer_norm, rms_norm

__all__ = ["BatchNorm2d", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm", "add_and_norm"]


class BatchNorm2d(Module):
    """(x - mean) / sqrt(var + eps) weight + bias, per channel (arXiv 1502.03167).

    In training, mean and variance (divided by count) are the batch's. The running ones move by
    ``momentum`` towards the batch's mean and its variance divided by count - 1. Evaluation uses
    the running ones.

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

    >>> norm = et.nn.BatchNorm2d(1)
    >>> norm(et.ExTensor([[[[0.0, 2.0]]]])).numpy().round(3)
    array([[[[-1.,  1.]]]], dtype=float32)
    >>> norm.running_mean.numpy(), norm.running_var.numpy()
    (array([0.1], dtype=float32), array([1.1], dtype=float32))
    """

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        self.channels = check_size("channels", channels)
        if not 0.0 <= momentum <= 1.0:
            raise ValueError(f"BatchNorm2d: expected momentum in [0, 1], got {momentum!r}")
        self.eps, self.momentum = check_eps("BatchNorm2d", eps), momentum
        self.weight = Parameter(np.ones(channels, np.float32))
        self.bias = Parameter(np.zeros(channels, np.float32))
        self.running_mean = Buffer(np.zeros(channels, np.float32))
        self.running_var = Buffer(np.ones(channels, np.float32))

    def forward(self, x: ExTensor) -> ExTensor:
        """See :meth:`extensor.nn.Module.forward`: the same shape."""
        check_images("BatchNorm2d", x, self.channels)
        check_width("BatchNorm2d", x, self.weight)
        if self.training:
            count = x.size // self.channels
            if count < 2:
                raise ValueError(
                    f"BatchNorm2d: expected two values or more per channel in training, got shape "
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
        """See :meth:`extensor.nn.Module.extra_repr`."""
        return f"{self.channels}, eps={self.eps}, momentum={self.momentum}"


class LayerNorm(Module):
    """(x - mean) / sqrt(var + eps) weight + bias over the last axes (arXiv 1607.06450).

    Args:
        shape: the length of the last axis, or the lengths of the last axes.
        eps: above 0.
        bias: whether there is one.

    Attributes:
        weight, bias: float32 of ``shape``, ones and zeros at first; the latter None without bias.
        narrow: whether the result is rounded to bfloat16; `apply_recipe` sets it.

    Raises:
        ValueError: for lengths below 1 or an eps not above 0; when called, for an input whose
            last axes are not ``shape``.

    >>> et.nn.LayerNorm(2)(et.ExTensor([[0.0, 2.0], [5.0, 5.0]])).numpy().round(3)
    array([[-1.,  1.],
           [ 0.,  0.]], dtype=float32)
    """

    def __init__(self, shape: int | tuple[int, ...], eps: float = 1e-5, bias: bool = True) -> None:
        lengths = shape if isinstance(shape, tuple) else (shape,)
        self.shape = tuple(check_size("shape", n) for n in lengths)
        if not self.shape:
            raise ValueError(f"LayerNorm: expected at least one axis, got {shape!r}")
        self.eps = check_eps("LayerNorm", eps)
        self.weight = Parameter(np.ones(self.shape, np.float32))
        self.bias = Parameter(np.zeros(self.shape, np.float32)) if bias else None
        self.narrow = False
        self._zeros: ExTensor | None = None  # in place of a bias; made once on the weight's device

    def forward(self, x: ExTensor) -> ExTensor:
        """See :meth:`extensor.nn.Module.forward`: the same shape."""
        check_last_axes("LayerNorm", x, *self.shape)
        check_width("LayerNorm", x, self.weight)
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
        """See :meth:`extensor.nn.Module.extra_repr`."""
        return f"{self.shape}, eps={self.eps}" + (", bias=False" if self.bias is None else "")


class RMSNorm(Module):
    """x / sqrt(mean(x^2) + eps) weight over the last axis (arXiv 1910.07467).

    Args:
        size: the length of the last axis.
        eps: above 0.

    Attributes:
        weight: float32 (size,), ones at first.
        narrow: whether the result is rounded to bfloat16; `apply_recipe` sets it.

    Raises:
        ValueError: for a size below 1 or an eps not above 0; when called, for an input whose last
            axis is not ``size`` long.

    >>> et.nn.RMSNorm(2)(et.ExTensor([[3.0, -3.0]])).numpy().round(3)
    array([[ 1., -1.]], dtype=float32)
    """

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        self.size = check_size("size", size)
        self.eps = check_eps("RMSNorm", eps)
        self.narrow = False
        self.weight = Parameter(np.ones(size, np.float32))

    def forward(self, x: ExTensor) -> ExTensor:
        """See :meth:`extensor.nn.Module.forward`: the same shape."""
        check_last_axes("RMSNorm", x, self.size)
        check_width("RMSNorm", x, self.weight)
        return rms_norm(x, self.weight, self.eps, self.narrow)

    def extra_repr(self) -> str:
        """See :meth:`extensor.nn.Module.extra_repr`."""
        return f"{self.size}, eps={self.eps}"


def add_and_norm(norm: RMSNorm, x: ExTensor, y: ExTensor) -> tuple[ExTensor, ExTensor]:
    """X + y, and its norm: in one launch on a GPU, of bfloat16 without gradients.

    Args:
        norm: of the last axis.
        x: (..., size).
        y: of the same shape.

    Returns:
        What the sum and a call of ``norm`` give.

    >>> from extensor.nn.norm import add_and_norm
    >>> total, y = add_and_norm(et.nn.RMSNorm(2), et.ones(2), et.ones(2))
    >>> total.tolist(), y.numpy().round(3).tolist()
    ([2.0, 2.0], [1.0, 1.0])
    """
    backend = x.backend
    alike = x.shape == y.shape and x.shape[-1:] == (norm.size,)
    narrow = x.dtype is y.dtype is norm.weight.dtype is bfloat16
    plain = type(norm) is RMSNorm and not (norm._hooks or norm._pre_hooks)
    if not (alike and narrow and plain and backend.groups_products) or is_grad_enabled():
        total = x + y
        return total, norm(total)
    whole, out = backend.add_rms_norm(x.data, y.data, norm.weight.data, norm.eps)
    return wrap(whole, backend), wrap(out, backend)


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

    >>> et.nn.GroupNorm(groups=2, channels=4)(et.ExTensor([[0.0, 2.0, 4.0, 4.0]])).numpy().round(3)
    array([[-1.,  1.,  0.,  0.]], dtype=float32)
    """

    def __init__(self, groups: int, channels: int, eps: float = 1e-5) -> None:
        self.groups = check_size("groups", groups)
        self.channels = check_size("channels", channels)
        if channels % groups:
            raise ValueError(
                f"GroupNorm: expected groups that divide channels, got {groups} and {channels}"
            )
        self.eps = check_eps("GroupNorm", eps)
        self.weight = Parameter(np.ones(channels, np.float32))
        self.bias = Parameter(np.zeros(channels, np.float32))

    def forward(self, x: ExTensor) -> ExTensor:
        """See :meth:`extensor.nn.Module.forward`: the same shape."""
        name = type(self).__name__
        tensors_only(name, x)
        if x.ndim < 2 or x.shape[1] != self.channels:
            raise ValueError(
                f"{name}: expected an input of shape (N, {self.channels}, ...), got {x.shape}"
            )
        check_width(name, x, self.weight)
        grouped = x.reshape((x.shape[0], self.groups, math.prod(x.shape[1:]) // self.groups))
        centred = grouped - grouped.mean(axis=2, keepdims=True)
        variance = centred.square().mean(axis=2, keepdims=True)
        normal = (centred * (variance + self.eps).rsqrt()).reshape(x.shape)
        across = (1, self.channels, *([1] * (x.ndim - 2)))
        return normal * self.weight.reshape(across) + self.bias.reshape(across)

    def extra_repr(self) -> str:
        """See :meth:`extensor.nn.Module.extra_repr`."""
        return f"{self.groups}, {self.channels}, eps={self.eps}"


class InstanceNorm(GroupNorm):
    """`GroupNorm` with every channel its own group (arXiv 1607.08022).

    Args:
        channels: C, 1 or more.
        eps: above 0.

    Raises:
        ValueError: as `GroupNorm`.

    >>> et.nn.InstanceNorm(1)(et.ExTensor([[[[0.0, 2.0]]]])).numpy().round(3)
    array([[[[-1.,  1.]]]], dtype=float32)
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__(channels, channels, eps)

    def extra_repr(self) -> str:
        """See :meth:`extensor.nn.Module.extra_repr`."""
        return f"{self.channels}, eps={self.eps}"
