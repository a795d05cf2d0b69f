"""Copies and pickles of whatever has a state, by enumeration: they go on to the same bits.

A copy is taken in the middle of training, between backward and step, which is where it has most to
lose; afterwards the two share no memory.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import nn, optim
from extensor.formats import FORMATS
from extensor.optim.states import STATES
from tests.test_every_layer import PEERS
from tests.test_every_optimizer import CASES, MATRICES, SHAPES

AGAIN: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
}
copied = pytest.mark.parametrize("how", AGAIN)


def forward(layer: Any, x: et.ExTensor) -> et.ExTensor:
    y = layer(x)
    return y[0] if isinstance(y, tuple) else y


def bits(tensors: Any) -> list[bytes]:
    return [t.detach().numpy().tobytes() for t in tensors]


def input_of(case: str) -> et.ExTensor:
    rng = np.random.default_rng(1)
    shape = PEERS[case][2]
    if case == "embedding":
        return et.ExTensor(rng.integers(0, 7, shape))
    return et.ExTensor(rng.standard_normal(shape).astype(np.float32))


@copied
@pytest.mark.parametrize("case", PEERS)
def test_layers(case: str, how: str) -> None:
    layer, x = PEERS[case][0](), input_of(case)
    trains = bool(list(layer.parameters()))
    optimizer = optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) if trains else None
    if trains:
        forward(layer, x).square().mean().backward()
    twins = AGAIN[how]((layer, optimizer))
    ends = []
    for model, steps in ((layer, optimizer), twins):
        if steps is not None:
            steps.step()
        ends.append((bits([forward(model, x)]), model.state_dict()))
    (mine, state), (theirs, other) = ends
    assert mine == theirs and state.keys() == other.keys()
    for key, value in state.items():
        assert np.asarray(value).tobytes() == np.asarray(other[key]).tobytes(), key


@copied
@pytest.mark.parametrize("make", [nn.Dropout, nn.Dropout2d])
def test_draws_go_on_where_they_were(make: Any, how: str) -> None:
    layer, x = make(0.5, rng=3), et.ones((4, 8, 3, 3))
    layer(x)
    twin = AGAIN[how](layer)
    for _ in range(3):
        assert bits([layer(x)]) == bits([twin(x)])


@copied
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("case", CASES)
def test_optimizers(case: str, states: str, how: str) -> None:
    name, options = CASES[case]
    rng = np.random.default_rng(0)
    shapes = MATRICES if name == "Muon" else SHAPES
    params = [et.ExTensor(rng.standard_normal(s).astype(np.float32)) for s in shapes]
    grads = [[rng.standard_normal(s).astype(np.float32) for s in shapes] for _ in range(4)]

    def give(to: list[et.ExTensor], step: int) -> None:
        for p, g in zip(to, grads[step], strict=True):
            p.requires_grad, p.grad = True, et.ExTensor(g)

    give(params, 0)
    optimizer = getattr(optim, name)(params, states=states, **options)
    optimizer.step()
    give(params, 1)
    again, other = AGAIN[how]((params, optimizer))
    before = bits(again)
    optimizer.step()
    assert bits(again) == before, "the copy moved with the original"
    other.step()
    for step in (2, 3):
        give(params, step)
        give(again, step)
        optimizer.step()
        other.step()
    assert bits(params) == bits(again)
    assert bits(params) != before


@copied
@pytest.mark.parametrize("recipe", sorted(et.RECIPES))
def test_layers_under_a_recipe(recipe: str, how: str) -> None:
    """Random numbers of stochastic rounding go on, too."""
    rng = np.random.default_rng(0)
    model = nn.Sequential(*(nn.Linear(64, 64, rng=rng) for _ in range(3)))
    nn.apply_recipe(model, recipe)
    x = et.randn(32, 64, seed=0)

    def step(model: Any, optimizer: Any) -> None:
        model.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)
    again, other = AGAIN[how]((model, optimizer))
    for _ in range(2):
        step(model, optimizer)
        step(again, other)
    assert bits(model.parameters()) == bits(again.parameters())


@pytest.mark.parametrize("how", [*AGAIN, "copy"])
@pytest.mark.parametrize("name", FORMATS)
def test_blocked_tensors(name: str, how: str) -> None:
    q = et.randn(4, 64, seed=0).quantize(et.QuantSpec(name))
    twin = (AGAIN | {"copy": copy.copy})[how](q)
    assert (twin.dtype, twin.shape, twin.spec) == (q.dtype, q.shape, q.spec)
    for part, array in q.data.parts.items():
        theirs = twin.data.parts[part]
        assert theirs.dtype == array.dtype and theirs.tobytes() == array.tobytes()
    assert bits([twin.dequantize()]) == bits([q.dequantize()])
