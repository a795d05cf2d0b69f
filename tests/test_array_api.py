"""The Python Array API standard (2025.12): special values and arguments, beside numpy.

Names, signatures, promotion and drawn calls of every function: test_array_api_peer.py.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import numpy as np
import pytest

import extensor as et

DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
          "float32", "float64", "complex64", "complex128")  # fmt: skip


def test_namespace_of_a_tensor() -> None:
    x = et.zeros((2, 3))
    assert x.__array_namespace__() is x.__array_namespace__(api_version="2025.12") is et
    with pytest.raises(ValueError, match="up to 2025.12"):
        x.__array_namespace__(api_version="1999.01")
    assert et.__array_namespace_info__().dtypes(kind="real floating").keys() == {
        "float32",
        "float64",
    }
    assert x.mT.shape == (3, 2) and x.to_device(x.device) is x
    assert (et.pi, et.e, et.inf, et.newaxis) == (np.pi, np.e, np.inf, None)


def test_casts_are_numpys_within_a_kind() -> None:
    """Promotion: test_array_api_peer.py and tests/unit/dtypes."""
    for a, b in itertools.product(DTYPES, DTYPES):
        kinds = {np.dtype(d).kind.replace("u", "i") for d in (a, b)}
        if len(kinds) == 1 and not (np.promote_types(a, b) == np.float64 and kinds == {"i"}):
            assert et.can_cast(a, b) == np.can_cast(a, b), (a, b)


GRID = np.array([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.5, -3.0, 1e-40, 3e38, np.inf, -np.inf, np.nan])
UNARY = {
    "abs": "abs", "acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh",
    "atan": "arctan", "atanh": "arctanh", "ceil": "ceil", "cos": "cos", "cosh": "cosh",
    "exp": "exp", "expm1": "expm1", "floor": "floor", "isfinite": "isfinite", "isinf": "isinf",
    "isnan": "isnan", "log": "log", "log10": "log10", "log1p": "log1p", "log2": "log2",
    "logical_not": "logical_not", "negative": "negative", "positive": "positive",
    "round": "round", "sign": "sign", "signbit": "signbit", "sin": "sin", "sinh": "sinh",
    "sqrt": "sqrt", "square": "square", "tan": "tan", "tanh": "tanh", "trunc": "trunc",
}  # fmt: skip
BINARY = {
    "add": "add", "atan2": "arctan2", "copysign": "copysign", "divide": "divide",
    "floor_divide": "floor_divide", "hypot": "hypot", "logaddexp": "logaddexp",
    "maximum": "maximum", "minimum": "minimum", "multiply": "multiply",
    "nextafter": "nextafter", "pow": "power", "remainder": "remainder", "subtract": "subtract",
    "equal": "equal", "less": "less", "greater_equal": "greater_equal",
}  # fmt: skip

CUPY_DIFFERS = ("floor_divide", "maximum", "minimum", "remainder")
"""cupy: which of 0 and -0 is larger; quotients and remainders by 0, of infinities, huge ones."""


def _same(got: et.ExTensor, expected: Any) -> None:
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-13, atol=0)
    if got.dtype.is_float:
        kept = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(got.numpy())[kept], np.signbit(expected)[kept])


@pytest.mark.parametrize("name", UNARY)
def test_special_values_of_one(name: str) -> None:
    with np.errstate(all="ignore"):
        _same(getattr(et, name)(et.ExTensor(GRID)), getattr(np, UNARY[name])(GRID))


@pytest.mark.parametrize("name", BINARY)
def test_special_values_of_two(name: str) -> None:
    a, b = GRID[:, None], GRID[None]
    with np.errstate(all="ignore"):
        expected = getattr(np, BINARY[name])(a, b)
        got = getattr(et, name)(et.ExTensor(a), et.ExTensor(b))
    if name == "floor_divide":  # beside infinities numpy has Python's NaN and -1
        with np.errstate(all="ignore"):
            expected = np.where(np.isinf(a) | np.isinf(b), a / b, expected)
    if got.device != "cpu" and name in CUPY_DIFFERS:
        finite = (np.abs(a) < 1e30) & (a != 0) & (np.abs(b) < 1e30) & (np.abs(b) > 1e-30)
        np.testing.assert_allclose(got.numpy()[finite], expected[finite], rtol=1e-13, atol=0)
    else:
        _same(got, expected)


def test_sets_and_searches() -> None:
    x = np.array([[3.0, np.nan], [3.0, 1.0]])
    for got, expected in zip(et.unique_all(et.ExTensor(x)), np.unique_all(x), strict=True):
        np.testing.assert_array_equal(got.numpy(), expected)
    for got, expected in zip(et.nonzero(et.ExTensor(x - 3)), np.nonzero(x - 3), strict=True):
        np.testing.assert_array_equal(got.numpy(), expected)
    assert et.count_nonzero(et.ExTensor(x - 3), axis=0).tolist() == [0, 2]
    assert et.isin(et.ExTensor(x), 3.0, invert=True).tolist() == [[False, True], [False, True]]
    row = et.ExTensor([1, 2, 2, 3])
    assert et.searchsorted(row, et.ExTensor([2, 4]), side="right").tolist() == [3, 4]


def test_clip_with_a_bound_that_is_nan() -> None:
    x = et.ExTensor([1.0, 2.0])
    assert et.isnan(et.clip(x, min=et.ExTensor([np.nan, 0.0]))).tolist() == [True, False]
    assert operator.eq(et.clip(x, max=1.5).tolist(), [1.0, 1.5])


def test_the_remaining_arguments() -> None:
    x = et.arange(6).reshape(2, 3)
    assert et.full((2,), x[1, 2]).tolist() == [5, 5] and et.full((), x[1, 2]).dtype is et.int64
    assert et.repeat(x, et.asarray([2, 0, 1]), axis=1).tolist() == [[0, 0, 2], [3, 3, 5]]
    assert et.repeat(et.zeros(0), et.zeros(0, "int64")).shape == (0,)
    assert et.concat([x, x[0]], axis=None).tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert et.tril(x, k=2**70).tolist() == x.tolist() and not et.any(et.triu(x, k=2**70))
    assert et.linspace(0, 2j, 3).tolist() == [0, 1j, 2j]
    assert et.clip(x).tolist() == x.tolist() and et.clip(x) is not x
    wide = et.asarray([1.5], dtype="float64")
    assert et.clip(et.asarray([1.0, 2.0]), max=wide).dtype is et.float32
    assert et.clip(et.asarray([1.0, 2.0]), wide).tolist() == [1.5, 2.0]
    assert et.isin(x, 3, invert=True).tolist() == [[True] * 3, [False, True, True]]
    own, shared = et.reshape(x, (3, 2), copy=True), et.reshape(x, (6,), copy=False)
    x[0, 0] = 9
    assert own[0, 0].item() == 0 and shared[0].item() == 9
    with pytest.raises(ValueError, match="cannot be had without a copy"):
        et.reshape(x.T, (6,), copy=False)
    twin = et.astype(x, "int64")
    twin[0, 0] = 1
    assert x[0, 0].item() == 9 and et.astype(x, "int64", copy=False) is x
    assert et.astype(x, "float32", device="cpu").dtype is et.float32


def test_numpy_arrays_are_taken_as_they_are() -> None:
    narrow = np.ones(2, et.bfloat16.numpy)
    assert et.asarray(narrow).dtype is et.bfloat16
    assert np.shares_memory(et.asarray(narrow, copy=False, device="cpu").numpy(), narrow)
    with pytest.raises(TypeError, match="byte order"):
        et.asarray(np.ones(2, ">f4"))
    with pytest.raises(ValueError, match="cannot be had without a copy"):
        et.asarray(np.ones(2), dtype="float32", copy=False)


def test_integers_wrap_around_in_the_dtype_they_are_summed_in() -> None:
    x = et.asarray([100, 100, -73], dtype="int8")
    assert et.sum(x).item() == 127 and et.sum(x, dtype="int8").item() == 127
    assert et.cumulative_sum(x, dtype="int8").tolist() == [100, -56, 127]
    assert et.prod(x[:2], dtype="int16").item() == 10_000
    assert et.sum(x, dtype="float32").dtype is et.float32


def test_a_bad_axis_is_an_index_error_too() -> None:
    for made in (lambda: et.sum(et.ones(2), axis=1), lambda: et.expand_dims(et.ones(2), 5)):
        with pytest.raises(IndexError, match="expected -"):
            made()
        with pytest.raises(ValueError, match="expected -"):
            made()


def test_several_arrays_are_a_tuple_and_several_axes_are_inserted() -> None:
    x = et.arange(3)
    assert isinstance(et.meshgrid(x, x), tuple) and et.meshgrid() == ()
    assert isinstance(et.broadcast_arrays(x, et.zeros((2, 1))), tuple)
    assert et.__array_namespace_info__().devices() == ("cpu",)
    for axes in ((0, -1), (1, 2), (-1, 0, 2), ()):
        assert et.expand_dims(x, axes).shape == np.expand_dims(x.numpy(), axes).shape, axes


def test_the_exponential_of_complex_infinities() -> None:
    """The standard's special cases of expm1; numpy makes inf + 0j a NaN."""
    x = [complex(np.inf, 0), complex(-np.inf, 1), complex(-np.inf, np.inf), complex(np.inf, 1)]
    others = [complex(np.inf, np.inf), complex(1e-4, 1e-4), complex(np.nan, 0)]
    got = et.expm1(et.ExTensor([*x, *others])).numpy()
    np.testing.assert_array_equal(got[:3], [complex(np.inf, 0), -1, -1])
    assert got[3].real == got[3].imag == np.inf
    assert np.isposinf(got[4].real) and np.isnan(got[4].imag)
    assert got[5] == np.expm1(np.complex64(complex(1e-4, 1e-4)))
    assert np.isnan(got[6].real) and got[6].imag == 0
