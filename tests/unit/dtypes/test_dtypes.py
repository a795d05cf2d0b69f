"""The dtype table and its promotion."""

from __future__ import annotations

import pickle

import ml_dtypes
import numpy as np
import pytest

import extensor as et
from extensor import dtypes
from extensor.formats import FORMATS


def test_one_blocked_dtype_per_format() -> None:
    assert [d.format for d in dtypes.BLOCKED.values()] == list(FORMATS.values())
    assert not set(dtypes.BLOCKED) & set(dtypes.DENSE)
    for name, dtype in dtypes.BLOCKED.items():
        assert getattr(et, name) is dtype
        assert dtype.is_blocked
        assert not dtype.is_float
    assert et.int8.format is None
    assert et.int8_blocked.format is FORMATS["int8"]
    assert et.int8 != et.int8_blocked


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("float32", et.float32),
        (np.float64, et.float64),
        (np.dtype("int8"), et.int8),
        (ml_dtypes.bfloat16, et.bfloat16),
        (np.dtype(ml_dtypes.bfloat16), et.bfloat16),
        (bool, et.bool_),
        (int, et.int64),
        (float, et.float32),
        (complex, et.complex64),
        ("mxfp4", et.mxfp4),
        ("int4_blocked", et.int4_blocked),
        (et.uint8, et.uint8),
    ],
)
def test_as_dtype(given: object, expected: et.DType) -> None:
    assert dtypes.as_dtype(given) is expected


@pytest.mark.parametrize("name", ["e2m1", "int4", "e4m3", "e3m2", "float4_e2m1fn"])
def test_an_element_without_a_scale_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=r"use x\.to_\w+\(\) or a blocked dtype"):
        et.ones(3).to(name)
    with pytest.raises(TypeError, match="no scale of its own"):
        et.ones(3).astype(name)


def test_the_refusal_points_to_mxfp4() -> None:
    with pytest.raises(TypeError, match=r"x\.to_mxfp4\(\).*et\.mxfp4"):
        et.ones(3).astype(ml_dtypes.float4_e2m1fn)


def test_unknown_names_list_near_ones() -> None:
    with pytest.raises(ValueError, match="did you mean 'float32'"):
        dtypes.as_dtype("flaot32")
    with pytest.raises(TypeError, match="expected an extensor dtype"):
        dtypes.as_dtype(3.5)
    with pytest.raises(TypeError, match="datetime64"):
        dtypes.as_dtype(np.datetime64)


PROMOTION = [
    ("int8", "uint8", "int16"),
    ("int32", "uint32", "int64"),
    ("bool", "int8", "int8"),
    ("bool", "float16", "float16"),
    ("int64", "float16", "float16"),
    ("int64", "float32", "float32"),
    ("float16", "bfloat16", "float32"),
    ("bfloat16", "bfloat16", "bfloat16"),
    ("bfloat16", "float32", "float32"),
    ("float32", "float64", "float64"),
    ("mxfp4", "float32", "float32"),
    ("mxfp4", "bfloat16", "float32"),
    ("mxfp4", "mxfp4", "float32"),
    ("nvfp4", "mxfp8_e4m3", "float32"),
    ("int8_blocked", "int8", "float32"),
    ("float32", "complex64", "complex64"),
    ("float64", "complex64", "complex128"),
    ("bfloat16", "complex64", "complex64"),
    ("int64", "complex64", "complex64"),
    ("mxfp4", "complex128", "complex128"),
]


@pytest.mark.parametrize(("a", "b", "expected"), PROMOTION)
def test_promotion(a: str, b: str, expected: str) -> None:
    first, second = dtypes.as_dtype(a), dtypes.as_dtype(b)
    assert dtypes.promote(first, second) is dtypes.as_dtype(expected)
    assert dtypes.promote(second, first) is dtypes.as_dtype(expected)


def test_promotion_agrees_with_numpy_within_a_kind() -> None:
    for a in dtypes.DENSE.values():
        for b in dtypes.DENSE.values():
            if a.kind != b.kind or {a.name, b.name} & {"bfloat16"}:
                continue
            assert a.numpy is not None
            common = np.promote_types(a.numpy, b.numpy)
            if common.kind == "f" and a.kind != "float":
                with pytest.raises(TypeError, match="no common integer type"):
                    dtypes.promote(a, b)
            else:
                assert dtypes.promote(a, b).numpy == common


def test_scalars_are_weak() -> None:
    assert (et.ones(2, "int8") + 1).dtype is et.int8
    assert (et.ones(2, "int8") + 1.0).dtype is et.float32
    assert (et.ones(2, "bfloat16") * 2.5).dtype is et.bfloat16
    assert (1 - et.ones(2, "float64")).dtype is et.float64
    assert (et.ones(2, "bool") + 1).dtype is et.int64
    assert (et.ones(2, "int32") / 2).dtype is et.float32
    assert (et.ones((2, 32)).to("mxfp4") * 2.0).dtype is et.float32
    assert (et.ones(2, "float32") + 1j).dtype is et.complex64
    assert (et.ones(2, "float64") * 1j).dtype is et.complex128
    assert (et.ones(2, "complex64") + 2.0).dtype is et.complex64
    with pytest.raises(OverflowError):
        et.ones(2, "int8") + 300


def test_a_scalar_beside_a_16_bit_float_is_not_rounded_first() -> None:
    x = et.full(1, 3.0, "bfloat16")
    once = np.float32(3.0) * np.float32(0.1)
    assert (x * 0.1).numpy()[0] == ml_dtypes.bfloat16(once)
    twice = np.float32(3.0) * np.float32(ml_dtypes.bfloat16(0.1))
    assert ml_dtypes.bfloat16(once) != ml_dtypes.bfloat16(twice) or x.item() == 3.0


def test_pickle_keeps_identity() -> None:
    for dtype in (*dtypes.DENSE.values(), *dtypes.BLOCKED.values()):
        assert pickle.loads(pickle.dumps(dtype)) is dtype


def test_itemsize() -> None:
    assert et.bfloat16.itemsize == 2
    with pytest.raises(TypeError, match="bits_per_element"):
        _ = et.mxfp4.itemsize


def test_foreign_arrays_are_refused() -> None:
    with pytest.raises(TypeError, match="byte order"):
        et.from_numpy(np.zeros(3, ">f4"))
    with pytest.raises(TypeError, match="longdouble|float128"):
        et.from_numpy(np.zeros(3, np.longdouble))
