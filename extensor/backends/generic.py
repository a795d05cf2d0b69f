"""Every backend method on nothing but an array module.

This is the definition: correct on numpy and cupy, fast on neither. A backend
subclasses it and overrides what is hot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import ml_dtypes
import numpy as np

from extensor.backends import dense, layers, training, windows
from extensor.backends.capture import Graph, StepCapture, UpdateGuard
from extensor.backends.preparation import FloatPreparation
from extensor.backends.protocol import (
    Array,
    FiniteQuery,
    OperandSpec,
    Preparation,
    Prepared,
    Window,
)
from extensor.quant import reference, views
from extensor.quant.array import QuantArray, QuantStats
from extensor.quant.recipe_state import Counts
from extensor.quant.spec import QuantSpec
from extensor.random import Stream

__all__ = ["GenericBackend"]


_BFLOAT16, _FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
P = ParamSpec("P")
T = TypeVar("T")


def _widened(method: Callable[P, T]) -> Callable[P, T]:
    """A method that is called again with float32 where arrays are bfloat16."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not any(getattr(a, "dtype", None) == _BFLOAT16 for a in args):
            return method(*args, **kwargs)
        backend: Any = args[0]
        wide = [
            backend.cast(a, _FLOAT32) if getattr(a, "dtype", None) == _BFLOAT16 else a
            for a in args[1:]
        ]
        made: T = getattr(backend, method.__name__)(*wide, **kwargs)
        return made

    return call


class GenericBackend:
    """Implements `extensor.backends.protocol.Backend` on the array module ``xp``."""

    multi_tensor_states: Collection[str] = ()
    bfloat16: Collection[str] = ()
    accumulating_vjps: Collection[str] = ()

    def __init__(self, name: str, xp: Any) -> None:
        self.name = name
        self.xp = xp

    @property
    def capturing(self) -> StepCapture | None:
        """See the protocol."""
        return None

    def quantize(
        self,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None = None,
        previous_amax: Array | None = None,
    ) -> tuple[QuantArray, QuantStats]:
        """See the protocol."""
        return reference.quantize(x, spec, stream, previous_amax, self.xp)

    def dequantize(self, q: QuantArray, dtype: str = "float32") -> Array:
        """See the protocol."""
        return reference.round_to(reference.dequantize(q, self.xp), dtype)

    @staticmethod
    def _input_reason(x: Array, spec: QuantSpec, stream: Stream | None) -> str | None:
        """Why no backend's kernel quantizes x, whatever its shape; None where one may."""
        if x.dtype.kind != "f" and x.dtype.name != "bfloat16":
            return f"{x.dtype} array"
        if (stream is None) == (spec.rounding == "stochastic"):
            return "the stream does not go with the rounding"
        return None

    def fake_quantize(
        self, x: Array, spec: QuantSpec, stream: Stream | None = None
    ) -> tuple[Array, Counts]:
        """See the protocol."""
        return reference.fake_quantize(x, spec, stream, self.xp)

    def quantize_rowwise_columnwise(
        self,
        x: Array,
        specs: tuple[QuantSpec, QuantSpec],
        streams: tuple[Stream | None, Stream | None] = (None, None),
    ) -> tuple[tuple[QuantArray, QuantStats], tuple[QuantArray, QuantStats]]:
        """See the protocol."""
        return self.quantize(x, specs[0], streams[0]), self.quantize(x, specs[1], streams[1])

    def fake_quantize_rowwise_columnwise(
        self,
        x: Array,
        specs: tuple[QuantSpec, QuantSpec],
        streams: tuple[Stream | None, Stream | None] = (None, None),
    ) -> tuple[tuple[Array, Counts], tuple[Array, Counts]]:
        """See the protocol."""
        return self.fake_quantize(x, specs[0], streams[0]), self.fake_quantize(
            x, specs[1], streams[1]
        )

    def block_scaled_matmul(self, a: QuantArray, b: QuantArray) -> Array:
        """See the protocol: the matrices of stacks one after the other."""
        if len(a.shape) == 2:
            return self.xp.matmul(self.dequantize(a), self.dequantize(b).T)
        out = self.xp.empty((*a.shape[:2], b.shape[1]), dtype=_FLOAT32)
        for i, sides in enumerate(zip(views.unstack(a), views.unstack(b), strict=True)):
            out[i] = self.block_scaled_matmul(*sides)
        return out

    def weight_only_matmul(self, x: Array, w: QuantArray) -> Array:
        """See the protocol."""
        return self.xp.matmul(self._wide(x), self.dequantize(w).T)

    def _wide(self, x: Array) -> Array:
        """Bfloat16 as float32; everything else as it is."""
        return self.cast(x, _FLOAT32) if x.dtype == _BFLOAT16 else x

    def prepare(
        self,
        x: Array,
        specs: Sequence[OperandSpec],
        streams: Sequence[Stream | None],
        work: int,
        amax_state: dict[str, Any] | None = None,
    ) -> Preparation:
        """See the protocol: operands are float32 values, too large to be kept."""
        return FloatPreparation(self, x, specs, streams)

    def run_batch(self, preparations: Sequence[Preparation]) -> list[Prepared]:
        """See the protocol: one after the other."""
        return [preparation.run() for preparation in preparations]

    def product(self, a: Any, b: Any, dtype: str = "float32", bias: Array | None = None) -> Array:
        """See the protocol."""
        out = self.matmul(a, b.T)
        if bias is not None:
            out += bias
        return out

    def quantized_conv2d(
        self,
        x: Array,
        w: Array,
        spec: QuantSpec,
        stream: Stream | None,
        shape: tuple[int, ...],
        window: Window,
        bias: Array | None = None,
    ) -> tuple[Array, Counts]:
        """See the protocol."""
        xp = self.xp
        values, stats = self._patches_operand(x, spec, stream, shape, window)
        ho, wo = window.output_size(x.shape[2:])
        out = xp.matmul(w, values).reshape(shape[0], x.shape[0], ho, wo)
        out = xp.ascontiguousarray(xp.swapaxes(out, 0, 1))
        if bias is not None:
            out += bias[:, None, None]
        return out, stats

    def quantized_conv2d_grad_w(
        self,
        g: Array,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None,
        shape: tuple[int, ...],
        window: Window,
    ) -> tuple[Array, Counts]:
        """See the protocol."""
        xp = self.xp
        values, stats = self._patches_operand(x, spec, stream, shape, window)
        return xp.matmul(g, xp.swapaxes(values, -1, -2)).reshape(shape), stats

    def _patches_operand(
        self,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None,
        shape: tuple[int, ...],
        window: Window,
    ) -> tuple[Array, Counts]:
        groups = x.shape[1] // shape[1]
        patches = windows.patch_matrix(x, window, groups, self.xp)
        return self.fake_quantize(patches if groups > 1 else patches[0], spec, stream)

    def conv2d(
        self, x: Array, w: Array, window: Window, groups: int, bias: Array | None = None
    ) -> Array:
        """See the protocol."""
        return windows.conv2d(x, w, window, groups, bias, self.xp)

    def conv2d_grad_x(
        self, g: Array, w: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> Array:
        """See the protocol."""
        return windows.conv2d_grad_x(g, w, shape, window, groups, self.xp)

    def conv2d_grad_w(
        self, g: Array, x: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> Array:
        """See the protocol."""
        return windows.conv2d_grad_w(g, x, shape, window, groups, self.xp)

    def max_pool2d(self, x: Array, window: Window) -> tuple[Array, Array]:
        """See the protocol."""
        return windows.max_pool2d(x, window, self.xp)

    def max_pool2d_grad(
        self, g: Array, index: Array, shape: tuple[int, ...], window: Window | None = None
    ) -> Array:
        """See the protocol."""
        return windows.max_pool2d_grad(g, index, shape, self.xp)

    def matmul(self, a: Array, b: Array, bias: Array | None = None) -> Array:
        """See the protocol."""
        return dense.matmul(a, b, bias, self.xp)

    @_widened
    def attention(
        self, q: Array, k: Array, v: Array, causal: bool, scale: float
    ) -> tuple[Array, Array]:
        """See the protocol."""
        return dense.attention(q, k, v, causal, scale, self.xp)

    @_widened
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
        """See the protocol."""
        dense.attention_grad(g, q, k, v, out, stats, causal, scale, into, self.xp)

    def dropout_mask(self, draws: Array, shape: tuple[int, ...], p: float) -> Array:
        """See the protocol."""
        return self.xp.asarray(training.dropout_mask(draws.tolist(), shape, p))

    @_widened
    def gelu(self, x: Array) -> tuple[Array, Array | None]:
        """See the protocol."""
        return training.gelu(x, self.xp)

    @_widened
    def gelu_grad(self, g: Array, x: Array, phi: Array | None) -> Array:
        """See the protocol."""
        if phi is None:
            _, phi = training.gelu(x, self.xp)
        return training.gelu_grad(g, x, phi, self.xp)

    @_widened
    def softmax(self, x: Array, axis: int) -> Array:
        """See the protocol."""
        return training.softmax(x, axis, self.xp)

    @_widened
    def softmax_grad(self, g: Array, out: Array, axis: int) -> Array:
        """See the protocol."""
        return training.softmax_grad(g, out, axis, self.xp)

    def log_softmax(self, x: Array, axis: int) -> Array:
        """See the protocol."""
        return training.log_softmax(x, axis, self.xp)

    def log_softmax_grad(self, g: Array, out: Array, axis: int) -> Array:
        """See the protocol."""
        return training.log_softmax_grad(g, out, axis, self.xp)

    @_widened
    def cross_entropy(self, x: Array, labels: Array, smoothing: float) -> tuple[Array, Array]:
        """See the protocol."""
        return training.cross_entropy(x, labels, smoothing, self.xp)

    @_widened
    def cross_entropy_grad(
        self, weight: Array, x: Array, labels: Array, kept: Array, smoothing: float
    ) -> Array:
        """See the protocol."""
        return training.cross_entropy_grad(weight, x, labels, kept, smoothing, self.xp)

    def layer_norm(
        self, x: Array, weight: Array, bias: Array, eps: float, narrow: bool = False
    ) -> tuple[Array, Array, Array]:
        """See the protocol."""
        y, mean, rstd = training.layer_norm(x, weight, bias, eps, self.xp)
        return self.cast(y, _BFLOAT16) if narrow else y, mean, rstd

    @_widened
    def layer_norm_grad(
        self, g: Array, x: Array, weight: Array, mean: Array, rstd: Array
    ) -> tuple[Array, Array, Array]:
        """See the protocol."""
        return training.layer_norm_grad(g, x, weight, mean, rstd, self.xp)

    def rms_norm(
        self, x: Array, weight: Array, eps: float, narrow: bool = False
    ) -> tuple[Array, Array]:
        """See the protocol."""
        y, rstd = training.rms_norm(x, weight, eps, self.xp)
        return self.cast(y, _BFLOAT16) if narrow else y, rstd

    @_widened
    def rms_norm_grad(self, g: Array, x: Array, weight: Array, rstd: Array) -> tuple[Array, Array]:
        """See the protocol."""
        return training.rms_norm_grad(g, x, weight, rstd, self.xp)

    def adam(
        self,
        weight: Array,
        grad: Array,
        mean: Array,
        square: Array,
        factors: Mapping[str, float],
    ) -> None:
        """See the protocol."""
        training.adam(weight, grad, mean, square, factors, self.xp)

    def adam_multi_tensor(
        self,
        parts: Sequence[tuple[Array, Array, Array, Array]],
        factors: Sequence[Mapping[str, float]],
        guard: UpdateGuard | None = None,
        check_finite: bool = False,
        cache: dict[str, Any] | None = None,
        numbers: Sequence[int] | int = 0,
    ) -> FiniteQuery:
        """See the protocol. States are float32 here."""

        def update(
            mine: Mapping[str, float], weight: Array, grad: Array, mean: Array, square: Array
        ) -> None:
            grad = grad + weight * mine["decay"] if mine["decay"] else grad
            self.adam(weight, grad, mean, square, mine)

        return self._each(parts, factors, check_finite, update)

    def sgd_multi_tensor(
        self,
        parts: Sequence[tuple[Array, Array, Array | None]],
        factors: Sequence[Mapping[str, float]],
        guard: UpdateGuard | None = None,
        check_finite: bool = False,
        cache: dict[str, Any] | None = None,
        numbers: Sequence[int] | int = 0,
    ) -> FiniteQuery:
        """See the protocol. States are float32 here."""

        def update(mine: Mapping[str, float], weight: Array, grad: Array, buffer: Array) -> None:
            more = (mine["lr"], mine["momentum"], mine["decay"], bool(mine["nesterov"]))
            self.sgd(weight, grad, buffer, *more)

        return self._each(parts, factors, check_finite, update)

    def _each(
        self,
        parts: Sequence[tuple[Array | None, ...]],
        factors: Sequence[Mapping[str, float]],
        check_finite: bool,
        update: Callable[..., None],
    ) -> FiniteQuery:
        """Part after part, flat; none if a gradient that is looked at is not finite."""
        found = self.all_finite_multi_tensor([part[1] for part in parts]) if check_finite else []
        if all(found):
            for part, mine in zip(parts, factors, strict=True):
                update(mine, *(None if a is None else a.reshape(-1) for a in part))
        return lambda: found

    def raising(self) -> AbstractContextManager[Any]:
        """See the protocol."""
        return nullcontext()

    def scale_multi_tensor(self, arrays: Sequence[Array], factor: float | Array) -> None:
        """See the protocol."""
        for x in arrays:
            number = factor if isinstance(factor, float) else factor.astype(x.dtype)
            self.xp.multiply(x, number, out=x)

    def square_sum_multi_tensor(self, arrays: Sequence[Array]) -> float | Array:
        """See the protocol."""
        return sum((training.square_sum(x, self.xp) for x in arrays), 0.0)

    def new_graph(self) -> Graph | None:
        """See the protocol."""
        return None

    def refuse(self, bad: Array, error: Callable[[], Exception]) -> None:
        """See the protocol."""
        if self.capturing is not None:
            self.capturing.watch(bad, error)
        elif bool(bad.any()):  # one wait for a GPU
            raise error()

    def add_rows(self, out: Array, index: Array, rows: Array) -> None:
        """See the protocol."""
        training.add_rows(out, index, rows, self.xp)

    @_widened
    def relu(self, x: Array) -> Array:
        """See the protocol."""
        return layers.relu(x, self.xp)

    @_widened
    def relu_grad(self, g: Array, out: Array) -> Array:
        """See the protocol."""
        return layers.relu_grad(g, out, self.xp)

    def add(self, a: Array, b: Array) -> Array:
        """See the protocol."""
        # By identity: cheap, and true of what numpy makes in float32.
        if a.dtype is b.dtype is _FLOAT32 or _BFLOAT16 not in (a.dtype, b.dtype):
            return a + b
        out = self.add(self.cast(a, _FLOAT32), self.cast(b, _FLOAT32))
        return self.cast(out, _BFLOAT16) if a.dtype == b.dtype else out

    def cast(self, x: Array, dtype: np.dtype[Any]) -> Array:
        """See the protocol."""
        return x.astype(dtype, copy=False)

    def bfloat16_values(self, x: Array) -> Array:
        """See the protocol."""
        return layers.bfloat16_values(x, self.xp)

    def all_finite(self, x: Array) -> bool:
        """See the protocol."""
        return layers.all_finite(x, self.xp)

    def all_finite_multi_tensor(self, arrays: Sequence[Array]) -> list[bool]:
        """See the protocol."""
        return [self.all_finite(x) for x in arrays]

    def leading_sum(self, x: Array, axes: int) -> Array:
        """See the protocol."""
        return layers.leading_sum(x, axes)

    def channel_sum(self, x: Array) -> Array:
        """See the protocol."""
        return layers.channel_sum(x, self.xp)

    def batch_norm(
        self, x: Array, weight: Array, bias: Array, eps: float
    ) -> tuple[Array, Array, Array]:
        """See the protocol."""
        return layers.batch_norm(x, weight, bias, eps, self.xp)

    def batch_norm_grad(
        self, g: Array, x: Array, weight: Array, mean: Array, var: Array, eps: float
    ) -> tuple[Array, Array, Array]:
        """See the protocol."""
        return layers.batch_norm_grad(g, x, weight, mean, var, eps, self.xp)

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
        layers.sgd(weight, grad, buffer, lr, momentum, decay, nesterov, self.xp)
