"""Captured steps, and weights and gradients that others write: what is there is what counts."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import nn
from extensor.optim import SGD
from tests.unit.cuda.graphs import Wrap, both, same


def by_optimizer(model: Any) -> Callable[[], None]:
    return SGD(model.named_parameters(), lr=0.1).step


def by_hand(write: Callable[[Any, Any], Any]) -> Callable[[Any], Callable[[], None]]:
    def update(model: Any) -> Callable[[], None]:
        def step() -> None:
            with et.no_grad():
                for param in model.parameters():
                    write(param, param - 0.1 * param.grad)

        return step

    return update


UPDATES = {
    "optimizer": by_optimizer,
    "index": by_hand(lambda param, new: param.__setitem__(..., new)),
    "assign_": by_hand(lambda param, new: param.assign_(new.data)),
    "view": by_hand(lambda param, new: param.detach().reshape(-1).copy_(new.reshape(-1))),
}


def build(recipe: str = "mxfp4_all") -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(64, 96, rng=0), nn.ReLU(), nn.Linear(96, 32, rng=1)).to("cuda")
    return model, nn.apply_recipe(model, recipe, seed=3)


def batch(number: int) -> et.ExTensor:
    return et.randn((8, 64), seed=number).to("cuda")


def test_an_update_of_weights_in_blocks_is_not_captured(gpu: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 32, rng=0))
    nn.cast_weights(model, "mxint8")
    model = model.to("cuda")
    by = SGD(model.named_parameters(), lr=0.1, masters=False)

    def step(x: et.ExTensor) -> et.ExTensor:
        by.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        by.step()
        return loss

    codes = model[0].weight.data.codes
    before = codes.tobytes()
    step(batch(0))
    assert model[0].weight.data.codes is codes  # the memory that a captured forward pass reads
    assert codes.tobytes() != before
    call = et.capture(step)
    with pytest.raises(ValueError, match=r"0.weight: a captured step updates .* none in blocks"):
        [call(batch(number)) for number in range(3)]


@pytest.mark.parametrize("name", UPDATES)
def test_weights_written_in_a_captured_step_are_quantized_anew(gpu: Any, name: str) -> None:
    """Two updates and an evaluation in each step, an evaluation after it."""

    def run(wrap: Wrap) -> Any:
        model, state = build()
        update = UPDATES[name](model)

        def step(x: et.ExTensor) -> et.ExTensor:
            for _ in range(2):
                model.zero_grad()
                model(x).square().mean().backward()
                update()
            with et.no_grad():
                return model(x)

        train, seen = wrap(step), []
        for number in range(6):
            state.step = number
            seen.append(train(batch(number)).numpy().copy())
            with et.no_grad():
                seen.append(model(batch(9)).numpy().copy())
        return seen

    eager = both(run)
    assert not np.array_equal(eager[-1], eager[-3])


def test_what_a_failed_capture_made_is_not_used(gpu: Any) -> None:
    """Its operands were never computed, though they would be of the weights that are there."""
    model, _ = build("bf16")

    def step(x: et.ExTensor) -> et.ExTensor:
        out: et.ExTensor = model(x).mean()
        return out * float(out)

    with et.no_grad():
        expected = model(batch(0)).numpy().copy()
        train = et.capture(step)
        with pytest.raises(RuntimeError, match="cannot be captured"):
            for _ in range(3):
                train(batch(0))
        gc.collect()  # the capture, but not what it made
        np.testing.assert_array_equal(model(batch(0)).numpy(), expected)


def test_gradients_from_before_a_step_are_not_added_to(gpu: Any) -> None:
    """Each replay would add to what was there in the capture."""
    model, _ = build("fp32")

    def backward(x: et.ExTensor) -> None:
        model(x).square().mean().backward()

    train = et.capture(backward)
    train(batch(0))
    before = [param.grad for param in model.parameters()]
    with pytest.raises(RuntimeError, match="reset them in the step, by optimizer.zero_grad"):
        train(batch(1))
    assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))
    model.zero_grad()
    train(batch(0))

    def sums(x: et.ExTensor) -> None:
        model.zero_grad()
        for row in range(2):  # gradients of the step itself are
            backward(x[4 * row : 4 * row + 4])

    train = et.capture(sums)
    for _ in range(4):
        train(batch(1))
    found = [p.grad.numpy().copy() for p in model.parameters()]
    sums(batch(1))
    same(found, [p.grad.numpy() for p in model.parameters()])


def test_other_threads_copy_from_the_host_meanwhile(gpu: Any) -> None:
    model, _ = build("fp32")
    copied: list[bool] = []

    def copy() -> None:
        et.from_numpy(np.ones((3, 3), np.float32), device="cuda")
        copied.append(True)

    def step(x: et.ExTensor) -> et.ExTensor:
        thread = threading.Thread(target=copy)
        thread.start()
        thread.join()
        return model(x).detach()

    train = et.capture(step)
    for _ in range(4):
        train(batch(0))
    assert len(copied) == 3
