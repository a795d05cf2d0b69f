"""The steps of a recipe: stochastic rounding draws other bits in each step and in each use.

What an optimizer updates tells the recipe's state that the step is over, so that a loop without a
word about steps never draws the same bits twice. Gradients of one input and one weight differ
between steps by their random bits alone, so equal gradients would mean equal bits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import nn, optim
from extensor.quant.recipe import LayerRecipe, Recipe
from extensor.quant.recipe_state import RecipeState

X = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)


def made(layer: nn.Module | None = None) -> tuple[nn.Module, RecipeState]:
    layer = layer or nn.Linear(64, 32, rng=0)
    return layer, nn.apply_recipe(layer, "mxfp4_all", seed=1)


def gradient(layer: nn.Module, x: np.ndarray = X) -> bytes:
    """The weights' gradients of one backward pass, from none."""
    layer.zero_grad()
    layer(et.from_numpy(x)).square().mean().backward()
    return b"".join(p.grad.numpy().tobytes() for p in layer.parameters() if p.grad is not None)


def still(layer: nn.Module) -> optim.SGD:
    """An optimizer that leaves the weights as they are."""
    return optim.SGD(layer.parameters(), lr=0.0)


@pytest.mark.parametrize("layer", [nn.Linear(64, 32, rng=0), nn.Conv2d(4, 32, 4, rng=0)])
def test_steps_that_nobody_counts_draw_bits_of_their_own(layer: nn.Module) -> None:
    layer, state = made(copy.deepcopy(layer))
    x = X if isinstance(layer, nn.Linear) else X.reshape(32, 4, 4, 4)
    optimizer, seen = still(layer), []
    for step in range(4):
        assert state.step == step
        seen.append(gradient(layer, x))
        optimizer.step()
    assert len(set(seen)) == 4
    state.step = 2
    assert gradient(layer, x) == seen[2]


def test_counting_by_hand_is_what_the_optimizer_does() -> None:
    def run(by_hand: bool) -> list[bytes]:
        layer, state = made()
        optimizer = optim.SGD(layer.parameters(), lr=0.1)
        seen = []
        for step in range(3):
            if by_hand:
                state.step = step
            seen.append(gradient(layer))
            optimizer.step()
        return seen

    assert run(by_hand=True) == run(by_hand=False)


def test_micro_batches_and_several_uses_draw_bits_of_their_own() -> None:
    layer, state = made()
    seen = [gradient(layer) for _ in range(3)]
    assert len(set(seen)) == 3 and state.step == 0
    state.step = 0
    assert [gradient(layer) for _ in range(3)] == seen
    one, two = layer(et.from_numpy(X)), layer(et.from_numpy(X))
    layer.zero_grad()
    one.square().mean().backward()
    first = layer.weight.grad.numpy().copy()
    layer.zero_grad()
    two.square().mean().backward()
    assert not np.array_equal(first, layer.weight.grad.numpy())


def test_a_backward_pass_draws_the_bits_of_its_own_forward_pass() -> None:
    layer, state = made()
    expected = gradient(layer)
    state.step = 0
    y = layer(et.from_numpy(X)).square().mean()
    layer(et.from_numpy(X))  # another use comes between
    layer.zero_grad()
    y.backward()
    assert b"".join(p.grad.numpy().tobytes() for p in layer.parameters()) == expected


def rotated(signs: Any, layer: nn.Module | None = None) -> tuple[nn.Module, RecipeState]:
    """MXFP8 rounded to nearest in each product, under a transform."""
    spec = et.QuantSpec("mxfp8_e4m3", scale_rule="rceil", transform=et.Hadamard(32, signs))
    layer = layer or nn.Linear(64, 32, rng=0)
    return layer, nn.apply_recipe(layer, Recipe("rotated", "", LayerRecipe.uniform(spec)), seed=1)


def test_signs_are_drawn_in_each_step_and_not_in_each_use() -> None:
    layer, state = rotated("per_step")
    optimizer, seen = still(layer), []
    for _ in range(3):
        seen.append(gradient(layer))
        assert gradient(layer) == seen[-1]
        optimizer.step()
    assert len(set(seen)) == 3
    state.step = 1
    assert gradient(layer) == seen[1]
    layer, state = rotated("random")
    first, state.step = gradient(layer), 1
    assert gradient(layer) == first


@pytest.mark.parametrize("layer", [nn.Linear(64, 32, rng=0), nn.Conv2d(4, 32, 4, rng=0)])
@pytest.mark.parametrize("moved", ["no", "use", "micro_batch", "step"])
def test_operands_of_a_product_have_the_same_signs(layer: nn.Module, moved: str) -> None:
    """Others would leave nothing of it: the gradients are those of float32, to MXFP8's error."""
    layer, state = rotated("per_step", copy.deepcopy(layer))
    x = et.from_numpy(X if isinstance(layer, nn.Linear) else X.reshape(32, 4, 4, 4))
    x.requires_grad_()
    if moved == "use":
        layer(x)
    state.micro_batch = 3 if moved == "micro_batch" else 0
    y = layer(x)
    if moved == "step":
        state.step += 1
    y.square().mean().backward()
    exact = copy.deepcopy(layer)
    nn.apply_recipe(exact, "fp32")
    exact.zero_grad()
    z = et.from_numpy(x.numpy()).requires_grad_()
    exact(z).square().mean().backward()
    for ours, theirs in ((x, z), (layer.weight, exact.weight)):
        difference = ours.grad.numpy() - theirs.grad.numpy()
        assert np.linalg.norm(difference) < 0.1 * np.linalg.norm(theirs.grad.numpy())


def test_an_evaluation_is_no_use() -> None:
    layer, state = made()
    first = gradient(layer)
    second = gradient(layer)
    state.step = 0
    assert gradient(layer) == first
    with et.no_grad():
        layer(et.from_numpy(X))
    assert gradient(layer) == second


def test_a_resumed_run_repeats_the_uninterrupted_one() -> None:
    def go_on(layer: nn.Module, optimizer: optim.Adam, steps: int) -> None:
        for _ in range(steps):
            gradient(layer)
            optimizer.step()

    layer, state = made()
    optimizer = optim.Adam(layer.parameters(), lr=0.01)
    go_on(layer, optimizer, 3)
    saved = layer.state_dict(), optimizer.state_dict(), state.step
    go_on(layer, optimizer, 3)

    resumed, its_state = made(nn.Linear(64, 32, rng=9))
    its_optimizer = optim.Adam(resumed.parameters(), lr=0.01)
    resumed.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    its_state.step = saved[2]
    go_on(resumed, its_optimizer, 3)
    for ours, theirs in zip(layer.parameters(), resumed.parameters(), strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


def test_a_skipped_step_is_over_too() -> None:
    layer, state = made()
    optimizer, scaler = still(layer), optim.MXGradScaler(state)
    scaler.scale(layer(et.from_numpy(X)).sum() * math.inf).backward()
    assert scaler.step(optimizer) is False
    assert state.step == 1


def test_an_update_that_fails_does_not_end_the_step() -> None:
    layer, state = made()
    optimizer = still(layer)
    gradient(layer)
    layer.weight.grad = et.full_like(layer.weight, math.nan)
    with pytest.raises(FloatingPointError):
        optimizer.step()
    assert state.step == 0


@pytest.mark.parametrize("late", [False, True])
def test_a_recipe_may_be_applied_after_the_optimizer_is_made(late: bool) -> None:
    layer: nn.Module = nn.Linear(64, 32, rng=0)
    optimizer = still(layer) if late else None
    layer, state = made(layer)
    optimizer = optimizer or still(layer)
    gradient(layer)
    optimizer.step()
    assert state.step == 1


def test_a_copy_has_steps_of_its_own() -> None:
    layer, state = made()
    gradient(layer)
    other = copy.deepcopy(layer)
    gradient(other)
    still(other).step()
    assert state.step == 0 and other.quant.state.step == 1


def test_several_models_and_a_recipe_over_several_layers() -> None:
    model, state = made(nn.Sequential(nn.Linear(64, 32, rng=0), nn.Linear(32, 32, rng=1)))
    other, its = made()
    gradient(model)
    gradient(other)
    still(model).step()
    assert state.step == 1 and its.step == 0


def test_more_uses_than_streams_have_numbers_for() -> None:
    """A loop without an optimizer of ours never begins another step."""
    context = made()[0].quant
    streams = set()
    for _ in range(3 * 4096):
        stream = context.next_use().stream("dgrad.g", column=False)
        streams.add((stream.key, stream.counter_high))
    assert len(streams) == 3 * 4096


@pytest.mark.parametrize("wrap", [lambda step: step, et.capture])
def test_captured_steps_count_too(wrap: Callable[..., Callable[..., et.ExTensor]]) -> None:
    layer, state = made()
    optimizer = still(layer)

    def step(x: et.ExTensor) -> et.ExTensor:
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    call = wrap(step)
    for number in range(5):
        assert state.step == number
        call(et.from_numpy(X))
