"""QuantSpec and the reference: an error says what was expected, what was given, what to do."""

from __future__ import annotations

import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.formats import DIALECTS, FORMATS
from extensor.quant.array import (
    block_grid,
    coded_length,
    packed_length,
    stored_nbytes,
    tile_extent,
)
from extensor.quant.reference import dequantize, fake_quantize, quantize
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream

BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"format": "mxfp5"}, ValueError, r"no format named 'mxfp5'; did you mean .*'mxfp4'"),
    ({"format": "MXFP4"}, ValueError, r"no format named 'MXFP4'.*known: .*mxfp4.*nvfp4"),
    ({"format": None}, TypeError, r"format: expected a string, got None"),
    ({"dialect": "nvida"}, ValueError, r"no dialect named 'nvida'; did you mean .*'nvidia'"),
    ({"scale_rule": "flor"}, ValueError, r"scale rule of mxfp4 named 'flor'; did you mean .*floor"),
    ({"scale_rule": "amax"}, ValueError, r"no scale rule of mxfp4 named 'amax'"),
    (
        {"format": "nvfp4", "scale_rule": "floor"},
        ValueError,
        r"scale rule of nvfp4 .*four_over_six",
    ),
    ({"axis": 1.0}, TypeError, r"axis: expected an int, got 1\.0"),
    ({"axis": True}, TypeError, r"axis: expected an int, got True"),
    ({"axis": None}, TypeError, r"axis: expected an int, got None"),
    ({"tile": (1, 0)}, ValueError, r"1 or more, got \(1, 0\)"),
    ({"tile": (1, -32)}, ValueError, r"1 or more, got \(1, -32\)"),
    ({"tile": (0, 32)}, ValueError, r"1 or more"),
    ({"tile": (1, 2**31)}, ValueError, r"at most 2147483647.*'channel' spans the axis"),
    ({"tile": (10**30, 1)}, ValueError, r"at most 2147483647"),
    ({"tile": (1, 32.0)}, TypeError, r"tile: expected \(rows, columns\)"),
    ({"tile": (1, True)}, TypeError, r"tile: expected \(rows, columns\)"),
    ({"tile": 32}, TypeError, r"tile: expected \(rows, columns\).*got 32"),
    ({"tile": [1, 32]}, TypeError, r"tile: expected \(rows, columns\)"),
    ({"tile": (1, 2, 3)}, TypeError, r"tile: expected"),
    ({"tile": "row"}, TypeError, r"'channel', 'tensor' or None, got 'row'"),
    ({"rounding": "nearest"}, ValueError, r"rounding: expected 'nearest_even' or 'stochastic'"),
    ({"rbits": 16}, ValueError, r"rbits: expected 8 or 32, got 16"),
    ({"transform": 16}, TypeError, r"transform: expected a Hadamard or None, got 16"),
    ({"statistic": "max"}, ValueError, r"statistic: expected 'amax', 'percentile' or 'running'"),
    ({"percentile": 0.0}, ValueError, r"percentile: expected a number in \(0, 100\]"),
    ({"percentile": 100.5}, ValueError, r"percentile"),
    ({"percentile": float("nan")}, ValueError, r"percentile"),
    ({"decay": 1.0}, ValueError, r"decay: expected a number in \[0, 1\)"),
    ({"decay": -0.1}, ValueError, r"decay"),
    ({"element_scale": 0.0}, ValueError, r"element_scale: expected a number in \(0, 1\]"),
    ({"element_scale": 1.5}, ValueError, r"element_scale"),
    ({"element_scale": float("nan")}, ValueError, r"element_scale"),
    ({"scale_window": -1}, ValueError, r"scale_window: expected an int >= 0, got -1"),
    ({"scale_window": 2.0}, TypeError, r"scale_window: expected an int or None, got 2\.0"),
    ({"format": "nvfp4", "scale_window": 28}, ValueError, r"scale_window: only for E8M0.*nvfp4"),
    (
        {"scale_dtype": "float32"},
        ValueError,
        r"scale_dtype: expected None .*got 'float32' with mxfp4",
    ),
    ({"format": "int8", "scale_dtype": "e8m0"}, ValueError, r"scale_dtype: expected None"),
    ({"format": "int8", "scale_dtype": "float64"}, ValueError, r"scale_dtype: expected None"),
    ({"symmetric": False}, ValueError, r"mxfp4 has no zero point; use int8 or int4"),
    ({"format": "fp8_e4m3", "symmetric": False}, ValueError, r"no zero point"),
    (
        {"format": "int8", "symmetric": False, "statistic": "percentile"},
        ValueError,
        r"symmetric=False",
    ),
    ({"rebased": True}, ValueError, r"rebased: expected MXFP8 in tiles \(1, n\).*got mxfp4"),
    (
        {"format": "mxfp8_e4m3", "rebased": True, "tile": (32, 32)},
        ValueError,
        r"rebased: .*in tiles \(32, 32\)",
    ),
    (
        {"format": "mxfp8_e5m2", "rebased": True, "tile": (1, 48)},
        ValueError,
        r"n a divisor of 128.*\(1, 48\)",
    ),
    (
        {"format": "mxfp8_e4m3", "rebased": True, "transform": Hadamard(16)},
        ValueError,
        r"transform",
    ),
    ({"outliers": 4}, ValueError, r"outliers: expected None .*got 4 with mxfp4"),
    ({"format": "outlier", "outliers": 33}, ValueError, r"0\.\.32.*got 33"),
    ({"format": "outlier", "outliers": -1}, ValueError, r"outliers: expected"),
    ({"format": "outlier", "outliers": True}, TypeError, r"outliers: expected an int or None"),
    ({"format": "outlier", "transform": Hadamard(16)}, ValueError, r"outlier codes whole rows"),
    ({"format": "outlier", "statistic": "running"}, ValueError, r"outlier codes whole rows"),
    ({"format": "outlier", "tile": (1, 32)}, ValueError, r"outlier codes whole rows"),
]


@pytest.mark.parametrize(("fields", "kind", "message"), BAD)
def test_bad_fields(fields: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        QuantSpec(**{"format": "mxfp4", **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 8}, r"Hadamard size: expected one of .*128.*got 8"),
        ({"size": 256}, r"Hadamard size"),
        ({"signs": "some"}, r"Hadamard signs: expected none, .* or per_step, got 'some'"),
        ({"signs": "per_step", "step": -1}, r"Hadamard step: expected an int in 0\.\.2\*\*32"),
        ({"signs": "random", "stream": 1}, r"only for signs='per_step', got signs='random'"),
        ({"seed": -1}, r"Hadamard seed: expected an int in 0\.\.2\*\*64"),
        ({"seed": 1 << 64}, r"Hadamard seed"),
        ({"seed": 1.5}, r"Hadamard seed"),
    ],
)
def test_bad_transforms(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Hadamard(**fields)


@pytest.mark.parametrize("name", [n for n, d in DIALECTS.items() if d.mx_scale_rule])
def test_a_rule_that_contradicts_the_dialect(name: str) -> None:
    theirs = DIALECTS[name].mx_scale_rule
    for rule in FORMATS["mxfp4"].scale_rules:
        if rule == theirs:
            assert QuantSpec("mxfp4", dialect=name, scale_rule=rule).rule == theirs
        else:
            message = f"dialect '{name}' means scale_rule='{theirs}', got '{rule}'"
            with pytest.raises(ValueError, match=message):
                QuantSpec("mxfp4", dialect=name, scale_rule=rule)
    # NVFP4 has rules of its own, about which these dialects say nothing.
    assert QuantSpec("nvfp4", dialect=name, scale_rule="four_over_six").rule == "four_over_six"


@pytest.mark.parametrize("axis", [2, -3, 100])
def test_axis_out_of_range(axis: int) -> None:
    with pytest.raises(ValueError, match=rf"axis: expected -2\.\.1 .*2 axes, got {axis}"):
        quantize(np.ones((3, 4), np.float32), QuantSpec("mxfp4", axis=axis))


def test_a_scalar_has_no_axis() -> None:
    with pytest.raises(ValueError, match=r"scalar has no axis.*reshape"):
        quantize(np.float32(1).reshape(()), QuantSpec("mxfp4"))


def test_a_tile_of_rows_needs_two_axes() -> None:
    with pytest.raises(ValueError, match=r"needs two axes"):
        quantize(np.ones(64, np.float32), QuantSpec("mxfp4", tile=(16, 16)))


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.bool_, np.complex64])
def test_only_floats_are_quantized(dtype: type) -> None:
    with pytest.raises(TypeError, match="expected a float array, got"):
        quantize(np.ones((2, 32), dtype), QuantSpec("mxfp4"))


def test_a_stream_exactly_when_rounding_is_stochastic() -> None:
    x = np.ones((2, 32), np.float32)
    with pytest.raises(ValueError, match=r"'stochastic' needs a stream"):
        quantize(x, QuantSpec("mxfp4", rounding="stochastic"))
    with pytest.raises(ValueError, match=r"'nearest_even' takes no stream"):
        quantize(x, QuantSpec("mxfp4"), Stream(seed=0))


def test_previous_maxima_that_do_not_fit() -> None:
    x = np.ones((2, 64), np.float32)
    running = QuantSpec("mxfp4", statistic="running")
    good = np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match="only with statistic='running', not 'amax'"):
        quantize(x, QuantSpec("mxfp4"), None, good)
    factors = (np.float32("nan"), np.float32("inf"), np.float32(-1))
    wrong = (good[:, :1], good.astype(np.float64), *(good * f for f in factors))
    for previous in wrong:
        with pytest.raises(ValueError, match="previous_amax: expected"):
            quantize(x, running, None, previous)


def test_resolving_fills_in_what_depends_on_the_array() -> None:
    spec = QuantSpec("nvfp4", axis=-2).resolve(3)
    assert (spec.axis, spec.tile, spec.scale_rule) == (1, (1, 16), "amax")
    assert QuantSpec("mxfp4", dialect="nvidia").resolve(1).scale_rule == "rceil"
    assert spec.resolve(3) == spec


def test_replacing_checks_again() -> None:
    with pytest.raises(ValueError, match="rbits"):
        QuantSpec("mxfp4").replace(rbits=4)


def test_extents_grids_and_lengths() -> None:
    spec = QuantSpec("mxfp6_e2m3", axis=0, tile=(4, 8), transform=Hadamard(16)).resolve(3)
    shape = (33, 5, 6)
    assert tile_extent(spec, shape) == (8, 1, 4)  # before axis 0 comes, cyclically, the last
    assert coded_length(spec, shape) == 48
    assert block_grid(spec, shape) == (6, 5, 2)
    assert packed_length(spec, shape) == 36
    q, stats = quantize(np.ones(shape, np.float32), spec)
    assert q.codes.shape == (36, 5, 6)
    assert q.scales.shape == (6, 5, 2)
    assert q.shape == shape
    assert stats.count == 48 * 5 * 6


def test_real_sizes_in_bytes() -> None:
    x = np.ones((4, 64), np.float32)
    sizes = {
        "mxfp4": 4 * 32 + 4 * 2,
        "nvfp4": 4 * 32 + 4 * 4 + 4,
        "mxfp6_e2m3": 4 * 48 + 4 * 2,
        "mxfp8_e5m2": 4 * 64 + 4 * 2,
        "mxint8": 4 * 64 + 4 * 2,
        "fp8_e4m3": 4 * 64 + 4,
        "int8": 4 * 64 + 4 * 4,
        "int4": 4 * 32 + 4 * 2 * 4,
        "outlier": 4 * 64 + 4 * 4 + 4 * 4 + 4 * 8 * (4 + 4),
    }
    for name, size in sizes.items():
        q, _ = quantize(x, QuantSpec(name))
        assert q.nbytes == size, name
        assert q.nbytes == sum(part.nbytes for part in q.parts.values())
    half, _ = quantize(x, QuantSpec("int4", scale_dtype="float16", symmetric=False))
    assert half.nbytes == 4 * 32 + 4 * 2 * (2 + 1)


@pytest.mark.parametrize("shape", [(4, 64), (3, 70), (2, 5, 33), (0, 64), (64, 0)])
@pytest.mark.parametrize("name", [n for n, row in FORMATS.items() if not row.outliers])
def test_sizes_that_are_foretold_are_the_real_ones(name: str, shape: tuple[int, ...]) -> None:
    asymmetric = [QuantSpec(name, symmetric=False)] if name in ("int4", "int8") else []
    for spec in (QuantSpec(name), QuantSpec(name, axis=0), *asymmetric):
        x = np.ones(shape, np.float32)
        assert stored_nbytes(spec.resolve(len(shape)), shape) == quantize(x, spec)[0].nbytes


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64, np.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_every_float_type_goes_in_and_float32_comes_out(name: str, dtype: type) -> None:
    """16-bit floats are exact in float32; float64 is rounded to float32 first."""
    x = np.random.default_rng(1).standard_normal((3, 40)).astype(dtype)
    before = x.copy()
    q, _ = quantize(x, QuantSpec(name))
    same, _ = quantize(x.astype(np.float32), QuantSpec(name))
    for part, other in zip(q.parts.values(), same.parts.values(), strict=True):
        np.testing.assert_array_equal(part, other)
    assert dequantize(q).dtype == fake_quantize(x, QuantSpec(name))[0].dtype == np.float32
    np.testing.assert_array_equal(x, before)


def test_float64_beyond_float32_follows_the_rule_for_infinity() -> None:
    x = np.ones((1, 64))
    x[0, 3] = 1e300
    q, _ = quantize(x, QuantSpec("mxfp4"))
    np.testing.assert_array_equal(q.scales, [[0xFF, 125]])


@pytest.mark.parametrize("name", FORMATS)
def test_views_with_any_strides(name: str) -> None:
    base = np.random.default_rng(2).standard_normal((40, 6)).astype(np.float32)
    for view in (base.T, base[::2], base[:, ::-1], base[::-1].T):
        q, _ = quantize(view, QuantSpec(name))
        same, _ = quantize(np.ascontiguousarray(view), QuantSpec(name))
        np.testing.assert_array_equal(q.codes, same.codes)
        np.testing.assert_array_equal(dequantize(q), dequantize(same))


def test_specs_are_equal_by_their_fields_whatever_was_derived_of_them() -> None:
    """A hash is kept, but not by a copy with other signs, nor in another process."""
    transform = Hadamard(32, "per_step")
    spec = QuantSpec("mxfp4", transform=transform)
    assert hash(spec) == hash(QuantSpec("mxfp4", transform=transform))
    one, two = (spec.with_signs(Hadamard(32, "per_step", step=n)) for n in (1, 2))
    again = QuantSpec("mxfp4", transform=Hadamard(32, "per_step", step=1))
    assert len({spec, one, two}) == 3 and one == again and hash(one) == hash(again)
    assert two.with_signs(one.transform).drawn_from is one.drawn_from is spec
    copy = pickle.loads(pickle.dumps(one))
    assert copy == one and vars(copy).keys() == QuantSpec.__dataclass_fields__.keys()
