"""The CUDA backend's training kernels: losses, norms, Adam and gradient descent in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from extensor.backends.generic import GenericBackend
from extensor.backends.recording import Guard
from extensor_cuda.kernels import cross_entropy, norm, optimizer, scatter

__all__ = ["CudaTraining"]

Array = Any


class CudaTraining(GenericBackend):
    """The methods of a training step, each a kernel where its ``_..._reason`` gives None."""

    steps_together = True

    def _training_reasons(self) -> dict[str, Callable[..., str | None]]:
        return {
            "cross_entropy": lambda x, labels, smoothing: self._loss_reason(x),
            "cross_entropy_grad": lambda weight, x, *_: self._loss_reason(x),
            "layer_norm": lambda x, weight, bias, eps: self._norm_reason(x, weight, bias),
            "layer_norm_grad": lambda g, x, weight, *_: self._norm_reason(x, weight, g),
            "rms_norm": lambda x, weight, eps: self._norm_reason(x, weight),
            "add_rows": self._rows_reason,
            "rms_norm_grad": lambda g, x, weight, rstd: self._norm_reason(x, weight, g),
        }

    def _norm_reason(self, x: Array, weight: Array, *others: Array) -> str | None:
        if any(a.dtype != np.float32 for a in (x, weight, *others)):
            return "no float32 arrays"
        if not x.size:
            return "an empty array"
        if weight.size > norm.MOST:
            return f"rows of {weight.size} values; the kernel keeps up to {norm.MOST}"
        return None

    def _loss_reason(self, x: Array) -> str | None:
        if x.dtype != np.float32:
            return f"{x.dtype} scores"
        return None if x.size else "an empty array"

    def cross_entropy(self, x: Array, labels: Array, smoothing: float) -> tuple[Array, Array]:
        """See the protocol; bounds in `extensor_cuda.kernels.cross_entropy`."""
        if self._loss_reason(x):
            return super().cross_entropy(x, labels, smoothing)
        x, labels = self.xp.ascontiguousarray(x), labels.astype(np.int64, copy=False)
        return cross_entropy.losses(x, labels, smoothing, self.xp)

    def cross_entropy_grad(
        self, weight: Array, x: Array, labels: Array, kept: Array, smoothing: float
    ) -> Array:
        """See the protocol; bounds in `extensor_cuda.kernels.cross_entropy`."""
        if self._loss_reason(x):
            return super().cross_entropy_grad(weight, x, labels, kept, smoothing)
        x, weight = map(self.xp.ascontiguousarray, (x, weight.astype(np.float32, copy=False)))
        labels = labels.astype(np.int64, copy=False)
        return cross_entropy.grad(weight, x, labels, kept, smoothing, self.xp)

    def layer_norm(
        self, x: Array, weight: Array, bias: Array, eps: float
    ) -> tuple[Array, Array, Array]:
        """See the protocol; bounds in `extensor_cuda.kernels.norm`."""
        if self._norm_reason(x, weight, bias):
            return super().layer_norm(x, weight, bias, eps)
        x, weight, bias = map(self.xp.ascontiguousarray, (x, weight, bias))
        return norm.norm(x, weight, bias, eps, True, self.xp)

    def layer_norm_grad(
        self, g: Array, x: Array, weight: Array, mean: Array, rstd: Array
    ) -> tuple[Array, Array, Array]:
        """See the protocol; bounds in `extensor_cuda.kernels.norm`."""
        if self._norm_reason(x, weight, g):
            return super().layer_norm_grad(g, x, weight, mean, rstd)
        g, x, weight, mean, rstd = map(self.xp.ascontiguousarray, (g, x, weight, mean, rstd))
        return norm.grad(g, x, weight, mean, rstd, self.xp)

    def rms_norm(self, x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
        """See the protocol; bounds in `extensor_cuda.kernels.norm`."""
        if self._norm_reason(x, weight):
            return super().rms_norm(x, weight, eps)
        x, weight = map(self.xp.ascontiguousarray, (x, weight))
        out, _, rstd = norm.norm(x, weight, None, eps, False, self.xp)
        return out, rstd

    def rms_norm_grad(self, g: Array, x: Array, weight: Array, rstd: Array) -> tuple[Array, Array]:
        """See the protocol; bounds in `extensor_cuda.kernels.norm`."""
        if self._norm_reason(x, weight, g):
            return super().rms_norm_grad(g, x, weight, rstd)
        g, x, weight, rstd = map(self.xp.ascontiguousarray, (g, x, weight, rstd))
        gx, gw, _ = norm.grad(g, x, weight, None, rstd, self.xp)
        return gx, gw

    def add_rows(self, out: Array, index: Array, rows: Array) -> None:
        """See the protocol. One launch, in order."""
        if self._rows_reason(out, index, rows):
            super().add_rows(out, index, rows)
        else:
            scatter.add_rows(out, index, rows, self.xp)

    def _rows_reason(self, out: Array, index: Array, rows: Array) -> str | None:
        if not optimizer.takes(out) or rows.dtype != np.float32:
            return "no contiguous float32 arrays"
        return None if index.size else "an empty array"

    def all_finite_each(self, arrays: Sequence[Array]) -> list[bool]:
        """See the protocol. One launch, and one wait for the GPU."""
        if not all(optimizer.takes(a) for a in arrays):
            return super().all_finite_each(arrays)
        return optimizer.finite(arrays, self.xp)

    def adam_each(
        self,
        parts: Sequence[tuple[Array, Array, Array, Array]],
        factors: Sequence[Mapping[str, float]],
        guard: Guard | None = None,
    ) -> None:
        """See the protocol. One launch; the same bits as on the CPU."""
        if parts:
            optimizer.adam(parts, factors, self.xp, guard)

    def sgd_each(
        self,
        parts: Sequence[tuple[Array, Array, Array | None]],
        factors: Sequence[Mapping[str, float]],
        guard: Guard | None = None,
    ) -> None:
        """See the protocol. One launch; the same bits as on the CPU."""
        if parts:
            optimizer.sgd(parts, factors, self.xp, guard)

    def scale_each(self, arrays: Sequence[Array], factor: float | Array) -> None:
        """See the protocol. One launch."""
        if not all(optimizer.takes(a) for a in arrays):
            super().scale_each(arrays, factor)
        elif arrays:
            optimizer.scale(arrays, factor, self.xp)

    def square_sum_each(self, arrays: Sequence[Array]) -> float | Array:
        """See the protocol. Two launches."""
        if not all(optimizer.takes(a) for a in arrays):
            return super().square_sum_each(arrays)
        return optimizer.square_sum(arrays, self.xp)
