"""Initializers: bounds, moments, reproducibility, and what they refuse."""

import math

import numpy as np
import pytest

from extensor.nn import init

SHAPE = (200, 30, 3, 5)  # fan_in 450, fan_out 3000
FAN_IN, FAN_OUT = 450, 3000


def moments(values):
    assert values.dtype == np.float32 and values.shape == SHAPE
    assert abs(values.mean()) < 0.02 * values.std()
    return float(values.std()), float(np.abs(values).max())


def test_fans():
    assert init.fans((7, 5)) == (5, 7)
    assert init.fans(SHAPE) == (FAN_IN, FAN_OUT)


@pytest.mark.parametrize(
    ("make", "std", "top"),
    [
        (lambda r: init.xavier_uniform(SHAPE, r), None, math.sqrt(6 / (FAN_IN + FAN_OUT))),
        (lambda r: init.xavier_uniform(SHAPE, r, 2.0), None, math.sqrt(24 / (FAN_IN + FAN_OUT))),
        (lambda r: init.xavier_normal(SHAPE, r), math.sqrt(2 / (FAN_IN + FAN_OUT)), None),
        (lambda r: init.kaiming_uniform(SHAPE, r), None, math.sqrt(6 / FAN_IN)),
        (lambda r: init.kaiming_uniform(SHAPE, r, 1.0, "out"), None, math.sqrt(3 / FAN_OUT)),
        (lambda r: init.kaiming_normal(SHAPE, r), math.sqrt(2 / FAN_IN), None),
        (lambda r: init.kaiming_normal(SHAPE, r, "tanh"), 5 / 3 / math.sqrt(FAN_IN), None),
        (lambda r: init.uniform(SHAPE, 0.25, r), None, 0.25),
        (lambda r: init.trunc_normal(SHAPE, r, 0.5), 0.5 * 0.8796, 1.0),
    ],
)
def test_distributions(make, std, top):
    values = make(0)
    got_std, got_top = moments(values)
    if std is None:  # uniform: standard deviation is bound / sqrt(3)
        std = top / math.sqrt(3.0)
    assert got_std == pytest.approx(std, rel=0.01)
    if top is not None:
        assert 0.999 * top < got_top <= np.float32(top)
    np.testing.assert_array_equal(make(0), values)
    assert (make(1) != values).any()


def test_kaiming_keeps_the_second_moment_through_relu():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1000, 512))
    for _ in range(5):
        x = np.maximum(x @ init.kaiming_normal((512, 512), rng).T.astype(float), 0.0)
    assert 0.5 < (x**2).mean() < 2.0


def test_trunc_normal_has_a_mean_and_a_bound():
    values = init.trunc_normal((100, 100), 0, std=2.0, mean=5.0, bound=1.0)
    assert values.min() >= 3.0 and values.max() <= 7.0
    assert values.mean() == pytest.approx(5.0, abs=0.05)


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (8, 2, 3, 3), (3, 2, 3, 3)])
def test_orthogonal(shape):
    matrix = init.orthogonal(shape, 0, gain=2.0).reshape(shape[0], -1).astype(float) / 2.0
    small = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    np.testing.assert_allclose(small, np.eye(len(small)), atol=1e-6)


def test_orthogonal_is_uniform_in_sign():
    """Without the sign fix numpy's Q has a diagonal of one sign more often than the other."""
    rng = np.random.default_rng(0)
    first = [init.orthogonal((3, 3), rng)[0, 0] for _ in range(400)]
    assert abs(np.mean(np.sign(first))) < 0.15


def test_a_generator_goes_on():
    rng = np.random.default_rng(0)
    one, two = init.xavier_normal((4, 4), rng), init.xavier_normal((4, 4), rng)
    assert (one != two).any()
    assert init.as_rng(rng) is rng and init.as_rng(7).random() == np.random.default_rng(7).random()
    assert (init.xavier_normal((4, 4)) != init.xavier_normal((4, 4))).any()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: init.xavier_uniform((3,)), ValueError, "expected two axes or more"),
        (lambda: init.orthogonal((3,)), ValueError, "expected two axes or more"),
        (lambda: init.kaiming_normal((3, 0)), ValueError, "none empty"),
        (lambda: init.xavier_normal((3, 3), gain=0.0), ValueError, "gain: expected a finite"),
        (lambda: init.kaiming_normal((3, 3), gain="rellu"), ValueError, "did you mean 'relu'"),
        (lambda: init.kaiming_normal((3, 3), gain=float("inf")), ValueError, "gain"),
        (lambda: init.kaiming_uniform((3, 3), fan="both"), ValueError, "fan: expected 'in'"),
        (lambda: init.trunc_normal((3, 3), std=0.0), ValueError, "std"),
        (lambda: init.trunc_normal((3, 3), bound=0.0), ValueError, "bound"),
        (lambda: init.orthogonal((3, 3), gain=-1.0), ValueError, "gain"),
        (lambda: init.xavier_normal((3, 3), "seed"), TypeError, "rng: expected a numpy.random"),
        (lambda: init.xavier_normal((3, 3), True), TypeError, "rng"),
        (lambda: init.xavier_normal((3, 3), np.random.RandomState(0)), TypeError, "rng"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()
