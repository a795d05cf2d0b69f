"""Attention over grouped heads: masks, windows and sinks are those of repeated heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import extensor as et


def by_formula(q: Any, k: Any, v: Any, seen: Any, sinks: Any) -> np.ndarray:
    """float64, one query at a time: softmax over what is seen, the sink one score more."""
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, h, t in np.ndindex(q.shape[:3]):
        group = h // (q.shape[1] // k.shape[1])
        scores = k[b, group] @ q[b, h, t] / np.sqrt(q.shape[3])
        weights = np.exp(scores) * seen[b, h, t]
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[h]))
        out[b, h, t] = weights @ v[b, group] / total if total else 0
    return out


@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (4, 1)])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 7)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 2}])
@pytest.mark.parametrize("masked", ["", "heads", "batch"])
@pytest.mark.parametrize("sunk", [False, True])
def test_grouped_heads(
    heads: tuple[int, int], lengths: tuple[int, int], options: dict[str, Any], masked: str,
    sunk: bool,
) -> None:  # fmt: skip
    rng = np.random.default_rng(0)
    (hq, hk), (t, s) = heads, lengths
    q, k, v = (rng.standard_normal(n) for n in ((2, hq, t, 8), (2, hk, s, 8), (2, hk, s, 8)))
    sinks = rng.standard_normal(hq) if sunk else None
    seen = np.ones((2, hq, t, s), bool)
    place = np.arange(s) - np.arange(t)[:, None] - (s - t)
    if "causal" in options:
        seen &= place <= 0
    if "window" in options:
        seen &= place > -options["window"]
    mask = None
    if masked:
        mask = rng.random((1, hq, t, s) if masked == "heads" else (2, 1, t, s)) < 0.7
        mask[..., max(0, s - t) :] |= place[:, max(0, s - t) :] == 0  # each query sees a key
        seen &= mask
    found = et.scaled_dot_product_attention(
        *(et.ExTensor(a) for a in (q, k, v)),
        None if sinks is None else et.ExTensor(sinks),
        mask=None if mask is None else et.ExTensor(mask),
        **options,
    )
    np.testing.assert_allclose(found.numpy(), by_formula(q, k, v, seen, sinks), rtol=1e-10)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
def test_gradients_lie_in_memory_as_what_they_are_of(
    lead: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that heads cut out of a product's rows are joined again without a copy."""
    rng, backend = np.random.default_rng(1), et.zeros(1).backend
    written, write = [], backend.attention_grad

    def spy(g: Any, forward: Any, into: Any) -> None:
        written.append([a.strides[-3:] for a in into])
        write(g, forward, into)

    monkeypatch.setattr(backend, "attention_grad", spy)
    rows = [rng.standard_normal((*lead, 5, 4, 8)).astype(np.float32) for _ in range(3)]
    side_by_side = [x.swapaxes(-2, -3) for x in rows]
    grads = []
    for arrays in (side_by_side, [np.ascontiguousarray(x) for x in side_by_side]):
        tensors = [et.ExTensor._from_array(x, et.float32, "cpu", True) for x in arrays]
        out = et.scaled_dot_product_attention(*tensors, causal=True)
        (out * out).sum().backward()
        grads.append([t.grad.numpy() for t in tensors])
        assert written[-1] == [x.strides[-3:] for x in arrays]
    for ours, theirs in zip(*grads, strict=True):
        np.testing.assert_array_equal(ours, theirs)
