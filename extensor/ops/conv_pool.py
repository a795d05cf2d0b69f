"""Two-dimensional convolution and pooling, through the backend's kernels.

A convolution is linear in each operand, and its gradients are two more
operations that are linear in each of theirs, so the three differentiate into
each other without end.
"""

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

__all__ = ["avg_pool2d", "conv2d", "global_avg_pool2d", "max_pool2d"]

Pair = int | tuple[int, int]
"""One number for height and width, or (height, width)."""


def int_pair(name: str, what: str, value: Any, least: int) -> tuple[int, int]:
    """(height, width) of ints, ``least`` or more.

    Raises:
        TypeError, ValueError: for anything else.
    """
    if type(value) is tuple and [type(n) for n in value] == [int, int] and min(value) >= least:
        return value  # the usual case: what a layer checked when it was made
    both = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(both) != 2 or not all(
        isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in both
    ):
        raise TypeError(f"{name}: {what}: expected an int or two, got {value!r}")
    if min(both) < least:
        raise ValueError(f"{name}: {what}: expected {least} or more, got {value!r}")
    return int(both[0]), int(both[1])


def conv_window(
    name: str,
    x: ExTensor,
    w: ExTensor,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Window:
    """The window of a convolution, after checking everything about it.

    Raises:
        TypeError, ValueError: for arguments that do not go together.
    """
    xs, ws = x.shape, w.shape
    if len(xs) != 4 or len(ws) != 4:
        raise ValueError(
            f"{name}: expected x (N, C, H, W) and w (O, C / groups, kh, kw), got shapes {xs} and "
            f"{ws}"
        )
    if not isinstance(groups, (int, np.integer)) or groups < 1 or xs[1] % groups or ws[0] % groups:
        raise ValueError(
            f"{name}: groups: expected a number that divides {xs[1]} input and {ws[0]} output "
            f"channels, got {groups!r}"
        )
    if ws[1] * groups != xs[1]:
        raise ValueError(
            f"{name}: expected w with {xs[1] // groups} channels for {xs[1]} input channels in "
            f"{groups} group(s), got w of shape {ws}"
        )
    if min(ws[2:]) < 1:
        raise ValueError(f"{name}: expected a kernel of 1 x 1 or more, got w of shape {ws}")
    window = Window(
        (ws[2], ws[3]),
        int_pair(name, "stride", stride, 1),
        int_pair(name, "padding", padding, 0),
        int_pair(name, "dilation", dilation, 1),
    )
    if min(window.output_size((xs[2], xs[3]))) < 1:
        raise ValueError(
            f"{name}: the window {window} does not fit an image of {xs[2]} x {xs[3]}; "
            "use more padding or a smaller kernel"
        )
    return window


def _conv2d(backend: Any, x: Any, w: Any, b: Any = None, *, window: Window, groups: int) -> Any:
    return backend.conv2d(x, w, window, groups, b)


def _conv2d_fused_vjp(
    backend: Any, g: Any, out: None, inputs: Any, needs: Any, window: Window, groups: int
) -> Any:
    x, w = inputs[:2]
    parts = [
        backend.conv2d_grad_x(g, w, x.shape, window, groups) if needs[0] else None,
        backend.conv2d_grad_w(g, x, w.shape, window, groups) if needs[1] else None,
    ]
    if len(needs) == 3:
        parts.append(backend.channel_sum(g) if needs[2] else None)
    return parts


def _conv_samples(rng: np.random.Generator) -> list[Sample]:
    x, w = rng.normal(size=(2, 4, 5, 4)), rng.normal(size=(4, 4, 3, 2))
    b, grouped = rng.normal(size=4), rng.normal(size=(4, 2, 2, 2))
    return [
        Sample((x, w)),
        Sample((x, w, b), {"stride": 2, "padding": (1, 0)}),
        Sample((x, grouped, b), {"groups": 2, "dilation": (2, 1)}),
    ]


def _conv2d_vjp_at(
    index: int, g: ExTensor, out: None, *inputs: ExTensor, window: Window, groups: int
) -> ExTensor:
    x, w = inputs[:2]
    if index == 0:
        return apply("conv2d_grad_x", g, w, shape=x.shape, window=window, groups=groups)
    if index == 1:
        return apply("conv2d_grad_w", g, x, shape=w.shape, window=window, groups=groups)
    return g.sum((0, 2, 3))


@primitive(
    forward=_conv2d,
    vjp_at=_conv2d_vjp_at,
    fused_vjp=_conv2d_fused_vjp,
    reads="inputs",
    slots=("layer",),
    to_float=True,
    samples=_conv_samples,
    errors=(
        BadInput((np.zeros((1, 4, 5)), np.zeros((4, 4, 3, 3))), ValueError, "expected x (N, C"),
        BadInput((np.zeros((1, 4, 5, 5)), np.zeros((4, 3, 3, 3))), ValueError, "w with 4 channels"),
        BadInput((np.zeros((1, 4, 2, 2)), np.zeros((4, 4, 3, 3))), ValueError, "does not fit"),
        BadInput((np.zeros((1, 4, 5, 5)), np.zeros((4, 4, 3, 3)), np.zeros(3)), ValueError, "bias"),
        BadInput(
            (np.zeros((1, 4, 5, 5)), np.zeros((4, 4, 3, 3))), ValueError, "stride", {"stride": 0}
        ),
        BadInput(
            (np.zeros((1, 4, 5, 5)), np.zeros((4, 4, 3, 3))), ValueError, "groups", {"groups": 3}
        ),
    ),
)
def conv2d(
    x: ExTensor,
    w: ExTensor,
    bias: ExTensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> ExTensor:
    """2-D convolution, which in networks means cross-correlation of images with kernels.

    Args:
        x: images (N, C, H, W).
        w: kernels (O, C / groups, kh, kw).
        bias: added per output channel, (O,).
        stride: steps of the window, one number or (height, width).
        padding: zeros on each side, likewise.
        dilation: steps between the kernel's pixels, likewise.
        groups: number of channel groups, which are convolved separately.

    Returns:
        (N, O, Ho, Wo), Ho = (H + 2 padding - dilation (kh - 1) - 1) // stride + 1.

    Raises:
        TypeError, ValueError: for shapes and numbers that do not go together.

    Example:
        >>> image, kernel = et.ones((1, 1, 3, 3)), et.ones((1, 1, 2, 2))
        >>> et.conv2d(image, kernel, padding=1, stride=2).tolist()
        [[[[1.0, 2.0], [2.0, 4.0]]]]
    """
    tensors_only("conv2d", x, w)
    window = conv_window("conv2d", x, w, stride, padding, dilation, groups)
    if bias is None:
        return apply("conv2d", x, w, window=window, groups=groups)
    tensors_only("conv2d", bias)
    if bias.shape != w.shape[:1]:
        raise ValueError(f"conv2d: bias: expected shape {w.shape[:1]}, got {bias.shape}")
    return apply("conv2d", x, w, bias, window=window, groups=groups)


_CONV_GRADIENT = {"shape": (2, 4, 5, 4), "window": Window((3, 2), (2, 1), (1, 0)), "groups": 2}


def _gradient_samples(first: tuple[int, ...], second: tuple[int, ...], **params: Any) -> Any:
    return lambda rng: [Sample((rng.normal(size=first), rng.normal(size=second)), params)]


@primitive(
    forward=lambda backend, g, w, shape, window, groups: backend.conv2d_grad_x(
        g, w, shape, window, groups
    ),
    vjps=(
        lambda h, out, g, w, shape, window, groups: apply(
            "conv2d", h, w, window=window, groups=groups
        ),
        lambda h, out, g, w, shape, window, groups: apply(
            "conv2d_grad_w", g, h, shape=w.shape, window=window, groups=groups
        ),
    ),
    reads="inputs",
    samples=_gradient_samples((2, 4, 3, 3), (4, 2, 3, 2), **_CONV_GRADIENT),
)
def _conv2d_grad_x(
    g: ExTensor, w: ExTensor, shape: tuple[int, ...], window: Window, groups: int
) -> ExTensor:
    """The gradient of conv2d in x, as an operation on (g, w)."""
    return apply("conv2d_grad_x", g, w, shape=shape, window=window, groups=groups)


@primitive(
    forward=lambda backend, g, x, shape, window, groups: backend.conv2d_grad_w(
        g, x, shape, window, groups
    ),
    vjps=(
        lambda h, out, g, x, shape, window, groups: apply(
            "conv2d", x, h, window=window, groups=groups
        ),
        lambda h, out, g, x, shape, window, groups: apply(
            "conv2d_grad_x", g, h, shape=x.shape, window=window, groups=groups
        ),
    ),
    reads="inputs",
    samples=_gradient_samples(
        (2, 4, 3, 3), (2, 4, 5, 4), **(_CONV_GRADIENT | {"shape": (4, 2, 3, 2)})
    ),
)
def _conv2d_grad_w(
    g: ExTensor, x: ExTensor, shape: tuple[int, ...], window: Window, groups: int
) -> ExTensor:
    """The gradient of conv2d in w, as an operation on (g, x)."""
    return apply("conv2d_grad_w", g, x, shape=shape, window=window, groups=groups)


def _pool_window(
    name: str, x: ExTensor, kernel: Pair, stride: Pair | None, padding: Pair
) -> Window:
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


_POOL_ERRORS = (
    BadInput((np.zeros((4, 4)), 2), ValueError, "expected x (N, C, H, W)"),
    BadInput((np.zeros((1, 1, 4, 4)), 5), ValueError, "does not fit"),
    BadInput((np.zeros((1, 1, 4, 4)), 2, 2, 2), ValueError, "half the kernel"),
    BadInput((np.zeros((1, 1, 4, 4)), 2.5), TypeError, "an int or two"),
)


def _pool_samples(rng: np.random.Generator) -> Iterator[Sample]:
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
    samples=_pool_samples,
    errors=_POOL_ERRORS,
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
    return apply("max_pool2d", x, window=_pool_window("max_pool2d", x, kernel, stride, padding))


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
    samples=_pool_samples,
    errors=_POOL_ERRORS,
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
    return apply("avg_pool2d", x, window=_pool_window("avg_pool2d", x, kernel, stride, padding))


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
