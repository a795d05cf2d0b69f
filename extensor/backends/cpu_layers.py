"""The CPU backend's layer kernels: ReLU, bfloat16, sums, BatchNorm and SGD in float32.

relu and its gradient, add, bfloat16_values and sgd give the bytes that numpy gives. Sums over
images are taken in float32 over runs of pixels and in float64 over those: with P pixels an image,
u = 2**-24, no overflow and any values,

    channel_sum   |error| <= (P + 12) u sum |x|

BatchNorm's mean and variance are such sums; its test says the bounds that follow.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from extensor.backends.cpu_core import CoreBackend, ready
from extensor.backends.protocol import Array

__all__ = ["CpuLayers"]

_WORTH = 1 << 14  # elements; below, numpy's own call is as fast


class CpuLayers(CoreBackend):
    """The methods of layers, each in C++ where its ``_..._reason`` gives None."""

    def _layer_reasons(self) -> dict[str, Callable[..., str | None]]:
        return {
            "relu": self._arrays_reason,
            "relu_grad": self._arrays_reason,
            "add": self._add_reason,
            "bfloat16_values": self._arrays_reason,
            "all_finite": self._arrays_reason,
            "channel_sum": self._arrays_reason,
            "batch_norm": self._arguments_reason,
            "batch_norm_grad": self._arguments_reason,
            "sgd": self._sgd_reason,
        }

    def relu(self, x: Array) -> Array:
        """See the protocol."""
        if self._arrays_reason(x):
            return super().relu(x)
        return self.core.relu(ready(x))

    def relu_grad(self, g: Array, out: Array) -> Array:
        """See the protocol."""
        if self._arrays_reason(g, out):
            return super().relu_grad(g, out)
        return self.core.relu_grad(ready(g), ready(out))

    def add(self, a: Array, b: Array) -> Array:
        """See the protocol."""
        if self._add_reason(a, b):
            return super().add(a, b)
        return self.core.add(a, b)

    def _add_reason(self, a: Array, b: Array) -> str | None:
        if a.size < _WORTH or a.shape != b.shape:
            return "small, or of two shapes"
        if not (a.flags.c_contiguous and b.flags.c_contiguous):
            return "not contiguous"
        if not (a.flags.aligned and b.flags.aligned):
            return "misaligned"
        return self._arrays_reason(a, b)

    def bfloat16_values(self, x: Array) -> Array:
        """See the protocol."""
        if self._arrays_reason(x):
            return super().bfloat16_values(x)
        return self.core.bfloat16_values(ready(x))

    def all_finite(self, x: Array) -> bool:
        """See the protocol."""
        if self._arrays_reason(x):
            return super().all_finite(x)
        return bool(self.core.all_finite(ready(x)))

    def channel_sum(self, x: Array) -> Array:
        """See the protocol."""
        if self._arrays_reason(x):
            return super().channel_sum(x)
        return self.core.channel_sum(ready(x))

    def batch_norm(
        self, x: Array, weight: Array, bias: Array, eps: float
    ) -> tuple[Array, Array, Array]:
        """See the protocol."""
        if self._arrays_reason(x, weight, bias):
            return super().batch_norm(x, weight, bias, eps)
        y, mean, var = self.core.batch_norm(ready(x), ready(weight), ready(bias), eps)
        return y, mean, var

    def batch_norm_grad(
        self, g: Array, x: Array, weight: Array, mean: Array, var: Array, eps: float
    ) -> tuple[Array, Array, Array]:
        """See the protocol."""
        if self._arrays_reason(g, x, weight, mean, var):
            return super().batch_norm_grad(g, x, weight, mean, var, eps)
        arrays = (ready(a) for a in (g, x, weight, mean, var))
        gx, gw, gb = self.core.batch_norm_grad(*arrays, eps)
        return gx, gw, gb

    def sgd(
        self,
        weight: Array,
        grad: Array,
        buffer: Array | None,
        lr: float,
        momentum: float,
        decay: float,
        nesterov: bool,
    ) -> None:
        """See the protocol."""
        if self._sgd_reason(weight, grad, buffer, lr, momentum, decay, nesterov):
            super().sgd(weight, grad, buffer, lr, momentum, decay, nesterov)
            return
        self.core.sgd(weight, ready(grad), buffer, lr, momentum, decay, nesterov)

    def _sgd_reason(
        self,
        weight: Array,
        grad: Array,
        buffer: Array | None,
        lr: float,
        momentum: float,
        decay: float,
        nesterov: bool,
    ) -> str | None:
        written = [weight] if buffer is None else [weight, buffer]
        if reason := self._updates_reason(grad, *written):
            return reason
        if any(0 < abs(number) < np.finfo(np.float32).tiny for number in (lr, momentum, decay)):
            return "a factor that underflows in float32"
        return None
