"""Two-dimensional convolution, through the backend's kernels.

The operation is linear in each operand, and its gradients are two more
operations that are linear in each of theirs, so the three differentiate into
each other without end.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, primitive
from extensor.autograd.tensor import ExTensor
from extensor.backends.protocol import Window
from extensor.ops.arguments import tensors_only

__all__ = ["conv2d"]

Pair = int | tuple[int, int]
"""One number for height and width, or (height, width)."""


def int_pair(name: str, what: str, value: Any, least: int) -> tuple[int, int]:
    """(height, width) of ints, ``least`` or more.

    Raises:
        TypeError, ValueError: for anything else.
    """
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


def _forward(backend: Any, x: Any, w: Any, b: Any = None, *, window: Window, groups: int) -> Any:
    return backend.conv2d(x, w, window, groups, b)


def _fused_vjp(
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


def _samples(rng: np.random.Generator) -> list[Sample]:
    x, w = rng.normal(size=(2, 4, 5, 4)), rng.normal(size=(4, 4, 3, 2))
    b, grouped = rng.normal(size=4), rng.normal(size=(4, 2, 2, 2))
    return [
        Sample((x, w)),
        Sample((x, w, b), {"stride": 2, "padding": (1, 0)}),
        Sample((x, grouped, b), {"groups": 2, "dilation": (2, 1)}),
    ]


def _vjp_at(
    index: int, g: ExTensor, out: None, *inputs: ExTensor, window: Window, groups: int
) -> ExTensor:
    x, w = inputs[:2]
    if index == 0:
        return apply("conv2d_grad_x", g, w, shape=x.shape, window=window, groups=groups)
    if index == 1:
        return apply("conv2d_grad_w", g, x, shape=w.shape, window=window, groups=groups)
    return g.sum((0, 2, 3))


@primitive(
    forward=_forward,
    vjp_at=_vjp_at,
    fused_vjp=_fused_vjp,
    reads="inputs",
    to_float=True,
    samples=_samples,
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


_GRADIENT_SAMPLE = {"shape": (2, 4, 5, 4), "window": Window((3, 2), (2, 1), (1, 0)), "groups": 2}


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
    samples=_gradient_samples((2, 4, 3, 3), (4, 2, 3, 2), **_GRADIENT_SAMPLE),
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
        (2, 4, 3, 3), (2, 4, 5, 4), **(_GRADIENT_SAMPLE | {"shape": (4, 2, 3, 2)})
    ),
)
def _conv2d_grad_w(
    g: ExTensor, x: ExTensor, shape: tuple[int, ...], window: Window, groups: int
) -> ExTensor:
    """The gradient of conv2d in w, as an operation on (g, x)."""
    return apply("conv2d_grad_w", g, x, shape=shape, window=window, groups=groups)
