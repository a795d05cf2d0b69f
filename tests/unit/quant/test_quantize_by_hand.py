"""Vectors worked out by hand: scale bytes, codes, special blocks, dialects, packing, counts."""

from __future__ import annotations

import numpy as np
import pytest

from extensor.formats import ELEMENTS
from extensor.quant.reference import dequantize, quantize
from extensor.quant.rounding import decode, unpack
from extensor.quant.scale_rules import e8m0_bytes
from extensor.quant.spec import QuantSpec
from tests.oracle.grid import bits_of, from_bits

F = np.float32
RULES = ("floor", "rceil", "ceil", "even")


def after(x: float) -> float:
    return float(np.nextafter(F(x), F(np.inf)))


def before(x: float) -> float:
    return float(np.nextafter(F(x), F(0)))


def spread(first: list[float], n: int = 32) -> np.ndarray:
    """A block that starts with these values and goes on with zeros."""
    return np.array(first + [0.0] * (n - len(first)), F)


def codes_of(x: np.ndarray, spec: QuantSpec) -> np.ndarray:
    q, _ = quantize(x, spec)
    return unpack(q.codes, q.spec.row.element.bits, x.shape[-1])


# E8M0 bytes of one largest magnitude under floor, rceil, ceil, even.
BYTES = [
    ("e2m1", 6.0, (127, 127, 128, 127)),
    ("e2m1", after(6.0), (127, 128, 128, 127)),
    ("e2m1", 3.5, (126, 127, 127, 127)),
    ("e2m1", before(3.5), (126, 127, 127, 126)),
    ("e2m1", 4.0, (127, 127, 127, 127)),
    ("e2m1", before(4.0), (126, 127, 127, 127)),
    ("e2m1", after(4.0), (127, 127, 128, 127)),
    ("e2m1", 3.0, (126, 126, 127, 126)),
    ("e2m1", after(3.0), (126, 127, 127, 126)),
    ("e2m1", 7.0, (127, 128, 128, 128)),
    ("e4m3", 448.0, (127, 127, 128, 127)),
    ("e4m3", after(448.0), (127, 128, 128, 127)),
    ("e4m3", 496.0, (127, 128, 128, 128)),  # even carries from 1.9375 with three mantissa bits
    ("e4m3", before(496.0), (127, 128, 128, 127)),
    ("e5m2", 57344.0, (127, 127, 128, 127)),
    ("e5m2", 61440.0, (127, 128, 128, 128)),  # 1.875 * 2**15
    ("e2m3", 7.5, (127, 127, 128, 127)),
    ("e2m3", 7.75, (127, 128, 128, 128)),
    ("e3m2", 28.0, (127, 127, 128, 127)),
    ("e3m2", 30.0, (127, 128, 128, 128)),
    ("int8_mx", 1.0, (127, 127, 127, 127)),
    ("int8_mx", 127 / 64, (127, 127, 128, 127)),
    ("int8_mx", 255 / 128, (127, 128, 128, 128)),
    # The log form of rceil would say 128 here; the float32 form is the rule.
    ("int8_mx", 1.9843751, (127, 127, 128, 127)),
    # The ends.
    ("e2m1", 2.0**-149, (0, 0, 0, 0)),
    ("e2m1", 2.0**-126, (0, 0, 0, 0)),
    ("int8_mx", 2.0**-127, (0, 0, 0, 0)),
    ("int8_mx", 2.0**-126, (1, 1, 1, 1)),
    ("e5m2", 3.4028234663852886e38, (239, 240, 240, 240)),
    ("int8_mx", 3.4028234663852886e38, (254, 254, 254, 254)),
]


@pytest.mark.parametrize(("element", "amax", "expected"), BYTES)
def test_scale_bytes(element: str, amax: float, expected: tuple[int, ...]) -> None:
    grid, value = ELEMENTS[element], np.array([amax], F)
    got = tuple(int(e8m0_bytes(value, grid, rule)[0]) for rule in RULES)
    assert got == expected
    assert int(e8m0_bytes(value, grid, "one")[0]) == 127


def test_rceil_where_its_product_is_subnormal() -> None:
    """Exponent field 0: up only above a mantissa of 0x400000."""
    grid = ELEMENTS["int8_mx"]
    seen = set()
    for mantissa in (0x7EFFFF, 0x7F0000, 0x7F0001, 0x3FFFFF, 0x400001, 0x20, 0x7FFFFF):
        amax = from_bits(mantissa)
        product = bits_of(F(amax * F(F(1) / F(127 / 64))))
        expected = int(product > 0x400000)
        assert int(e8m0_bytes(np.array([amax]), grid, "rceil")[0]) == expected
        seen.add(expected)
    assert seen == {0, 1}


def test_e2m1_rounds_to_even_and_saturates() -> None:
    inputs = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.5, 6.0]
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0]
    for sign in (1.0, -1.0):
        x = spread([sign * v for v in inputs])
        q, stats = quantize(x, QuantSpec("mxfp4"))
        got = dequantize(q)[: len(inputs)]
        np.testing.assert_array_equal(got, np.array(expected, F) * sign)
        np.testing.assert_array_equal(np.signbit(got), np.full(len(inputs), sign < 0))
        assert (stats.count, stats.saturated, stats.flushed) == (32, 0, 1)


def test_counts_of_saturated_and_flushed() -> None:
    x = spread([7.9, 7.0, 6.99, -7.5, 0.25, -0.25, 0.2500001, 0.0, -0.0])
    _, stats = quantize(x, QuantSpec("mxfp4"))  # 7 ties with the 8 of an unbounded grid: up
    assert (stats.saturated, stats.flushed) == (3, 2)
    _, stats = quantize(x, QuantSpec("mxfp4", dialect="nvidia"))
    assert (stats.saturated, stats.flushed) == (0, 3)


def test_fp8_by_hand() -> None:
    x = np.array([0.5, -1.2, 0.1, 0, 2, -0.3, 0.7, -0.8], F)
    q, _ = quantize(x, QuantSpec("fp8_e4m3"))
    assert q.scales.shape == (1,)
    assert q.scales[0] == F(2) / F(448)
    expected = [112, -256, 22, 0, 448, -64, 160, -176]
    np.testing.assert_array_equal(decode(q.codes, ELEMENTS["e4m3"]), expected)
    back = [0.5, -1.142857, 0.098214, 0, 2, -0.285714, 0.714286, -0.785714]
    np.testing.assert_allclose(dequantize(q), back, atol=1e-6)


def test_int8_by_hand() -> None:
    q, _ = quantize(np.array([[0.5, -1, 0.25, -0.75]], F), QuantSpec("int8"))
    assert q.scales[0, 0] == F(1) / F(127)
    np.testing.assert_array_equal(q.codes.view(np.int8), [[64, -127, 32, -95]])


def test_int4_by_hand() -> None:
    q, _ = quantize(spread([7.0, -7.0, 3.5, -3.4, 0.5, 1.5]), QuantSpec("int4"))
    assert q.scales[0] == 1
    # 3.5 ties to 4, 0.5 to 0, 1.5 to 2; two's complement, even element in the low nibble
    np.testing.assert_array_equal(q.codes[:3], [0x97, 0xD4, 0x20])


def test_asymmetric_by_hand() -> None:
    x = np.array([[0.0, 255.0, 100.0, 1.5]], F)
    q, _ = quantize(x, QuantSpec("int8", symmetric=False))
    assert q.scales[0, 0] == 1
    assert q.zero_points is not None
    assert q.zero_points.dtype == np.int8
    np.testing.assert_array_equal(q.zero_points, [[-128]])
    np.testing.assert_array_equal(q.codes.view(np.int8), [[-128, 127, -28, -126]])
    np.testing.assert_array_equal(dequantize(q), [[0, 255, 100, 2]])
    q, _ = quantize(np.array([[-5.0, 10.0]], F), QuantSpec("int4", symmetric=False))
    np.testing.assert_array_equal(q.zero_points, [[-3]])
    np.testing.assert_array_equal(q.codes[0, :2], [0x78, 0x00])  # -8 and 7, then padding
    np.testing.assert_array_equal(dequantize(q), [[-5, 10]])


def test_asymmetric_range_always_holds_zero() -> None:
    x = np.array([[10.0, 20.0, 0.0, 15.0], [-10.0, -20.0, -15.0, 0.0]], F)
    q, _ = quantize(x, QuantSpec("int8", symmetric=False))
    np.testing.assert_array_equal(q.zero_points, [[-128], [127]])
    assert dequantize(q)[0, 2] == dequantize(q)[1, 3] == 0


def test_float16_scales_round_first() -> None:
    x = spread([0.7, 0.1])
    q, _ = quantize(x, QuantSpec("int4", scale_dtype="float16"))
    scale = np.float16(F(0.7) / F(7))
    assert q.scales.dtype == np.float16
    assert q.scales[0] == scale
    assert dequantize(q)[0] == F(7) * F(scale)
    for value, expected in ((3e38, 65504.0), (1e-20, 2.0**-24), (0.0, 1.0)):
        q, _ = quantize(spread([value]), QuantSpec("int4", scale_dtype="float16"))
        assert q.scales[0] == expected


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "int8", "int4", "outlier"])
def test_float_scales_of_nothing_are_one(name: str) -> None:
    for value in (0.0, 1e-45):  # the second divided by 7 or more rounds to zero
        q, _ = quantize(spread([value], 8), QuantSpec(name))
        np.testing.assert_array_equal(q.scales, np.ones_like(q.scales))


def test_nvfp4_by_hand() -> None:
    x = np.concatenate([spread([6.0, 3.0, -1.5], 16), spread([0.75, -0.5], 16)])
    q, _ = quantize(x, QuantSpec("nvfp4"))
    s_enc = F(2688) / F(6)
    assert q.tensor_scale is not None
    assert q.tensor_scale.dtype == np.float32
    assert q.tensor_scale.shape == ()
    assert q.tensor_scale == F(1) / s_enc
    # 448 = 0x7E for the first block; 0.75 * 448 / 6 = 56 = 1.75 * 2**5 = 0x66
    np.testing.assert_array_equal(q.scales, [0x7E, 0x66])
    np.testing.assert_array_equal(q.codes[:2], [0x57, 0x0B])  # 6, 3 (5), -1.5 (11)
    np.testing.assert_array_equal(q.codes[8:9], [0xE7])  # 6 and -4 times 0.125
    np.testing.assert_allclose(dequantize(q), x, rtol=1e-6)


def test_nvfp4_of_nothing_is_nothing() -> None:
    q, stats = quantize(np.zeros((3, 40), F), QuantSpec("nvfp4"))
    assert q.tensor_scale == 1
    assert not q.scales.any()
    np.testing.assert_array_equal(dequantize(q), np.zeros((3, 40)))
    assert (stats.saturated, stats.flushed) == (0, 0)


def test_four_over_six_uses_four_where_that_is_nearer() -> None:
    # 4.5 beside a 6 lies between 4 and 6; with the 6 coded as 4 it is coded as 3, exactly.
    x = np.concatenate([spread([6.0, 4.5], 16), spread([6.0, 3.0], 16)])
    q, _ = quantize(x, QuantSpec("nvfp4", scale_rule="four_over_six"))
    assert q.tensor_scale == F(1) / (F(1536) / F(6))
    np.testing.assert_array_equal(q.scales, [0x7C, 0x78])  # 384 = 1.5 * 256, and 256
    np.testing.assert_array_equal(q.codes[[0, 8]], [0x56, 0x57])
    np.testing.assert_array_equal(dequantize(q)[[0, 1, 16, 17]], [6, 4.5, 6, 3])


def test_fp8exact_scales_have_three_significands() -> None:
    x = np.random.default_rng(3).standard_normal((64, 64)).astype(F)
    x[5] *= 1e-6
    q, _ = quantize(x, QuantSpec("nvfp4_fp8exact"))
    assert set(np.unique(q.scales & 7)) == {0, 2, 4}
    assert q.scales[5].max() <= 0x0A  # no smaller candidates
    assert q.scales.min() >= 0x08
    assert q.scales.max() <= 0x7C


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4"])
def test_mx_zero_blocks_keep_their_signs(name: str) -> None:
    x = np.zeros(32, F)
    x[1::2] = -0.0
    q, _ = quantize(x, QuantSpec(name))
    sign = ELEMENTS[q.spec.row.element.name].sign_mask
    assert q.scales[0] == 0
    np.testing.assert_array_equal(codes_of(x, QuantSpec(name)), [0, sign] * 16)
    np.testing.assert_array_equal(dequantize(q), x)
    np.testing.assert_array_equal(np.signbit(dequantize(q)), np.signbit(x))


def test_values_that_round_to_zero_keep_their_sign() -> None:
    got = dequantize(quantize(spread([4.0, -0.1, 0.1]), QuantSpec("mxfp4"))[0])
    np.testing.assert_array_equal(np.signbit(got[1:3]), [True, False])
    np.testing.assert_array_equal(got[1:3], [0, 0])


def test_float32_max_may_come_back_as_infinity() -> None:
    """Stated in the documentation: 4 times 2**126 is beyond float32, 6 times 2**125 is not."""
    x = spread([3.4028234663852886e38, 1.0])
    for rule, value in (("floor", 6 * 2.0**125), ("rceil", np.inf), ("ceil", np.inf)):
        q, _ = quantize(x, QuantSpec("mxfp4", scale_rule=rule))
        assert dequantize(q)[0] == F(value), rule
    q, _ = quantize(x, QuantSpec("mxfp4", scale_rule="even"))
    assert np.isposinf(dequantize(q)[0])


@pytest.mark.parametrize(
    ("dialect", "byte"),
    [
        ("ocp", 0xFF),
        ("nvidia", 0xFE),
        ("torchao", 0xFD),  # 2**128 under floor: 128 - 2 + 127
        ("compressed_tensors", 0xFF),
        ("model_optimizer", 0xFF),
        ("microxcaling", 0xFF),
    ],
)
def test_infinity_in_an_mx_block(dialect: str, byte: int) -> None:
    q, stats = quantize(spread([1.0, np.inf, -np.inf]), QuantSpec("mxfp4", dialect=dialect))
    assert q.scales[0] == byte
    if byte == 0xFF:
        assert not q.codes.any()
        assert np.isnan(dequantize(q)).all()
        assert (stats.saturated, stats.flushed) == (0, 0)
    else:
        np.testing.assert_array_equal(q.codes[:2], [0x70, 0x0F])
        assert (stats.saturated, stats.flushed) == (2, 1)


@pytest.mark.parametrize(
    ("dialect", "byte"),
    [
        ("ocp", 0x00),
        ("nvidia", 0x00),
        ("torchao", 0x08),
        ("compressed_tensors", 0x20),
        ("model_optimizer", 0x38),
        ("microxcaling", 0x00),
    ],
)
def test_zero_block_of_nvfp4(dialect: str, byte: int) -> None:
    x = np.concatenate([spread([1.0], 16), spread([0.0, -0.0], 16)])
    q, _ = quantize(x, QuantSpec("nvfp4", dialect=dialect))
    np.testing.assert_array_equal(q.scales, [0x7E, byte])
    kept = dialect not in ("compressed_tensors", "model_optimizer")  # these drop -0.0's sign
    np.testing.assert_array_equal(q.codes[8:10], [0x80 if kept else 0x00, 0x00])
    np.testing.assert_array_equal(dequantize(q), x)


def test_tiny_block_of_nvfp4() -> None:
    x = np.concatenate([spread([1.0], 16), spread([1e-10, -1e-10], 16)])
    q, stats = quantize(x, QuantSpec("nvfp4"))
    np.testing.assert_array_equal(q.scales, [0x7E, 0])
    np.testing.assert_array_equal(q.codes[8:10], [0x80, 0])
    assert (stats.saturated, stats.flushed) == (0, 2)
    q, stats = quantize(x, QuantSpec("nvfp4", dialect="nvidia"))
    np.testing.assert_array_equal(q.scales, [0x7E, 0])
    np.testing.assert_array_equal(q.codes[8:10], [0xF7, 0])
    assert (stats.saturated, stats.flushed) == (2, 2)


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [
        ("ocp", [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]),
        ("microxcaling", [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]),
        ("model_optimizer", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0]),
        ("gguf", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0]),
    ],
)
def test_ties_of_a_dialect(dialect: str, expected: list[float]) -> None:
    x = spread([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    for sign in (F(1), F(-1)):
        got = dequantize(quantize(x * sign, QuantSpec("mxfp4", dialect=dialect))[0])
        np.testing.assert_array_equal(got[:7], np.array(expected, F) * sign)


def test_mxint8_never_holds_minus_128() -> None:
    x = spread([-1.9999, 1.9999, -2.0 + 2**-20])
    for dialect in ("ocp", "microxcaling"):
        got = codes_of(x, QuantSpec("mxint8", dialect=dialect)).view(np.int8)
        np.testing.assert_array_equal(got[:3], [-127, 127, -127])


def test_scale_window_by_hand() -> None:
    x = np.stack([spread([4.0]), spread([4 * 2.0**-10]), spread([4 * 2.0**-20]), spread([0.0])])
    x = np.concatenate([x, spread([np.nan])[None]])
    for window, expected in ((None, [127, 117, 107]), (15, [127, 117, 112]), (0, [127] * 3)):
        q, _ = quantize(x, QuantSpec("mxfp4", scale_window=window))
        np.testing.assert_array_equal(q.scales[:, 0], [*expected, 0, 0xFF])


def test_scale_window_is_anchored_on_blocks_that_hold_something() -> None:
    """Not on a zero, which has no exponent, nor on NaN: E is -12, so nothing falls below -13."""
    x = np.stack([spread([2.0**-10]), spread([2.0**-20]), spread([0.0]), spread([np.nan])])
    q, _ = quantize(x, QuantSpec("mxfp4", scale_window=1))
    np.testing.assert_array_equal(q.scales[:, 0], [115, 114, 0, 0xFF])


def test_nvfp4_block_scale_takes_a_sixth_of_s_enc_first() -> None:
    """Amax times (S_enc times 1/6), as Transformer Engine: any other order gives 0x58 here."""
    x = np.stack([spread([float.fromhex("0x1.80bf6cp+0")], 16)] * 2)
    x[1, 0] = float.fromhex("0x1.d33196p-5")
    np.testing.assert_array_equal(quantize(x, QuantSpec("nvfp4"))[0].scales[:, 0], [0x7E, 0x59])


def test_percentile_is_the_nearest_rank_of_real_elements() -> None:
    x = np.array([[16.0, 1.0, 2.0, 4.0, 8.0, 0.0, 0.0, 0.0, 0.0, 0.0]], F)  # ten, then padding
    for percentile, amax in ((100.0, 16), (95.0, 16), (90.0, 8), (70.0, 2), (60.0, 1)):
        spec = QuantSpec("mxfp4", statistic="percentile", percentile=percentile)
        q, _ = quantize(x, spec)
        assert q.scales[0, 0] == 125 + np.log2(amax), percentile
    # Where the ranked value is zero the block's maximum stands in.
    q, _ = quantize(x, QuantSpec("mxfp4", statistic="percentile", percentile=50.0))
    assert q.scales[0, 0] == 125 + 4
    q, stats = quantize(x, QuantSpec("mxfp4", statistic="percentile", percentile=80.0))
    assert q.scales[0, 0] == 127
    assert dequantize(q)[0, 0] == 6
    assert stats.saturated == 2


def test_percentile_rank_is_not_spoiled_by_rounding() -> None:
    """0.55 * 100 is 55.000000000000007 in float64, but the 55th of 100 was asked for."""
    x = np.ldexp(F(1), np.arange(100) - 50).astype(F)
    spec = QuantSpec("int8", statistic="percentile", percentile=55.0)
    assert quantize(x, spec)[0].scales[0] == F(2.0**4) / F(127)


def test_running_maximum_by_hand() -> None:
    x = np.stack([spread([1.0]), spread([1.0]), spread([0.0])])
    previous = np.array([[8.0], [1.0], [8.0]], F)
    q, _ = quantize(x, QuantSpec("mxfp4", statistic="running", decay=0.5), None, previous)
    np.testing.assert_array_equal(q.scales[:, 0], [127, 125, 0])


def test_element_scale_stays_in_the_values() -> None:
    q, _ = quantize(spread([4.0, -2.0]), QuantSpec("mxfp4", element_scale=0.75))
    assert q.scales[0] == 127
    np.testing.assert_array_equal(dequantize(q)[:2], [3, -1.5])


def test_outlier_by_hand() -> None:
    x = np.array([[1.0, 1.0, 101.0, 1.0, 1.0, -99.0, 3.0, -1.0]], F)
    q, _ = quantize(x, QuantSpec("outlier", outliers=2))
    np.testing.assert_array_equal(q.row_means, [[1.0]])
    np.testing.assert_array_equal(q.outlier_index, [[2, 5]])
    np.testing.assert_array_equal(q.outlier_value, [[101.0, -99.0]])
    assert q.scales[0, 0] == F(2) / F(448)
    np.testing.assert_array_equal(q.codes[0, [0, 2, 5]], [0, 0, 0])
    np.testing.assert_array_equal(dequantize(q), x)
    q, _ = quantize(np.tile(x, (1, 4)), QuantSpec("outlier"))  # an eighth of 32
    np.testing.assert_array_equal(q.outlier_index, [[2, 5, 10, 13]])  # ties: lower indices


def test_axis_and_tile_share_scales_where_they_should() -> None:
    x = np.ones((4, 6), F)
    x[1, 2] = 64.0
    q, _ = quantize(x, QuantSpec("mxfp4", axis=1, tile=(2, 3)))
    np.testing.assert_array_equal(q.scales, [[131, 125], [125, 125]])
    q, _ = quantize(x, QuantSpec("mxfp4", axis=0, tile=(2, 3)))  # 3 down axis 0, 2 along axis 1
    np.testing.assert_array_equal(q.scales, [[125, 131, 125], [125, 125, 125]])
    assert q.codes.shape == (3, 6)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("mxfp4", 1), ("mxfp6_e2m3", 3), ("mxfp6_e3m2", 2), ("mxfp8_e4m3", 3), ("mxfp8_e5m2", 2)],
)
def test_what_rounds_to_two_to_the_128_decodes_to_infinity(name: str, bits: int) -> None:
    """From the middle between that power and the element's number below it on."""
    first = np.float32((1 - 2.0 ** -(bits + 2)) * 2.0**128)
    edges = np.repeat(np.float32([[np.nextafter(first, np.float32(0))], [first]]), 32, axis=1)
    for rule in ("rceil", "ceil", "even", "mse", "floor"):
        found = dequantize(quantize(edges, QuantSpec(name, scale_rule=rule))[0])
        assert np.isfinite(found[0]).all() and np.isinf(found[1]).all() == (rule != "floor")
