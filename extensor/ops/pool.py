"""Two-dimensional pooling."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, composite, primitive
from extensor.autograd.tensor import ExTensor
from extensor.backends.protocol import Window
from extensor.ops.arguments import tensors_only
from extensor.ops.conv import Pair, int_pair

__all__ = ["avg_pool2d", "global_avg_pool2d", "max_pool2d"]


def _window(name: str, x: ExTensor, kernel: Pair, stride: Pair | None, padding: Pair) -> Window:
    tensors_only(name, x)
    if x.ndim != 4:
        raise ValueError(f"{name}: expected x (N, C, H, W), got shape {x.shape}")
    size = int_pair(name, "kernel", kernel, 1)
    window = Window(
        size,
        size if stride is None else int_pair(name, "stride", stride, 1),
        int_pair(name, "padding", padding, 0),
    )
    if any(2 * p > k for p, k in zip(window.padding, size, strict=True)):
        raise ValueError(
            f"{name}: padding: expected at most half the kernel {size}, got {window.padding}; more "
            "would make windows of nothing but padding"
        )
    if min(window.output_size((x.shape[2], x.shape[3]))) < 1:
        raise ValueError(
            f"{name}: the window {window} does not fit an image of {x.shape[2:]}; use more padding "
            "or a smaller kernel"
        )
    return window


_ERRORS = (
    BadInput((np.zeros((4, 4)), 2), ValueError, "expected x (N, C, H, W)"),
    BadInput((np.zeros((1, 1, 4, 4)), 5), ValueError, "does not fit"),
    BadInput((np.zeros((1, 1, 4, 4)), 2, 2, 2), ValueError, "half the kernel"),
    BadInput((np.zeros((1, 1, 4, 4)), 2.5), TypeError, "an int or two"),
)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    def image(*shape: int) -> Any:  # well apart, so that no maximum changes hands
        return rng.permutation(int(np.prod(shape))).astype(np.float64).reshape(shape)

    yield Sample((image(2, 3, 4, 4), 2))
    yield Sample((image(1, 2, 5, 4), (3, 2), (2, 1), (1, 1)))


@primitive(
    forward=lambda backend, x, window: backend.max_pool2d(x, window),
    vjps=(
        lambda g, out, x, window, saved: apply("max_pool2d_grad", g, index=saved, shape=x.shape),
    ),
    fused_vjp=lambda backend, g, out, inputs, needs, window, saved: (
        backend.max_pool2d_grad(g, saved, inputs[0].shape, window),
    ),
    reads="nothing",
    saves=True,
    to_float=True,
    samples=_samples,
    errors=_ERRORS,
)
def max_pool2d(
    x: ExTensor, kernel: Pair, stride: Pair | None = None, padding: Pair = 0
) -> ExTensor:
    """The largest value of each window; the first one gets the gradient, NaN wins.

    Args:
        x: (N, C, H, W).
        kernel: the window, one number or (height, width).
        stride: its steps, likewise; the kernel's size if None.
        padding: on each side, likewise, at most half the kernel; it never wins.

    Returns:
        (N, C, Ho, Wo), Ho = (H + 2 padding - kh) // stride + 1.

    Raises:
        TypeError, ValueError: for shapes and numbers that do not go together.

    Example:
        >>> image = et.arange(16, dtype="float32").reshape(1, 1, 4, 4)
        >>> et.max_pool2d(image, 2).tolist()
        [[[[5.0, 7.0], [13.0, 15.0]]]]
    """
    return apply("max_pool2d", x, window=_window("max_pool2d", x, kernel, stride, padding))


def _gather(backend: Any, x: Any, index: Any) -> Any:
    flat = x.reshape(*x.shape[:2], math.prod(x.shape[2:]))
    where = backend.xp.asarray(index).reshape(*index.shape[:2], math.prod(index.shape[2:]))
    return backend.xp.take_along_axis(flat, where, axis=2).reshape(index.shape)


_INDEX = np.array([[[[0, 3], [8, 8]]]], dtype=np.int32)


@primitive(
    forward=lambda backend, g, index, shape: backend.max_pool2d_grad(g, index, shape),
    vjps=(lambda h, out, g, index, shape: apply("max_pool2d_gather", h, index=index),),
    reads="nothing",
    samples=lambda rng: [
        Sample((rng.normal(size=(1, 1, 2, 2)),), {"index": _INDEX, "shape": (1, 1, 3, 3)})
    ],
)
def _max_pool2d_grad(g: ExTensor, index: Any, shape: tuple[int, ...]) -> ExTensor:
    """The gradient of max_pool2d, as an operation on g."""
    return apply("max_pool2d_grad", g, index=index, shape=shape)


@primitive(
    forward=_gather,
    vjps=(lambda h, out, x, index: apply("max_pool2d_grad", h, index=index, shape=x.shape),),
    reads="nothing",
    samples=lambda rng: [Sample((rng.normal(size=(1, 1, 3, 3)),), {"index": _INDEX})],
)
def _max_pool2d_gather(x: ExTensor, index: Any) -> ExTensor:
    """The values of x at the positions that won: the transpose of max_pool2d_grad."""
    return apply("max_pool2d_gather", x, index=index)


def _offsets(window: Window, size: tuple[int, int]) -> Iterator[tuple[Any, ...]]:
    """For each place in the window, the padded image's pixels that stand there."""
    ho, wo = window.output_size(size)
    (kh, kw), (sh, sw) = window.kernel, window.stride
    for i in range(kh):
        for j in range(kw):
            rows = slice(i, i + sh * (ho - 1) + 1, sh)
            yield ..., rows, slice(j, j + sw * (wo - 1) + 1, sw)


def _avg_pool(backend: Any, x: Any, window: Window) -> Any:
    xp, (ph, pw) = backend.xp, window.padding
    size = x.shape[2], x.shape[3]
    if ph or pw:
        x = xp.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    out = xp.zeros((*x.shape[:2], *window.output_size(size)), dtype=x.dtype)
    for place in _offsets(window, size):
        out += x[place]
    out *= 1.0 / (window.kernel[0] * window.kernel[1])
    return out


def _avg_pool_grad(backend: Any, g: Any, shape: tuple[int, ...], window: Window) -> Any:
    (ph, pw), (n, c, h, w) = window.padding, shape
    out = backend.xp.zeros((n, c, h + 2 * ph, w + 2 * pw), dtype=g.dtype)
    part = g * (1.0 / (window.kernel[0] * window.kernel[1]))
    for place in _offsets(window, (h, w)):
        out[place] += part
    return out[:, :, ph : ph + h, pw : pw + w]


@primitive(
    forward=_avg_pool,
    vjps=(lambda g, out, x, window: apply("avg_pool2d_grad", g, shape=x.shape, window=window),),
    fused_vjp=lambda backend, g, out, inputs, needs, window: (
        _avg_pool_grad(backend, g, inputs[0].shape, window),
    ),
    reads="nothing",
    to_float=True,
    samples=_samples,
    errors=_ERRORS,
)
def avg_pool2d(
    x: ExTensor, kernel: Pair, stride: Pair | None = None, padding: Pair = 0
) -> ExTensor:
    """The mean of each window, padding counted as zeros.

    Args:
        x: (N, C, H, W).
        kernel: the window, one number or (height, width).
        stride: its steps, likewise; the kernel's size if None.
        padding: on each side, likewise, at most half the kernel.

    Returns:
        (N, C, Ho, Wo), Ho = (H + 2 padding - kh) // stride + 1.

    Raises:
        TypeError, ValueError: for shapes and numbers that do not go together.

    Example:
        >>> image = et.arange(16, dtype="float32").reshape(1, 1, 4, 4)
        >>> et.avg_pool2d(image, 2).tolist()
        [[[[2.5, 4.5], [10.5, 12.5]]]]
    """
    return apply("avg_pool2d", x, window=_window("avg_pool2d", x, kernel, stride, padding))


@primitive(
    forward=_avg_pool_grad,
    vjps=(lambda h, out, g, shape, window: apply("avg_pool2d", h, window=window),),
    reads="nothing",
    samples=lambda rng: [
        Sample(
            (rng.normal(size=(1, 2, 3, 3)),),
            {"shape": (1, 2, 5, 4), "window": Window((3, 2), (2, 1), (1, 0))},
        )
    ],
)
def _avg_pool2d_grad(g: ExTensor, shape: tuple[int, ...], window: Window) -> ExTensor:
    """The gradient of avg_pool2d, as an operation on g."""
    return apply("avg_pool2d_grad", g, shape=shape, window=window)


@composite(
    samples=lambda rng: [Sample((rng.normal(size=(2, 3, 4, 4)),))],
    errors=(BadInput((np.zeros((4, 4)),), ValueError, "expected x (N, C, H, W)"),),
)
def global_avg_pool2d(x: ExTensor) -> ExTensor:
    """The mean of each channel of each image.

    Args:
        x: (N, C, H, W).

    Returns:
        (N, C, 1, 1).

    Raises:
        TypeError, ValueError: for a tensor that has not four axes.

    Example:
        >>> et.global_avg_pool2d(et.ones((2, 3, 4, 4))).shape
        (2, 3, 1, 1)
    """
    tensors_only("global_avg_pool2d", x)
    if x.ndim != 4:
        raise ValueError(f"global_avg_pool2d: expected x (N, C, H, W), got shape {x.shape}")
    return x.mean((2, 3), keepdims=True)
