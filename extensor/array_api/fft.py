"""The standard's extension `fft`: discrete Fourier transforms, computed by the array module.

Transforms have no gradients: a tensor that requires one is refused. float32 and complex64
transform in single precision; 16-bit floats and integers as float32.
``norm`` says which direction is divided by n: "backward", "forward", or both by its root, "ortho".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from extensor.autograd.tensor import ExTensor, wrap
from extensor.backends import registry
from extensor.dtypes import DTypeLike, as_dtype, float32
from extensor.ops.arguments import axis_index, axis_tuple, non_differentiable_input, tensors_only
from extensor.ops.joining import roll

__all__ = [
    "fft", "fftfreq", "fftn", "fftshift", "hfft", "ifft", "ifftn", "ifftshift", "ihfft", "irfft",
    "irfftn", "rfft", "rfftfreq", "rfftn",
]  # fmt: skip

_NORMS = ("backward", "ortho", "forward")
_REAL_INPUT = {"rfft": "fft", "ihfft": "ifft", "rfftn": "fftn"}
"""Transforms that take real numbers only, and the one for complex numbers."""


def _input(name: str, x: ExTensor, norm: str) -> Any:
    """The values as an array to transform."""
    tensors_only(name, x)
    if norm not in _NORMS:
        raise ValueError(f"{name}: norm: expected one of {', '.join(_NORMS)}, got {norm!r}")
    if x.dtype.is_complex and name in _REAL_INPUT:
        raise TypeError(
            f"{name}: expected real numbers, got {x.dtype.name}; use {_REAL_INPUT[name]}"
        )
    return non_differentiable_input(name, x, "x.detach()")[0]


def _transform_1d(name: str, x: ExTensor, n: int | None, axis: int, norm: str) -> ExTensor:
    """A transform along one axis, cut or filled with zeros to n."""
    array = _input(name, x, norm)
    at = axis_index(name, axis, x.ndim)
    if n is not None and n < 1:
        raise ValueError(f"{name}: n: expected 1 or more, got {n}")
    made = getattr(x.backend.xp.fft, name)(array, n=n, axis=at, norm=norm)
    return wrap(made, x.backend)


def _transform_nd(
    name: str, x: ExTensor, s: Sequence[int] | None, axes: Sequence[int] | None, norm: str
) -> ExTensor:
    """A transform along several axes, in their order."""
    array = _input(name, x, norm)
    if axes is None:
        axes = range(x.ndim) if s is None else range(x.ndim - len(s), x.ndim)
    positions = [axis_index(name, a, x.ndim) for a in axes]
    if s is not None and len(s) != len(positions):
        raise ValueError(f"{name}: expected as many sizes as axes, got {tuple(s)}, {tuple(axes)}")
    sizes = None if s is None else tuple(s)
    made = getattr(x.backend.xp.fft, name)(array, s=sizes, axes=positions, norm=norm)
    return wrap(made, x.backend)


def fft(
    x: ExTensor, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
) -> ExTensor:
    """The discrete Fourier transform along an axis.

    Args:
        x: one axis or more, without gradient.
        n: transform the first n values, or fill with zeros up to n; the axis's length if None.
        axis: the axis to transform.
        norm: "backward", "forward" or "ortho": which direction is divided by n, or both by its
            root.

    Returns:
        Complex, n values along the axis.

    Raises:
        TypeError, ValueError: for a tensor that requires a gradient, or a bad n, axis or norm.

    Example:
        >>> et.fft.fft(et.ExTensor([1.0, 0.0, 0.0, 0.0])).tolist()
        [(1+0j), (1+0j), (1+0j), (1+0j)]
    """
    return _transform_1d("fft", x, n, axis, norm)


def ifft(
    x: ExTensor, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
) -> ExTensor:
    """The inverse of `fft`.

    Args:
        x: one axis or more, without gradient.
        n: transform the first n values, or fill with zeros up to n; the axis's length if None.
        axis: the axis to transform.
        norm: as of `fft`.

    Returns:
        Complex, n values along the axis.

    Raises:
        TypeError, ValueError: as `fft`.

    Example:
        >>> et.fft.ifft(et.ExTensor([4.0, 0.0, 0.0, 0.0])).tolist()
        [(1+0j), (1+0j), (1+0j), (1+0j)]
    """
    return _transform_1d("ifft", x, n, axis, norm)


def rfft(
    x: ExTensor, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
) -> ExTensor:
    """The `fft` of real numbers: the n // 2 + 1 frequencies that are not negative.

    Args:
        x: real, one axis or more, without gradient.
        n: transform the first n values, or fill with zeros up to n; the axis's length if None.
        axis: the axis to transform.
        norm: as of `fft`.

    Returns:
        Complex, n // 2 + 1 values along the axis.

    Raises:
        TypeError, ValueError: as `fft`, and for complex numbers.

    Example:
        >>> et.fft.rfft(et.ExTensor([1.0, 1.0, 1.0, 1.0])).tolist()
        [(4+0j), 0j, 0j]
    """
    return _transform_1d("rfft", x, n, axis, norm)


def irfft(
    x: ExTensor, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
) -> ExTensor:
    """The inverse of `rfft`.

    Args:
        x: frequencies, m along the axis, without gradient.
        n: how many real values to give; 2 (m - 1) if None.
        axis: the axis to transform.
        norm: as of `fft`.

    Returns:
        Real, n values along the axis.

    Raises:
        TypeError, ValueError: as `fft`.

    Example:
        >>> et.fft.irfft(et.ExTensor([4.0, 0.0, 0.0])).tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    return _transform_1d("irfft", x, n, axis, norm)


def hfft(
    x: ExTensor, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
) -> ExTensor:
    """The real spectrum of a signal that is Hermitian in time, given by its first half.

    Args:
        x: the first half, m values along the axis, without gradient.
        n: how many values to give; 2 (m - 1) if None.
        axis: the axis to transform.
        norm: as of `fft`.

    Returns:
        Real, n values along the axis.

    Raises:
        TypeError, ValueError: as `fft`.

    Example:
        >>> et.fft.hfft(et.ExTensor([1.0, 0.0, 0.0])).tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    return _transform_1d("hfft", x, n, axis, norm)


def ihfft(
    x: ExTensor, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
) -> ExTensor:
    """The inverse of `hfft`.

    Args:
        x: a real spectrum, without gradient.
        n: transform the first n values, or fill with zeros up to n; the axis's length if None.
        axis: the axis to transform.
        norm: as of `fft`.

    Returns:
        Complex, n // 2 + 1 values along the axis.

    Raises:
        TypeError, ValueError: as `fft`, and for complex numbers.

    Example:
        >>> et.real(et.fft.ihfft(et.ExTensor([1.0, 1.0, 1.0, 1.0]))).tolist()
        [1.0, 0.0, 0.0]
    """
    return _transform_1d("ihfft", x, n, axis, norm)


def fftn(
    x: ExTensor, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None,
    norm: str = "backward",
) -> ExTensor:  # fmt: skip
    """The `fft` along several axes.

    Args:
        x: one axis or more, without gradient.
        s: the size of each axis, to cut or to fill with zeros to; their own if None.
        axes: the axes to transform; the last ``len(s)``, or all, if None.
        norm: as of `fft`.

    Returns:
        Complex, of the shape of x with the sizes ``s``.

    Raises:
        TypeError, ValueError: as `fft`, and for another number of sizes than axes.

    Example:
        >>> et.fft.fftn(et.ones((2, 2))).tolist()
        [[(4+0j), 0j], [0j, 0j]]
    """
    return _transform_nd("fftn", x, s, axes, norm)


def ifftn(
    x: ExTensor, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None,
    norm: str = "backward",
) -> ExTensor:  # fmt: skip
    """The inverse of `fftn`.

    Args:
        x: one axis or more, without gradient.
        s: the size of each axis, to cut or to fill with zeros to; their own if None.
        axes: the axes to transform; the last ``len(s)``, or all, if None.
        norm: as of `fft`.

    Returns:
        Complex, of the shape of x with the sizes ``s``.

    Raises:
        TypeError, ValueError: as `fftn`.

    Example:
        >>> et.fft.ifftn(et.ExTensor([[4.0, 0.0], [0.0, 0.0]])).tolist()
        [[(1+0j), (1+0j)], [(1+0j), (1+0j)]]
    """
    return _transform_nd("ifftn", x, s, axes, norm)


def rfftn(
    x: ExTensor, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None,
    norm: str = "backward",
) -> ExTensor:  # fmt: skip
    """The `fftn` of real numbers, the last axis as `rfft`.

    Args:
        x: real, one axis or more, without gradient.
        s: the size of each axis, to cut or to fill with zeros to; their own if None.
        axes: the axes to transform; the last ``len(s)``, or all, if None.
        norm: as of `fft`.

    Returns:
        Complex; the last axis has the frequencies that are not negative.

    Raises:
        TypeError, ValueError: as `fftn`, and for complex numbers.

    Example:
        >>> et.fft.rfftn(et.ones((2, 4))).shape
        (2, 3)
    """
    return _transform_nd("rfftn", x, s, axes, norm)


def irfftn(
    x: ExTensor, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None,
    norm: str = "backward",
) -> ExTensor:  # fmt: skip
    """The inverse of `rfftn`.

    Args:
        x: frequencies, without gradient.
        s: the size of each axis of the result; 2 (m - 1) for m values along the last one if None.
        axes: the axes to transform; the last ``len(s)``, or all, if None.
        norm: as of `fft`.

    Returns:
        Real, of the sizes ``s``.

    Raises:
        TypeError, ValueError: as `fftn`.

    Example:
        >>> et.fft.irfftn(et.fft.rfftn(et.ones((2, 4)))).tolist()
        [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
    """
    return _transform_nd("irfftn", x, s, axes, norm)


def _frequencies(
    name: str, n: int, d: float, dtype: DTypeLike | None, device: str | None
) -> ExTensor:
    kind = as_dtype(float32 if dtype is None else dtype)
    if not kind.is_float or n < 1 or d == 0:
        raise ValueError(
            f"{name}: expected n of 1 or more, d other than 0 and a float dtype, got {n}, {d}, "
            f"{kind.name}"
        )
    backend = registry.get(device)
    made = getattr(np.fft, name)(n, d=d).astype(kind.numpy)
    return wrap(backend.xp.asarray(made), backend)


def fftfreq(
    n: int, /, *, d: float = 1.0, dtype: DTypeLike | None = None, device: str | None = None
) -> ExTensor:
    """The frequencies that `fft` gives for n samples, in cycles per unit of ``d``.

    Args:
        n: the number of samples.
        d: the distance between samples.
        dtype: a float dtype; float32 if None.
        device: of the result.

    Returns:
        (n,): 0 and the positive frequencies, then the negative ones.

    Raises:
        ValueError: for n below 1, d of 0, or a dtype that is not of floats.

    Example:
        >>> et.fft.fftfreq(4, d=0.5).tolist()
        [0.0, 0.5, -1.0, -0.5]
    """
    return _frequencies("fftfreq", n, d, dtype, device)


def rfftfreq(
    n: int, /, *, d: float = 1.0, dtype: DTypeLike | None = None, device: str | None = None
) -> ExTensor:
    """The frequencies that `rfft` gives for n samples, in cycles per unit of ``d``.

    Args:
        n: the number of samples.
        d: the distance between samples.
        dtype: a float dtype; float32 if None.
        device: of the result.

    Returns:
        (n // 2 + 1,), ascending from 0.

    Raises:
        ValueError: for n below 1, d of 0, or a dtype that is not of floats.

    Example:
        >>> et.fft.rfftfreq(4, d=0.5).tolist()
        [0.0, 0.5, 1.0]
    """
    return _frequencies("rfftfreq", n, d, dtype, device)


def fftshift(x: ExTensor, /, *, axes: int | Sequence[int] | None = None) -> ExTensor:
    """Move frequency 0 from the start to the middle.

    Args:
        x: any shape.
        axes: the axes to shift, all if None.

    Returns:
        The shape of x.

    Raises:
        TypeError, ValueError: for axes out of range.

    Example:
        >>> et.fft.fftshift(et.ExTensor([0, 1, 2, -3, -2, -1])).tolist()
        [-3, -2, -1, 0, 1, 2]
    """
    tensors_only("fftshift", x)
    positions = axis_tuple("fftshift", axes, x.ndim)
    return roll(x, tuple(x.shape[a] // 2 for a in positions), positions)


def ifftshift(x: ExTensor, /, *, axes: int | Sequence[int] | None = None) -> ExTensor:
    """The inverse of `fftshift`.

    Args:
        x: any shape.
        axes: the axes to shift, all if None.

    Returns:
        The shape of x.

    Raises:
        TypeError, ValueError: for axes out of range.

    Example:
        >>> et.fft.ifftshift(et.ExTensor([-3, -2, -1, 0, 1, 2])).tolist()
        [0, 1, 2, -3, -2, -1]
    """
    tensors_only("ifftshift", x)
    positions = axis_tuple("ifftshift", axes, x.ndim)
    return roll(x, tuple(-(x.shape[a] // 2) for a in positions), positions)
