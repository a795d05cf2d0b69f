"""Signal to noise on a million normal values: one figure that any wrong rule would move."""

from __future__ import annotations

import numpy as np
import pytest

from extensor.quant.reference import dequantize, quantize
from extensor.quant.spec import QuantSpec

X = np.random.default_rng(0).standard_normal(2**20, dtype=np.float32)


def decibels(spec: QuantSpec) -> float:
    q, _ = quantize(X, spec)
    signal = X.astype(np.float64)
    noise = signal - dequantize(q)
    return float(10 * np.log10((signal**2).sum() / (noise**2).sum()))


@pytest.mark.parametrize(
    ("rule", "expected"), [("floor", 18.784), ("rceil", 18.755), ("even", 19.030), ("ceil", 16.837)]
)
def test_mxfp4(rule: str, expected: float) -> None:
    assert abs(decibels(QuantSpec("mxfp4", scale_rule=rule)) - expected) < 0.001


@pytest.mark.parametrize(
    ("spec", "published", "here"),
    [
        (QuantSpec("nvfp4"), 20.44, 20.4306),
        (QuantSpec("nvfp4", scale_rule="four_over_six"), 21.22, 21.2078),
        (QuantSpec("nvfp4_fp8exact"), 20.85, 20.8531),
    ],
)
def test_nvfp4(spec: QuantSpec, published: float, here: float) -> None:
    """The tensor's largest value moves the block scales: other seeds differ by 0.02 dB."""
    got = decibels(spec)
    assert abs(got - published) < 0.02
    assert abs(got - here) < 0.001
