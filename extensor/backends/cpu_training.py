"""The CPU backend's training kernels in float32: gelu, softmax, losses, norms and Adam.

Against exact arithmetic, with u = 2**-24, n the length of a row and no overflow:

    gelu          |error| <= (x^2 / 2 + 16) u |gelu(x)| + 2**-144
    gelu_grad     |error| <= (x^2 / 2 + 16) u |g| (Phi(x) + |x| density(x)) + 2**-144 (1 + |g|),
                  Phi being the one given
    softmax       |error| <= (d + sum p d + n + 16) u p + 2**-126, with d = max(x) - x
    softmax_grad  |error| <= (n + 4) u p (|g| + sum |g p|) + 2**-126
    log_softmax   |error| <= (sum p d + n + 8) u + 4 u (log sum + d), with log sum = log sum e^-d
    log_softmax_grad  |error| <= (n + 16) u p sum |g| + 2 u |g| + 2**-126 (1 + sum |g|),
                  p = e^out of the output given
    cross_entropy |error| <= that of log_softmax at the label, and with smoothing s also
                  4 u s (log sum + mean d) + s (n + 3) u mean d
    cross_entropy_grad  |error| <= ((d + sum p d + n + 16) u p + 4 u (p + target) + 2**-126)
                  |weight| + 2**-149

Norms are sums of at most n terms of a row, or of one term a row: their tests say the bound. Adam
gives the bytes that numpy gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np

from extensor.backends.cpu_core import CoreBackend, ready
from extensor.backends.protocol import Array

__all__ = ["CpuTraining"]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class CpuTraining(CoreBackend):
    """The methods of a training step, each in C++ where its ``_..._reason`` gives None."""

    def _training_reasons(self) -> dict[str, Callable[..., str | None]]:
        return {
            "gelu": self._arrays_reason,
            "gelu_grad": self._arrays_reason,
            "softmax": self._softmax_reason,
            "softmax_grad": self._softmax_grad_reason,
            "log_softmax": self._softmax_reason,
            "log_softmax_grad": self._softmax_grad_reason,
            "cross_entropy": self._losses_reason,
            "cross_entropy_grad": self._losses_grad_reason,
            "layer_norm": self._arguments_reason,
            "layer_norm_grad": self._arrays_reason,
            "rms_norm": self._arguments_reason,
            "rms_norm_grad": self._arrays_reason,
            "adam": self._adam_reason,
        }

    def gelu(self, x: Array) -> tuple[Array, Array | None]:
        """See the protocol."""
        if self._arrays_reason(x):
            return super().gelu(x)
        y, phi = self.core.gelu(ready(x))
        return y, phi

    def gelu_grad(self, g: Array, x: Array, phi: Array | None) -> Array:
        """See the protocol."""
        if phi is None or self._arrays_reason(g, x, phi):
            return super().gelu_grad(g, x, phi)
        return self.core.gelu_grad(ready(g), ready(x), ready(phi))

    def softmax(self, x: Array, axis: int) -> Array:
        """See the protocol."""
        if self._softmax_reason(x, axis):
            return super().softmax(x, axis)
        return self.core.softmax(ready(x), x.shape[axis])

    def _softmax_reason(self, x: Array, axis: int) -> str | None:
        return self._arrays_reason(x) or _axis_reason(x, axis)

    def softmax_grad(self, g: Array, out: Array, axis: int) -> Array:
        """See the protocol."""
        if self._softmax_grad_reason(g, out, axis):
            return super().softmax_grad(g, out, axis)
        return self.core.softmax_grad(ready(g), ready(out), out.shape[axis])

    def _softmax_grad_reason(self, g: Array, out: Array, axis: int) -> str | None:
        return self._arrays_reason(g, out) or _axis_reason(out, axis)

    def log_softmax(self, x: Array, axis: int) -> Array:
        """See the protocol."""
        if self._softmax_reason(x, axis):
            return super().log_softmax(x, axis)
        return self.core.log_softmax(ready(x), x.shape[axis])

    def log_softmax_grad(self, g: Array, out: Array, axis: int) -> Array:
        """See the protocol."""
        if self._softmax_grad_reason(g, out, axis):
            return super().log_softmax_grad(g, out, axis)
        return self.core.log_softmax_grad(ready(g), ready(out), out.shape[axis])

    def cross_entropy(self, x: Array, labels: Array, smoothing: float) -> tuple[Array, Array]:
        """See the protocol. Kept are each row's largest score and its sum of exponentials."""
        if self._losses_reason(x, labels, smoothing):
            return super().cross_entropy(x, labels, smoothing)
        losses, kept = self.core.cross_entropy(ready(x), _numbers(labels), smoothing)
        return losses, kept

    def _losses_reason(self, x: Array, labels: Array, smoothing: float) -> str | None:
        return self._arrays_reason(x)

    def cross_entropy_grad(
        self, weight: Array, x: Array, labels: Array, kept: Array, smoothing: float
    ) -> Array:
        """See the protocol."""
        if self._losses_grad_reason(weight, x, labels, kept, smoothing):
            return super().cross_entropy_grad(weight, x, labels, kept, smoothing)
        weight = ready(weight.astype(np.float32, copy=False))
        return self.core.cross_entropy_grad(
            weight, ready(x), _numbers(labels), ready(kept), smoothing
        )

    def _losses_grad_reason(
        self, weight: Array, x: Array, labels: Array, kept: Array, smoothing: float
    ) -> str | None:
        return self._arrays_reason(x)

    def layer_norm(
        self, x: Array, weight: Array, bias: Array, eps: float, narrow: bool = False
    ) -> tuple[Array, Array, Array]:
        """See the protocol."""
        if self._arrays_reason(x, weight, bias):
            return super().layer_norm(x, weight, bias, eps, narrow)
        y, mean, rstd = self.core.layer_norm(ready(x), ready(weight), ready(bias), eps)
        kept = _kept(x, weight)
        y = self.cast(y, _BFLOAT16) if narrow else y
        return y, mean.reshape(kept), rstd.reshape(kept)

    def layer_norm_grad(
        self, g: Array, x: Array, weight: Array, mean: Array, rstd: Array
    ) -> tuple[Array, Array, Array]:
        """See the protocol."""
        if self._arrays_reason(g, x, weight, mean, rstd):
            return super().layer_norm_grad(g, x, weight, mean, rstd)
        arrays = (ready(a) for a in (g, x, weight, mean, rstd))
        gx, gw, gb = self.core.norm_grad(*arrays)
        return gx, gw, gb

    def rms_norm(
        self, x: Array, weight: Array, eps: float, narrow: bool = False
    ) -> tuple[Array, Array]:
        """See the protocol."""
        if self._arrays_reason(x, weight):
            return super().rms_norm(x, weight, eps, narrow)
        y, rstd = self.core.rms_norm(ready(x), ready(weight), eps)
        y = self.cast(y, _BFLOAT16) if narrow else y
        return y, rstd.reshape(_kept(x, weight))

    def rms_norm_grad(self, g: Array, x: Array, weight: Array, rstd: Array) -> tuple[Array, Array]:
        """See the protocol."""
        if self._arrays_reason(g, x, weight, rstd):
            return super().rms_norm_grad(g, x, weight, rstd)
        gx, gw, _ = self.core.norm_grad(ready(g), ready(x), ready(weight), None, ready(rstd))
        return gx, gw

    def adam(
        self,
        weight: Array,
        grad: Array,
        mean: Array,
        square: Array,
        factors: Mapping[str, float],
    ) -> None:
        """See the protocol."""
        if self._adam_reason(weight, grad, mean, square, factors):
            super().adam(weight, grad, mean, square, factors)
            return
        names = ("keep", "take1", "keep2", "take2", "widen", "eps", "rate")
        numbers = np.array([factors[name] for name in names], dtype=np.float32)
        self.core.adam(weight, ready(grad), mean, square, numbers)

    def _adam_reason(
        self,
        weight: Array,
        grad: Array,
        mean: Array,
        square: Array,
        factors: Mapping[str, float],
    ) -> str | None:
        return self._updates_reason(grad, weight, mean, square)


def _axis_reason(x: Array, axis: int) -> str | None:
    last = x.ndim - 1
    return None if axis in (last, -1) else f"axis {axis} of {x.ndim}; the core takes the last"


def _numbers(labels: Array) -> Array:
    return ready(labels.astype(np.int64, copy=False))


def _kept(x: Array, weight: Array) -> tuple[int, ...]:
    """The shape of what is kept for each row."""
    return (*x.shape[: x.ndim - weight.ndim], *(1,) * weight.ndim)
