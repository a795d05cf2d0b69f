"""The CUDA backend's training kernels: losses, norms, Adam and gradient descent in float32.

Arrays that a training step writes and reads between its products may be bfloat16 too (`bfloat16`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from extensor.backends.capture import UpdateGuard
from extensor.backends.generic import GenericBackend, conv_pool
from extensor.backends.protocol import FiniteQuery, Window
from extensor.optim.states import STATES, Stored
from extensor_cuda.kernels import (
    attention,
    cross_entropy,
    dropout,
    elementwise,
    norm,
    optimizer,
    scatter,
    softmax,
    sums,
)
from extensor_cuda.kernels import window as kernels

__all__ = ["CudaTraining"]

Array = Any
_LEAST_COLUMNS = 32  # neighbours that a warp sums, each lane one or more


class CudaTraining(GenericBackend):
    """The methods of a training step, each a kernel where its ``_..._reason`` gives None."""

    multi_tensor_states = frozenset(STATES)
    accumulating_vjps = frozenset({"layer_norm", "rms_norm"})
    bfloat16 = frozenset(
        {
            "add",
            "cross_entropy",
            "gelu_exact",
            "packed_attention",
            "relu",
            "scaled_dot_product_attention",
            "softmax",
        }
    )

    def _training_reasons(self) -> dict[str, Callable[..., str | None]]:
        return {
            "cross_entropy": lambda x, labels, smoothing: self._loss_reason(x),
            "cross_entropy_grad": lambda weight, x, *_: self._loss_reason(x),
            "layer_norm": lambda x, weight, bias, *_: self._norm_reason(x, weight, bias),
            "layer_norm_grad": lambda g, x, weight, *_: self._norm_grad_reason(g, x, weight),
            "rms_norm": lambda x, weight, *_: self._norm_reason(x, weight),
            "add_rows": self._rows_reason,
            "leading_sum": self._sum_reason,
            "attention": lambda q, k, v, causal, scale: self._attention_reason(scale, q, k, v),
            "attention_grad": lambda g, q, k, v, out, stats, causal, scale, into: (
                self._attention_reason(scale, q, k, v, g)
            ),
            "conv2d_grad_x": lambda g, w, *_: self._floats_reason(g, w),
            "dropout_mask": lambda draws, shape, p: None,
            "gelu": self._values_reason,
            "add": self._add_reason,
            "cast": self._cast_reason,
            "relu": self._values_reason,
            "max_pool2d": lambda x, window: self._floats_reason(x),
            "max_pool2d_grad": self._pool_reason,
            "relu_grad": self._values_reason,
            "bfloat16_values": self._floats_reason,
            "gelu_grad": self._gelu_grad_reason,
            "softmax": lambda x, axis: self._softmax_reason(axis, x),
            "softmax_grad": lambda g, out, axis: self._softmax_reason(axis, g, out),
            "rms_norm_grad": lambda g, x, weight, _: self._norm_grad_reason(g, x, weight),
        }

    def _norm_reason(self, x: Array, weight: Array, *others: Array) -> str | None:
        if any(a.dtype != np.float32 for a in (x, weight, *others)):
            return "no float32 arrays"
        if not x.size:
            return "an empty array"
        if weight.size > norm.MOST:
            return f"rows of {weight.size} values; the kernel keeps up to {norm.MOST}"
        return None

    def _norm_grad_reason(self, g: Array, x: Array, weight: Array) -> str | None:
        return self._values_reason(g) or self._norm_reason(x, weight)

    def _loss_reason(self, x: Array) -> str | None:
        return self._values_reason(x)

    def cross_entropy(self, x: Array, labels: Array, smoothing: float) -> tuple[Array, Array]:
        """See the protocol; bounds in `extensor_cuda.kernels.cross_entropy`."""
        if self._loss_reason(x):
            return super().cross_entropy(x, labels, smoothing)
        x, labels = map(self.xp.ascontiguousarray, (x, labels.astype(np.int64, copy=False)))
        return cross_entropy.losses(x, labels, smoothing, self.xp)

    def cross_entropy_grad(
        self, weight: Array, x: Array, labels: Array, kept: Array, smoothing: float
    ) -> Array:
        """See the protocol; bounds in `extensor_cuda.kernels.cross_entropy`."""
        if self._loss_reason(x):
            return super().cross_entropy_grad(weight, x, labels, kept, smoothing)
        weight, labels = weight.astype(np.float32, copy=False), labels.astype(np.int64, copy=False)
        weight, x, labels, kept = map(self.xp.ascontiguousarray, (weight, x, labels, kept))
        return cross_entropy.grad(weight, x, labels, kept, smoothing, self.xp)

    def layer_norm(
        self, x: Array, weight: Array, bias: Array, eps: float, narrow: bool = False
    ) -> tuple[Array, Array, Array]:
        """See the protocol; bounds in `extensor_cuda.kernels.norm`."""
        if self._norm_reason(x, weight, bias):
            return super().layer_norm(x, weight, bias, eps, narrow)
        x, weight, bias = map(self.xp.ascontiguousarray, (x, weight, bias))
        return norm.norm(x, weight, bias, eps, True, self.xp, narrow)

    def layer_norm_grad(
        self,
        g: Array,
        x: Array,
        weight: Array,
        mean: Array,
        rstd: Array,
        addend: Array | None = None,
    ) -> tuple[Array, Array, Array]:
        """See the protocol; bounds in `extensor_cuda.kernels.norm`."""
        if self._norm_grad_reason(g, x, weight):
            gx, gw, gb = super().layer_norm_grad(g, x, weight, mean, rstd)
            return gx if addend is None else self.add(addend, gx), gw, gb
        g, x, weight, mean, rstd = map(self.xp.ascontiguousarray, (g, x, weight, mean, rstd))
        return norm.grad(g, x, weight, mean, rstd, self.xp, addend)

    def rms_norm(
        self, x: Array, weight: Array, eps: float, narrow: bool = False
    ) -> tuple[Array, Array]:
        """See the protocol; bounds in `extensor_cuda.kernels.norm`."""
        if self._norm_reason(x, weight):
            return super().rms_norm(x, weight, eps, narrow)
        x, weight = map(self.xp.ascontiguousarray, (x, weight))
        out, _, rstd = norm.norm(x, weight, None, eps, False, self.xp, narrow)
        return out, rstd

    def rms_norm_grad(
        self, g: Array, x: Array, weight: Array, rstd: Array, addend: Array | None = None
    ) -> tuple[Array, Array]:
        """See the protocol; bounds in `extensor_cuda.kernels.norm`."""
        if self._norm_grad_reason(g, x, weight):
            gx, gw = super().rms_norm_grad(g, x, weight, rstd)
            return gx if addend is None else self.add(addend, gx), gw
        g, x, weight, rstd = map(self.xp.ascontiguousarray, (g, x, weight, rstd))
        gx, gw, _ = norm.grad(g, x, weight, None, rstd, self.xp, addend)
        return gx, gw

    def leading_sum(self, x: Array, axes: int) -> Array:
        """See the protocol; bounds in `extensor_cuda.kernels.sums`."""
        if self._sum_reason(x, axes):
            return super().leading_sum(x, axes)
        shape = x.shape[axes:]
        return sums.column_sums(x.reshape(-1, math.prod(shape)), self.xp).reshape(shape)

    def _sum_reason(self, x: Array, axes: int) -> str | None:
        if x.dtype.name not in sums.KINDS or not x.flags.c_contiguous:
            return f"{x.dtype} array, or a strided one"
        if not x.size or not axes:
            return "an empty array, or no axes"
        columns = math.prod(x.shape[axes:])
        return None if columns >= _LEAST_COLUMNS else f"{columns} columns, too few for the kernel"

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

    def _floats_reason(self, *arrays: Array) -> str | None:
        if any(a.dtype != np.float32 for a in arrays):
            return "no float32 arrays"
        return None if arrays[0].size else "an empty array"

    def _values_reason(self, *arrays: Array) -> str | None:
        if any(a.dtype not in elementwise.KINDS for a in arrays):
            return "no float32 or bfloat16 arrays"
        return None if arrays[0].size else "an empty array"

    def _gelu_grad_reason(self, g: Array, x: Array, phi: Array | None) -> str | None:
        return self._values_reason(g, x) if phi is None else "phi was kept"

    def _add_reason(self, a: Array, b: Array) -> str | None:
        if a.shape != b.shape or not (a.flags.c_contiguous and b.flags.c_contiguous):
            return "arrays of several shapes, or strided ones"
        return self._values_reason(a, b)

    def _cast_reason(self, x: Array, dtype: np.dtype[Any]) -> str | None:
        if dtype == x.dtype:
            return "nothing to do"
        if dtype not in elementwise.KINDS or not x.flags.c_contiguous:
            return f"{dtype} wanted, or a strided array"
        return self._values_reason(x)

    def _softmax_reason(self, axis: int, *arrays: Array) -> str | None:
        x = arrays[-1]
        if reason := self._values_reason(*arrays):
            return reason
        if any(a.dtype != x.dtype for a in arrays):
            return "arrays of several dtypes"
        if axis != x.ndim - 1 or x.shape[-1] > softmax.MOST:
            return f"rows of {x.shape[axis]} values along axis {axis} of {x.ndim}"
        return None

    def _attention_reason(
        self, scale: float, q: Array, k: Array, v: Array, *g: Array
    ) -> str | None:
        if self._is_half(q):
            return attention.reason(q, k, v, scale, self.xp.cuda.runtime.getDevice())
        if reason := self._floats_reason(q, k, v, *g):
            return reason
        keys = k.shape[-2]
        return None if keys <= softmax.MOST else f"{keys} keys; a row has up to {softmax.MOST}"

    def _is_half(self, a: Array) -> bool:
        return bool(a.dtype.name == "bfloat16")

    def _pool_reason(
        self, g: Array, index: Array, shape: tuple[int, ...], window: Window | None = None
    ) -> str | None:
        return "an unknown window" if window is None else self._floats_reason(g)

    def conv2d_grad_x(
        self, g: Array, w: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> Array:
        """See the protocol: a product, and a launch that sums its patches."""
        if self._floats_reason(g, w):
            return super().conv2d_grad_x(g, w, shape, window, groups)
        patches = conv_pool.patches_grad(g, w, shape, window, groups, self.xp)
        return kernels.fold(self._whole(patches), shape, window, self.xp)

    def max_pool2d(self, x: Array, window: Window) -> tuple[Array, Array]:
        """See the protocol; the same bits as on the CPU."""
        if self._floats_reason(x):
            return super().max_pool2d(x, window)
        out = conv_pool.check_max_windows(window, x.shape[2:])
        return kernels.max_pool(self._whole(x), window, out, self.xp)

    def max_pool2d_grad(
        self, g: Array, index: Array, shape: tuple[int, ...], window: Window | None = None
    ) -> Array:
        """See the protocol; the same bits as on the CPU, where the window is known."""
        if window is None or self._floats_reason(g):
            return super().max_pool2d_grad(g, index, shape)
        return kernels.max_pool_grad(self._whole(g), self._whole(index), shape, window, self.xp)

    def relu_grad(self, g: Array, out: Array) -> Array:
        """See the protocol."""
        if self._values_reason(g, out):
            return super().relu_grad(g, out)
        g, out = self._whole(g), self._whole(out)
        return elementwise.binary("relu_grad", g, out, self.xp, g.dtype)

    def relu(self, x: Array) -> Array:
        """See the protocol."""
        if self._values_reason(x):
            return super().relu(x)
        return elementwise.unary("relu", self._whole(x), self.xp)

    def add(self, a: Array, b: Array) -> Array:
        """See the protocol."""
        if self._add_reason(a, b):
            return super().add(a, b)
        dtype = a.dtype if a.dtype == b.dtype else np.float32
        return elementwise.binary("add", a, b, self.xp, dtype)

    def cast(self, x: Array, dtype: np.dtype[Any]) -> Array:
        """See the protocol."""
        if self._cast_reason(x, dtype):
            return super().cast(x, dtype)
        return elementwise.unary("cast", x, self.xp, dtype)

    def bfloat16_values(self, x: Array) -> Array:
        """See the protocol."""
        if self._floats_reason(x):
            return super().bfloat16_values(x)
        return elementwise.unary("bfloat16_values", self._whole(x), self.xp)

    def dropout_mask(self, draws: Array, shape: tuple[int, ...], p: float) -> Array:
        """See the protocol. Does not wait for the GPU."""
        return dropout.dropout_mask(self._whole(draws), shape, p, self.xp)

    def gelu(self, x: Array) -> tuple[Array, Array | None]:
        """See the protocol; bounds in `extensor_cuda.kernels.elementwise`."""
        if self._values_reason(x):
            return super().gelu(x)
        return elementwise.unary("gelu", self._whole(x), self.xp), None

    def gelu_grad(self, g: Array, x: Array, phi: Array | None) -> Array:
        """See the protocol; bounds in `extensor_cuda.kernels.elementwise`."""
        if self._gelu_grad_reason(g, x, phi):
            return super().gelu_grad(g, x, phi)
        return elementwise.binary("gelu_grad", self._whole(g), self._whole(x), self.xp, g.dtype)

    def softmax(self, x: Array, axis: int) -> Array:
        """See the protocol; bounds in `extensor_cuda.kernels.softmax`."""
        if self._softmax_reason(axis, x):
            return super().softmax(x, axis)
        return softmax.softmax(self._whole(x), self.xp)

    def softmax_grad(self, g: Array, out: Array, axis: int) -> Array:
        """See the protocol; bounds in `extensor_cuda.kernels.softmax`."""
        if self._softmax_reason(axis, g, out):
            return super().softmax_grad(g, out, axis)
        return softmax.softmax_grad(self._whole(g), self._whole(out), self.xp)

    def attention(
        self, q: Array, k: Array, v: Array, causal: bool, scale: float
    ) -> tuple[Array, Array]:
        """See the protocol: two products and a launch between them; one launch in bfloat16.

        Bounds in `extensor_cuda.kernels.attention`.
        """
        if self._attention_reason(scale, q, k, v):
            return super().attention(q, k, v, causal, scale)
        if self._is_half(q):
            return attention.attention(q, k, v, causal, scale, self.xp)
        split = q.reshape(*k.shape[:2], q.shape[1] // k.shape[1], *q.shape[-2:])
        scores = self.xp.matmul(split, k[:, :, None].swapaxes(-1, -2))
        stats = softmax.attend(scores, scale, causal, self.xp)
        out = self.xp.matmul(scores, v[:, :, None])
        return out.reshape(*q.shape[:-1], v.shape[-1]), stats.reshape(*q.shape[:-1], 2)

    def attention_grad(
        self,
        g: Array,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        stats: Array,
        causal: bool,
        scale: float,
        into: tuple[Array, Array, Array],
    ) -> None:
        """See the protocol: five products, and a launch in the middle; two launches in bfloat16."""
        if self._attention_reason(scale, q, k, v, g):
            super().attention_grad(g, q, k, v, out, stats, causal, scale, into)
            return
        if self._is_half(q):
            attention.attention_grad(g, q, k, v, out, stats, causal, scale, into, self.xp)
            return
        shape = (*k.shape[:2], q.shape[1] // k.shape[1], q.shape[2])
        gg, qq = (a.reshape(*shape, a.shape[-1]) for a in (g, q))
        product, keys = self.xp.matmul, k[:, :, None]
        scores = product(qq, keys.swapaxes(-1, -2))
        d = product(gg, v[:, :, None].swapaxes(-1, -2))
        along = self._whole((g * out).sum(axis=-1))  # of strided arrays it may be strided
        softmax.attend_grad(scores, d, self._whole(stats), along, scale, causal)
        into[0][...] = product(d, keys).reshape(q.shape)
        into[1][...] = product(d.swapaxes(-1, -2), qq).sum(axis=2)
        into[2][...] = product(scores.swapaxes(-1, -2), gg).sum(axis=2)

    def _whole(self, a: Array) -> Array:
        """C-contiguous, of the same axes."""
        return a if a.flags.c_contiguous else self.xp.ascontiguousarray(a)

    def all_finite_multi_tensor(self, arrays: Sequence[Array]) -> list[bool]:
        """See the protocol. One launch, and one wait for the GPU."""
        if not all(optimizer.takes(a) for a in arrays):
            return super().all_finite_multi_tensor(arrays)
        return optimizer.finite(arrays, self.xp)

    def adam_multi_tensor(
        self,
        parts: Sequence[tuple[Array, Array, Stored, Stored]],
        factors: Sequence[Mapping[str, float]],
        guard: UpdateGuard | None = None,
        check_finite: bool = False,
        cache: dict[str, Any] | None = None,
        numbers: Sequence[int] | int = 0,
    ) -> FiniteQuery:
        """See the protocol. One launch, one more to look; the CPU's bits, states' too."""
        return optimizer.adam(parts, factors, self.xp, guard, check_finite, cache, numbers)

    def sgd_multi_tensor(
        self,
        parts: Sequence[tuple[Array, Array, Stored | None]],
        factors: Sequence[Mapping[str, float]],
        guard: UpdateGuard | None = None,
        check_finite: bool = False,
        cache: dict[str, Any] | None = None,
        numbers: Sequence[int] | int = 0,
    ) -> FiniteQuery:
        """See the protocol. One launch, one more to look; the CPU's bits, states' too."""
        return optimizer.sgd(parts, factors, self.xp, guard, check_finite, cache, numbers)

    def scale_multi_tensor(self, arrays: Sequence[Array], factor: float | Array) -> None:
        """See the protocol. One launch."""
        if not all(optimizer.takes(a) for a in arrays):
            super().scale_multi_tensor(arrays, factor)
        elif arrays:
            optimizer.scale(arrays, factor, self.xp)

    def square_sum_multi_tensor(self, arrays: Sequence[Array]) -> float | Array:
        """See the protocol. Two launches."""
        if not all(optimizer.takes(a) for a in arrays):
            return super().square_sum_multi_tensor(arrays)
        return optimizer.square_sum(arrays, self.xp)
