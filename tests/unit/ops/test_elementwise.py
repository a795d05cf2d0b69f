"""Elementwise operations and softmax: special values and the ends of their range."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

import extensor as et

INF, NAN = np.inf, np.nan


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


def test_power_at_the_edges() -> None:
    x = et.ExTensor([0.0, -2.0, 0.0], requires_grad=True)
    (x ** et.ExTensor([2.0, 3.0, 0.0])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 12, 0]


@pytest.mark.parametrize("op", [et.add, et.multiply, et.subtract, et.divide, et.maximum])
def test_mixed_operands_promote(op: Callable[..., et.ExTensor]) -> None:
    """The result's dtype follows the table of promotions, not the first operand."""
    ones = {name: et.ones((2, 32), name) for name in ("float16", "bfloat16", "float32", "float64")}
    for a, b, expected in (
        ("bfloat16", "float32", et.float32),
        ("float16", "bfloat16", et.float32),
        ("float16", "float64", et.float64),
        ("bfloat16", "bfloat16", et.bfloat16),
    ):
        assert op(ones[a], ones[b]).dtype is expected
        assert op(ones[b], ones[a]).dtype is expected
    blocked = {name: ones["float32"].to(name) for name in ("mxfp4", "nvfp4", "mxfp8_e4m3")}
    for name, q in blocked.items():
        for other in (q, blocked["mxfp4"], ones["float32"], ones["bfloat16"], 1.0):
            for result in (op(q, other), op(other, q)):
                assert result.dtype is et.float32, (name, other)
                np.testing.assert_array_equal(result.numpy(), op(ones["float32"], 1.0).numpy())


@pytest.mark.parametrize("pair", [("int8", "int32"), ("uint8", "int16"), ("bool", "int64")])
def test_integers_stay_integers_and_functions_of_reals_make_them_float32(
    pair: tuple[str, str],
) -> None:
    x, y = et.ones(3, pair[0]), et.full(3, 2, pair[1])
    total = x + y
    assert total.dtype.name == np.result_type(*pair).name and total.tolist() == [3, 3, 3]
    assert et.exp(y).dtype == et.atan2(x, y).dtype == et.float32
    assert et.exp(y).tolist() == pytest.approx([np.exp(2)] * 3, rel=1e-6)
