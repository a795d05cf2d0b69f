"""Training with the rounding that storage will do: recipes made of schemes, and distillation."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import extensor as et
from extensor import nn


def model() -> nn.Module:
    """Three layers whose scores are large enough that rounding them shows."""
    rng = np.random.default_rng(0)
    layers = [nn.Linear(64, n, rng=rng) for n in (64, 64, 16)]
    for layer in layers:
        layer.weight = nn.Parameter(3.0 * layer.weight.numpy())
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def train(net: nn.Module, teacher: nn.Module, steps: int, lr: float) -> nn.Module:
    """Learn a teacher's classes from its scores."""
    optimizer = et.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.0)
    rng = np.random.default_rng(3)
    for _ in range(steps):
        x = et.ExTensor(rng.standard_normal((64, 64)).astype(np.float32))
        with et.no_grad():
            expected = teacher(x)
        net.zero_grad()
        et.distillation(net(x), expected, temperature=2.0).backward()
        optimizer.step()
    return net


def far(net: nn.Module, teacher: nn.Module) -> float:
    x = et.randn(256, 64, seed=9)
    with et.no_grad():
        return et.distillation(net(x), teacher(x)).item()


@pytest.mark.parametrize("scheme", ["mxfp4_weights", "nvfp4_weights", "mxfp4_a8", "mxfp4"])
def test_quantization_aware_training_beats_rounding_afterwards(scheme: str) -> None:
    teacher = model()
    rounded = far(et.quantize_model(teacher, scheme), teacher)
    student = copy.deepcopy(teacher)
    nn.apply_recipe(student, et.SCHEMES[scheme].recipe())
    # Training computes what the packed model will compute.
    x = et.randn(8, 64, seed=4)
    with et.no_grad():
        packed = et.quantize_model(student, scheme)
        np.testing.assert_allclose(student(x).numpy(), packed(x).numpy(), rtol=1e-5, atol=1e-4)
    train(student, teacher, steps=120, lr=2e-3)
    tuned = far(et.quantize_model(student, scheme), teacher)
    assert tuned < 0.6 * rounded
