"""Properties that hold for any array, with hypothesis choosing arrays and specs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from extensor.formats import DIALECTS, FORMATS
from extensor.quant.array import QuantArray
from extensor.quant.reference import dequantize, fake_quantize, quantize
from extensor.quant.scale_rules import E8M0_SEARCHES
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream
from tests.oracle import quantize as oracle
from tests.oracle.compare import same_bytes, same_stored

F = np.float32
MX = [name for name, row in FORMATS.items() if row.scale.name == "e8m0"]
CALM = settings(max_examples=120, derandomize=True)
SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=40).filter(
    lambda shape: np.prod(shape) <= 600
)
# Any 32 bits, or values of ordinary size (most arrays of random bits hold a NaN).
ANY_BITS = st.integers(0, 2**32 - 1).map(lambda b: np.array(b, np.uint32).view(F)[()])
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
MODEST = st.floats(-1000, 1000, width=32) | st.sampled_from([0.0, -0.0, 6.0, 448.0, 0.25, 2.0**-30])


def arrays(elements: st.SearchStrategy[object]) -> st.SearchStrategy[np.ndarray]:
    return SHAPES.flatmap(lambda s: hnp.arrays(F, s, elements=elements, fill=st.just(F(0.7))))


@st.composite
def specs(draw: st.DrawFn, ndim: int) -> QuantSpec:
    """Any spec that is valid for an array of so many axes."""
    name = draw(st.sampled_from(list(FORMATS)))
    row = FORMATS[name]
    fields: dict[str, object] = {
        "axis": draw(st.integers(-ndim, ndim - 1)),
        "rounding": draw(st.sampled_from(["nearest_even", "stochastic"])),
        "rbits": draw(st.sampled_from([8, 32])),
        "dialect": draw(st.sampled_from(list(DIALECTS))),
        "element_scale": draw(st.sampled_from([1.0, 1.0, 0.75, 0.1])),
    }
    if row.scale.name != "e8m0" or not DIALECTS[str(fields["dialect"])].mx_scale_rule:
        fields["scale_rule"] = draw(st.sampled_from([None, *row.scale_rules]))
    searched = fields.get("scale_rule") in E8M0_SEARCHES  # by values: no window, no statistic
    if row.scale.name == "e8m0" and not searched:
        fields["scale_window"] = draw(st.none() | st.integers(0, 300))
    if row.scale.name == "float32":
        fields["scale_dtype"] = draw(st.sampled_from([None, "float32", "float16"]))
    if row.zero_point:
        fields["symmetric"] = draw(st.booleans())
    if row.outliers:
        fields["outliers"] = draw(st.none() | st.integers(0, 32))
        return QuantSpec(name, **fields)
    rows = 1 if ndim == 1 else draw(st.sampled_from([1, 1, 2, 16]))
    tile = (rows, draw(st.sampled_from([1, 7, 16, 32, 64])))
    fields["tile"] = draw(st.sampled_from([None, "channel", "tensor", tile, tile]))
    if draw(st.booleans()):
        size, signs = draw(st.sampled_from([16, 32])), draw(st.sampled_from(["none", "random"]))
        fields["transform"] = Hadamard(size, signs, draw(st.integers(0, 2**64 - 1)))
    if fields.get("symmetric", True) and not searched:
        fields["statistic"] = draw(st.sampled_from(["amax", "amax", "percentile", "running"]))
        fields["percentile"] = draw(st.floats(0.5, 100))
    return QuantSpec(name, **fields)


def quantized(x: np.ndarray, spec: QuantSpec) -> QuantArray:
    return quantize(x, spec)[0]


@settings(CALM, max_examples=500)
@given(st.data())
def test_any_spec_on_any_array_matches_the_oracle(data: st.DataObject) -> None:
    x = data.draw(arrays(ANY_BITS) | arrays(FINITE) | arrays(MODEST), label="x")
    spec = data.draw(specs(x.ndim), label="spec")
    stream = None
    if spec.rounding == "stochastic":
        stream = Stream(seed=data.draw(st.integers(0, 2**64 - 1)), slot=3)
    previous = None
    if spec.statistic == "running" and data.draw(st.booleans()):
        grid = quantize(x, spec, stream)[0].scales.shape
        elements = st.floats(0, 2.0**20, width=32)
        previous = data.draw(hnp.arrays(F, grid, elements=elements, fill=st.just(F(3))))
    expected = oracle.quantize(x, spec, stream, previous)
    q, stats = quantize(x, spec, stream, previous)
    same_stored(q, stats, expected)
    same_bytes("dequantized", dequantize(q), expected.values)
    if previous is None:
        same_bytes("operand", fake_quantize(x, spec, stream)[0], expected.operand)


@pytest.mark.parametrize("name", MX)
@CALM
@given(x=arrays(FINITE), rule=st.sampled_from(["floor", "rceil", "ceil", "even"]))
def test_quantizing_again_changes_nothing(name: str, x: np.ndarray, rule: str) -> None:
    """True of the E8M0 formats: every value of a block is on the grid of the new scale, too."""
    spec = QuantSpec(name, scale_rule=rule)
    once = dequantize(quantized(x, spec))
    if np.isfinite(once).all():
        np.testing.assert_array_equal(dequantize(quantized(once, spec)), once)


@CALM
@given(x=arrays(FINITE), name=st.sampled_from(MX))
def test_error_within_half_a_step(x: np.ndarray, name: str) -> None:
    """Under rceil (which does not clip) every error is at most half the local step of the grid."""
    q = quantized(x, QuantSpec(name, scale_rule="rceil"))
    got = dequantize(q).astype(np.float64)
    scale = np.ldexp(1.0, q.scales.astype(np.int64) - 127)
    scale = np.repeat(scale, 32, axis=-1)[..., : x.shape[-1]]
    element = q.spec.row.element
    size = np.maximum(np.abs(x.astype(np.float64)) / scale, element.min_normal)
    step = 2.0 ** (np.floor(np.log2(size)) - element.mantissa_bits) * scale
    if not element.is_float:
        step = element.min_positive * scale
    ends = np.abs(x) > 2.0**126  # there the result may be infinite
    assert (ends | (np.abs(got - x) <= step / 2)).all()
