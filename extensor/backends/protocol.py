"""What a backend brings beyond its array module.

Ordinary operations use only the array module (numpy or cupy). The few methods
here are the ones worth writing a kernel for. `GenericBackend` implements all of
them on the array module; a backend overrides the hot ones, and
`tests/test_every_kernel.py` finds each override and compares it with the generic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from extensor.backends.capture import Graph, StepCapture, UpdateGuard
from extensor.quant.array import QuantArray, QuantStats
from extensor.quant.recipe_state import Counts
from extensor.quant.spec import QuantSpec
from extensor.random import Stream

__all__ = ["Array", "Backend", "Finite", "Window"]

Array = Any
Finite = Callable[[], list[bool]]
"""Waits, and says of each array whether it is without NaN and infinity."""


@dataclass(frozen=True)
class Window:
    """A sliding window: kernel, stride, padding, dilation, each (height, width)."""

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    def output_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the output for an input of ``size``; below 1 if it does not fit."""
        out = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(
                size, self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        ]
        return out[0], out[1]


class Backend(Protocol):
    """One device's arrays and kernels."""

    name: str
    xp: Any
    steps_together: Collection[str]
    """Kinds of optimizer state with which many parameters are best updated in one call."""
    bfloat16: Collection[str]
    """Primitives whose methods here take bfloat16, beside float32, as it is.

    They compute in float32. What they give is that, or rounded once to what the arrays promote to.
    """

    @property
    def capturing(self) -> StepCapture | None:
        """The capture under way in this thread, None if there is none; see `extensor.capture`."""
        ...

    def quantize(
        self,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None = None,
        previous_amax: Array | None = None,
    ) -> tuple[QuantArray, QuantStats]:
        """Float array -> codes and scales. ``spec`` is resolved; ``stream`` iff stochastic."""
        ...

    def dequantize(self, q: QuantArray, dtype: str = "float32") -> Array:
        """Codes and scales -> values of ``q.shape``, any Hadamard transform undone.

        ``dtype``: float32, or bfloat16 or float16, to which the float32 values are rounded once.
        """
        ...

    def operand(
        self, x: Array, spec: QuantSpec, stream: Stream | None = None
    ) -> tuple[Array, Counts]:
        """The float32 values a GEMM multiplies: quantized and decoded, still transformed.

        Same values, bit for bit, as decoding ``quantize``. Along the axis the result has the
        length the transform padded it to. It carries ``spec.element_scale``.
        """
        ...

    def quantize_pair(
        self,
        x: Array,
        specs: tuple[QuantSpec, QuantSpec],
        streams: tuple[Stream | None, Stream | None] = (None, None),
    ) -> tuple[tuple[QuantArray, QuantStats], tuple[QuantArray, QuantStats]]:
        """One array under two specs, as for two GEMMs: bit for bit two calls of ``quantize``.

        A backend may read a matrix once for a spec along its rows and one down its columns.
        """
        ...

    def operand_pair(
        self,
        x: Array,
        specs: tuple[QuantSpec, QuantSpec],
        streams: tuple[Stream | None, Stream | None] = (None, None),
    ) -> tuple[tuple[Array, Counts], tuple[Array, Counts]]:
        """The same for ``operand``."""
        ...

    def block_matmul(self, a: QuantArray, b: QuantArray) -> Array:
        """Float32 a b^T of (M, K) and (N, K), both blocked along the last axis: (M, N)."""
        ...

    def block_matmul_batch(self, a: QuantArray, b: QuantArray) -> Array:
        """`block_matmul` of each of (B, M, K) and (B, N, K), blocked along the last: (B, M, N)."""
        ...

    def weight_matmul(self, x: Array, w: QuantArray) -> Array:
        """Float32 x w^T of a dense (M, K) and (N, K) blocked along the last axis: (M, N).

        x is float32 or bfloat16, which is multiplied as it is or widened, exactly.
        """
        ...

    def operand_matmul(self, a: Array, b: Array) -> Array:
        """Float32 a b of (M, K) and (K, N), as `operand` gives them: (M, N), summed in float32."""
        ...

    def product_operands(
        self,
        x: Array,
        specs: Sequence[QuantSpec],
        streams: Sequence[Stream | None],
        work: int,
        memory: dict[str, Any] | None = None,
    ) -> list[tuple[Any, Counts]]:
        """A matrix under one spec, or under one along its rows and one down its columns.

        Each as `operand_product` takes it: what a spec blocks along is contracted, and last.
        ``work`` is the number of multiplications of the product, 0 where its other operand is not
        quantized. The counts may be a function that waits for them. ``memory`` is the tensor's own
        from call to call, for what a kernel wants to know of it beforehand; it decides no value.
        """
        ...

    def product_operands_each(
        self,
        xs: Sequence[Array],
        specs: Sequence[QuantSpec],
        memories: Sequence[dict[str, Any]],
    ) -> list[list[tuple[Any, Counts]]]:
        """`product_operands` of several matrices of one dtype, without random bits.

        Only for what `joins_operands` and, of each matrix, `keeps_operands` say yes to.
        """
        ...

    def joins_operands(self, specs: Sequence[QuantSpec]) -> bool:
        """Whether there is a `product_operands_each` for these specs."""
        ...

    def dense_operands(self, x: Array, axes: Sequence[int], dtype: str, work: int) -> list[Any]:
        """A matrix rounded to ``dtype``, bfloat16 or float32, once, as `operand_product` takes it.

        One for each of ``axes``, along which it is contracted, and which becomes the last.
        ``work`` is the number of multiplications of the product, 0 where its other operand is not
        of this dtype.
        """
        ...

    def keeps_dense(self, dtype: str, work: int) -> bool:
        """Whether `dense_operands` makes one array of 16 bits, worth to be kept, for all axes."""
        ...

    def keeps_operands(
        self,
        x: Array,
        specs: Sequence[QuantSpec],
        streams: Sequence[Stream | None],
        work: int,
    ) -> bool:
        """Whether `product_operands` makes these two at once, and small enough to be kept."""
        ...

    def operand_product(
        self, a: Any, b: Any, dtype: str = "float32", bias: Array | None = None
    ) -> Array:
        """A b^T + bias of (M, K) and (N, K) from `product_operands`: (M, N), summed in float32.

        The bias, float32 (N,), is added to that sum. In float32, or rounded to ``dtype``, where a
        kernel writes that.
        """
        ...

    def operand_conv2d(
        self,
        x: Array,
        w: Array,
        spec: QuantSpec,
        stream: Stream | None,
        shape: tuple[int, ...],
        window: Window,
        bias: Array | None = None,
    ) -> tuple[Array, Counts]:
        """The convolution of x's patches, quantized by ``spec``, with the values w, plus a bias.

        The patches are a matrix (C / groups * kh * kw, N * Ho * Wo), or one of each group,
        (groups, ...); w is (O, K) or (groups, O / groups, K), as `operand` gives it, K being the
        patches' length after it. ``shape`` is that of the weights. Gives (N, O, Ho, Wo).
        """
        ...

    def operand_conv2d_grad_w(
        self,
        g: Array,
        x: Array,
        spec: QuantSpec,
        stream: Stream | None,
        shape: tuple[int, ...],
        window: Window,
    ) -> tuple[Array, Counts]:
        """The gradient in the weights, of ``shape``, from quantized patches, and what it counted.

        Patches as for `operand_conv2d`; g is (O, M) or (groups, O / groups, M), as `operand` gives
        it, M being N * Ho * Wo after it.
        """
        ...

    def conv2d(
        self, x: Array, w: Array, window: Window, groups: int, bias: Array | None = None
    ) -> Array:
        """(N, C, H, W), (O, C / groups, kh, kw) -> (N, O, Ho, Wo), plus a bias (O,) if given."""
        ...

    def conv2d_grad_x(
        self, g: Array, w: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> Array:
        """Gradient of conv2d in x, of ``shape`` (N, C, H, W)."""
        ...

    def conv2d_grad_w(
        self, g: Array, x: Array, shape: tuple[int, ...], window: Window, groups: int
    ) -> Array:
        """Gradient of conv2d in w, of ``shape`` (O, C / groups, kh, kw)."""
        ...

    def max_pool2d(self, x: Array, window: Window) -> tuple[Array, Array]:
        """(N, C, H, W) -> maxima and their int32 flat positions in H * W, both (N, C, Ho, Wo).

        The first maximum in row-major window order wins; NaN wins over everything; padding never
        wins.
        """
        ...

    def max_pool2d_grad(
        self, g: Array, index: Array, shape: tuple[int, ...], window: Window | None = None
    ) -> Array:
        """Scatter-add of g (N, C, Ho, Wo) to the positions in ``index``, giving ``shape``.

        ``window`` is that of the maxima, where it is known.
        """
        ...

    def matmul(self, a: Array, b: Array, bias: Array | None = None) -> Array:
        """A b of (..., M, K) and (..., K, N), leading axes broadcasting, plus a bias (N,)."""
        ...

    def attention(
        self, q: Array, k: Array, v: Array, causal: bool, scale: float
    ) -> tuple[Array, Array]:
        """softmax(scale q k^T) v, (B, H, T, dv), and what the gradient needs of it, (B, H, T, 2).

        q is (B, H, T, d), k (B, Hkv, S, d) and v (B, Hkv, S, dv); nothing is empty, H is a
        multiple of Hkv. If ``causal`` query t sees the keys up to t + S - T, and S >= T.
        """
        ...

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
        """Gradients of attention, whose results are ``out`` and ``stats``, in q, k and v.

        They are written to ``into``, arrays of the inputs' shapes that may be strided.
        """
        ...

    def dropout_mask(self, draws: Array, shape: tuple[int, ...], p: float) -> Array:
        """Float32 of a shape: 0 with probability p, else 1 / (1 - p); the same on every device.

        ``draws`` is int64 (2,): the seed, and how often it was drawn from before. Value i is kept
        where the i-th word of 32 bits is p 2^32 or more, of those that numpy.random.Philox gives,
        low half first, from the key (seed, 0) and the counter (0, calls, 0, 0).
        """
        ...

    def gelu(self, x: Array) -> tuple[Array, Array | None]:
        """X Phi(x), with the normal distribution function Phi, and Phi(x) where that is kept."""
        ...

    def gelu_grad(self, g: Array, x: Array, phi: Array | None) -> Array:
        """Gradient of gelu; phi is what gelu gave beside its result."""
        ...

    def softmax(self, x: Array, axis: int) -> Array:
        """exp(x) over its sum along ``axis``, which is not empty."""
        ...

    def softmax_grad(self, g: Array, out: Array, axis: int) -> Array:
        """Gradient of softmax, whose output is ``out``."""
        ...

    def log_softmax(self, x: Array, axis: int) -> Array:
        """The logarithm of softmax, without underflow."""
        ...

    def log_softmax_grad(self, g: Array, out: Array, axis: int) -> Array:
        """Gradient of log_softmax, whose output is ``out``."""
        ...

    def cross_entropy(self, x: Array, labels: Array, smoothing: float) -> tuple[Array, Array]:
        """-log softmax(x)[label] of rows (N, C), labels (N,) in 0..C - 1; what its gradient needs.

        The target is 1 - smoothing at the label plus smoothing / C everywhere.
        """
        ...

    def cross_entropy_grad(
        self, weight: Array, x: Array, labels: Array, kept: Array, smoothing: float
    ) -> Array:
        """Gradient of cross_entropy in x times ``weight``, () or (N, 1); it gave ``kept``."""
        ...

    adding: Collection[str]
    """Primitives whose gradients' methods here take ``addend``, to be added to the first of them.

    It is float32, of the input's shape: a gradient that was there before.
    """

    def layer_norm(
        self, x: Array, weight: Array, bias: Array, eps: float, narrow: bool = False
    ) -> tuple[Array, Array, Array]:
        """LayerNorm over the last axes, those of the weight; each mean and 1 / sqrt(var + eps).

        ``narrow``: the first is rounded to bfloat16.
        """
        ...

    def layer_norm_grad(
        self, g: Array, x: Array, weight: Array, mean: Array, rstd: Array
    ) -> tuple[Array, Array, Array]:
        """Gradients of layer_norm in x, weight and bias; g may be bfloat16."""
        ...

    def rms_norm(
        self, x: Array, weight: Array, eps: float, narrow: bool = False
    ) -> tuple[Array, Array]:
        """RMSNorm over the last axes, those of the weight; 1 / sqrt(mean(x^2) + eps) of each.

        ``narrow``: the first is rounded to bfloat16.
        """
        ...

    def rms_norm_grad(self, g: Array, x: Array, weight: Array, rstd: Array) -> tuple[Array, Array]:
        """Gradients of rms_norm in x and weight; g may be bfloat16."""
        ...

    def adam(
        self,
        weight: Array,
        grad: Array,
        mean: Array,
        square: Array,
        factors: Mapping[str, float],
    ) -> None:
        """One step of Adam in place, on vectors; see `extensor.backends.training.adam`."""
        ...

    def adam_each(
        self,
        parts: Sequence[tuple[Array, Array, Array, Array]],
        factors: Sequence[Mapping[str, float]],
        guard: UpdateGuard | None = None,
        look: bool = False,
        memory: dict[str, Any] | None = None,
        numbers: Sequence[int] | int = 0,
    ) -> Finite:
        """`adam` on each (weight, grad, mean, square), with the factors of each.

        Arrays are float32, C-contiguous and of one size in each part, whatever their shapes. A
        factor ``decay`` times the weight is added to the gradient first, which is not written.
        ``guard`` says, in a capture, what the device decides. With ``look`` nothing is done if
        a gradient holds NaN or infinity; whether each is without them is what the result gives
        when it is called, until when a device may be at it. What a backend derives from arrays
        that stay from call to call it may keep in ``memory``, with these arrays.

        Mean and square may be stored in another way that `steps_together` names, the same in all
        parts: bfloat16 arrays, or blocks of flat arrays as `extensor.optim.states` has them. They
        are written where they lie, with the random bits of a factor ``step`` and of the part's
        tensor number in ``numbers``.
        """
        ...

    def sgd_each(
        self,
        parts: Sequence[tuple[Array, Array, Array | None]],
        factors: Sequence[Mapping[str, float]],
        guard: UpdateGuard | None = None,
        look: bool = False,
        memory: dict[str, Any] | None = None,
        numbers: Sequence[int] | int = 0,
    ) -> Finite:
        """`sgd` on each (weight, grad, buffer), all else as for `adam_each`.

        Factors are lr, momentum, decay, nesterov and step.
        """
        ...

    def scale_each(self, arrays: Sequence[Array], factor: float | Array) -> None:
        """Multiply each array in place by a number, or by an array of shape () on the device."""
        ...

    def square_sum_each(self, arrays: Sequence[Array]) -> float | Array:
        """The sum of all squares in float64, in an order that depends on sizes alone.

        A number, or an array of shape () where the device computes it without waiting.
        """
        ...

    def new_graph(self) -> Graph | None:
        """What repeats a step without Python; None where Python is all there is."""
        ...

    def refuse(self, bad: Array, error: Callable[[], Exception]) -> None:
        """Raise ``error()`` if an element of a bool array is true; waits for a device.

        In a capture nothing waits: updates stop then, and the error is raised afterwards.
        """
        ...

    def add_rows(self, out: Array, index: Array, rows: Array) -> None:
        """out[index] += rows along the first axis, in place; positions that repeat add up.

        ``index`` is of whole numbers in -len(out)..len(out) - 1, (...), and rows (..., *rest).
        """
        ...

    def raising(self) -> AbstractContextManager[Any]:
        """A context in which the array module's ``linalg`` raises LinAlgError, as numpy's does."""
        ...

    def relu(self, x: Array) -> Array:
        """max(x, 0), NaN for NaN."""
        ...

    def relu_grad(self, g: Array, out: Array) -> Array:
        """G where relu's output is positive, 0 elsewhere."""
        ...

    def add(self, a: Array, b: Array) -> Array:
        """A + b, broadcasting, in float32 rounded once where both are bfloat16."""
        ...

    def cast(self, x: Array, dtype: np.dtype[Any]) -> Array:
        """The values in another dtype, rounded to nearest even; x itself where it has that."""
        ...

    def bfloat16_values(self, x: Array) -> Array:
        """Float32 values rounded to the nearest bfloat16, ties to even, as float32."""
        ...

    def all_finite(self, x: Array) -> bool:
        """Whether no value of a float array is NaN or infinite."""
        ...

    def all_finite_each(self, arrays: Sequence[Array]) -> list[bool]:
        """`all_finite` of each array."""
        ...

    def leading_sum(self, x: Array, axes: int) -> Array:
        """Sums over the first ``axes`` axes, in float32 for 16-bit floats: of a bias's gradient."""
        ...

    def channel_sum(self, x: Array) -> Array:
        """Sums over all but the second axis, (N, C, ...) -> (C,)."""
        ...

    def batch_norm(
        self, x: Array, weight: Array, bias: Array, eps: float
    ) -> tuple[Array, Array, Array]:
        """BatchNorm of (N, C, ...); each channel's mean and variance over count, (C,)."""
        ...

    def batch_norm_grad(
        self, g: Array, x: Array, weight: Array, mean: Array, var: Array, eps: float
    ) -> tuple[Array, Array, Array]:
        """Gradients of batch_norm in x, weight and bias."""
        ...

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
        """One step of gradient descent in place, on vectors; see `extensor.backends.layers.sgd`."""
        ...
