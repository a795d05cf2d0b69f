"""Float products and attention on any array module: the definitions.

`GenericBackend` forwards to these functions; each takes the array module ``xp`` last. Kernels are
compared with them. All arrays are of one float dtype.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from extensor.backends.protocol import Array

__all__ = ["attention", "attention_grad", "matmul"]


def matmul(a: Array, b: Array, bias: Array | None, xp: Any) -> Array:
    """A b of (..., M, K) and (..., K, N), plus a bias (N,)."""
    if b.ndim == 2 and a.ndim > 2:  # one product instead of one per leading index
        rows = a.reshape(math.prod(a.shape[:-1]), a.shape[-1])
        return matmul(rows, b, bias, xp).reshape(*a.shape[:-1], b.shape[-1])
    out = xp.matmul(a, b)
    if bias is not None:
        out += bias
    return out


def attention(
    q: Array, k: Array, v: Array, causal: bool, scale: float, xp: Any
) -> tuple[Array, Array]:
    """softmax(scale q k^T) v, and each row's largest score with the inverse of its sum.

    Args:
        q: (B, H, T, d).
        k: (B, Hkv, S, d), H a multiple of Hkv.
        v: (B, Hkv, S, dv).
        causal: query t sees the keys up to t + S - T.
        scale: of the products.
        xp: the array module.

    Returns:
        (B, H, T, dv) and (B, H, T, 2).
    """
    with np.errstate(all="ignore"):
        p = _scores(q, k, causal, scale, xp)
        largest = p.max(axis=-1, keepdims=True)
        p -= largest
        xp.exp(p, out=p)
        inverse = 1 / p.sum(axis=-1, keepdims=True)
        out = xp.matmul(p, v[:, :, None]) * inverse
        stats = xp.empty((*largest.shape[:-1], 2), dtype=largest.dtype)
        stats[..., :1], stats[..., 1:] = largest, inverse
    return out.reshape(*q.shape[:-1], v.shape[-1]), stats.reshape(*q.shape[:-1], 2)


def attention_grad(
    g: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    stats: Array,
    causal: bool,
    scale: float,
    into: tuple[Array, Array, Array],
    xp: Any,
) -> None:
    """Gradients of attention in q, k and v, written to the arrays ``into``.

    With p the probabilities, d = g v^T and t = sum over a row of g out: gv = p^T g,
    ds = scale p (d - t), gq = ds k, gk = ds^T q.
    """
    batch, groups = k.shape[:2]
    shape = (batch, groups, q.shape[1] // groups, q.shape[2])
    grouped = [a.reshape(*shape, a.shape[-1]) for a in (g, q, out, stats)]
    gg, qq, oo, ss = grouped
    p = xp.exp(_scores(q, k, causal, scale, xp) - ss[..., :1]) * ss[..., 1:]
    d = xp.matmul(gg, v[:, :, None].swapaxes(-1, -2))
    d -= (gg * oo).sum(axis=-1, keepdims=True)
    d *= p
    d *= scale
    into[0][...] = xp.matmul(d, k[:, :, None]).reshape(q.shape)
    into[1][...] = xp.matmul(d.swapaxes(-1, -2), qq).sum(axis=2)
    into[2][...] = xp.matmul(p.swapaxes(-1, -2), gg).sum(axis=2)


def _scores(q: Array, k: Array, causal: bool, scale: float, xp: Any) -> Array:
    """(B, Hkv, H / Hkv, T, S); -inf where a query does not see a key."""
    queries, keys = q.shape[-2], k.shape[-2]
    split = q.reshape(*k.shape[:2], q.shape[1] // k.shape[1], queries, q.shape[-1])
    scores = xp.matmul(split, k[:, :, None].swapaxes(-1, -2))
    scores *= scale
    if causal:
        seen = xp.tri(queries, keys, keys - queries, dtype=bool)
        scores = xp.where(seen, scores, -np.inf).astype(scores.dtype, copy=False)
    return scores
