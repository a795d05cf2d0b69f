"""The standard's extension `fft`: discrete Fourier transforms, computed by the array module.

Transforms have no gradients: a tensor that requires one is refused. float32 and complex64
transform in single precision; 16-bit floats and integers as float32.
``norm`` says which direction is divided by n: "backward", "forward", or both by its root, "ortho".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from extensor.autograd.apply import wrap
from extensor.autograd.tensor import ExTensor
from extensor.backends import registry
from extensor.dtypes import DTypeLike, as_dtype, float32
from extensor.ops.arguments import axis_index, axis_tuple, non_differentiable_input, tensors_only
from extensor.ops.shape import roll

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
    """The transform along ``axis``, of its first n values or with zeros up to n.

    Raises:
        TypeError, ValueError: for a tensor that requires a gradient, or a bad n, axis or norm.
    """
    return _transform_1d("fft", x, n, axis, norm)


def ifft(
    x: ExTensor, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
) -> ExTensor:
    """The inverse of `fft`."""
    return _transform_1d("ifft", x, n, axis, norm)


def rfft(
    x: ExTensor, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
) -> ExTensor:
    """As `fft` of real numbers, the n // 2 + 1 frequencies that are not negative."""
    return _transform_1d("rfft", x, n, axis, norm)


def irfft(
    x: ExTensor, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
) -> ExTensor:
    """The inverse of `rfft`: n real numbers, 2 (m - 1) of m frequencies if not told."""
    return _transform_1d("irfft", x, n, axis, norm)


def hfft(
    x: ExTensor, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
) -> ExTensor:
    """The real spectrum of a signal that is Hermitian in time, given by its first half."""
    return _transform_1d("hfft", x, n, axis, norm)


def ihfft(
    x: ExTensor, /, *, n: int | None = None, axis: int = -1, norm: str = "backward"
) -> ExTensor:
    """The inverse of `hfft`."""
    return _transform_1d("ihfft", x, n, axis, norm)


def fftn(
    x: ExTensor, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None,
    norm: str = "backward",
) -> ExTensor:  # fmt: skip
    """`fft` along several axes, all if None, each cut or filled to its size in ``s``."""
    return _transform_nd("fftn", x, s, axes, norm)


def ifftn(
    x: ExTensor, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None,
    norm: str = "backward",
) -> ExTensor:  # fmt: skip
    """The inverse of `fftn`."""
    return _transform_nd("ifftn", x, s, axes, norm)


def rfftn(
    x: ExTensor, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None,
    norm: str = "backward",
) -> ExTensor:  # fmt: skip
    """As `fftn` of real numbers, the last axis as `rfft`."""
    return _transform_nd("rfftn", x, s, axes, norm)


def irfftn(
    x: ExTensor, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None,
    norm: str = "backward",
) -> ExTensor:  # fmt: skip
    """The inverse of `rfftn`."""
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
    """The frequencies of `fft` of n samples, ``d`` apart, in cycles per unit of d; float32.

    Raises:
        ValueError: for n below 1, d of 0, or a dtype that is not of floats.
    """
    return _frequencies("fftfreq", n, d, dtype, device)


def rfftfreq(
    n: int, /, *, d: float = 1.0, dtype: DTypeLike | None = None, device: str | None = None
) -> ExTensor:
    """As `fftfreq`, those of `rfft`."""
    return _frequencies("rfftfreq", n, d, dtype, device)


def fftshift(x: ExTensor, /, *, axes: int | Sequence[int] | None = None) -> ExTensor:
    """Give x with frequency 0 in the middle of ``axes``, all if None.

    Raises:
        TypeError, ValueError: for axes out of range.
    """
    tensors_only("fftshift", x)
    positions = axis_tuple("fftshift", axes, x.ndim)
    return roll(x, tuple(x.shape[a] // 2 for a in positions), positions)


def ifftshift(x: ExTensor, /, *, axes: int | Sequence[int] | None = None) -> ExTensor:
    """The inverse of `fftshift`."""
    tensors_only("ifftshift", x)
    positions = axis_tuple("ifftshift", axes, x.ndim)
    return roll(x, tuple(-(x.shape[a] // 2) for a in positions), positions)
