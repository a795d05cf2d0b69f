"""Scaled dot-product attention."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from extensor.autograd.apply import wrap
from extensor.autograd.primitive import BadInput, Sample, composite
from extensor.autograd.tensor import ExTensor
from extensor.ops.activation import softmax
from extensor.ops.arguments import tensors_only
from extensor.ops.arithmetic import where
from extensor.ops.linalg import matmul

__all__ = ["scaled_dot_product_attention"]


def _reference(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    """One query at a time, in numpy."""
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    shared = q.shape[-3] // k.shape[-3]
    for at in np.ndindex(q.shape[:-1]):
        *lead, head, t = at
        keys, values = k[(*lead, head // shared)], v[(*lead, head // shared)]
        seen = t + 1 + k.shape[-2] - q.shape[-2] if causal else k.shape[-2]
        weight = np.exp(keys[:seen] @ q[at] * scale)
        out[at] = weight @ values[:seen] / weight.sum()
    return out


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for heads, shared, queries, keys, causal in (
        (2, 1, 3, 4, False),
        (1, 1, 3, 3, True),
        (4, 2, 2, 3, True),
    ):
        q = rng.normal(size=(2, heads, queries, 4))
        k, v = (rng.normal(size=(2, heads // shared, keys, n)) for n in (4, 3))
        expected = _reference(q, k, v, causal, 0.5)
        yield Sample((q, k, v), {"causal": causal}, expected=expected)
    q, k = rng.normal(size=(1, 2, 3)), rng.normal(size=(1, 4, 3))
    yield Sample((q, k, k), {"scale": 0.3}, expected=_reference(q, k, k, False, 0.3))


_Q = np.zeros((2, 4, 3, 8))


@composite(
    samples=_samples,
    errors=(
        BadInput((np.zeros((3, 8)), np.zeros((3, 8)), np.zeros((3, 8))), ValueError, "three axes"),
        BadInput((_Q, np.zeros((2, 4, 3, 6)), _Q), ValueError, "same length d"),
        BadInput((_Q, _Q, np.zeros((2, 4, 5, 8))), ValueError, "as many values as keys"),
        BadInput((_Q, np.zeros((2, 3, 3, 8)), np.zeros((2, 3, 3, 8))), ValueError, "multiple"),
        BadInput((_Q, np.zeros((1, 4, 3, 8)), np.zeros((1, 4, 3, 8))), ValueError, "leading"),
        BadInput(
            (_Q, np.zeros((2, 4, 2, 8)), np.zeros((2, 4, 2, 8))),
            ValueError,
            "as many keys as queries",
            {"causal": True},
        ),
        BadInput((_Q, np.zeros((2, 4, 0, 8)), np.zeros((2, 4, 0, 8))), ValueError, "one key"),
        BadInput((_Q, _Q, _Q), ValueError, "finite", {"scale": math.inf}),
    ),
)
def scaled_dot_product_attention(
    q: ExTensor, k: ExTensor, v: ExTensor, *, causal: bool = False, scale: float | None = None
) -> ExTensor:
    """softmax(scale q k^T) v: each query's mean of the values, weighted by how its key fits.

    Args:
        q: queries (..., H, T, d).
        k: keys (..., Hkv, S, d); H is a multiple of Hkv, and H / Hkv query heads that follow each
            other share one key head (grouped-query attention, arXiv 2305.13245).
        v: values (..., Hkv, S, dv).
        causal: query t sees the keys 0 .. t + S - T only, so the last query sees all of them.
        scale: what the products are multiplied by; 1 / sqrt(d) if None.

    Returns:
        (..., H, T, dv).

    Raises:
        TypeError, ValueError: for shapes that do not go together, no key at all, fewer keys than
            queries under ``causal``, or a scale that is not finite.

    Source: Vaswani et al., arXiv 1706.03762, section 3.2.1.
    """
    _check(q, k, v, causal, scale)
    heads, groups = q.shape[-3], k.shape[-3]
    queries, keys, width = q.shape[-2], k.shape[-2], q.shape[-1]
    lead = q.shape[:-3]
    if heads != groups:  # an axis for the heads that share a key head
        q = q.reshape((*lead, groups, heads // groups, queries, width))
        k, v = k.expand_dims(-3), v.expand_dims(-3)
    # On the queries, which are smaller than the scores.
    scores = matmul(q * (1.0 / math.sqrt(width) if scale is None else scale), k.swapaxes(-1, -2))
    if causal and queries > 1:
        xp = q.backend.xp
        seen = xp.tri(queries, keys, keys - queries, dtype=bool)
        scores = where(wrap(seen, q.backend), scores, -math.inf)
    out = matmul(softmax(scores), v)
    return out.reshape((*lead, heads, queries, v.shape[-1])) if heads != groups else out


def _check(q: ExTensor, k: ExTensor, v: ExTensor, causal: bool, scale: float | None) -> None:
    name = "scaled_dot_product_attention"
    tensors_only(name, q, k, v)
    shapes = f"got q {q.shape}, k {k.shape} and v {v.shape}"
    if min(q.ndim, k.ndim, v.ndim) < 3:
        raise ValueError(f"{name}: wanted (..., heads, length, d) of three axes or more, {shapes}")
    if q.shape[-1] != k.shape[-1] or q.shape[-1] < 1:
        raise ValueError(f"{name}: wanted queries and keys of the same length d, {shapes}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"{name}: wanted as many values as keys, and heads as many, {shapes}")
    if q.shape[:-3] != k.shape[:-3]:
        raise ValueError(f"{name}: wanted equal leading axes, {shapes}")
    if not k.shape[-3] or q.shape[-3] % k.shape[-3]:
        raise ValueError(f"{name}: wanted query heads a multiple of the key heads, {shapes}")
    if not k.shape[-2]:
        raise ValueError(f"{name}: wanted at least one key, {shapes}")
    if causal and k.shape[-2] < q.shape[-2]:
        raise ValueError(f"{name}: causal: wanted at least as many keys as queries, {shapes}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"{name}: scale: wanted a finite number, got {scale!r}")
