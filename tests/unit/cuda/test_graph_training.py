"""Captured steps train as eager ones do, bit for bit.

Without a GPU on one made of numpy: `tests.unit.cuda.fake_backend`.
"""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.inspect import plan as plan_module
from extensor.models.gpt.configs import GPTConfig
from extensor.models.gpt.model import build as build_gpt
from extensor.nn.recipe import apply_recipe
from extensor.optim import SGD, AdamW, MXGradScaler, WarmupCosine
from extensor_cuda.runtime import placement
from tests.unit.cuda.graphs import Wrap, both, gpt, lenet, same, train


@pytest.fixture(autouse=True)
def small_arrays_are_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large ones are: `extensor_cuda.runtime.placement`."""
    monkeypatch.setattr(placement, "LEAST", 1)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("recipe", ["fp32", "mxfp4", "mxfp8_rebased"])
@pytest.mark.parametrize("make", [lenet, gpt])
def test_captured_steps_are_the_eager_ones_bit_for_bit(
    gpu: Any, make: Any, recipe: str, scaled: bool
) -> None:
    eager = both(lambda wrap: train(wrap, make, recipe, scaled))
    assert eager["losses"][0][0] != eager["losses"][6][0]


@pytest.mark.parametrize("states", ["bfloat16", "mxfp8_e4m3"])
@pytest.mark.parametrize("make", [lenet, gpt])
def test_captured_steps_with_narrow_optimizer_states(gpu: Any, make: Any, states: str) -> None:
    """Their random bits are of the parameters' steps, which the device counts."""
    narrow, bad = partial(make, states=states), 3 if make is lenet else -1
    eager = both(lambda wrap: train(wrap, narrow, "fp32", True, bad))
    assert eager["scaler"]["skipped"] == (bad == 3)


def recomputed_gpt(recipe: str) -> tuple[Any, Any, list[Any]]:
    """Its blocks keep their input alone."""
    model, step_of, batches = gpt(recipe)
    for block in model.blocks:
        block.recomputed = True
    return model, step_of, batches


def test_captured_steps_run_checkpoints_again(gpu: Any) -> None:
    eager = both(lambda wrap: train(wrap, recomputed_gpt, "mxfp4", False))
    kept = train(lambda step: step, gpt, "mxfp4", False)
    same(eager, kept)


def test_captured_steps_keep_what_a_plan_of_memory_says(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are given, by which one plan keeps all and the other none."""
    x = et.randn((64, 32), seed=3).to("cuda")

    def losses(wrap: Wrap, *seconds: float) -> tuple[list[float], Any]:
        times = dict(zip(plan_module._CHOICES, seconds, strict=True))
        monkeypatch.setattr(plan_module, "_times", lambda groups, *rest: [times] * len(groups))
        parts = [et.nn.Linear(32, 128, rng=0), et.nn.ReLU(), et.nn.Linear(128, 32, rng=1)]
        model = et.nn.Sequential(*(et.nn.Sequential(*copy.deepcopy(parts)) for _ in range(3)))
        apply_recipe(model.to("cuda"), "mxfp4_all", 5)
        by = SGD(model.named_parameters(), lr=0.1)

        def backward(x: et.ExTensor) -> et.ExTensor:
            (loss := model(x).square().mean()).backward()
            return loss

        def step(x: et.ExTensor) -> et.ExTensor:
            by.zero_grad()
            loss = backward(x)
            by.step()
            return loss

        plan = et.inspect.plan_memory(model, lambda: backward(x), 1 << 40, "*", "cuda", rounds=1)
        call = wrap(step)
        return [float(call(x)) for _ in range(5)], plan

    eager, kept = losses(lambda step: step, 0.0, 1.0, 2.0, 3.0)
    captured, again = losses(et.capture, 3.0, 2.0, 1.0, 0.0)
    assert set(kept.choices.values()) == {"kept"}
    assert set(again.choices.values()) == {"recomputed"}
    assert captured == eager and len(set(eager)) == 5


def lean_gpt(wrap: Wrap, weights: str, in_backward: bool) -> dict[str, Any]:
    """Steps of a GPT in narrow weights and 8-bit states; what they leave behind."""
    model, _, batches = gpt("fp32")
    et.nn.cast_weights(model, weights)
    apply_recipe(model, "fp32", 5)
    model.blocks[0].recomputed = True
    by = AdamW(model.named_parameters(), lr=0.01, states="mxfp8_e4m3", masters=False)
    schedule, losses = WarmupCosine(2, 9), []

    def step(inputs: et.ExTensor, labels: et.ExTensor) -> et.ExTensor:
        by.zero_grad()
        scores = model(inputs)
        loss = et.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels)
        with by.step_in_backward() if in_backward else nullcontext():
            loss.backward()
        if not in_backward:
            by.step()
        return loss

    call = wrap(step)
    for number, batch in enumerate(batches[:5]):
        schedule.apply(by, number)
        losses.append(float(call(*(et.from_numpy(a, device="cuda") for a in batch))))
    return {"losses": losses, "model": model.state_dict(), "optimizer": by.state_dict()}


@pytest.mark.parametrize("weights", ["bfloat16", "mxint8"])
def test_captured_updates_inside_backward_have_the_bits_of_eager_ones(
    gpu: Any, weights: str
) -> None:
    eager = both(lambda wrap: lean_gpt(wrap, weights, True))
    same(eager, lean_gpt(et.capture, weights, False))
    assert eager["losses"][0] != eager["losses"][4]


def wide_gpt(recipe: str) -> tuple[Any, Any, list[Any]]:
    """Products large enough for the tensor cores of a GPU."""
    config = GPTConfig(vocab=256, context=64, layers=2, width=128, heads=2)
    model = build_gpt(config, np.random.default_rng(1)).to("cuda")
    rng = np.random.default_rng(2)
    tokens = [rng.integers(0, 256, (2, 65)) for _ in range(4)]
    batches = [(np.ascontiguousarray(t[:, :-1]), t[:, 1:].reshape(-1)) for t in tokens]
    return model, AdamW(model.named_parameters(), lr=0.01), batches


@pytest.mark.parametrize("recipe", ["bf16", "mxfp4"])
@pytest.mark.parametrize("make", [lenet, wide_gpt])
def test_captured_steps_with_activations_in_bfloat16_too(gpu: Any, make: Any, recipe: str) -> None:
    eager = both(lambda wrap: train(wrap, make, recipe, False, activations="bfloat16"))
    assert eager["losses"][0][0] != eager["losses"][-1][0]
    assert eager["losses"][0][1].dtype.name == "bfloat16"


@pytest.mark.parametrize("bad", [0, 1, 2, 4])
def test_steps_without_finite_gradients_are_skipped_as_in_eager_ones(gpu: Any, bad: int) -> None:
    eager = both(lambda wrap: train(wrap, lenet, "fp32", True, bad))
    assert eager["scaler"]["skipped"] == 1


@pytest.mark.parametrize("states", ["float32", "bfloat16"])
def test_other_shapes_and_eager_steps_in_between_count_on(gpu: Any, states: str) -> None:
    def run(wrap: Wrap) -> Any:
        layer = et.nn.Linear(8, 4, rng=0).to("cuda")
        by = AdamW(layer.named_parameters(), lr=0.1, states=states)
        scaler = MXGradScaler(init_scale=4.0, growth_interval=2)

        def step(inputs: et.ExTensor) -> et.ExTensor:
            by.zero_grad()
            loss = layer(inputs).square().mean()
            scaler.scale(loss).backward()
            scaler.step(by)
            scaler.update()
            return loss

        train = wrap(step)
        for number in range(14):
            # a third shape is warmed up after replays of others
            rows = 7 if number in (8, 10, 12) else 3 if number % 3 else 5
            inputs = et.randn((rows, 8), seed=number).to("cuda")
            (step if number == 11 else train)(inputs)
        return layer.state_dict(), by.state_dict(), scaler.state_dict()

    assert both(run)[1]["step.weight"] == 14


@pytest.mark.parametrize("recipe", ["bf16", "mxfp4_all"])
def test_accumulated_gradients_evaluation_and_loading_in_between_are_the_eager_ones(
    gpu: Any, recipe: str
) -> None:
    """Operands of weights that are kept from use to use are those of the weights that are there."""

    def run(wrap: Wrap) -> Any:
        model, by, batches = gpt(recipe)
        state, first = apply_recipe(model, recipe, 5), model.state_dict()

        def step(inputs: et.ExTensor, labels: et.ExTensor) -> Any:
            by.zero_grad()
            for row in range(2):
                scores = model(inputs[row : row + 1]).reshape(-1, 40)
                et.cross_entropy(scores, labels[8 * row : 8 * row + 8]).backward()
            by.step()
            return scores

        train, seen = wrap(step), []
        for number, arrays in enumerate(batches):
            state.step = number
            inputs, labels = (et.from_numpy(a, device="cuda") for a in arrays)
            seen.append(train(inputs, labels).numpy().copy())
            with et.no_grad():
                seen.append(model(inputs[:1]).numpy().copy())
            if number == 4:
                model.load_state_dict(first)
        return seen, model.state_dict(), by.state_dict(), dict(state.telemetry)

    both(run)


def test_running_averages_advance(gpu: Any) -> None:
    def run(wrap: Wrap) -> Any:
        layer = et.nn.BatchNorm2d(3).to("cuda")
        by = SGD(layer.named_parameters(), lr=0.1)

        def step(inputs: et.ExTensor) -> None:
            by.zero_grad()
            layer(inputs).square().sum().backward()
            by.step()

        train = wrap(step)
        for number in range(6):
            train(et.randn((4, 3, 5, 5), seed=number).to("cuda"))
        return layer.state_dict()

    both(run)


def test_dropout_draws_anew_in_each_repetition(gpu: Any) -> None:
    def run(wrap: Wrap) -> Any:
        layer = et.nn.Dropout(0.4, rng=0).to("cuda")
        step = wrap(layer)
        drawn = [step(et.ones((3, 50)).to("cuda")).numpy().copy() for _ in range(6)]
        assert all((a != b).any() for a, b in itertools.combinations(drawn, 2))
        return drawn, layer.state_dict()

    there = et.nn.Dropout(0.4, rng=0)
    for drawn in both(run)[0]:
        np.testing.assert_array_equal(there(et.ones((3, 50), device="cpu")).numpy(), drawn)


@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize(
    "recipe",
    [
        "mxfp4_all",
        "mxfp8_nvidia",
        "mxfp8_rebased",
        "bf16",
        "mxfp6",
        "mxfp4_tseng",
        "fp8_block",
        "fp8_tensor",
        "int8",
    ],
)
def test_tensor_core_products_are_captured(recipe: str) -> None:
    """Layers large enough for every way of making operands."""

    def run(wrap: Wrap) -> Any:
        layer = et.nn.Linear(1024, 1024, rng=0).to("cuda")
        state = apply_recipe(layer, recipe, 3)
        by = AdamW(layer.named_parameters(), lr=0.01)

        def step(inputs: et.ExTensor) -> et.ExTensor:
            by.zero_grad()
            loss = layer(inputs).square().mean()
            loss.backward()
            by.step()
            return loss

        train, losses = wrap(step), []
        for number in range(6):
            state.step = number
            inputs = et.randn((1024, 1024), seed=number).to("cuda")
            losses.append(train(inputs).numpy().copy())
        return losses, layer.state_dict(), by.state_dict(), dict(state.telemetry)

    both(run)
