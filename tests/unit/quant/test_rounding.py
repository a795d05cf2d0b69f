"""Rounding to element grids, against libraries, integers and the oracle.

Every 16-bit float is judged by two libraries and by integer arithmetic; float32 values near grid
values and ties by the scalar oracle.
"""

from __future__ import annotations

import itertools

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as hypothesis_arrays

from ci.exhaustive import ML_DTYPES
from extensor.formats import ELEMENTS
from extensor.quant.rounding import decode, encode, pack, unpack
from tests.oracle import grid as oracle
from tests.oracle.blocks import pack as oracle_pack
from tests.oracle.rounding import magnitude_codes

FLOATS = ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2")
# Where ml_dtypes 0.6 does not do what this project does: what it makes of NaN (a zero where the
# grid has none), and of values that round beyond the largest one. Codes without the sign bit.
ML_NAN = {"e2m1": 0, "e2m3": 0, "e3m2": 0, "e4m3": 0x7F, "e5m2": 0x7E}
ML_OVERFLOW = {"e2m1": 0x7, "e2m3": 0x1F, "e3m2": 0x1F, "e4m3": 0x7F, "e5m2": 0x7C}


def all_bfloat16() -> np.ndarray:
    bits = np.arange(1 << 16, dtype=np.uint16)
    return bits.view(ml_dtypes.bfloat16).astype(np.float32)


def all_float16() -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


INPUTS = {"bfloat16": all_bfloat16(), "float16": all_float16()}


@pytest.mark.parametrize("source", INPUTS)
@pytest.mark.parametrize("name", FLOATS)
def test_every_16_bit_float_as_ml_dtypes(name: str, source: str) -> None:
    x, element = INPUTS[source], ELEMENTS[name]
    nan = np.isnan(x)
    with np.errstate(invalid="ignore"):  # the library's cast of NaN
        theirs = x.astype(ML_DTYPES[name]).view(np.uint8)
    codes, saturated = encode(x[~nan], element)
    overflowed = (theirs[~nan] & (element.sign_mask - 1)) == ML_OVERFLOW[name]
    if name in ("e4m3", "e5m2"):  # overflow has a code of its own there
        np.testing.assert_array_equal(overflowed, saturated)
    else:
        assert (overflowed | ~saturated).all()
    top = element.max_magnitude_code
    sign = np.where(np.signbit(x[~nan]), element.sign_mask, 0)
    expected = np.where(saturated, top | sign, theirs[~nan])
    np.testing.assert_array_equal(codes, expected)
    # The table of differences stays true, or this test has to be read again.
    assert set(theirs[nan] & (element.sign_mask - 1)) == {ML_NAN[name]}
    if element.nan_code is None:
        with pytest.raises(ValueError, match="has no NaN"):
            encode(x, element)
    else:
        ours, marked = encode(x[nan], element)
        assert np.isnan(decode(ours, element)).all()
        assert not marked.any()


@pytest.mark.parametrize("source", INPUTS)
@pytest.mark.parametrize("name", [*FLOATS, "int8_mx"])
def test_every_16_bit_float_as_gfloat(name: str, source: str) -> None:
    x, element = INPUTS[source], ELEMENTS[name]
    x = x[np.isfinite(x)]
    table = gfloat.formats.format_info_ocp_int8 if name == "int8_mx" else None
    table = table or getattr(gfloat.formats, f"format_info_ocp_{name}")
    theirs = gfloat.round_ndarray(table, x.astype(np.float64), sat=True)
    if name == "int8_mx":  # gfloat keeps -2.0, this project clamps to -127/64
        theirs = np.maximum(theirs, -127 / 64)
    codes, saturated = encode(x, element)
    values = decode(codes, element)
    np.testing.assert_array_equal(values, theirs.astype(np.float32))
    if element.is_float:
        np.testing.assert_array_equal(np.signbit(values), np.signbit(x))
    # Saturated: rounds beyond the largest value on the grid continued upwards.
    last = element.max - ELEMENTS[name].decode(element.max_magnitude_code - 1)
    tie = element.max + last / 2
    even = name not in ("e4m3",)  # only e4m3's largest code is even: its tie rounds down
    np.testing.assert_array_equal(saturated, np.abs(x) >= tie if even else np.abs(x) > tie)


@pytest.mark.parametrize("source", INPUTS)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_every_16_bit_float_as_rint(name: str, source: str) -> None:
    x, element = INPUTS[source], ELEMENTS[name]
    x = x[~np.isnan(x)]
    codes, saturated = encode(x, element)
    expected = np.clip(np.rint(x), -element.max, element.max)
    np.testing.assert_array_equal(decode(codes, element), expected)
    np.testing.assert_array_equal(saturated, np.abs(np.rint(x)) > element.max)


def critical(name: str) -> np.ndarray:
    """Every grid value and every midpoint of either sign, with both float32 neighbours."""
    grid = oracle.GRIDS[name]
    steps = [float(v) for v in (*grid.values, grid.beyond)]
    points = steps + [(a + b) / 2 for a, b in itertools.pairwise(steps)]
    points += [steps[1] / 4, 1e-45, 1.2e-38, 3.4e38, np.inf]
    base = np.array(points, np.float32)
    around = [base, np.nextafter(base, np.float32(0)), np.nextafter(base, np.float32(np.inf))]
    x = np.unique(np.concatenate(around))
    return np.concatenate([x, -x])


@pytest.mark.parametrize("ties", ["even", "away", "zero"])
@pytest.mark.parametrize("name", ELEMENTS)
def test_around_every_value_and_midpoint(name: str, ties: str) -> None:
    x = critical(name)
    codes, saturated = encode(x, ELEMENTS[name], ties=ties)
    for k, value in enumerate(x):
        expected = oracle.encode(value, name, ties=ties)
        assert (int(codes[k]), bool(saturated[k])) == expected, f"{value!r} on {name}, ties {ties}"


@pytest.mark.parametrize("name", ELEMENTS)
def test_stochastic_around_every_value_and_midpoint(name: str) -> None:
    x = critical(name)
    rng = np.random.default_rng(5)
    words = rng.integers(0, 1 << 32, x.shape, dtype=np.uint32)
    fixed = (0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1)
    for w in (words, *(np.full(x.shape, f, np.uint32) for f in fixed)):
        codes, saturated = encode(x, ELEMENTS[name], words=w)
        for k, value in enumerate(x):
            expected = oracle.encode(value, name, int(w[k]))
            assert (int(codes[k]), bool(saturated[k])) == expected, (
                f"{value!r} on {name}, word {w[k]}"
            )


ROUNDINGS = ("even", "away", "zero", "stochastic")


def check_magnitudes(x: np.ndarray, name: str, rounding: str, words: np.ndarray) -> None:
    """Codes and saturation in float32 steps against the same in integers."""
    element = ELEMENTS[name]
    stochastic = rounding == "stochastic"
    args = (words, "even") if stochastic else (None, rounding)
    codes, saturated = encode(x, element, *args)
    expected = magnitude_codes(x, element, *args)
    top = element.max_magnitude_code
    np.testing.assert_array_equal(saturated, expected > top)
    magnitude = np.minimum(expected, top)
    if element.is_float:
        expected_codes = magnitude + element.sign_mask * np.signbit(x)
    else:
        expected_codes = np.where(np.signbit(x), -magnitude, magnitude) % (1 << element.bits)
    np.testing.assert_array_equal(codes, expected_codes)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", ELEMENTS)
def test_every_16_bit_float_as_in_integers(name: str, rounding: str) -> None:
    rng = np.random.default_rng(3)
    for x in INPUTS.values():
        x = x[~np.isnan(x)]
        ends = np.array([0, 1, 1 << 31, (1 << 31) - 1, (1 << 32) - 1], np.uint32)
        words = np.where(
            rng.integers(0, 2, x.shape),
            rng.integers(0, 1 << 32, x.shape, dtype=np.uint32),
            rng.choice(ends, x.shape),
        ).astype(np.uint32)
        check_magnitudes(x, name, rounding, words)


@settings(max_examples=300)
@given(
    bits=hypothesis_arrays(np.uint32, 8),
    words=hypothesis_arrays(np.uint32, 8),
    name=st.sampled_from(sorted(ELEMENTS)),
    rounding=st.sampled_from(ROUNDINGS),
)
def test_any_float32_as_in_integers(
    bits: np.ndarray, words: np.ndarray, name: str, rounding: str
) -> None:
    x = bits.view(np.float32)
    check_magnitudes(np.where(np.isnan(x), np.float32(1), x), name, rounding, words)


@pytest.mark.parametrize("name", ["e2m1", "e5m2", "int8"])
def test_long_and_transposed_arrays_as_short_ones(name: str) -> None:
    """Long arrays are rounded in segments, and keep their order in memory."""
    rng = np.random.default_rng(9)
    x = rng.standard_normal((70, 1031)).astype(np.float32)
    words = rng.integers(0, 1 << 32, x.shape, dtype=np.uint32)
    rows = [encode(x[i], ELEMENTS[name], words[i]) for i in range(len(x))]
    for view in (x, np.asfortranarray(x), np.repeat(x, 2, axis=1)[:, ::2]):
        codes, saturated = encode(view, ELEMENTS[name], words)
        np.testing.assert_array_equal(codes, [row[0] for row in rows])
        np.testing.assert_array_equal(saturated, [row[1] for row in rows])
        np.testing.assert_array_equal(
            decode(codes, ELEMENTS[name]), decode(np.ascontiguousarray(codes), ELEMENTS[name])
        )


@pytest.mark.parametrize("name", ELEMENTS)
def test_decode_gives_the_table(name: str) -> None:
    element = ELEMENTS[name]
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    values = decode(codes, element)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, np.array(element.values, np.float32))


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 7, 8, 31, 32])
def test_packing(bits: int, length: int) -> None:
    rng = np.random.default_rng(length)
    codes = rng.integers(0, 1 << bits, (3, length), dtype=np.uint8)
    packed = pack(codes, bits)
    expected = oracle_pack(codes, -1, 1, bits)
    np.testing.assert_array_equal(packed, expected)
    assert packed.dtype == np.uint8
    np.testing.assert_array_equal(unpack(packed, bits, length), codes)


def test_packing_by_hand() -> None:
    np.testing.assert_array_equal(pack(np.array([0x1, 0xA, 0xF], np.uint8), 4), [0xA1, 0x0F])
    six = np.array([0b000001, 0b000011, 0b100000, 0b111111], np.uint8)
    np.testing.assert_array_equal(pack(six, 6), [0b11000001, 0b00000000, 0b11111110])
