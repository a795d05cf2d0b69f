"""Floats rounded to odd: what is kept of a value, and that a format's codes stay the same."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from extensor.quant.reference import quantize
from extensor.quant.round_to_odd import odd_bits, odd_nbytes, round_to_odd
from extensor.quant.spec import QuantSpec


def by_hand(x: np.ndarray, bits: int) -> np.ndarray:
    """The upper bits of each float32, the last one set where what is cut is not zero."""
    words = x.view(np.uint32)
    kept = words >> np.uint32(32 - bits)
    kept |= (words & np.uint32((1 << (32 - bits)) - 1)) != 0
    return (kept << np.uint32(32 - bits)).view(np.float32)


@pytest.mark.parametrize("count", [0, 1, 7, 8, (1 << 15) - 1, 1 << 15, (1 << 15) + 3, 1 << 16])
@pytest.mark.parametrize("bits", [12, 16])
def test_values_are_cut_to_their_bits(bits: int, count: int) -> None:
    x = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    x[:3] = np.array([0.0, -0.0, 1.0], np.float32)[:count]
    kept = round_to_odd(x, bits, np)
    assert kept is not None
    np.testing.assert_array_equal(kept.values(np).view(np.uint32), by_hand(x, bits).view(np.uint32))
    assert kept.nbytes == odd_nbytes(bits, x.shape) == (bits * count + 7) // 8


@pytest.mark.parametrize("bits", [12, 16])
def test_a_subnormal_is_not_kept_and_the_least_normal_is(bits: int) -> None:
    least = np.float32(2.0**-126)
    assert round_to_odd(np.array([1.0, least, -least], np.float32), bits, np) is not None
    below = np.nextafter(least, np.float32(0))
    for value in (below, -below, np.float32(1e-45)):
        assert round_to_odd(np.array([1.0, value], np.float32), bits, np) is None


@pytest.mark.parametrize(
    ("fields", "bits"),
    [
        ({}, 12),
        ({"rounding": "stochastic"}, None),
        ({"statistic": "percentile"}, None),
        ({"element_scale": 0.75}, None),
        ({"scale_rule": "mse"}, None),
    ],
)
def test_only_plain_mx_floats_need_fewer_bits(fields: dict[str, object], bits: int | None) -> None:
    assert odd_bits(QuantSpec("mxfp4", **fields), np.dtype(np.float32)) == bits
    assert odd_bits(QuantSpec("mxfp8_e4m3", **fields), np.dtype(ml_dtypes.bfloat16)) is None
    for name in ("mxint8", "nvfp4", "int8"):
        assert odd_bits(QuantSpec(name), np.dtype(np.float32)) is None


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2"])
def test_codes_are_those_of_the_whole_values(name: str) -> None:
    x = (np.random.default_rng(0).standard_normal((8, 64)) * 50).astype(np.float32)
    spec = QuantSpec(name)
    kept = round_to_odd(x, odd_bits(spec, x.dtype) or 0, np)
    assert kept is not None
    ours, theirs = quantize(kept.values(np).reshape(x.shape), spec)[0], quantize(x, spec)[0]
    assert ours.codes.tobytes() == theirs.codes.tobytes()
    assert ours.scales.tobytes() == theirs.scales.tobytes()


def test_bfloat16_keeps_its_upper_bits_and_its_dtype() -> None:
    x = np.random.default_rng(0).standard_normal((3, 37)).astype(ml_dtypes.bfloat16)
    kept = round_to_odd(x, 12, np)
    assert kept is not None and kept.nbytes == odd_nbytes(12, x.shape)
    found = kept.values(np)
    assert found.dtype == x.dtype and found.shape == x.shape
    expected = by_hand(np.ascontiguousarray(x, np.float32), 12)
    np.testing.assert_array_equal(found.astype(np.float32), expected)
