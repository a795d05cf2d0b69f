"""Attention: exact values in float64 beside bounds, term by term from u = 2**-24.

By Higham, Accuracy and Stability of Numerical Algorithms, 3.1; 1.02 covers products of two errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from extensor.backends import cpu
from extensor.backends.protocol import AttentionForward, AttentionOptions
from tests.kernels.inputs import CORE, SECOND, UNIT, VIEWS, Bounded, assert_bytes, normals

TINY = 2.0**-120

ATTENTIONS = (  # batch, heads, key heads, queries, keys, d, dv, causal, options
    (1, 1, 1, 1, 1, 1, 1, False, ""),
    (2, 4, 2, 33, 40, 32, 16, True, ""),
    (2, 3, 3, 64, 64, 32, 32, True, ""),
    (1, 2, 1, 70, 70, 20, 9, True, ""),
    (2, 2, 2, 5, 37, 8, 24, False, ""),
    (2, 4, 2, 45, 70, 16, 16, True, "window sinks"),
    (2, 2, 1, 5, 37, 8, 24, False, "mask"),
    (1, 2, 1, 35, 37, 8, 8, True, "window mask sinks"),
    (3, 2, 2, 1, 40, 8, 8, True, "padding"),
    (2, 6, 2, 1, 45, 16, 16, True, "window sinks"),
    (3, 6, 3, 1, 37, 16, 10, False, "padding sinks"),
    (1, 80, 2, 1, 37, 8, 8, True, ""),
)


def options_of(names: str, shape: tuple[int, int, int, int], number: int) -> Any:
    """Options of the kinds named, for scores (B, H, T, S); one query sees nothing."""
    if not names:
        return None
    rng, (batch, heads, queries, keys) = np.random.default_rng(number), shape
    mask = None
    if "mask" in names:
        mask = rng.integers(0, 4, (batch, 1, queries, keys)) > 0
        mask[0, 0, 2] = False
    if "padding" in names:
        mask = np.arange(keys) >= np.array([0, 7, keys])[:, None, None, None]
    sinks = rng.standard_normal(heads).astype(np.float32) if "sinks" in names else None
    return AttentionOptions(6 if "window" in names else None, mask, sinks)


def attention_arrays() -> Iterator[tuple[Any, ...]]:
    for number, case in enumerate(ATTENTIONS):
        batch, heads, groups, queries, keys, d, dv, causal, names = case
        q, k, v, g = normals(
            number,
            (batch, heads, queries, d),
            (batch, groups, keys, d),
            (batch, groups, keys, dv),
            (batch, heads, queries, dv),
        )
        options = options_of(names, (batch, heads, queries, keys), number)
        yield q, k, v, g, causal, (-0.7 if number == 4 else d**-0.5), options


def repeated(x: np.ndarray, heads: int) -> np.ndarray:
    return np.repeat(x.astype(np.float64), heads // x.shape[1], axis=1)


def hidden_from(shape: tuple[int, ...], causal: bool, options: Any) -> np.ndarray:
    """Which keys a query does not see, of scores (B, H, T, S)."""
    queries, keys = shape[-2:]
    own, hidden = np.arange(queries)[:, None] + keys - queries, np.zeros(shape, bool)
    if causal:
        hidden |= np.arange(keys) > own
    if options is not None and options.window is not None:
        hidden |= np.arange(keys) <= own - options.window
    if options is not None and options.mask is not None:
        hidden |= ~options.mask
    return hidden


def probabilities(
    q: np.ndarray, k: np.ndarray, causal: bool, scale: float, options: Any
) -> tuple[Any, ...]:
    """Scores, p, the largest scores, 1 / the sums, and the bound of an error of a score."""
    across = repeated(k, q.shape[1]).swapaxes(-1, -2)
    scores = scale * (q.astype(np.float64) @ across)
    off = (q.shape[-1] + 3) * UNIT * abs(scale) * (np.abs(q).astype(np.float64) @ np.abs(across))
    hidden = hidden_from(scores.shape, causal, options)
    scores[hidden], off[hidden] = -np.inf, 0.0
    sinks = np.full((1, 1, 1), -np.inf)
    if options is not None and options.sinks is not None:
        sinks = options.sinks.astype(np.float64)[:, None, None]
    top = np.maximum(scores.max(axis=-1, keepdims=True), sinks)
    top[np.isneginf(top)] = 0.0
    e = np.exp(scores - top)
    total = e.sum(axis=-1, keepdims=True) + np.exp(sinks - top)
    inverse = np.divide(1, total, out=np.zeros_like(total), where=total > 0)
    return scores, e * inverse, top, inverse, off


def depth(scores: np.ndarray, top: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(scores), top - scores, 0.0)


def attention_cases() -> Bounded:
    for q, k, v, _, causal, scale, options in attention_arrays():
        scores, p, top, inverse, off = probabilities(q, k, causal, scale, options)
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
        yield (
            (q, k, v, causal, scale, options),
            exact,
            [SECOND * b + TINY for b in (bound, stats_bound)],
        )


def folded(x: np.ndarray, groups: int) -> np.ndarray:
    """Sums over the heads that share a key head."""
    batch, heads = x.shape[:2]
    return x.reshape(batch, groups, heads // groups, *x.shape[2:]).sum(axis=2)


def attention_grad_cases() -> Bounded:
    for q, k, v, g, causal, scale, options in attention_arrays():
        scores, p, top, inverse, off = probabilities(q, k, causal, scale, options)
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
            (g, AttentionForward(q, k, v, out, stats, causal, scale, options)),
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
            other = AttentionForward(*kept, forward.causal, forward.scale, forward.options)
            backend.attention_grad(view(g), other, parts)
            for one, two in zip(parts, into, strict=True):
                assert_bytes(one.copy(), two, (forward.q.shape, path))


@dataclass(eq=False)
class Memory:
    """Keys and values with room, as a cache keeps them."""

    keys: Any
    values: Any
    length: Any
    place: Any

    @classmethod
    def of(cls, used: int, *parts: Any) -> Memory:
        addresses = [part.__array_interface__["data"][0] for part in parts]
        place = np.array([*addresses, parts[0].shape[2]], np.int64)
        return cls(*parts, np.array([used], np.int64), place)


def check_cached_attention(backend: cpu.CpuBackend) -> None:
    """The bits of `attention` with the token appended; tokens after it and the length stay."""
    cases = ((1, 1, 1, 0, 3, 4, 4), (2, 6, 2, 5, 9, 16, 8), (1, 9, 3, 40, 41, 64, 64))
    for number, (batch, heads, groups, used, capacity, d, dv) in enumerate(cases):
        q, k, v, keys, values = normals(
            number,
            (batch, heads, 1, d),
            (batch, groups, 1, d),
            (batch, groups, 1, dv),
            (batch, groups, capacity, d),
            (batch, groups, capacity, dv),
        )
        whole = [np.concatenate([a[:, :, :used], b], 2) for a, b in ((keys, k), (values, v))]
        expected, _ = backend.attention(q, *whole, False, 0.3)
        for name in ("strided", "transposed", "misaligned", "read-only"):
            memory = Memory.of(used, keys.copy(), values.copy())
            given = [VIEWS[name](x) for x in (q, k, v)]
            path = backend.path("cached_attention", *given, memory, 0.3)
            assert CORE is None or path.startswith("core ("), path
            got = backend.cached_attention(*given, memory, 0.3)
            assert_bytes(got.copy(), expected.copy(), (name, path))
            assert memory.length.tolist() == [used]
            for part, old, new in ((memory.keys, keys, k), (memory.values, values, v)):
                changed = old.copy()
                changed[:, :, used : used + 1] = new
                assert_bytes(part, changed, (name, path))
