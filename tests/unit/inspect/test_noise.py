"""sqnr: figures by hand, one formula for all, and what it refuses."""

import math

import numpy as np
import pytest

import extensor as et
from extensor.inspect import decibels, normal_sqnr, sqnr


def test_figures_by_hand():
    x = et.ExTensor([[3.0, 4.0, 0.0, 0.0]])
    assert sqnr(x, et.ExTensor([[3.0, 3.5, 0.0, 0.0]])) == pytest.approx(20.0)  # 25 over 0.25
    sevens = et.full((1, 32), 7.0)  # stored as 6 under floor scales
    assert sqnr(sevens, "mxfp4") == pytest.approx(20 * math.log10(7))
    assert sqnr(sevens, sevens.to_mxfp4()) == sqnr(sevens, "mxfp4")
    assert sqnr(x, "mxfp8_e4m3") == math.inf


def test_special_ratios():
    assert decibels(1.0, 0.0) == decibels(0.0, 0.0) == math.inf
    assert decibels(0.0, 1.0) == decibels(1.0, math.inf) == -math.inf
    assert math.isnan(decibels(1.0, math.nan))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_sums_are_float64_of_any_dtype(dtype):
    x = et.randn(64, 256, seed=0).to(dtype)
    exact = x.to("float64").numpy()
    coded = x.to_nvfp4().dequantize().numpy().astype(np.float64)
    by_hand = 10 * math.log10((exact**2).sum() / ((exact - coded) ** 2).sum())
    assert sqnr(x, "nvfp4") == pytest.approx(by_hand, abs=1e-9)


def test_it_is_the_figure_of_compare_layers():
    model = et.nn.Linear(64, 64, rng=0, bias=False)
    quantized = et.quantize_model(model, "mxfp4_weights")
    eye = et.eye(64)  # the output is the weight
    row = et.compare_layers(quantized, model, eye).rows[-1]
    assert row.sqnr_db == pytest.approx(sqnr(model.weight, quantized.weight), abs=1e-3)


def test_stochastic_rounding_takes_a_seed():
    x, spec = et.randn(32, 64, seed=0), et.QuantSpec("mxfp4", rounding="stochastic")
    assert sqnr(x, spec, seed=1) == sqnr(x, spec, seed=1) != sqnr(x, spec, seed=2)
    assert sqnr(x, spec, seed=1) < sqnr(x, "mxfp4")
    with pytest.raises(ValueError, match="seed"):
        sqnr(x, spec)


def test_what_normal_data_keep_is_what_the_page_says():
    known = {"mxfp8_e4m3": 30.6, "mxfp6_e2m3": 30.9, "nvfp4": 20.4, "mxfp4": 18.8}
    for name, ratio in known.items():
        assert normal_sqnr(et.QuantSpec(name)) == pytest.approx(ratio, abs=0.05)
    again = sqnr(et.randn(512, 1024, seed=5), "nvfp4")
    assert normal_sqnr(et.QuantSpec("nvfp4")) == pytest.approx(again, abs=0.05)


def test_gradients_and_the_source_are_left_alone():
    x = et.ExTensor([[1.0, 2.2, 3.0, 4.0]], requires_grad=True)
    sqnr(x, "mxfp4")
    assert x.grad is None and x.requires_grad


X = et.ones((2, 32))


@pytest.mark.parametrize(
    ("x", "quantized", "error", "message"),
    [
        (np.ones((2, 32)), "mxfp4", TypeError, "et.from_numpy"),
        (X.to_mxfp4(), "mxfp4", TypeError, "tensor that it was made from"),
        (et.ones((2, 32), "int64"), "mxfp4", TypeError, "dense floats, got int64"),
        (et.zeros((0, 32)), "mxfp4", ValueError, r"expected values in x, got shape \(0, 32\)"),
        (et.zeros((2, 32)), "mxfp4", ValueError, "zeros only"),
        (et.full((2, 32), math.nan), "mxfp4", ValueError, "NaN or Inf"),
        (et.full((2, 32), math.inf), "mxfp4", ValueError, "NaN or Inf"),
        (X, et.full((2, 32), math.nan), ValueError, "numbers in the quantized"),
        (X, et.ones((32, 2)).to_mxfp4(), ValueError, r"shape \(2, 32\), got \(32, 2\)"),
        (X, "mxfp5", ValueError, "mxfp4"),
        (X, 4, TypeError, "got int"),
    ],
)
def test_what_it_refuses(x, quantized, error, message):
    with pytest.raises(error, match=message):
        sqnr(x, quantized)


def test_a_seed_for_a_quantized_tensor_is_refused():
    with pytest.raises(ValueError, match="quantized already"):
        sqnr(X, X.to_mxfp4(), seed=0)
