"""Real and imaginary parts, and conjugates. Only real tensors have gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, composite, primitive
from extensor.autograd.tensor import ExTensor
from extensor.ops.arguments import tensors_only
from extensor.ops.arithmetic import clone
from extensor.ops.declare import NO_TENSOR

__all__ = ["conj", "imag", "real"]

_NONE = "of complex numbers, which have no gradients here"


def _complex(rng: np.random.Generator) -> Any:
    return rng.normal(size=(3, 4)) + 1j * rng.normal(size=(3, 4))


@primitive(
    name="conjugate",
    forward=lambda backend, x: backend.xp.conj(x),
    no_vjp=_NONE,
    samples=lambda rng: [Sample((_complex(rng),))],
)
def _conjugate(x: ExTensor) -> ExTensor:
    """The conjugate of a complex tensor."""
    return apply("conjugate", x)


@composite(samples=lambda rng: [Sample((rng.normal(size=(3, 4)),))], errors=NO_TENSOR)
def conj(x: ExTensor, /) -> ExTensor:
    """The complex conjugate; a copy of a real tensor.

    Args:
        x: any shape.

    Returns:
        The shape and dtype of x.

    Example:
        >>> et.conj(et.ExTensor([1 + 2j])).tolist()
        [(1-2j)]
    """
    tensors_only("conj", x)
    return _conjugate(x) if x.dtype.is_complex else clone(x)


@primitive(
    name="real_part",
    forward=lambda backend, x: backend.xp.real(x).copy(),
    no_vjp=_NONE,
    samples=lambda rng: [Sample((_complex(rng),))],
)
def _real_part(x: ExTensor) -> ExTensor:
    """The real part of a complex tensor."""
    return apply("real_part", x)


@composite(samples=lambda rng: [Sample((rng.normal(size=(3, 4)),))], errors=NO_TENSOR)
def real(x: ExTensor, /) -> ExTensor:
    """The real part; a copy of a real tensor.

    Args:
        x: any shape.

    Returns:
        The shape of x, of the real dtype with the precision of x.

    Example:
        >>> et.real(et.ExTensor([1 + 2j])).tolist()
        [1.0]
    """
    tensors_only("real", x)
    return _real_part(x) if x.dtype.is_complex else clone(x)


@primitive(
    forward=lambda backend, x: backend.xp.imag(x).copy(),
    no_vjp=_NONE,
    samples=lambda rng: [Sample((_complex(rng),))],
    errors=(*NO_TENSOR, BadInput((np.zeros(3),), TypeError, "expected complex numbers")),
)
def imag(x: ExTensor, /) -> ExTensor:
    """The imaginary part of complex numbers.

    Args:
        x: any shape, complex.

    Returns:
        The shape of x, of the real dtype with the precision of x.

    Raises:
        TypeError: for a tensor that is not complex.

    Example:
        >>> et.imag(et.ExTensor([1 + 2j])).tolist()
        [2.0]
    """
    tensors_only("imag", x)
    if not x.dtype.is_complex:
        raise TypeError(f"imag: expected complex numbers, got {x.dtype.name}")
    return apply("imag", x)
