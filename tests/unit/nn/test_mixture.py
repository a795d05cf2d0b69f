"""Experts that run together, on backends where a product of groups is quicker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.backends.cpu import CpuBackend
from extensor.models.llama.configs import ExpertsConfig
from extensor.models.llama.model import Expert, mixture
from extensor.nn.lora import add_adapters


@pytest.fixture
def grouping(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The CPU as such a backend; notes how many groups each product has, 0 of experts at once."""
    seen: list[int] = []
    together, at_once = CpuBackend.grouped_weight_only_matmul, CpuBackend.gated_experts

    def noted(self: Any, x: Any, weights: Any, ends: Any) -> Any:
        seen.append(len(weights))
        return together(self, x, weights, ends)

    def noted_at_once(self: Any, *given: Any) -> Any:
        seen.append(0)
        return at_once(self, *given)

    monkeypatch.setattr(CpuBackend, "gated_experts", noted_at_once)
    monkeypatch.setattr(CpuBackend, "groups_products", True)
    monkeypatch.setattr(CpuBackend, "grouped_weight_only_matmul", noted)
    return seen


def made(scheme: str, bias: bool = True) -> Any:
    config = ExpertsConfig(6, 2, 64, bias=bias, alpha=1.702, limit=7.0)
    rng = np.random.default_rng(0)
    experts = mixture(32, config, rng)
    for parameter in experts.parameters():
        parameter.data[...] = rng.standard_normal(parameter.shape).astype(np.float32)
    return et.quantize_model(experts, scheme)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True])
def test_together_they_have_the_bits_of_each_alone(
    grouping: list[int], monkeypatch: pytest.MonkeyPatch, bias: bool, dtype: str
) -> None:
    experts, x = made("mxfp4_weights", bias), et.randn(3, 40, 32, seed=1).to(dtype)
    x[:, :, 0] = 3.0  # most tokens to few experts: some are left out
    with et.no_grad():
        got = experts(x)
        at_once = dtype == "bfloat16" and not bias  # biases are float32
        assert grouping == [0] if at_once else len(grouping) == 3 and len(set(grouping)) == 1
        for way in ("run_groups", "run_choices"):
            monkeypatch.setattr(Expert, way, lambda *_: None)
        expected = experts(x)
    assert got.dtype == expected.dtype
    assert np.array_equal(got.to("float32").numpy(), expected.to("float32").numpy())


def test_weights_as_a_file_has_them_give_float32(grouping: list[int]) -> None:
    experts = made("mxfp4_weights")
    for _, layer in et.nn.gemm_layers(experts):
        layer.quant = None
    with et.no_grad():
        assert experts(et.randn(100, 32, seed=1)).dtype == et.float32
    assert len(grouping) == 3


@pytest.mark.parametrize("case", ["few rows", "activations", "dense", "hook", "lora"])
def test_some_experts_run_one_after_the_other(grouping: list[int], case: str) -> None:
    experts = made("mxfp4_a8" if case == "activations" else "mxfp4_weights")
    layer = experts.experts[3].up_proj
    if case == "dense":
        experts.experts[3].up_proj = et.nn.Linear(32, 64, rng=0)
    if case == "hook":
        layer.register_forward_hook(lambda module, output: None)
    if case == "lora":
        add_adapters(experts, rank=2)
    x = et.randn(20 if case == "few rows" else 100, 32, seed=1)
    with et.no_grad():
        experts(x)
    assert not grouping


def test_gradients_flow_through_experts_that_run_together(
    grouping: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the input, the router and the biases: what is tuned around packed experts."""
    experts, x = made("mxfp4_weights"), et.randn(100, 32, seed=1, requires_grad=True)
    sign = et.randn(100, 32, seed=2)

    def gradients() -> list[Any]:
        experts.zero_grad()
        x.grad = None
        (experts(x) * sign).sum().backward()
        return [one.grad.numpy() for one in (x, *experts.parameters())]

    together = gradients()
    assert len(grouping) == 3 and len(together) == 3 + 3 * 6
    monkeypatch.setattr(Expert, "run_groups", lambda *_: None)
    for got, expected in zip(together, gradients(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * abs(expected).max())
    assert len(grouping) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("before", [False, True])
def test_an_experts_hook_runs(grouping: list[int], dtype: str, before: bool) -> None:
    experts, rows = made("mxfp4_weights", bias=False), []
    hooked = experts.experts[3]
    if before:
        hooked.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    else:
        hooked.register_forward_hook(lambda module, output: rows.append(len(output)))
    with et.no_grad():
        experts(et.randn(100, 32, seed=1).to(dtype))
    assert len(rows) == 1 and rows[0] > 0 and not grouping
