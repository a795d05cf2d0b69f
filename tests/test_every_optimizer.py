"""Every optimizer against torch for twenty steps, by enumeration.

Torch has no Lion and no LARS: both are written here on torch tensors, from their papers. An
optimizer that `extensor.optim` offers and no case here runs fails without torch, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import optim

SHAPES = ((3, 4), (5,), (), (2, 0))
MATRICES = ((3, 4), (6, 2), (4, 4))


def lion(torch: Any, params: list[Any], lr: float, betas: Any, weight_decay: float) -> Any:
    """Chen et al., arXiv 2302.06675, program 1, line for line; a closure over its state."""
    momenta = [torch.zeros_like(p) for p in params]

    def step() -> None:
        for p, m in zip(params, momenta, strict=True):
            if p.grad is not None:
                update = torch.sign(p.grad * (1 - betas[0]) + m * betas[0])
                m.copy_(p.grad * (1 - betas[1]) + m * betas[1])
                p.sub_((update + p * weight_decay) * lr)

    return step


def lars(
    torch: Any, params: list[Any], lr: float, momentum: float, weight_decay: float, trust: float
) -> Any:
    """You et al., arXiv 1708.03888, algorithm 1: the rate of each tensor, then momentum."""
    velocities: dict[int, Any] = {}

    def step() -> None:
        for i, p in enumerate(params):
            if p.grad is None:
                continue
            size, slope = p.norm().item(), p.grad.norm().item()
            local = trust * size / (slope + weight_decay * size) if size * slope else 1.0
            move = local * (p.grad + weight_decay * p)
            # the rate outside the momentum, as torch's SGD has it, and ours
            velocities[i] = momentum * velocities[i] + move if i in velocities else move
            p.sub_(lr * velocities[i])

    return step


def of_torch(torch: Any, name: str, params: list[Any], **options: Any) -> Any:
    fast = {} if name == "Muon" else {"foreach": False}
    return getattr(torch.optim, name)(params, **options, **fast).step


WRITTEN_HERE: dict[str, Callable[..., Any]] = {"Lion": lion, "LARS": lars}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd decay": ("SGD", {"lr": 0.1, "weight_decay": 0.05}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "momentum decay": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}),
    "nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": ("Adam", {"lr": 0.01}),
    "adam options": (
        "Adam", {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1},
    ),
    "adamw": ("AdamW", {"lr": 0.01}),
    "adamw options": ("AdamW", {"lr": 0.02, "betas": (0.5, 0.9), "weight_decay": 0.3}),
    "adagrad": ("Adagrad", {"lr": 0.1, "weight_decay": 0.1}),
    "rmsprop": ("RMSprop", {"lr": 0.01, "weight_decay": 0.1}),
    "rmsprop momentum": ("RMSprop", {"lr": 0.01, "momentum": 0.9}),
    "lion": ("Lion", {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}),
    "lars": ("LARS", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05, "trust": 0.02}),
    "muon": ("Muon", {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}),
}  # fmt: skip


def test_every_optimizer_has_a_peer() -> None:
    offered = {
        name
        for name in optim.__all__
        if inspect.isclass(thing := getattr(optim, name))
        and issubclass(thing, optim.Optimizer)
        and not inspect.isabstract(thing)
    }
    assert len(offered) >= 8
    missing = offered - {name for name, _ in CASES.values()}
    assert not missing, f"optimizers that nothing compares with torch: {sorted(missing)}"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_twenty_steps_as_torch(case: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is the oracle: pip install -e .[peers]")
    name, options = CASES[case]
    # torch rounds the matrices of Muon's iteration to bfloat16; here they stay as they are
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    rng = np.random.default_rng(0)
    shapes = MATRICES if name == "Muon" else SHAPES
    start = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    mine = [et.ExTensor(a.copy(), requires_grad=True) for a in start]
    theirs = [torch.tensor(a) for a in start]
    optimizer = getattr(optim, name)(mine, **options)
    if name in WRITTEN_HERE:
        step_theirs = WRITTEN_HERE[name](torch, theirs, **options)
    else:
        for q in theirs:
            q.requires_grad_()
        step_theirs = of_torch(torch, name, theirs, **options)
    for step in range(20):
        for p, q in zip(mine, theirs, strict=True):
            g = (rng.standard_normal(p.shape) * 10.0 ** rng.integers(-4, 3)).astype(dtype)
            if step == 7 and p.shape in ((5,), (6, 2)):  # a step without a gradient is no step
                p.grad = q.grad = None
                continue
            p.grad, q.grad = et.ExTensor(g), torch.tensor(g)
        optimizer.step()
        step_theirs()
        for p, q in zip(mine, theirs, strict=True):
            expected = q.detach().numpy()
            if name == "Muon":  # torch clamps the norm at 1e-7, ours adds it; then five steps
                np.testing.assert_allclose(p.numpy(), expected, rtol=1e-4, atol=1e-4)
                continue
            tolerance = 20 * np.finfo(dtype).eps
            np.testing.assert_allclose(p.numpy(), expected, rtol=tolerance, atol=tolerance)
