"""Convolutions with a bias; values of all: tests/test_every_reference.py."""

from __future__ import annotations

import re

import numpy as np
import pytest

import extensor as et


def test_conv_bias_is_the_sum_of_both() -> None:
    x, w, b = et.randn(2, 3, 5, 5, seed=0), et.randn(4, 3, 3, 3, seed=1), et.randn(4, seed=2)
    both, apart = et.conv2d(x, w, b).numpy(), (et.conv2d(x, w) + b.reshape(4, 1, 1)).numpy()
    size = et.conv2d(x.abs(), w.abs(), b.abs()).numpy()  # 28 terms, added in any order
    assert (np.abs(both - apart) <= 2 * 29 * 2.0**-24 * size).all()


def test_a_convolution_of_no_channels_is_its_bias() -> None:
    y = et.conv2d(et.zeros((1, 0, 3, 3)), et.zeros((2, 0, 2, 2)), et.ExTensor([1.0, 2.0]))
    np.testing.assert_array_equal(y.numpy(), np.array([1, 2]).reshape(1, 2, 1, 1) * np.ones((2, 2)))


def test_a_convolution_of_integers_is_in_float32() -> None:
    out = et.conv2d(et.ones((1, 1, 3, 3), "int32"), et.ones((1, 1, 2, 2), "int64"))
    assert out.dtype == et.float32 and out.tolist() == [[[[4.0, 4.0], [4.0, 4.0]]]]


def test_a_window_larger_than_its_image_is_refused() -> None:
    for pool in (et.max_pool2d, et.avg_pool2d):
        for image in ((2, 5), (5, 2), (1, 1)):
            message = re.escape(f"does not fit an image of {image}")
            with pytest.raises(ValueError, match=message):
                pool(et.zeros((1, 4, *image)), 3)
        assert pool(et.zeros((1, 4, 3, 3)), 3).shape == (1, 4, 1, 1)
