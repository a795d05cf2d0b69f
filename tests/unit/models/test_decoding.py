"""What each query of a batch sees, by the definition: one position, one key at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import models
from extensor.models.decoding import Batch, attend, batch_of
from extensor.models.llama.configs import ExpertsConfig

KEYS: list[Any] = [None, (0, 1, 2, 3, 4), (2, 3, 4), (0, 3, 4), (1, 2, 3, 4), (0, 2, 4)]
"""Which of the five tokens have a key left: a cache may drop the others."""


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("window", [None, 1, 2, 9])
@pytest.mark.parametrize("padded", [False, True])
def test_a_query_sees_real_keys_that_are_not_later_within_its_window(
    keys: Any, window: int | None, padded: bool
) -> None:
    past, new, total = 3, 2, 5
    real = np.array([[False, True, True, True, True], [True, True, True, True, False]])
    batch = Batch(
        et.zeros((2, new), "int64"), past, real if padded else None, slice(past, total), total - 1
    )
    slots = None if keys is None else np.array(keys)
    mask, ordered = batch.mask(slots, window)
    places = range(total) if keys is None else keys
    expected = [
        [
            [k <= q and (window is None or k > q - window) and bool(real[b, k] or not padded)
             for k in places]
            for q in range(past, total)
        ]
        for b in range(2)
    ]  # fmt: skip
    found = np.ones((2, new, len(places)), bool)
    if mask is not None:
        found = found & np.asarray(mask if mask.ndim == 2 else mask[:, 0])
    if ordered:  # what attention does for keys in a row: see `Batch.mask`
        lag = np.arange(len(places))[None] - np.arange(new)[:, None] - (len(places) - new)
        found = found & (lag <= 0) & (lag > -(window or total))
    np.testing.assert_array_equal(found, expected)


def test_a_token_stands_where_as_many_real_ones_are_before_it() -> None:
    """Whatever the padding, and however much of the text the cache holds."""
    rng = np.random.default_rng(0)
    for past in range(6):
        real = rng.random((4, 6)) < 0.6
        real[:, -1] = True
        cache: Any = SimpleNamespace(length=past)
        tokens = et.zeros((4, 6 - past), "int64")
        batch = batch_of("Toy", tokens, real, cache=cache)
        for b, place in zip(*np.nonzero(real[:, past:]), strict=True):
            before = int(real[b, : past + place].sum())
            assert batch.positions.numpy()[b, place] == before
        assert batch.last == real.sum(axis=1).max() - 1
        whole = batch_of("Toy", tokens, np.ones((4, 6)), cache=cache)
        assert whole.positions == slice(past, 6) and whole.last == 5 and whole.padding is None


def test_experts_at_their_bounds() -> None:
    for count, active, hidden in ((1, 1, 1), (4, 4, 1), (4, 1, 8)):
        assert ExpertsConfig(count, active, hidden).hidden == hidden
    for count, active, hidden in ((1, 0, 1), (1, 2, 1), (4, 2, 0)):
        with pytest.raises(ValueError, match=f"1 to {count} active experts and a hidden width"):
            ExpertsConfig(count, active, hidden)


@pytest.mark.parametrize("window", [3, 6, 9, 20])
def test_a_window_hides_what_lies_before_it_however_wide_a_head_is(window: int) -> None:
    """Heads of 4 and 16 values, 8 keys: a window of all keys or more hides none."""
    for size in (4, 16):
        rng = np.random.default_rng(size)
        q, k, v = (et.ExTensor(rng.standard_normal((1, 2, 8, size))) for _ in range(3))
        batch = batch_of("Toy", et.zeros((1, 8), "int64"), None, cache=None)
        found = attend(q, k, v, batch, None, 0, window)
        expected = et.scaled_dot_product_attention(q, k, v, causal=True, window=window)
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-12)


def test_a_layer_may_be_replaced_and_watched() -> None:
    """Without gradients the others hand each other two parts of a sum."""

    class Skipped(et.nn.Module):
        def forward(self, x: et.ExTensor, step: object) -> et.ExTensor:
            return x

    config = models.config("llama", "nano")
    model: Any = models.build("llama", config, np.random.default_rng(0))
    tokens, seen = et.zeros((1, 4), dtype="int64"), []
    for layer in (model.model.layers[1], Skipped()):
        setattr(model.model.layers, "1", layer)
        with et.no_grad():
            found = model(tokens).numpy()
        np.testing.assert_array_equal(found, model(tokens).numpy())
    model.model.layers[0].register_forward_hook(lambda layer, x: seen.append(x.shape))
    with et.no_grad():
        model(tokens)
    assert seen == [(1, 4, config.width)]
