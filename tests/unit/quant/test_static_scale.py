"""Fixed scales against Python's own rounding, and against ml_dtypes' FP8."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from extensor.quant.reference import dequantize, quantize
from extensor.quant.spec import QuantSpec
from extensor.quant.static_scale import (
    StaticScale,
    check_static_spec,
    choose_static_scale,
    quantize_static,
)

ASYMMETRIC = QuantSpec("int8", tile="tensor", symmetric=False)
SYMMETRIC = QuantSpec("int8", tile="tensor")
FP8 = QuantSpec("fp8_e4m3", tile="tensor")


def values(scale: float = 1.0) -> np.ndarray:
    """Normal values, ties at a scale of 0.5, zeros of both signs, and what lies far outside."""
    x = np.random.default_rng(3).standard_normal(500).astype(np.float32) * np.float32(scale)
    ties = np.arange(-20, 20, dtype=np.float32) * np.float32(0.25)
    edges = np.array([0.0, -0.0, 1e30, -1e30, 3e38, 1e-45], np.float32)
    return np.concatenate([x, ties, edges]).reshape(2, -1)


@pytest.mark.parametrize(
    "fixed", [StaticScale(0.5, 3), StaticScale(2.0**-6, -128), StaticScale(2.0**-10, 127)]
)
def test_integers_with_a_zero_point(fixed: StaticScale) -> None:
    x = values()
    q, stats = quantize_static(x, ASYMMETRIC, fixed)
    assert fixed.zero_point is not None
    saturated = flushed = 0
    for value, code in zip(x.reshape(-1), q.codes.reshape(-1).view(np.int8), strict=True):
        with np.errstate(over="ignore"):
            ratio = float(value / np.float32(fixed.scale))
        whole = round(ratio) if np.isfinite(ratio) else int(np.sign(ratio)) * 10**6
        expected = whole + fixed.zero_point
        saturated += not -128 <= expected <= 127
        expected = min(max(expected, -128), 127)
        flushed += value != 0 and expected == fixed.zero_point
        assert code == expected, value
    assert (stats.count, stats.saturated, stats.flushed) == (x.size, saturated, flushed)
    decoded = (q.codes.view(np.int8).astype(np.float32) - fixed.zero_point) * fixed.scale
    assert np.array_equal(dequantize(q), decoded)


def test_symmetric_integers_leave_the_last_code_out() -> None:
    q, stats = quantize_static(
        np.array([[-200.0, -127.4, 127.0, 128.0]], np.float32), SYMMETRIC, StaticScale(1.0)
    )
    assert q.codes.view(np.int8).tolist() == [[-127, -127, 127, 127]]
    assert stats.saturated == 2 and q.zero_points is None


def test_fp8() -> None:
    x, fixed = values(100.0), StaticScale(0.25)
    q, stats = quantize_static(x, FP8, fixed)
    with np.errstate(over="ignore"):
        scaled = x / np.float32(fixed.scale)
    expected = np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(q.codes, expected.view(np.uint8))
    # beyond 464, halfway to the code that would follow 448, a value rounds outside the grid
    assert stats.saturated == int((np.abs(scaled) >= 464).sum())
    assert stats.flushed == int(((expected.astype(np.float32) == 0) & (x != 0)).sum())


@pytest.mark.parametrize("spec", [ASYMMETRIC, SYMMETRIC, FP8])
def test_the_data_s_own_range_gives_the_dynamic_codes(spec: QuantSpec) -> None:
    x = np.random.default_rng(1).standard_normal((7, 33)).astype(np.float32) + np.float32(0.5)
    own, counts = quantize(x, spec)
    fixed = choose_static_scale(float(x.min()), float(x.max()), spec)
    q, stats = quantize_static(x, spec, fixed)
    for name, part in own.parts.items():
        assert part.tobytes() == getattr(q, name).tobytes(), name
        assert part.shape == getattr(q, name).shape
    assert stats == counts and q.spec == own.spec


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_poisons_the_tensor(bad: float) -> None:
    x = np.array([[1.0, bad, 300.0]], np.float32)
    q, stats = quantize_static(x, ASYMMETRIC, StaticScale(1.0, 0))
    assert np.isnan(dequantize(q)).all() and not q.codes.any()
    assert (stats.saturated, stats.flushed) == (0, 0)


def test_the_scale_of_a_range() -> None:
    # 255 steps from -1 to 3; zero is the code 64 above the least one
    fixed = choose_static_scale(-1.0, 3.0, ASYMMETRIC)
    assert fixed.scale == float(np.float32(4 / 255)) and fixed.zero_point == -128 + 64
    assert choose_static_scale(2.0, 51.0, ASYMMETRIC) == StaticScale(
        float(np.float32(51 / 255)), -128
    )
    assert choose_static_scale(-51.0, -2.0, ASYMMETRIC) == StaticScale(
        float(np.float32(51 / 255)), 127
    )
    assert choose_static_scale(-8.96, 4.0, FP8).scale == float(np.float32(8.96) / np.float32(448))
    for spec in (ASYMMETRIC, SYMMETRIC, FP8):
        assert choose_static_scale(0.0, 0.0, spec).scale == 1.0


@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec("int8"),
        QuantSpec("int4", tile="tensor"),
        QuantSpec("mxfp8_e4m3", tile="tensor"),
        QuantSpec("int8", tile="tensor", scale_dtype="float16"),
        QuantSpec("fp8_e4m3", rounding="stochastic"),
        QuantSpec("fp8_e4m3", statistic="percentile", percentile=99.0),
    ],
)
def test_specs_without_a_fixed_scale(spec: QuantSpec) -> None:
    with pytest.raises(ValueError, match="static scale: expected"):
        check_static_spec(spec)
    with pytest.raises(ValueError, match="static scale: expected"):
        quantize_static(np.ones((1, 4), np.float32), spec, StaticScale(1.0))


def test_what_does_not_go_together() -> None:
    x = np.ones((1, 4), np.float32)
    with pytest.raises(ValueError, match="expected a zero point exactly if symmetric=False"):
        quantize_static(x, ASYMMETRIC, StaticScale(1.0))
    with pytest.raises(ValueError, match="expected a zero point exactly if symmetric=False"):
        quantize_static(x, FP8, StaticScale(1.0, 0))
    for scale in (0.0, -1.0, np.inf, np.nan, 0.1):
        with pytest.raises(ValueError, match="expected a positive float32"):
            StaticScale(scale)
    with pytest.raises(ValueError, match=r"zero_point: expected -128\.\.127"):
        StaticScale(1.0, 128)
    for low, high in ((1.0, 0.0), (0.0, np.inf), (np.nan, 1.0)):
        with pytest.raises(ValueError, match="range: expected finite"):
            choose_static_scale(low, high, FP8)


@pytest.mark.parametrize("spec", [FP8, SYMMETRIC, ASYMMETRIC], ids=str)
def test_values_that_become_zero_are_counted(spec: QuantSpec) -> None:
    x = np.array([[0.0, 1e-4, -1e-4, 0.4, 0.6, 3.0]], np.float32)
    static = StaticScale(1.0, None if spec.symmetric else 0)
    q, stats = quantize_static(x, spec, static)
    zeros = (dequantize(q) == 0) & (x != 0)
    assert stats.flushed == zeros.sum() >= 2 and stats.count == x.size
