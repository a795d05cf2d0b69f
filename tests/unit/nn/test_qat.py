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


def inputs(count: int, rng: np.random.Generator) -> et.ExTensor:
    """Real inputs fill little of their space: here, 8 of 64 directions."""
    plane = np.random.default_rng(1).standard_normal((8, 64)) / np.sqrt(8)
    return et.ExTensor((rng.standard_normal((count, 8)) @ plane).astype(np.float32))


def train(net: nn.Module, teacher: nn.Module, steps: int, lr: float) -> nn.Module:
    """Learn a teacher's classes from its scores."""
    optimizer = et.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.0)
    rng = np.random.default_rng(3)
    for _ in range(steps):
        x = inputs(64, rng)
        with et.no_grad():
            expected = teacher(x)
        net.zero_grad()
        et.distillation(net(x), expected, temperature=2.0).backward()
        optimizer.step()
    return net


def far(net: nn.Module, teacher: nn.Module) -> float:
    x = inputs(512, np.random.default_rng(9))
    with et.no_grad():
        return et.distillation(net(x), teacher(x)).item()


@pytest.mark.parametrize("scheme", ["mxfp4_weights", "nvfp4_weights", "mxfp4_a8", "int4_g32"])
def test_training_computes_what_the_packed_model_will(scheme: str) -> None:
    student = model()
    nn.apply_recipe(student, et.SCHEMES[scheme].recipe())
    x = et.randn(8, 64, seed=4)
    with et.no_grad():
        expected = et.quantize_model(student, scheme)(x).numpy()
        np.testing.assert_allclose(student(x).numpy(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("scheme", ["mxfp4_weights", "mxfp4"])
def test_quantization_aware_training_beats_rounding_afterwards(scheme: str) -> None:
    teacher = model()
    rounded = far(et.quantize_model(teacher, scheme), teacher)
    student = copy.deepcopy(teacher)
    nn.apply_recipe(student, et.SCHEMES[scheme].recipe())
    train(student, teacher, steps=150, lr=1e-3)
    assert far(et.quantize_model(student, scheme), teacher) < 0.7 * rounded
