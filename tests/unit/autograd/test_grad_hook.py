"""Hooks on gradients that are final: each leaf once, early, with all of its parts."""

from __future__ import annotations

import numpy as np

import extensor as et
from extensor.autograd.mode import post_accumulate_grad_hook


def model() -> et.nn.Sequential:
    rng = np.random.default_rng(0)
    shared = et.nn.Linear(8, 8, rng=rng)
    return et.nn.Sequential(et.nn.Linear(8, 8, rng=rng), shared, et.nn.ReLU(), shared)


def test_each_leaf_once_with_its_whole_gradient() -> None:
    x = et.randn((4, 8), seed=1)
    expected, given = model(), model()
    expected(x).sum().backward()
    seen: dict[int, np.ndarray] = {}

    def hook(leaf: et.ExTensor) -> None:
        assert id(leaf) not in seen
        seen[id(leaf)] = leaf.grad.numpy().copy()

    with post_accumulate_grad_hook(hook):
        given(x).sum().backward()
    assert len(seen) == 4  # the shared layer's weight and bias are used twice
    for mine, theirs in zip(given.parameters(), expected.parameters(), strict=True):
        np.testing.assert_array_equal(seen[id(mine)], theirs.grad.numpy())
        np.testing.assert_array_equal(mine.grad.numpy(), theirs.grad.numpy())


def test_the_last_layers_gradient_comes_while_the_first_is_not_there() -> None:
    net = et.nn.Sequential(et.nn.Linear(8, 8, rng=0), et.nn.ReLU(), et.nn.Linear(8, 8, rng=1))
    there: list[bool] = []
    with post_accumulate_grad_hook(lambda leaf: there.append(net[0].weight.grad is not None)):
        net(et.ones((2, 8))).sum().backward()
    assert there[:2] == [False, False] and there[-1]


def test_accumulated_gradients_and_recomputed_blocks() -> None:
    layer = et.nn.Linear(8, 8, rng=0)
    x = et.randn((4, 8), seed=2)
    layer(x).sum().backward()
    once = layer.weight.grad.numpy().copy()
    seen = []
    with post_accumulate_grad_hook(lambda leaf: seen.append(leaf)):
        et.checkpoint(lambda x: layer(x), x).sum().backward()
    assert len(seen) == 2
    np.testing.assert_array_equal(layer.weight.grad.numpy(), 2 * once)


def test_gradients_of_rows_are_offered_where_the_leaf_has_none_yet() -> None:
    """Where nobody takes them, they are the dense gradient."""
    table, tokens = et.nn.Embedding(8, 4, rng=0), et.ExTensor([1, 3, 1])
    expected = np.zeros((8, 4), np.float32)
    np.add.at(expected, [1, 3, 1], 1)
    offered: list[et.ExTensor] = []

    def rows(leaf: et.ExTensor, gradient: object) -> bool:
        offered.append(leaf)
        return False

    for times, offers in ((1, None), (2, None), (3, rows)):
        with post_accumulate_grad_hook(lambda leaf: None, offers):
            table(tokens).sum().backward()
        np.testing.assert_array_equal(table.weight.grad.numpy(), times * expected)
    assert not offered
    table.zero_grad()
    with post_accumulate_grad_hook(lambda leaf: None, rows):
        table(tokens).sum().backward()
    assert len(offered) == 1 and offered[0] is table.weight
    np.testing.assert_array_equal(table.weight.grad.numpy(), expected)
