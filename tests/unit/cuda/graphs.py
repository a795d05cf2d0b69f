"""Training with captured steps and with eager ones, and what tells whether they left the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import extensor as et
from extensor.models.gpt.configs import GPTConfig
from extensor.models.gpt.model import build as build_gpt
from extensor.models.lenet.configs import LeNetConfig
from extensor.models.lenet.model import build as build_lenet
from extensor.nn.recipe import apply_recipe
from extensor.optim import SGD, AdamW, MXGradScaler, WarmupCosine, clip_grad_norm
from extensor.quant.array import QuantArray
from tests.oracle.compare import same_bytes


def lenet(recipe: str, states: str = "float32") -> tuple[Any, Any, Any]:
    model = build_lenet(LeNetConfig(), np.random.default_rng(1)).to("cuda")
    rng = np.random.default_rng(2)
    batches = [
        (rng.standard_normal((4, 1, 28, 28)).astype(np.float32), rng.integers(0, 10, 4))
        for _ in range(7)
    ]
    return model, SGD(model.named_parameters(), lr=0.05, momentum=0.9, states=states), batches


def gpt(recipe: str, states: str = "float32") -> tuple[Any, Any, Any]:
    config = GPTConfig(vocab=40, context=8, layers=2, width=32, heads=2)
    model = build_gpt(config, np.random.default_rng(1)).to("cuda")
    matrices = [(n, p) for n, p in model.named_parameters() if p.ndim > 1]
    vectors = [(n, p) for n, p in model.named_parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    rng = np.random.default_rng(2)
    tokens = [rng.integers(0, 40, (2, 9)) for _ in range(7)]
    batches = [(np.ascontiguousarray(t[:, :-1]), t[:, 1:].reshape(-1)) for t in tokens]
    return model, AdamW(groups, lr=0.01, states=states), batches


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""`et.capture`, or what leaves a step as it is."""


def train(
    wrap: Wrap, make: Any, recipe: Any, scaled: bool, bad: int = -1, activations: Any = None
) -> dict[str, Any]:
    """Seven steps; what they leave behind."""
    model, step_of, batches = make(recipe)
    state = apply_recipe(model, recipe, 5, activations)
    scaler = MXGradScaler(state, init_scale=4.0, growth_interval=2) if scaled else None
    schedule = WarmupCosine(2, 9)

    def step(inputs: et.ExTensor, labels: et.ExTensor) -> tuple[et.ExTensor, et.ExTensor]:
        step_of.zero_grad()
        scores = model(inputs)
        scores = scores.reshape(-1, scores.shape[-1])
        loss = et.cross_entropy(scores, labels)
        if scaler is None:
            loss.backward()
            clip_grad_norm(step_of.params, 0.5)
            step_of.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(step_of)
            clip_grad_norm(step_of.params, 0.5, nonfinite="return")
            scaler.step(step_of)
            scaler.update()
        return loss, scores

    call, losses = wrap(step), []
    for number, (inputs, labels) in enumerate(batches):
        assert state.step == number  # of a step whose gradients are bad, too
        schedule.apply(step_of, number)
        if number == bad:
            inputs = np.full_like(inputs, np.inf)
        there = [et.from_numpy(a, device="cuda") for a in (inputs, labels)]
        losses.append([t.numpy().copy() for t in call(*there)])
    counts = dict(state.telemetry)
    report = None if scaler is None else scaler.state_dict()
    return {
        "losses": losses,
        "model": model.state_dict(),
        "optimizer": step_of.state_dict(),
        "telemetry": counts,
        "scaler": report,
    }


def same(ours: Any, theirs: Any, where: str = "") -> None:
    assert type(ours) is type(theirs), where
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            same(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, (list, tuple)):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            same(a, b, f"{where}[{i}]")
    elif isinstance(ours, np.ndarray):
        same_bytes(where, ours, theirs)
    elif isinstance(ours, QuantArray):
        same(ours.parts, theirs.parts, where)
    else:
        assert ours == theirs, (where, ours, theirs)


def both(run: Callable[[Wrap], Any]) -> Any:
    """What a run leaves behind with captured steps is what it leaves with eager ones."""
    captured, eager = run(et.capture), run(lambda step: step)
    same(captured, eager)
    return eager
