"""The checks themselves: they must be able to fail."""

from __future__ import annotations

import numpy as np
import pytest

import extensor as et
from extensor.testing import assert_bitwise_equal, first_difference, gradcheck, gradgradcheck


def test_first_difference_shows_coordinate_and_bytes() -> None:
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    b = a.copy()
    assert first_difference(a, b) is None
    b[1, 2] = np.nextafter(b[1, 2], 9, dtype=np.float32)
    message = first_difference(b, a)
    assert message is not None
    assert "1 of 6 elements differ, the first at (1, 2)" in message
    assert "bytes 00 00 a0 40" in message
    assert "bytes 01 00 a0 40" in message
    with pytest.raises(AssertionError, match="scales: 1 of 6"):
        assert_bitwise_equal(b, a, "scales")


def test_bits_count() -> None:
    assert first_difference(np.float32(0.0), np.float32(-0.0)) is not None
    nan = np.array([np.nan], np.float32)
    other = (nan.view(np.uint32) + 1).view(np.float32)
    assert first_difference(nan, nan.copy()) is None
    assert first_difference(nan, other) is not None
    assert "dtype" in str(first_difference(np.zeros(2, np.float32), np.zeros(2)))
    assert "shape" in str(first_difference(np.zeros(2), np.zeros((2, 1))))
    assert first_difference(np.zeros((0, 3)), np.zeros((0, 3))) is None
    assert first_difference(et.ones(3), np.ones(3, np.float32)) is None


def test_gradcheck_takes_several_inputs_and_outputs() -> None:
    x, y = et.randn(3, 2, seed=0, dtype="float64"), et.randn(2, seed=1, dtype="float64")
    assert gradcheck(lambda a, b: (a * b, (a + b).sum()), [x, y])
    assert gradgradcheck(lambda a, b: (a * b, (a * b).sum()), [x, y])


def test_gradcheck_catches_a_gradient_that_stops() -> None:
    x = et.randn(3, seed=0, dtype="float64")
    with pytest.raises(AssertionError, match="the gradient says"):
        gradcheck(lambda a: a * a.detach(), x)


def test_gradcheck_says_why_a_gradient_is_missing() -> None:
    """A function through numpy leaves the graph; one that quantizes gives no float64."""
    x = et.randn(4, seed=0, dtype="float64")
    with pytest.raises(AssertionError, match=r"0\.0, central.*leave the graph"):
        gradcheck(lambda a: et.ExTensor(np.sin(a.numpy())), x)
    with pytest.raises(TypeError, match="got none; a quantized or float32 step"):
        gradcheck(lambda a: a.to_mxfp4().dequantize(), x)


def test_gradgradcheck_catches_a_second_derivative_that_stops() -> None:
    x = et.randn(3, seed=0, dtype="float64")

    def half(a: et.ExTensor) -> et.ExTensor:
        return a * a.detach() * 2.0 - (a * a).detach()  # first derivative right, second not

    gradcheck(lambda a: a * a, x)
    with pytest.raises(AssertionError, match="the gradient says"):
        gradgradcheck(half, x)


def test_gradcheck_refuses_a_kink() -> None:
    with pytest.raises(AssertionError, match=r"away from kinks|the gradient says"):
        gradcheck(et.relu, et.zeros(3, "float64"))


def test_gradcheck_wants_float64() -> None:
    with pytest.raises(TypeError, match="expected float64 inputs, got float32"):
        gradcheck(et.exp, et.ones(3))
