"""Captured steps, and weights and gradients that others write: what is there is what counts."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import nn
from extensor.optim import SGD, AdamW, Lion
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


def host(part: Any) -> np.ndarray:
    return np.asarray(part.get())


def train_blocks(wrap: Wrap, format: str, make: Any, in_backward: bool) -> dict[str, Any]:
    """Steps of weights in blocks alone; what they leave behind."""
    model, _ = build()
    nn.cast_weights(model, format)
    by = make(model.named_parameters())

    def step(x: et.ExTensor) -> et.ExTensor:
        by.zero_grad()
        loss = model(x).square().mean()
        with by.step_in_backward() if in_backward else nullcontext():
            loss.backward()
        if not in_backward:
            by.step()
        return loss

    call, codes = wrap(step), model[0].weight.data.codes
    losses = [float(call(batch(number))) for number in range(4)]
    model.load_state_dict(model.state_dict())  # which a captured step finds where it reads
    losses += [float(call(batch(number))) for number in (4, 5)]
    assert model[0].weight.data.codes is codes  # the memory that a captured forward pass reads
    return {"losses": losses, "model": model.state_dict(), "optimizer": by.state_dict()}


OPTIMIZERS = {
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9, masters=False),
    "adamw": lambda params: AdamW(params, lr=0.01, states="mxfp8_e4m3", masters=False),
    "lion": lambda params: Lion(params, lr=0.01, states="bfloat16", masters=False),
}


@pytest.mark.parametrize("in_backward", [False, True], ids=["after", "in backward"])
@pytest.mark.parametrize("format", ["mxint8", "mxfp8_e4m3"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_captured_updates_of_weights_in_blocks_have_the_bits_of_eager_ones(
    gpu: Any, name: str, format: str, in_backward: bool
) -> None:
    eager = both(lambda wrap: train_blocks(wrap, format, OPTIMIZERS[name], in_backward))
    assert len(set(eager["losses"])) == 6
    assert eager["model"]["0.weight"].spec.format == format


def test_a_bad_gradient_leaves_weights_in_blocks_as_they_are(gpu: Any) -> None:
    def parts(wrap: Wrap, bad: int, count: int) -> list[bytes]:
        model, _ = build()
        nn.cast_weights(model, "mxint8")
        by = OPTIMIZERS["adamw"](model.named_parameters())

        def step(x: et.ExTensor) -> et.ExTensor:
            by.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            by.step()
            return loss

        call = wrap(step)
        with suppress(FloatingPointError):
            for number in range(count):
                float(call(batch(number) * (math.inf if number == bad else 1.0)))
        data = model[0].weight.data
        return [part.tobytes() for part in map(host, data.parts.values())]

    stopped, before = parts(et.capture, 4, 7), parts(lambda step: step, -1, 4)
    assert stopped == before != parts(lambda step: step, -1, 5)


def test_rows_that_are_no_whole_blocks_are_not_captured(gpu: Any) -> None:
    model = nn.Sequential(nn.Linear(40, 8, rng=0))
    nn.cast_weights(model, "mxint8")
    by = SGD(model.to("cuda").named_parameters(), lr=0.1, masters=False)

    def step(x: et.ExTensor) -> None:
        by.zero_grad()
        model(x).square().mean().backward()
        by.step()

    call, codes = et.capture(step), model[0].weight.data.codes
    before = codes.tobytes()
    step(batch(0)[:, :40])
    assert codes.tobytes() != before
    with pytest.raises(ValueError, match=r"0.weight: .* in rows of whole blocks, .*\(8, 40\)"):
        [call(batch(number)[:, :40]) for number in range(3)]


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
