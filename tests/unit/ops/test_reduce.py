"""Reductions: dtypes, equal extremes, zeros."""

from __future__ import annotations

import numpy as np
import pytest

import extensor as et


def test_a_bfloat16_sum_of_a_thousand_ones_is_a_thousand() -> None:
    ones = et.ones(1000, "bfloat16")
    assert ones.sum().item() == 1000.0
    assert ones.sum().dtype is et.bfloat16
    assert et.ones((1000, 3), "float16").mean().item() == 1.0
    assert (et.ones((1, 1000), "bfloat16") @ et.ones((1000, 1), "bfloat16")).item() == 1000.0
    x = et.ones((1000, 1), "bfloat16", requires_grad=True)
    bias = et.zeros(1, "bfloat16", requires_grad=True)
    (x + bias).sum().backward()
    assert bias.grad is not None
    assert bias.grad.item() == 1000.0


def test_sums_of_integers_and_bool_count() -> None:
    assert et.ones(300, "int8").sum().item() == 300
    assert et.ones(300, "bool").sum().dtype is et.int64
    assert et.arange(4).mean().dtype is et.float32
    assert et.arange(3).exp().dtype is et.float32
    assert (et.arange(3) / 2).tolist() == [0, 0.5, 1]
    assert (et.arange(5) // 2).dtype is et.int64


def test_equal_extremes_share_the_gradient() -> None:
    x = et.ExTensor([1.0, 3.0, 3.0], requires_grad=True)
    x.max().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 0.5, 0.5]


def test_products_with_zeros_have_gradients() -> None:
    x = et.ExTensor([2.0, 0.0, 5.0], requires_grad=True)
    x.prod().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 10, 0]


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        ([np.inf, np.inf], 50, np.inf),
        ([-np.inf, -np.inf, 1], 25, -np.inf),
        ([-np.inf, 1], 50, -np.inf),
        ([1, np.inf], 50, np.inf),
        ([1, np.inf, np.inf], 75, np.inf),
        ([1, 3, np.inf], 25, 2),
        ([3e38, 3.2e38], 50, 3.1e38),
    ],
)
def test_percentiles_of_infinities(values: list[float], q: float, expected: float) -> None:
    x = et.ExTensor(values, dtype="float32", requires_grad=True)
    got = et.percentile(x, q)
    assert got.item() == np.float32(expected)
    got.backward()
    assert x.grad is not None
    assert x.grad.numpy().sum() == pytest.approx(1) and np.isfinite(x.grad.numpy()).all()
    with np.errstate(invalid="ignore"):
        assert np.isnan(et.median(et.ExTensor([-np.inf, np.inf])).item())


def test_a_mean_of_nothing_is_nan_without_a_warning() -> None:
    assert np.isnan(et.mean(et.zeros((0,))).item())
    assert np.isnan(et.zeros((0, 3)).mean(0).numpy()).all()
    assert et.zeros((3, 0)).mean(0).shape == (0,)
