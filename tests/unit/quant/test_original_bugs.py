"""Every bug of the Mojo original that lies in number formats, each as a test of its own."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from extensor.formats import ELEMENTS
from extensor.quant.reference import dequantize, fake_quantize, quantize
from extensor.quant.rounding import decode, encode
from extensor.quant.spec import QuantSpec
from extensor.random import Stream

F = np.float32
MXFP4, NVFP4 = QuantSpec("mxfp4"), QuantSpec("nvfp4")


def roundtrip(x: np.ndarray, spec: QuantSpec = MXFP4) -> np.ndarray:
    return dequantize(quantize(x, spec)[0])


def test_e2m1_has_plus_and_minus_a_half() -> None:
    assert ELEMENTS["e2m1"].values[1] == 0.5
    assert ELEMENTS["e2m1"].values[9] == -0.5
    x = np.array([0.5, -0.5, 0.4, -0.6, 4.0], F)
    np.testing.assert_array_equal(roundtrip(x), [0.5, -0.5, 0.5, -0.5, 4.0])


def test_ties_go_to_even_not_up() -> None:
    x = np.array([0.25, 1.25, 2.5, 5.0, -0.25, -1.25, -2.5, -5.0], F)
    np.testing.assert_array_equal(roundtrip(x), [0, 1, 2, 4, -0.0, -1, -2, -4])


def test_nan_does_not_become_six() -> None:
    x = np.ones((2, 64), F)
    x[0, 5] = np.nan
    for spec in (MXFP4, NVFP4):
        got = roundtrip(x, spec)
        width = spec.row.tile[1]
        assert isinstance(width, int)
        assert np.isnan(got[0, :width]).all()
        np.testing.assert_array_equal(got[0, width:], x[0, width:])
        np.testing.assert_array_equal(got[1], x[1])


def test_e8m0_byte_255_is_nan_and_byte_0_is_2_to_the_minus_127() -> None:
    q, _ = quantize(np.full(32, np.nan, F), MXFP4)
    assert q.scales[0] == 255
    assert np.isnan(dequantize(q)).all()
    x = np.full(32, 2.0**-127, F)
    q, _ = quantize(x, MXFP4)
    assert q.scales[0] == 0
    np.testing.assert_array_equal(dequantize(q), x)


def test_no_rule_rounds_the_scale_to_the_nearest_power_of_two() -> None:
    """Amax 8: 8/6 is nearest to 1, which clips 8 to 6 and every value above 5 with it."""
    x = np.array([8.0, 1.0], F)
    for rule in ("rceil", "ceil", "floor", "even"):
        q, stats = quantize(x, QuantSpec("mxfp4", scale_rule=rule))
        assert q.scales[0] == 128, rule
        assert dequantize(q)[0] == 8
        assert stats.saturated == 0
    # rceil never clips, whatever the largest value
    x = np.exp2(np.linspace(0, 2, 999)).astype(F)[:, None]
    assert quantize(x, QuantSpec("mxfp4", scale_rule="rceil"))[1].saturated == 0


def test_stochastic_rounding_does_not_flush_what_lies_below_a_half() -> None:
    x = np.tile(np.array([4.0] + [0.1] * 31, F), (400, 1))
    q, _ = quantize(x, MXFP4.replace(rounding="stochastic"), Stream(seed=8))
    small = dequantize(q)[:, 1:]
    assert set(np.unique(small)) == {0.0, 0.5}
    assert abs(small.mean() - 0.1) < 4 * np.sqrt(0.1 * 0.4 / small.size)


def test_nvfp4_has_a_tensor_scale_and_no_default_block_scale() -> None:
    x = np.random.default_rng(0).standard_normal((8, 64)).astype(F)
    q, _ = quantize(x, NVFP4)
    assert q.tensor_scale == F(1) / (F(2688) / np.abs(x).max())
    big, _ = quantize(x * F(2.0**30), NVFP4)  # beyond what e4m3 scales alone could reach
    np.testing.assert_array_equal(big.codes, q.codes)
    np.testing.assert_array_equal(big.scales, q.scales)
    assert big.tensor_scale == q.tensor_scale * F(2.0**30)
    zero, _ = quantize(np.zeros(16, F), NVFP4)
    assert decode(zero.scales, ELEMENTS["e4m3"])[0] == 0


def test_blocks_do_not_cross_rows() -> None:
    x = np.ones((4, 40), F)  # 160 values: five blocks of 32 if rows were ignored
    x[1] *= F(1024)
    q, _ = quantize(x, MXFP4)
    assert q.scales.shape == (4, 2)
    np.testing.assert_array_equal(q.scales, [[125, 125], [135, 135], [125, 125], [125, 125]])
    np.testing.assert_array_equal(dequantize(q), x)


def test_padding_does_not_show_in_the_shape() -> None:
    for length in (1, 15, 31, 33, 47, 100):
        x = np.arange(1, 3 * length + 1, dtype=F).reshape(3, length)
        for spec in (MXFP4, NVFP4, QuantSpec("mxfp6_e2m3"), QuantSpec("int4")):
            q, stats = quantize(x, spec)
            assert q.shape == x.shape
            assert dequantize(q).shape == x.shape
            assert stats.count == x.size


def test_bfloat16_is_welcome() -> None:
    x = np.linspace(-3, 3, 64).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(roundtrip(x), roundtrip(x.astype(F)))


def test_e4m3_subnormals_are_512ths() -> None:
    element = ELEMENTS["e4m3"]
    for k in range(8):
        assert element.values[k] == k / 512
        codes, _ = encode(np.array([k / 512], F), element)
        assert codes[0] == k
    assert element.values[8] == 2.0**-6


def test_low_precision_never_decides_the_type_of_the_result() -> None:
    """What comes out of a quantizer is float32, whatever float went in."""
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        x = np.ones((2, 32), dtype)
        assert roundtrip(x).dtype == np.float32
        assert fake_quantize(x, MXFP4)[0].dtype == np.float32


def test_a_gradient_keeps_its_own_scale() -> None:
    """The backward pass's operand carries the gradient's scales, not those of the forward pass."""
    x = np.full((2, 32), 4.0, F)
    g = np.full((2, 32), 4.0 * 2.0**-20, F)
    for spec in (MXFP4, NVFP4):
        forward, backward = quantize(x, spec)[0], quantize(g, spec)[0]
        np.testing.assert_array_equal(forward.codes, backward.codes)
        np.testing.assert_array_equal(
            fake_quantize(g, spec)[0], fake_quantize(x, spec)[0] * F(2.0**-20)
        )


def test_nothing_is_off_by_one_at_a_block_boundary() -> None:
    for width in (16, 32):
        spec = QuantSpec("mxfp4", tile=(1, width))
        for place in (0, width - 1, width, 2 * width - 1, 2 * width):
            x = np.ones(2 * width + 1, F)
            x[place] = 4096.0
            q, _ = quantize(x, spec)
            expected = np.full(3, 125)
            expected[place // width] = 137
            np.testing.assert_array_equal(q.scales, expected)
            got = dequantize(q)
            assert got[place] == 4096
            others = np.arange(len(x)) // width != place // width
            np.testing.assert_array_equal(got[others], 1)
