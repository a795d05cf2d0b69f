"""Attention: exact values in float64 beside bounds, term by term from u = 2**-24.

By Higham, Accuracy and Stability of Numerical Algorithms, 3.1; 1.02 covers products of two errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from extensor.backends import cpu
from extensor.backends.protocol import AttentionForward
from tests.kernels.inputs import CORE, SECOND, UNIT, VIEWS, Bounded, assert_bytes, normals

TINY = 2.0**-120

ATTENTIONS = (  # batch, heads, key heads, queries, keys, d, dv, causal
    (1, 1, 1, 1, 1, 1, 1, False),
    (2, 4, 2, 33, 40, 32, 16, True),
    (2, 3, 3, 64, 64, 32, 32, True),
    (1, 2, 1, 70, 70, 20, 9, True),
    (2, 2, 2, 5, 37, 8, 24, False),
)


def attention_arrays() -> Iterator[tuple[Any, ...]]:
    for number, (batch, heads, groups, queries, keys, d, dv, causal) in enumerate(ATTENTIONS):
        q, k, v, g = normals(
            number,
            (batch, heads, queries, d),
            (batch, groups, keys, d),
            (batch, groups, keys, dv),
            (batch, heads, queries, dv),
        )
        yield q, k, v, g, causal, (-0.7 if number == 4 else d**-0.5)


def repeated(x: np.ndarray, heads: int) -> np.ndarray:
    return np.repeat(x.astype(np.float64), heads // x.shape[1], axis=1)


def probabilities(q: np.ndarray, k: np.ndarray, causal: bool, scale: float) -> tuple[Any, ...]:
    """Scores, p, the largest scores, 1 / the sums, and the bound of an error of a score."""
    across = repeated(k, q.shape[1]).swapaxes(-1, -2)
    scores = scale * (q.astype(np.float64) @ across)
    off = (q.shape[-1] + 3) * UNIT * abs(scale) * (np.abs(q).astype(np.float64) @ np.abs(across))
    if causal:
        queries, keys = scores.shape[-2:]
        hidden = np.arange(keys) > np.arange(queries)[:, None] + keys - queries
        scores[..., hidden] = -np.inf
        off[..., hidden] = 0.0
    top = scores.max(axis=-1, keepdims=True)
    e = np.exp(scores - top)
    inverse = 1 / e.sum(axis=-1, keepdims=True)
    return scores, e * inverse, top, inverse, off


def depth(scores: np.ndarray, top: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(scores), top - scores, 0.0)


def attention_cases() -> Bounded:
    for q, k, v, _, causal, scale in attention_arrays():
        scores, p, top, inverse, off = probabilities(q, k, causal, scale)
        values, keys = repeated(v, q.shape[1]), k.shape[-2]
        relative = off + UNIT * (depth(scores, top) + 5)
        mean = (p * relative).sum(axis=-1, keepdims=True)
        rounding = (2 * keys + 12) * UNIT
        size = p @ np.abs(values)
        bound = (p * (relative + mean)) @ np.abs(values) + rounding * size
        largest = off.max(axis=-1, keepdims=True)
        stats = np.concatenate([top, inverse], axis=-1)
        stats_bound = np.concatenate([largest, inverse * (mean + largest + rounding)], axis=-1)
        exact = [p @ values, stats]
        yield (q, k, v, causal, scale), exact, [SECOND * b + TINY for b in (bound, stats_bound)]


def folded(x: np.ndarray, groups: int) -> np.ndarray:
    """Sums over the heads that share a key head."""
    batch, heads = x.shape[:2]
    return x.reshape(batch, groups, heads // groups, *x.shape[2:]).sum(axis=2)


def attention_grad_cases() -> Bounded:
    for q, k, v, g, causal, scale in attention_arrays():
        scores, p, top, inverse, off = probabilities(q, k, causal, scale)
        heads, groups, (queries, keys) = q.shape[1], k.shape[1], scores.shape[-2:]
        values, across = repeated(v, heads), repeated(k, heads)
        out = (p @ values).astype(np.float32)
        stats = np.concatenate([top, inverse], axis=-1).astype(np.float32)
        wide, terms = g.astype(np.float64), queries * (heads // groups)
        d = wide @ values.swapaxes(-1, -2)
        t = (wide * out).sum(axis=-1, keepdims=True)
        count = (v.shape[-1] + 2) * UNIT
        d_off = count * (np.abs(wide) @ np.abs(values).swapaxes(-1, -2))
        d_off = d_off + count * (np.abs(wide * out)).sum(axis=-1, keepdims=True)
        relative = off + UNIT * (depth(scores, top) + np.abs(top) + 8)
        ds, p_off = scale * p * (d - t), p * relative
        ds_off = abs(scale) * p * (relative * np.abs(d - t) + d_off) + 5 * UNIT * np.abs(ds)

        def summed(left: np.ndarray, left_off: np.ndarray, right: np.ndarray, n: int) -> np.ndarray:
            return left_off @ np.abs(right) + (n + 2) * UNIT * (np.abs(left) @ np.abs(right))

        ds_t, p_t = ds.swapaxes(-1, -2), p.swapaxes(-1, -2)
        queries64 = q.astype(np.float64)
        exact = [ds @ across, folded(ds_t @ queries64, groups), folded(p_t @ wide, groups)]
        bounds = [
            summed(ds, ds_off, across, keys),
            folded(summed(ds_t, ds_off.swapaxes(-1, -2), queries64, terms), groups),
            folded(summed(p_t, p_off.swapaxes(-1, -2), wide, terms), groups),
        ]
        yield (
            (g, AttentionForward(q, k, v, out, stats, causal, scale)),
            exact,
            [SECOND * bound + TINY for bound in bounds],
        )


def check_attention_grad(backend: cpu.CpuBackend) -> None:
    for (g, forward), exact, bounds in attention_grad_cases():
        inputs = forward.q, forward.k, forward.v
        into = tuple(np.full(a.shape, np.nan, np.float32) for a in inputs)
        path = backend.path("attention_grad", g, forward, into)
        assert CORE is None or path.startswith("core ("), path
        backend.attention_grad(g, forward, into)
        for got, expected, bound in zip(into, exact, bounds, strict=True):
            assert (np.abs(got - expected) <= bound).all(), (forward.q.shape, path)
        for view in (VIEWS["strided"], VIEWS["misaligned"], VIEWS["transposed"]):
            wide = tuple(np.empty((*a.shape[:-1], a.shape[-1] + 3), np.float32) for a in into)
            parts = tuple(a[..., : b.shape[-1]] for a, b in zip(wide, into, strict=True))
            kept = (view(a) for a in (*inputs, forward.out, forward.stats))
            other = AttentionForward(*kept, forward.causal, forward.scale)
            backend.attention_grad(view(g), other, parts)
            for one, two in zip(parts, into, strict=True):
                assert_bytes(one.copy(), two, (forward.q.shape, path))
