"""Rotary position embedding: pairs of components turned by angles that grow with the position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, primitive
from extensor.autograd.tensor import ExTensor
from extensor.ops.arguments import tensors_only

__all__ = ["rotary_embedding"]


def _vjp(g: ExTensor, out: None, x: None, cos: ExTensor, sin: ExTensor, **params: Any) -> ExTensor:
    """The transposed rotation, by the negative angle."""
    return apply("rotary_embedding", g, cos, -sin, **params)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, angles, interleaved in (
        ((2, 3, 5, 4), (5, 2), False),
        ((2, 3, 5, 6), (2, 1, 5, 2), True),
        ((1, 2), (1, 1), False),
    ):
        x, angle = rng.normal(size=shape), rng.normal(size=angles)
        half = angles[-1]
        parts = (x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2])
        if not interleaved:
            parts = x[..., :half], x[..., half : 2 * half]
        cos, sin = (f(angle).astype(np.float32) for f in (np.cos, np.sin))
        turned = (parts[0] + 1j * parts[1]) * (cos + 1j * sin)
        expected = x.copy()
        if interleaved:
            expected[..., : 2 * half : 2], expected[..., 1 : 2 * half : 2] = (
                turned.real,
                turned.imag,
            )
        else:
            expected[..., :half], expected[..., half : 2 * half] = turned.real, turned.imag
        yield Sample((x, cos, sin), {"interleaved": interleaved}, expected=expected)


_X, _TABLE = np.zeros((2, 3, 4)), np.zeros((3, 2), np.float32)


@primitive(
    forward=lambda backend, x, cos, sin, interleaved: backend.rotary(x, cos, sin, interleaved),
    vjps=(_vjp, None, None),
    fused_vjp=lambda backend, g, out, inputs, needs, interleaved: (
        backend.rotary(g, inputs[1], -inputs[2], interleaved),
        None,
        None,
    ),
    reads="inputs",
    samples=_samples,
    errors=(
        BadInput((_X, _TABLE, _TABLE[:2]), ValueError, "of one shape"),
        BadInput(
            (_X, np.zeros((3, 3), np.float32)[:, :], np.zeros((3, 3), np.float32)),
            ValueError,
            "at most 2 angles",
        ),
        BadInput((_X, _TABLE[:2], _TABLE[:2]), ValueError, "broadcast to (2, 3)"),
    ),
)
def rotary_embedding(
    x: ExTensor, cos: ExTensor, sin: ExTensor, *, interleaved: bool = False
) -> ExTensor:
    """Rotary position embedding: pairs of components of each vector, turned by given angles.

    With n angles, components i and i + n are a pair, as in GPT-NeoX and Hugging Face's Llama; or
    2i and 2i + 1 if ``interleaved``, as in the paper and in Meta's Llama. Components from 2n on
    stay as they are.

    Args:
        x: (..., T, d).
        cos: cosines of the angles (..., T, n), n of 1 to d / 2, whose leading axes broadcast to
            those of x; factors on both tables scale the result. Gradients do not reach them.
        sin: sines, likewise.
        interleaved: which components are a pair.

    Returns:
        The shape and dtype of x; 16-bit floats are computed in float32 and rounded once.

    Raises:
        TypeError, ValueError: for shapes that do not go together.

    Source: Su et al., arXiv 2104.09864, section 3.4.2.

    Example:
        >>> x, angle = et.ExTensor([[1.0, 0.0]]), et.ExTensor([[et.pi / 2]])
        >>> et.rotary_embedding(x, angle.cos(), angle.sin()).numpy().round(4)
        array([[-0.,  1.]], dtype=float32)
    """
    name = "rotary_embedding"
    tensors_only(name, x, cos, sin)
    shape, table = x.shape, cos.shape
    if table != sin.shape:
        raise ValueError(f"{name}: expected tables of one shape, got {table} and {sin.shape}")
    if len(shape) < 2 or not table or not 1 <= table[-1] <= shape[-1] // 2:
        raise ValueError(
            f"{name}: expected vectors (..., T, d) and at most {shape[-1] // 2 if shape else 0} "
            f"angles for each, got {shape} and {table}"
        )
    lead = shape[:-1]
    if len(table) > len(shape) or any(
        a not in (1, b) for a, b in zip(table[-2::-1], lead[::-1], strict=False)
    ):
        raise ValueError(
            f"{name}: expected tables whose leading axes broadcast to {lead}, got {table}"
        )
    return apply(name, x, cos, sin, interleaved=interleaved)
