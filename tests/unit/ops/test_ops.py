"""What operations mean where samples do not reach: special values, dtypes, conventions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import extensor as et

INF, NAN = np.inf, np.nan


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


def test_ieee_values_come_without_warnings() -> None:
    x = et.ExTensor([0.0, -1.0, INF, NAN])
    np.testing.assert_array_equal((1.0 / x).numpy(), np.float32([INF, -1, 0, NAN]))
    np.testing.assert_array_equal(x.log().numpy(), np.float32([-INF, NAN, INF, NAN]))
    np.testing.assert_array_equal(x.sqrt().numpy(), np.float32([0, NAN, INF, NAN]))
    np.testing.assert_array_equal(x.relu().numpy(), np.float32([0, 0, INF, NAN]))
    np.testing.assert_array_equal(x.clip(0, 1).numpy(), np.float32([0, 0, 1, NAN]))
    assert math.isnan(x.max().item())
    assert math.isnan(x.min().item())
    assert x.argmax().item() == 3
    assert math.isnan(x.median().item())
    assert et.maximum(x, 5.0).tolist()[:3] == [5, 5, INF]
    assert et.ExTensor([1000.0]).exp().item() == INF


def test_relu_gradient_selects_even_infinities() -> None:
    for dtype in ("float32", "float64", "bfloat16"):
        x = et.ExTensor([-1.0, 0.0, 2.0, 3.0], dtype, requires_grad=True)
        x.relu().backward(et.ExTensor([INF, NAN, INF, 5.0], dtype))
        assert x.grad is not None
        assert x.grad.tolist() == [0, 0, INF, 5]


def test_softmax_family_does_not_overflow() -> None:
    x = et.ExTensor([[1e4, 0.0, -1e4], [0.0, -INF, 0.0]])
    np.testing.assert_allclose(x.softmax().numpy(), [[1, 0, 0], [0.5, 0, 0.5]])
    np.testing.assert_allclose(x.logsumexp(1).numpy(), [1e4, math.log(2)], rtol=1e-6)
    assert et.softplus(et.ExTensor([1e4])).item() == 1e4
    assert et.sigmoid(et.ExTensor([-1e4, 1e4])).tolist() == [0, 1]
    loss = et.cross_entropy(x, et.ExTensor([1, 0]), reduction="none")
    np.testing.assert_allclose(loss.numpy(), [1e4, math.log(2)], rtol=1e-6)


def test_erf_is_exact_to_the_last_place_or_two() -> None:
    x = np.concatenate([np.linspace(-7, 7, 4001), [0.0, -0.0, 1e-300, INF, -INF, 0.5, -0.5]])
    expected = np.array([math.erf(v) for v in x])
    np.testing.assert_allclose(et.erf(et.ExTensor(x)).numpy(), expected, rtol=4e-15, atol=0)
    single = et.erf(et.ExTensor(x, "float32"))
    assert single.dtype is et.float32
    wide = np.array([math.erf(v) for v in x.astype(np.float32)])
    np.testing.assert_allclose(single.numpy(), wide, rtol=4e-7)
    assert math.isnan(et.erf(et.ExTensor([NAN])).item())
    assert np.signbit(et.erf(et.ExTensor([-0.0])).numpy())[0]


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


def test_power_at_the_edges() -> None:
    x = et.ExTensor([0.0, -2.0, 0.0], requires_grad=True)
    (x ** et.ExTensor([2.0, 3.0, 0.0])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 12, 0]


def test_shape_conventions() -> None:
    x = et.zeros((2, 3, 4))
    assert x.T.shape == (4, 3, 2)
    assert x.transpose().shape == (4, 3, 2)
    assert x.transpose(0, 1).shape == (3, 2, 4)
    assert x.transpose(1, 0, 2).shape == (3, 2, 4)
    assert x.permute(2, 0, 1).shape == (4, 2, 3)
    assert x.reshape(-1, 4).shape == (6, 4)
    assert x.reshape((-1,)).shape == (24,)
    assert x.flatten(1).shape == (2, 12)
    assert x[:, None, ..., 0].shape == (2, 1, 3)
    assert x.unsqueeze(0).squeeze(0).shape == x.shape
    assert et.zeros((0, 3)).reshape(3, -1).shape == (3, 0)
    assert [p.shape for p in x.split(2, -1)] == [(2, 3, 2)] * 2
    assert et.stack([x, x], -1).shape == (2, 3, 4, 2)
    assert et.zeros((2, 3)).transpose(0, 1).shape == (3, 2)


def test_tiles_and_rolls_are_numpys() -> None:
    x = np.arange(6.0).reshape(2, 3)
    t = et.ExTensor(x)
    for ours, theirs in (
        (et.tile(t, (2, 2)), np.tile(x, (2, 2))),
        (et.tile(t, 3), np.tile(x, 3)),
        (et.tile(t, (2, 1, 1)), np.tile(x, (2, 1, 1))),
        (et.repeat(t, 2), np.repeat(x, 2)),
        (et.repeat(t, 2, 0), np.repeat(x, 2, 0)),
        (et.roll(t, 1), np.roll(x, 1)),
        (et.roll(t, -1, 1), np.roll(x, -1, 1)),
        (et.pad(t, ((1, 0), (0, 2))), np.pad(x, ((1, 0), (0, 2)))),
        (et.percentile(t, 30.0), np.percentile(x, 30.0)),
        (et.median(t, 1), np.median(x, 1)),
        (et.einsum("ij,kj->ik", t, t), x @ x.T),
        (et.tensordot(t, t, ([0], [0])), np.tensordot(x, x, ([0], [0]))),
        (et.cumsum(t, 1), np.cumsum(x, 1)),
    ):
        np.testing.assert_allclose(ours.numpy(), theirs)
        assert ours.numpy().shape == np.shape(theirs)


def test_sorting_is_stable_both_ways() -> None:
    x = et.ExTensor([2, 1, 2, 1])
    assert x.sum().item() == 6
    assert et.argsort(x).tolist() == [1, 3, 0, 2]
    assert et.argsort(x, descending=True).tolist() == [0, 2, 1, 3]
    values, positions = et.topk(et.ExTensor([1.0, 9.0, 5.0]), 2)
    assert values.tolist() == [9, 5]
    assert positions.tolist() == [1, 2]


def test_repeated_rows_add_up_in_an_embedding() -> None:
    table = et.zeros((5, 3), "float64", requires_grad=True)
    index = np.array([[0, 4, 4], [-1, 2, 0]])
    g = np.random.default_rng(0).normal(size=(2, 3, 3))
    et.take(table, index).backward(et.ExTensor(g))
    expected = np.zeros((5, 3))
    np.add.at(expected, index, g)
    assert table.grad is not None
    np.testing.assert_allclose(
        table.grad.numpy(), expected, rtol=0, atol=4 * 2**-53 * np.abs(g).max()
    )
    assert et.take(table, np.zeros(0, int)).shape == (0, 3)


def test_cross_entropy_follows_the_definition() -> None:
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(5, 4)), np.array([0, 3, -100, 1, 1])
    logp = x - np.log(np.exp(x).sum(1, keepdims=True))
    s = 0.1
    each = -((1 - s) * logp[np.arange(5), labels % 4] + s * logp.mean(1)) * (labels != -100)
    kwargs = {"label_smoothing": s, "ignore_index": -100}
    for how, expected in (("none", each), ("sum", each.sum()), ("mean", each.sum() / 4)):
        loss = et.cross_entropy(et.ExTensor(x), et.ExTensor(labels), reduction=how, **kwargs)
        np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-13)
    ignored = et.ExTensor(np.full(5, -100))
    with pytest.raises(ValueError, match="no labels to average over"):
        et.cross_entropy(et.ExTensor(x), ignored, ignore_index=-100)


@pytest.mark.parametrize("labels", ["int64", "int32", "uint8"])
@pytest.mark.parametrize("how", ["none", "sum", "mean"])
@pytest.mark.parametrize("shape", [(7, 5), (2, 1, 3), (4, 6, 3, 2)])
def test_float32_cross_entropy_is_that_of_float64(
    shape: tuple[int, ...], how: Any, labels: str
) -> None:
    """Kernels take float32 alone; of scores below 16 each loss is within 100 units of 2**-24."""
    rng = np.random.default_rng(0)
    x = 2 * rng.standard_normal(shape, dtype=np.float32)
    y = et.ExTensor(rng.integers(0, shape[1], (shape[0], *shape[2:])).astype(labels))
    g = rng.standard_normal(y.shape if how == "none" else ())
    for smoothing, ignore in ((0.0, None), (0.2, None), (0.1, int(y.data.flat[0]) ^ 1)):
        made = []
        for dtype in ("float32", "float64"):
            leaf = et.ExTensor(x.astype(dtype), requires_grad=True)
            loss = et.cross_entropy(leaf, y, smoothing, ignore, how)
            loss.backward(et.ExTensor(g.astype(dtype)))
            assert leaf.grad is not None
            made.append((loss.numpy(), leaf.grad.numpy()))
        (loss32, grad32), (loss64, grad64) = made
        rows = 1 if how == "none" else y.size
        np.testing.assert_allclose(loss32, loss64, rtol=0, atol=100 * 2**-24 * rows)
        np.testing.assert_allclose(grad32, grad64, rtol=0, atol=100 * 2**-24 * np.abs(g).max())


def test_matmul_conventions() -> None:
    a, b = et.ones((2, 3)), et.ones((3,))
    assert (a @ b).shape == (2,)
    assert (b @ a.T).shape == (2,)
    assert (b @ b).shape == ()
    assert (et.ones((5, 1, 2, 3)) @ et.ones((4, 3, 2))).shape == (5, 4, 2, 2)
    with pytest.raises(ValueError, match="expected 3 rows on the right"):
        a @ a


def test_mixed_dtypes_promote_and_gradients_come_back_in_their_own() -> None:
    x = et.ones((2, 3), "bfloat16", requires_grad=True)
    w = et.ones((3, 2), requires_grad=True)
    y = x @ w
    assert y.dtype is et.float32
    y.sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    assert x.grad.dtype is et.bfloat16
    assert w.grad.dtype is et.float32
    x, n = et.ones(3, requires_grad=True), et.arange(3)
    (x * n).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 2]


def test_conv_bias_is_the_sum_of_both() -> None:
    x, w, b = et.randn(2, 3, 5, 5, seed=0), et.randn(4, 3, 3, 3, seed=1), et.randn(4, seed=2)
    both, apart = et.conv2d(x, w, b).numpy(), (et.conv2d(x, w) + b.reshape(4, 1, 1)).numpy()
    size = et.conv2d(x.abs(), w.abs(), b.abs()).numpy()  # 28 terms, added in any order
    assert (np.abs(both - apart) <= 2 * 29 * 2.0**-24 * size).all()


def test_pooling_by_definition() -> None:
    x = et.ExTensor(np.arange(16.0).reshape(1, 1, 4, 4))
    assert et.max_pool2d(x, 2).numpy().ravel().tolist() == [5, 7, 13, 15]
    assert et.avg_pool2d(x, 2).numpy().ravel().tolist() == [2.5, 4.5, 10.5, 12.5]
    assert et.avg_pool2d(x, 2, padding=1).numpy()[0, 0, 0, 0] == 0.0
    assert et.global_avg_pool2d(x).item() == 7.5


def test_losses_by_definition() -> None:
    a, b = et.ExTensor([0.0, 3.0]), et.ExTensor([0.5, 1.0])
    assert et.mse(a, b).item() == pytest.approx(2.125)
    assert et.l1(a, b, "sum").item() == pytest.approx(2.5)
    assert et.huber(a, b, 1.0, "none").tolist() == pytest.approx([0.125, 1.5])
    assert et.smooth_l1(a, b, 0.5, "none").tolist() == pytest.approx([0.25, 1.75])
    assert et.hinge(a, et.ExTensor([1.0, 1.0]), "none").tolist() == [1, 0]
    p, y = et.ExTensor([0.0, 1.0]), et.ExTensor([1.0, 1.0])
    assert et.binary_cross_entropy(p, y, "none").tolist() == [100, 0]
    logits = et.ExTensor([800.0, -800.0])
    loss = et.binary_cross_entropy_with_logits(logits, y, "none")
    assert loss.tolist() == [0, 800]
    assert et.kl_div(et.ExTensor([[0.0, -1.0]]), et.ExTensor([[0.0, 1.0]]), "batchmean").item() == 1
