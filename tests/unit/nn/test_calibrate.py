"""Ranges against the whole of the values, which calibration itself does not keep."""

from __future__ import annotations

import numpy as np
import pytest

import extensor as et
from extensor import nn
from extensor.nn.calibrate import BINS, SHRINKS, InputHistogram, calibrate, choose_scale
from extensor.quant.reference import dequantize
from extensor.quant.schemes import SCHEMES
from extensor.quant.static_scale import choose_static_scale, quantize_static

RNG = np.random.default_rng(5)
SHAPES = {
    "normal": RNG.standard_normal(20_000),
    "one-sided": np.maximum(RNG.standard_normal(20_000), 0.0),
    "skewed": RNG.exponential(1.0, 20_000) - 0.5,
    "below": -RNG.exponential(1.0, 20_000),
    "outliers": np.concatenate([RNG.standard_normal(20_000), [200.0, -50.0]]),
    "zeros": np.zeros(100),
    "constant": np.full(50, 3.0),
}


def seen_of(values: np.ndarray, parts: int = 3) -> InputHistogram:
    """By way of a model, in several batches."""
    model = nn.Sequential(layer=nn.Linear(1, 1))
    batches = [(et.from_numpy(p[:, None]),) for p in np.array_split(values, parts)]
    return calibrate(model, {"layer": model.layer}, batches)["layer"]


@pytest.mark.parametrize("shape", SHAPES)
def test_ranges(shape: str) -> None:
    x = SHAPES[shape].astype(np.float32)
    seen = seen_of(x)
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    assert (seen.low, seen.high) == (low, high)
    assert seen.counts is not None and seen.zeros + seen.counts.sum() == x.size
    assert seen.zeros == (x == 0).sum()
    spec = SCHEMES["int8"].activations
    assert choose_scale(seen, SCHEMES["int8"]) == choose_static_scale(low, high, spec)

    chosen = choose_scale(seen, SCHEMES["int8_percentile"])
    ends = [s * float(np.percentile(s * x, 99.99, method="inverted_cdf")) for s in (-1, 1)]
    one_bin = (high - low) / BINS
    expected = choose_static_scale(min(ends[0], 0.0), max(ends[1], 0.0), spec)
    assert abs(chosen.scale - expected.scale) * 255 <= 2 * one_bin * (1 + 1e-6)

    chosen = choose_scale(seen, SCHEMES["int8_mse"])
    q, _ = quantize_static(x, spec, chosen)
    error = float(((dequantize(q).astype(np.float64) - x) ** 2).sum())
    best = np.inf
    for share in SHRINKS:
        q, _ = quantize_static(x, spec, choose_static_scale(share * low, share * high, spec))
        best = min(best, float(((dequantize(q).astype(np.float64) - x) ** 2).sum()))
    assert error <= 1.02 * best + 1e-12  # centres of bins stand for the values in them


def test_the_outliers_are_left_out() -> None:
    seen = seen_of(SHAPES["outliers"].astype(np.float32))
    full, percentile, mse = (
        choose_scale(seen, SCHEMES[name]).scale for name in ("int8", "int8_percentile", "int8_mse")
    )
    assert percentile < 0.1 * full and mse < full


def test_fp8_ranges_are_symmetric() -> None:
    seen = seen_of(SHAPES["below"].astype(np.float32))
    chosen = choose_scale(seen, SCHEMES["fp8_tensor"])
    assert chosen.zero_point is None
    assert chosen.scale == float(np.float32(-seen.low) / np.float32(448))


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.BatchNorm2d(3))
    state = {k: v.tobytes() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match="BatchNorm2d"):
        calibrate(model, {"0": dict(model.named_modules())["0"]}, [(et.ones((2, 3)),)])
    assert model.training and not any(m._pre_hooks for m in model.modules())
    assert {k: v.tobytes() for k, v in model.state_dict().items()} == state
