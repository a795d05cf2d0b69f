"""Adapters on frozen weights: values and gradients in closed form, packed bases, merging."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor import nn

SCHEMES = ["mxfp4_weights", "nvfp4_weights", "int4_g32", "int4_g32_asym", "int8_weights"]


def layer(kind: type[nn.LoRA], scheme: str | None, bias: bool = True) -> nn.LoRA:
    """An adapter whose ``up`` is no longer zero, on a float or packed base."""
    base: Any = nn.Sequential(nn.Linear(64, 24, bias, rng=0))
    if scheme is not None:
        base = et.quantize_model(base, scheme)
    made = kind(base[0], rank=3, alpha=1.5, rng=1)
    rng = np.random.default_rng(2)
    made.up = nn.Parameter((0.3 * rng.standard_normal((24, 3))).astype(np.float32))
    if kind is nn.DoRA:
        made.magnitude = nn.Parameter(rng.uniform(0.5, 2.0, 24).astype(np.float32))
    return made


def weights_of(made: nn.LoRA) -> tuple[np.ndarray, np.ndarray]:
    """The weight that the layer stands for, in float64, and what its rows are scaled by."""
    w = made.base.weight.dequantize() if made.base.weight.is_blocked else made.base.weight
    w = w.numpy().astype(np.float64) + 0.5 * made.up.numpy() @ made.down.numpy().astype(np.float64)
    if not isinstance(made, nn.DoRA):
        return w, np.ones(24)
    rows = made.magnitude.numpy() / np.linalg.norm(w, axis=1)
    return w * rows[:, None], rows


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
@pytest.mark.parametrize("kind", [nn.LoRA, nn.DoRA])
def test_values_and_gradients_are_those_of_the_formula(
    kind: type[nn.LoRA], scheme: str | None
) -> None:
    made = layer(kind, scheme)
    x = et.randn(5, 64, seed=3, requires_grad=True)
    w, rows = weights_of(made)
    y = made(x)
    np.testing.assert_allclose(y.numpy(), x.numpy() @ w.T + made.base.bias.numpy(), atol=2e-5)
    np.testing.assert_allclose(made.merged().numpy(), w, atol=2e-6)
    g = np.random.default_rng(4).standard_normal((5, 24)).astype(np.float32)
    (y * et.ExTensor(g)).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), g @ w, atol=2e-5)
    dw = g.T.astype(np.float64) @ x.numpy()  # of the whole weight
    if isinstance(made, nn.DoRA):  # the norm counts as a constant
        grad = (dw * w).sum(1) / made.magnitude.numpy()
        np.testing.assert_allclose(made.magnitude.grad.numpy(), grad, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        made.up.grad.numpy(), 0.5 * rows[:, None] * dw @ made.down.numpy().T, rtol=1e-3, atol=1e-4
    )
    np.testing.assert_allclose(
        made.down.grad.numpy(), 0.5 * made.up.numpy().T @ (rows[:, None] * dw), rtol=1e-3, atol=1e-4
    )
    assert made.base.bias.grad is None


def stack() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(64, 64, rng=0), nn.ReLU(), nn.Linear(64, 64, rng=1), head=nn.Linear(64, 8, rng=2)
    )
    model.head.role = "head"
    return model


def tune(model: nn.Module, steps: int = 40) -> list[float]:
    x, target = et.randn(32, 64, seed=5), et.randn(32, 8, seed=6)
    optimizer = et.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(steps):
        model.zero_grad()
        loss = et.mse(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", [nn.LoRA, nn.DoRA])
@pytest.mark.parametrize("scheme", ["mxfp4_weights", "nvfp4_weights", "int4_g32"])
def test_tuning_moves_only_the_adapters_and_merging_keeps_the_storage(
    kind: type[nn.LoRA], scheme: str
) -> None:
    model = et.quantize_model(stack(), scheme)
    before = {name: copy.deepcopy(value) for name, value in model.state_dict().items()}
    assert nn.add_adapters(model, rank=4, kind=kind, rng=7) == ["0", "2"]
    losses = tune(model)
    assert losses[-1] < 0.7 * losses[0]
    tuned = {name.replace(".base", ""): value for name, value in model.state_dict().items()}
    for name, value in before.items():
        for part in ("codes", "scales"):
            if hasattr(value, part):
                assert np.array_equal(getattr(tuned[name], part), getattr(value, part)), name
    x = et.randn(16, 64, seed=8)
    with et.no_grad():
        expected = model(x)
        merged = nn.merge_adapters(model)
        got = model(x)
    assert [row.path for row in merged] == ["0", "2"]
    assert {row.format for row in merged} == {before["0.weight"].spec.format}
    assert all(10.0 < row.sqnr_db < math.inf for row in merged)
    assert isinstance(model[0], nn.Linear) and model[0].weight.spec == before["0.weight"].spec
    assert model[0].weight.nbytes == before["0.weight"].nbytes
    assert list(model.state_dict()) == list(before)
    noise = ((got - expected) ** 2).mean() / (expected**2).mean()
    assert noise.item() < 0.1


def test_a_float_base_merges_exactly() -> None:
    model = stack()
    nn.add_adapters(model, rank=4, match=["0", "head"])
    tune(model, 5)
    x = et.randn(16, 64, seed=8)
    with et.no_grad():
        expected = model(x).numpy()
        (one, two) = nn.merge_adapters(model)
        np.testing.assert_allclose(model(x).numpy(), expected, atol=1e-5)
    assert one.sqnr_db == math.inf and (one.format, two.path) == ("float32", "head")
    assert isinstance(model.head.weight, nn.Parameter)


def test_stochastic_merging_keeps_small_changes_in_the_mean() -> None:
    """A change too small for any code to move to nearest, times 256 roundings."""
    base = et.quantize_model(nn.Sequential(nn.Linear(64, 64, rng=0)), "mxfp4_weights")

    def merged(rounding: str, seed: int = 0) -> np.ndarray:
        model = copy.deepcopy(base)
        nn.add_adapters(model, rank=1, alpha=1.0, rng=1)
        model[0].up = nn.Parameter(np.full((64, 1), 1e-2, np.float32))
        nn.merge_adapters(model, rounding, seed)
        return model[0].weight.dequantize().numpy()

    old = base[0].weight.dequantize().numpy()
    assert np.array_equal(merged("nearest_even"), old)
    model = copy.deepcopy(base)
    nn.add_adapters(model, rank=1, alpha=1.0, rng=1)
    change = 1e-2 * np.tile(model[0].down.numpy(), (64, 1))
    mean = np.mean([merged("stochastic", 1000 * seed) for seed in range(100)], axis=0) - old
    # What rounds at the top of a block's range saturates; elsewhere the mean is the change.
    slope = (mean * change).sum() / (change * change).sum()
    assert 0.7 < slope < 1.1
    assert np.array_equal(merged("stochastic", 3), merged("stochastic", 3))
    assert not np.array_equal(merged("stochastic", 3), merged("stochastic", 4))


def test_the_report_says_what_rounding_lost() -> None:
    model = et.quantize_model(nn.Sequential(nn.Linear(64, 64, rng=0)), "mxfp4_weights")
    nn.add_adapters(model, rank=1, rng=1)
    (row,) = nn.merge_adapters(copy.deepcopy(model))
    assert math.isnan(row.change_db) and row.sqnr_db == math.inf
    model[0].up = nn.Parameter(np.full((64, 1), 1e-4, np.float32))
    (row,) = nn.merge_adapters(model)
    assert row.change_db == pytest.approx(0.0, abs=0.01)  # all of the change is lost


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: nn.add_adapters(m, match=["x*"]), ValueError, "'x*' matches no linear layer"),
        (lambda m: nn.add_adapters(m, match="*"), TypeError, "a list of globs"),
        (lambda m: nn.add_adapters(nn.Linear(4, 4)), ValueError, "matches no linear layer"),
        (lambda m: nn.LoRA(nn.ReLU()), TypeError, "LoRA: expected a Linear, got ReLU"),
        (lambda m: nn.DoRA(nn.Linear(4, 4), rank=0), ValueError, "rank"),
        (lambda m: nn.merge_adapters(m), ValueError, "got none"),
        (lambda m: nn.merge_adapters(m, "down"), ValueError, "rounding: expected"),
    ],
)
def test_what_cannot_be(call: Any, error: type[Exception], message: str) -> None:
    import re

    model = stack()
    with pytest.raises(error, match=re.escape(message)):
        call(model)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("kind", [nn.LoRA, nn.DoRA])
def test_the_default_rank_is_eight(kind: Any) -> None:
    assert kind(nn.Linear(32, 16, rng=0)).rank == 8
