"""Reductions: dtypes, equal extremes, zeros."""

from __future__ import annotations

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
