"""Scaled dot-product attention."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from extensor.autograd.apply import apply
from extensor.autograd.primitive import BadInput, Sample, primitive
from extensor.autograd.tensor import ExTensor, wrap
from extensor.backends.heads import empty_heads
from extensor.backends.protocol import Array, AttentionForward, AttentionOptions
from extensor.ops.arguments import tensors_only
from extensor.ops.arithmetic import where
from extensor.ops.joining import concatenate
from extensor.ops.matmul import matmul
from extensor.ops.softmax import softmax

__all__ = ["packed_attention", "scaled_dot_product_attention"]


def _with_one_leading_axis(*arrays: Any) -> list[Any]:
    """Arrays (..., H, T, d) with one leading axis."""
    return [a.reshape(math.prod(a.shape[:-3]), *a.shape[-3:]) for a in arrays]


def _options(
    xp: Any, lead: tuple[int, ...], window: int | None, mask: Any, sinks: Any
) -> AttentionOptions | None:
    """What the backend needs beside ``causal``, the mask's leading axes made one."""
    if window is None and mask is None and sinks is None:
        return None
    if mask is not None and len(lead) != 1:
        mask = xp.broadcast_to(mask, (*lead, *mask.shape[-3:])) if lead else mask[None]
        mask = mask.reshape(math.prod(lead), *mask.shape[-3:])
    return AttentionOptions(window, mask, sinks)


def _forward(
    backend: Any,
    q: Any,
    k: Any,
    v: Any,
    sinks: Any = None,
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
    mask: Any = None,
) -> Any:
    options = _options(backend.xp, q.shape[:-3], window, mask, sinks)
    arrays = (q, k, v) if q.ndim == 4 else _with_one_leading_axis(q, k, v)
    out, stats = backend.attention(*arrays, causal, scale, options)
    return out if q.ndim == 4 else out.reshape(*q.shape[:-1], v.shape[-1]), stats


def _fused_vjp(
    backend: Any,
    g: Any,
    out: Any,
    inputs: Any,
    needs: Any,
    causal: bool,
    scale: float,
    saved: Any,
    window: int | None = None,
    mask: Any = None,
) -> Any:
    into = [empty_heads(a, backend.xp) for a in inputs[:3]]
    q, k, v = _with_one_leading_axis(*inputs[:3])
    g, out = _with_one_leading_axis(g, out)
    sinks = inputs[3] if len(inputs) > 3 else None
    options = _options(backend.xp, inputs[0].shape[:-3], window, mask, sinks)
    forward = AttentionForward(q, k, v, out, saved, causal, scale, options)
    backend.attention_grad(g, forward, tuple(_with_one_leading_axis(*into)))
    if sinks is not None:
        into.append(_sinks_grad(backend.xp, g, forward))
    return into


def _sinks_grad(xp: Any, g: Array, forward: AttentionForward) -> Array:
    """-p t of each query, summed: the sink's probability p, and t = the sum of g out."""
    assert forward.options is not None and forward.options.sinks is not None
    sinks, stats = forward.options.sinks, forward.stats
    p = xp.exp(sinks[:, None] - stats[..., 0]) * stats[..., 1]
    return -(p * (g * forward.out).sum(axis=-1)).sum(axis=(0, 2)).astype(sinks.dtype)


def _seen(q: ExTensor, k: ExTensor, causal: bool, window: int | None, mask: Any) -> ExTensor | None:
    """Which keys each query sees, (..., Hkv, H / Hkv, T, S) or shorter; None for all."""
    xp, queries, keys = q.backend.xp, q.shape[-2], k.shape[-2]
    seen = xp.tri(queries, keys, keys - queries, dtype=bool) if causal else None
    if window is not None:
        near = ~xp.tri(queries, keys, keys - queries - window, dtype=bool)
        seen = near if seen is None else seen & near
    if mask is not None:
        full = xp.broadcast_to(mask, (*q.shape[:-1], keys))
        full = full.reshape(*k.shape[:-2], q.shape[-3] // k.shape[-3], queries, keys)
        seen = full if seen is None else seen & full
    return None if seen is None else wrap(seen, q.backend)


def _probabilities(scores: ExTensor, seen: ExTensor | None, sinks: ExTensor | None) -> ExTensor:
    """Softmax over the keys that are seen, and over the sinks, whose part comes last."""
    if seen is not None:
        nothing = ~seen.any(axis=-1, keepdims=True)
        scores = where(seen | nothing, scores, -math.inf)
    if sinks is not None:
        column = sinks.reshape((*scores.shape[-4:-2], 1, 1))
        column = column.broadcast_to((*scores.shape[:-1], 1))
        scores = concatenate([scores, column], axis=-1)
    p = softmax(scores)
    if seen is None:
        return p
    if sinks is not None:
        ones = wrap(p.backend.xp.ones((*seen.shape[:-1], 1), bool), p.backend)
        seen = concatenate([seen, ones], axis=-1)
    return where(seen, p, 0.0)


def _gradients(
    g: ExTensor,
    q: ExTensor,
    k: ExTensor,
    v: ExTensor,
    sinks: ExTensor | None = None,
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
    mask: Any = None,
) -> tuple[ExTensor, ...]:
    """The gradients written in operations, as in `extensor.backends.generic.nn`."""
    *lead, heads, queries, _ = q.shape
    groups, keys = k.shape[-3:-1]
    shape = (*lead, groups, heads // groups, queries)
    gg, qq = (a.reshape((*shape, a.shape[-1])) for a in (g, q))
    kk, vv = k.expand_dims(-3), v.expand_dims(-3)
    scores = matmul(qq, kk.swapaxes(-1, -2)) * scale
    limited = mask is not None or window is not None or (causal and queries > 1)
    seen = _seen(q, k, causal, window, mask) if limited else None
    p, d = _probabilities(scores, seen, sinks), matmul(gg, vv.swapaxes(-1, -2))
    sink, p = p[..., keys:], p[..., :keys]
    t = (p * d).sum(axis=-1, keepdims=True)
    ds = scale * p * (d - t)
    grads = (
        matmul(ds, kk).reshape(q.shape),
        matmul(ds.swapaxes(-1, -2), qq).sum(axis=-3),
        matmul(p.swapaxes(-1, -2), gg).sum(axis=-3),
    )
    if sinks is None:
        return grads
    others = (*range(len(lead)), len(lead) + 2, len(lead) + 3)
    return (*grads, -(sink * t).sum(axis=others).reshape(sinks.shape))


def _vjp(index: int, g: ExTensor, out: ExTensor, *inputs: ExTensor, **params: Any) -> ExTensor:
    params.pop("saved")
    return _gradients(g, *inputs, **params)[index]


def _reference(
    q: Any,
    k: Any,
    v: Any,
    causal: bool,
    scale: float,
    sinks: Any = None,
    window: int | None = None,
    mask: Any = None,
) -> Any:
    """One query at a time, in numpy."""
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    shared = q.shape[-3] // k.shape[-3]
    for at in np.ndindex(q.shape[:-1]):
        *lead, head, t = at
        keys, values = k[(*lead, head // shared)], v[(*lead, head // shared)]
        own = t + k.shape[-2] - q.shape[-2]
        seen = [
            j
            for j in range(k.shape[-2])
            if (not causal or j <= own)
            and (window is None or j > own - window)
            and (mask is None or np.broadcast_to(mask, (*q.shape[:-1], k.shape[-2]))[(*at, j)])
        ]
        weight = np.exp(keys[seen] @ q[at] * scale)
        total = weight.sum() + (0.0 if sinks is None else np.exp(sinks[head]))
        out[at] = weight @ values[seen] / total if seen else 0.0
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
    q = rng.normal(size=(2, 4, 3, 4))
    k, v, sinks = rng.normal(size=(2, 2, 5, 4)), rng.normal(size=(2, 2, 5, 2)), rng.normal(size=4)
    mask = rng.integers(0, 3, (2, 1, 3, 5)) > 0
    mask[0, 0, 1] = False
    options: dict[str, Any]
    for given, options in (
        ((sinks,), {"causal": True, "window": 2}),
        ((), {"causal": True, "window": 3, "mask": mask}),
        ((sinks,), {"causal": False, "mask": mask[:, :, :1]}),
    ):
        expected = _reference(q, k, v, scale=0.5, sinks=given[0] if given else None, **options)
        yield Sample((q, k, v, *given), options, expected=expected)


_Q = np.zeros((2, 4, 3, 8))


@primitive(
    forward=_forward,
    vjp_at=_vjp,
    fused_vjp=_fused_vjp,
    slots=("q", "k", "v", "input"),
    out_slot="o",
    saves=True,
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
        BadInput((_Q, _Q, _Q, np.zeros(3)), ValueError, "a sink for each of 4 heads"),
        BadInput((_Q, _Q, _Q), ValueError, "causal=True beside", {"window": 2}),
        BadInput((_Q, _Q, _Q), ValueError, "1 or more", {"window": 0, "causal": True}),
        BadInput((_Q, _Q, _Q), ValueError, "broadcasts to", {"mask": np.ones((2, 3), bool)}),
        BadInput((_Q, _Q, _Q), TypeError, "of bool", {"mask": np.ones((3, 3))}),
    ),
)
def scaled_dot_product_attention(
    q: ExTensor,
    k: ExTensor,
    v: ExTensor,
    sinks: ExTensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    mask: Any = None,
) -> ExTensor:
    """Attention, ``softmax(scale q k^T) v``: for each query a weighted mean of the values.

    Args:
        q: queries (..., H, T, d).
        k: keys (..., Hkv, S, d); H is a multiple of Hkv, and H / Hkv query heads that follow each
            other share one key head (grouped-query attention, arXiv 2305.13245).
        v: values (..., Hkv, S, dv).
        sinks: a score (H,) for each head. Its exponential joins the sum that the weights are
            divided by, so that a query may attend to nothing (arXiv 2508.10925, section 2.2).
        causal: query t sees the keys 0 .. t + S - T only, so the last query sees all of them.
        scale: the factor of the products q k^T; 1 / sqrt(d) if None.
        window: with ``causal``, the last so many of these keys only (arXiv 2004.05150).
        mask: bool, an array or a tensor that broadcasts to (..., H, T, S): True where a query sees
            a key. It goes with ``causal``: both must allow a key.

    Returns:
        (..., H, T, dv); zeros for a query that sees no key.

    Raises:
        TypeError, ValueError: for shapes that do not go together, no key at all, fewer keys than
            queries under ``causal``, a window without it, a mask that is not of bool, or a scale
            that is not finite.

    Source: Vaswani et al., arXiv 1706.03762, section 3.2.1.

    Example:
        >>> q, k = et.zeros((1, 2, 4)), et.zeros((1, 2, 4))
        >>> v = et.ExTensor([[[1.0], [3.0]]])
        >>> et.scaled_dot_product_attention(q, k, v, causal=True).tolist()
        [[[1.0], [2.0]]]
    """
    name = "scaled_dot_product_attention"
    _check(q, k, v, causal, scale)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    if sinks is None and window is None and mask is None:
        return apply(name, q, k, v, causal=causal, scale=scale)
    mask = _check_options(q, k, sinks, causal, window, mask)
    given = (q, k, v) if sinks is None else (q, k, v, sinks)
    return apply(name, *given, causal=causal, scale=scale, window=window, mask=mask)


def _check_options(
    q: ExTensor, k: ExTensor, sinks: Any, causal: bool, window: int | None, mask: Any
) -> Any:
    """Refuse options that do not fit; gives the mask as an array (..., 1 or H, 1 or T, 1 or S)."""
    name, heads = "scaled_dot_product_attention", q.shape[-3]
    if sinks is not None:
        tensors_only(name, sinks)
        if sinks.shape != (heads,):
            raise ValueError(
                f"{name}: expected a sink for each of {heads} heads, got shape {sinks.shape}"
            )
    if window is not None and not causal:
        raise ValueError(f"{name}: expected causal=True beside window={window}")
    if window is not None and window < 1:
        raise ValueError(f"{name}: window: expected 1 or more, got {window}")
    if mask is None:
        return None
    mask = mask.data if isinstance(mask, ExTensor) else q.backend.xp.asarray(mask)
    if mask.dtype != np.bool_:
        raise TypeError(f"{name}: expected a mask of bool, got {mask.dtype}")
    full = (*q.shape[:-1], k.shape[-2])
    if len(mask.shape) < 3:
        mask = mask.reshape((*(1,) * (3 - len(mask.shape)), *mask.shape))
    fits = len(mask.shape) <= len(full) and all(
        a in (1, b) for a, b in zip(reversed(mask.shape), reversed(full), strict=False)
    )
    if not fits:
        raise ValueError(f"{name}: expected a mask that broadcasts to {full}, got {mask.shape}")
    return mask


def _check(q: ExTensor, k: ExTensor, v: ExTensor, causal: bool, scale: float | None) -> None:
    name = "scaled_dot_product_attention"
    tensors_only(name, q, k, v)
    qs, ks, vs = q.shape, k.shape, v.shape
    if min(len(qs), len(ks), len(vs)) < 3:
        problem = "(..., heads, length, d) of three axes or more"
    elif qs[-1] != ks[-1] or qs[-1] < 1:
        problem = "queries and keys of the same length d"
    elif ks[:-1] != vs[:-1]:
        problem = "as many values as keys, and heads as many"
    elif qs[:-3] != ks[:-3]:
        problem = "equal leading axes"
    elif not ks[-3] or qs[-3] % ks[-3]:
        problem = "query heads a multiple of the key heads"
    elif not ks[-2]:
        problem = "at least one key"
    elif causal and ks[-2] < qs[-2]:
        problem = "at least as many keys as queries"
    elif scale is not None and not math.isfinite(scale):
        raise ValueError(f"{name}: scale: expected a finite number, got {scale!r}")
    else:
        return
    raise ValueError(f"{name}: expected {problem}, got q {qs}, k {ks} and v {vs}")


def _split_heads(x: Any, heads: int, groups: int) -> Any:
    """Views of (..., T, total d): queries, keys and values (..., heads, T, d)."""
    total = heads + 2 * groups
    split = x.reshape((*x.shape[:-1], total, x.shape[-1] // total)).swapaxes(-2, -3)
    ends = (heads, heads + groups, total)
    return [split[..., a:b, :, :] for a, b in zip((0, *ends), ends, strict=False)]


def _merge_heads(x: Any, heads: int) -> Any:
    """(..., heads, T, d) -> (..., T, heads d)."""
    return x.swapaxes(-2, -3).reshape((*x.shape[:-3], x.shape[-2], heads * x.shape[-1]))


def _packed_forward(
    backend: Any, x: Any, heads: int, groups: int, causal: bool, scale: float
) -> Any:
    rows = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    out, stats = backend.attention(*_split_heads(rows, heads, groups), causal, scale)
    mixed = _merge_heads(out, heads)
    return mixed.reshape(*x.shape[:-1], mixed.shape[-1]), stats


def _packed_fused(
    backend: Any, g: Any, out: Any, inputs: Any, needs: Any, saved: Any, **params: Any
) -> Any:
    x, heads, groups = inputs[0], params["heads"], params["groups"]
    lead = math.prod(x.shape[:-2])
    gx = backend.xp.empty((lead, *x.shape[-2:]), x.dtype)
    q, k, v = _split_heads(x.reshape(gx.shape), heads, groups)
    grad, result = (_split_heads(a.reshape(lead, *a.shape[-2:]), heads, 0)[0] for a in (g, out))
    into = tuple(_split_heads(gx, heads, groups))
    forward = AttentionForward(q, k, v, result, saved, params["causal"], params["scale"])
    backend.attention_grad(grad, forward, into)
    return [gx.reshape(x.shape)]


def _packed_vjp(
    g: ExTensor, out: ExTensor, x: ExTensor, heads: int, groups: int, **params: Any
) -> ExTensor:
    grad = _split_heads(g, heads, 0)[0]
    q, k, v = _split_heads(x, heads, groups)
    grads = _gradients(grad, q, k, v, causal=params["causal"], scale=params["scale"])
    return _merge_heads(concatenate(list(grads), axis=-3), heads + 2 * groups)


def _packed_reference(x: Any, heads: int, groups: int, causal: bool, scale: float) -> Any:
    """Head after head, each cut out by its columns."""
    d = x.shape[-1] // (heads + 2 * groups)
    out = []
    for head in range(heads):
        key = heads + head * groups // heads
        q, k, v = (x[..., None, :, i * d : (i + 1) * d] for i in (head, key, key + groups))
        out.append(_reference(q, k, v, causal, scale)[..., 0, :, :])
    return np.concatenate(out, axis=-1)


def _packed_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, heads, groups, causal, scale in (
        ((2, 3, 12), 2, 1, True, None),
        ((4, 6), 1, 1, False, None),
        ((2, 2, 16), 4, 2, False, 0.3),
    ):
        x = rng.normal(size=shape)
        root = (shape[-1] / (heads + 2 * groups)) ** -0.5
        expected = _packed_reference(x, heads, groups, causal, scale or root)
        yield Sample((x, heads, groups), {"causal": causal, "scale": scale}, expected=expected)


@primitive(
    forward=_packed_forward,
    vjps=(_packed_vjp,),
    fused_vjp=_packed_fused,
    slots=("qkv",),
    out_slot="o",
    saves=True,
    samples=_packed_samples,
    errors=(
        BadInput((np.zeros((3, 8)), 2), ValueError, "a multiple of 6"),
        BadInput((np.zeros(12), 2), ValueError, "with T of 1 or more, got shape (12,)"),
        BadInput((np.zeros((0, 12)), 2), ValueError, "with T of 1 or more, got shape (0, 12)"),
        BadInput((np.zeros((3, 12)), 3, 2), ValueError, "a multiple of the key heads"),
        BadInput((np.zeros((3, 12)), 0), ValueError, "1 head or more"),
        BadInput((np.zeros((3, 12)), 2), ValueError, "finite", {"scale": math.nan}),
    ),
)
def packed_attention(
    x: ExTensor,
    heads: int,
    kv_heads: int | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> ExTensor:
    """Self-attention of queries, keys and values packed in one tensor by one projection.

    The same as `scaled_dot_product_attention` of the three, without copies of them.

    Args:
        x: (..., T, (heads + 2 kv_heads) d): each token's queries, keys, values, by heads.
        heads: query heads.
        kv_heads: key and value heads, a divisor of ``heads``; None, as many.
        causal: see `scaled_dot_product_attention`.
        scale: likewise.

    Returns:
        (..., T, heads d), one head after the other.

    Raises:
        TypeError, ValueError: for sizes that do not go together, no tokens, or a scale that is not
            finite.

    Example:
        >>> et.packed_attention(et.ones((2, 5, 24)), heads=4, kv_heads=2).shape
        (2, 5, 12)
    """
    name = "packed_attention"
    tensors_only(name, x)
    groups = heads if kv_heads is None else kv_heads
    if min(heads, groups) < 1 or heads % groups:
        raise ValueError(
            f"{name}: expected 1 head or more, and a multiple of the key heads, got {heads} and "
            f"{groups}"
        )
    if x.ndim < 2 or not x.shape[-2]:
        raise ValueError(
            f"{name}: expected (..., T, a multiple of {heads + 2 * groups}) with T of 1 or more, "
            f"got shape {x.shape}"
        )
    total = heads + 2 * groups
    if not x.shape[-1] or x.shape[-1] % total:
        raise ValueError(f"{name}: expected (..., T, a multiple of {total}), got shape {x.shape}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"{name}: scale: expected a finite number, got {scale!r}")
    scale = math.sqrt(total / x.shape[-1]) if scale is None else float(scale)
    return apply(name, x, heads=heads, groups=groups, causal=causal, scale=scale)
