"""The tables of grids, formats and dialects against lists written out by hand."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import pytest

from extensor.formats import DIALECTS, ELEMENTS, FORMATS, SCALES
from tests.oracle.grid import GRIDS

# name: bits, largest, smallest normal, smallest positive, emax
NUMBERS = {
    "e2m1": (4, 6.0, 1.0, 0.5, 2),
    "e2m3": (6, 7.5, 1.0, 0.125, 2),
    "e3m2": (6, 28.0, 0.25, 0.0625, 4),
    "e4m3": (8, 448.0, 2.0**-6, 2.0**-9, 8),
    "e5m2": (8, 57344.0, 2.0**-14, 2.0**-16, 15),
    "int8_mx": (8, 127 / 64, 1 / 64, 1 / 64, 0),
    "int8": (8, 127.0, 1.0, 1.0, 6),
    "int4": (4, 7.0, 1.0, 1.0, 2),
    "int5": (5, 15.0, 1.0, 1.0, 3),
    "int6": (6, 31.0, 1.0, 1.0, 4),
}


def test_every_grid_is_listed_here() -> None:
    assert set(ELEMENTS) == set(NUMBERS) == set(GRIDS)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_a_grid(name: str) -> None:
    row = ELEMENTS[name]
    got = (row.bits, row.max, row.min_normal, row.min_positive, row.emax)
    assert got == NUMBERS[name]


@pytest.mark.parametrize("name", NUMBERS)
def test_value_of_every_code(name: str) -> None:
    row, grid = ELEMENTS[name], GRIDS[name]
    half = 1 << (row.bits - 1)
    for code in range(1 << row.bits):
        value = row.values[code]
        if grid.signed_integer:
            assert value == float((code - 2 * half if code >= half else code) * grid.values[1])
        elif code % half < len(grid.values):
            assert abs(value) == float(grid.values[code % half])
            assert math.copysign(1, value) == (-1 if code >= half else 1)
        else:
            infinite = name == "e5m2" and code % half == 0x7C
            assert math.isinf(value) if infinite else math.isnan(value)


def test_e4m3_has_two_nans_and_e5m2_six() -> None:
    assert [c for c in range(256) if math.isnan(ELEMENTS["e4m3"].values[c])] == [0x7F, 0xFF]
    expected = [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]
    assert [c for c in range(256) if math.isnan(ELEMENTS["e5m2"].values[c])] == expected
    assert ELEMENTS["e4m3"].nan_code == 0x7F
    assert ELEMENTS["e5m2"].nan_code == 0x7F
    assert all(ELEMENTS[n].nan_code is None for n in NUMBERS if n not in ("e4m3", "e5m2"))


def test_a_code_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"e2m1: expected a code in 0\.\.15, got 16"):
        ELEMENTS["e2m1"].decode(16)


def test_blocked_formats() -> None:
    got = {n: (r.element.name, r.scale.name, r.tile, r.scale_rule) for n, r in FORMATS.items()}
    assert got == {
        "mxfp8_e4m3": ("e4m3", "e8m0", (1, 32), "floor"),
        "mxfp8_e5m2": ("e5m2", "e8m0", (1, 32), "floor"),
        "mxfp6_e2m3": ("e2m3", "e8m0", (1, 32), "floor"),
        "mxfp6_e3m2": ("e3m2", "e8m0", (1, 32), "floor"),
        "mxfp4": ("e2m1", "e8m0", (1, 32), "floor"),
        "mxint8": ("int8_mx", "e8m0", (1, 32), "floor"),
        "nvfp4": ("e2m1", "ue4m3", (1, 16), "amax"),
        "nvfp4_fp8exact": ("e2m1", "ue4m3", (1, 16), "least_error"),
        "fp8_e4m3": ("e4m3", "float32", "tensor", "amax"),
        "fp8_e5m2": ("e5m2", "float32", "tensor", "amax"),
        "int8": ("int8", "float32", "channel", "amax"),
        "int4": ("int4", "float32", (1, 32), "amax"),
        "int5": ("int5", "float32", (1, 32), "amax"),
        "int6": ("int6", "float32", (1, 32), "amax"),
        "outlier": ("e4m3", "float32", "channel", "amax"),
    }
    assert {n for n, r in FORMATS.items() if r.tensor_scale} == {"nvfp4", "nvfp4_fp8exact"}
    assert {n for n, r in FORMATS.items() if r.zero_point} == {"int8", "int4"}
    assert {n: r.outliers for n, r in FORMATS.items() if r.outliers} == {"outlier": 32}


def test_bits_per_element() -> None:
    got = {n: r.bits_per_element() for n, r in FORMATS.items()}
    assert got["mxfp4"] == 4.25
    assert got["mxfp6_e2m3"] == got["mxfp6_e3m2"] == 6.25
    assert got["mxfp8_e4m3"] == got["mxfp8_e5m2"] == got["mxint8"] == 8.25
    assert got["nvfp4"] == 4.5
    assert got["fp8_e4m3"] == got["int8"] == 8.0
    assert FORMATS["mxfp4"].bits_per_element((16, 16)) == 4 + 8 / 256


def test_scale_bits() -> None:
    assert {n: s.bits for n, s in SCALES.items()} == {
        "e8m0": 8,
        "ue4m3": 8,
        "float32": 32,
        "float16": 16,
    }


def test_dialects() -> None:
    got = {
        n: (
            d.mx_scale_rule,
            d.ties,
            d.mx_inf_byte,
            d.nvfp4_order,
            d.nvfp4_zero_scale,
            d.nvfp4_least_scale,
            d.nvfp4_tiny_saturates,
        )
        for n, d in DIALECTS.items()
    }
    te = "transformer_engine"
    assert got == {
        "ocp": (None, "even", 0xFF, te, 0x00, 0x00, False),
        "nvidia": ("rceil", "even", 0xFE, te, 0x00, 0x00, True),
        "torchao": ("floor", "even", None, "torchao", 0x08, 0x08, False),
        "compressed_tensors": ("even", "even", 0xFF, te, 0x20, 0x00, False),
        "model_optimizer": ("rceil", "even", 0xFF, "model_optimizer", 0x38, 0x01, False),
        "microxcaling": ("floor", "away", 0xFF, te, 0x00, 0x00, False),
        "gguf": ("floor", "even", 0xFF, te, 0x00, 0x00, False),
    }
    ties = {n: d.ties_in("mxfp4") for n, d in DIALECTS.items() if d.ties_in("mxfp4") != d.ties}
    assert ties == {"model_optimizer": "zero", "gguf": "zero"}
    signs = {(n, f): d.zero_sign_in(f) for n, d in DIALECTS.items() for f in FORMATS}
    assert {key: sign for key, sign in signs.items() if sign != "kept"} == {
        ("compressed_tensors", f): "zeros_positive" for f in FORMATS
    } | {
        ("model_optimizer", "mxfp4"): "zeros_negative",
        ("model_optimizer", "nvfp4"): "zeros_positive",
        ("gguf", "mxfp4"): "codes_positive",
    }
    assert {n for n, d in DIALECTS.items() if d.mx_least_divisor != -127} == {"torchao"}


@pytest.mark.parametrize("table", [ELEMENTS, FORMATS, SCALES, DIALECTS])
def test_tables_cannot_be_changed(table: dict[str, object]) -> None:
    name, row = next(iter(table.items()))
    with pytest.raises(TypeError):
        table[name] = row
    with pytest.raises(FrozenInstanceError):
        row.name = "other"
    assert all(name == row.name for name, row in table.items())
