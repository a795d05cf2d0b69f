"""Every operation's values against an independent reference, by enumeration.

A sample's expected value stands in its declaration or is computed in `tests/references.py`; an
operation with neither fails here.
"""

from __future__ import annotations

import inspect
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extensor as et
import extensor.ops.prequantized  # the registry is complete once its declarations are imported
from extensor.autograd.primitive import OPS, Op, Sample
from tests.references import ELSEWHERE, REFERENCES

ROOT = Path(__file__).resolve().parent.parent


def _samples(op: Op) -> list[Sample]:
    return list(op.samples(np.random.default_rng(zlib.crc32(op.name.encode()))))


def _wrapped(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return et.ExTensor(value)
    if isinstance(value, list) and any(isinstance(item, np.ndarray) for item in value):
        return [_wrapped(item) for item in value]
    return value


def _expected(op: Op, sample: Sample) -> list[Any]:
    if sample.expected is not None:
        return [sample.expected]
    made = REFERENCES[op.name](*sample.args, **sample.kwargs)
    return list(made) if isinstance(made, list | tuple) else [made]


@pytest.mark.parametrize("name", sorted(OPS.keys() - ELSEWHERE.keys()))
def test_values(name: str) -> None:
    op = OPS[name]
    for sample in _samples(op):
        result = op.function(*map(_wrapped, sample.args), **sample.kwargs)
        got = [result] if isinstance(result, et.ExTensor) else list(result)
        for mine, expected in zip(got, _expected(op, sample), strict=True):
            assert mine.shape == np.shape(expected)
            # Samples are of float64: at most a few dozen terms of order 1, at 2**-53 each.
            assert mine.dtype in (et.float64, et.complex128) or not mine.dtype.is_inexact
            np.testing.assert_allclose(mine.numpy(), expected, rtol=1e-12, atol=1e-13)


def test_what_is_compared_elsewhere_is() -> None:
    for name, why in ELSEWHERE.items():
        assert name in OPS
        path = ROOT / why.partition(":")[0].partition(" and ")[0]
        assert path.is_file(), f"{name}: {path} is gone"


def test_no_reference_is_left_over() -> None:
    """A reference whose samples all carry their expected values judges nothing."""
    for name in REFERENCES:
        assert any(sample.expected is None for sample in _samples(OPS[name])), name


SUMS = ("sum", "prod", "cumulative_sum", "cumulative_prod")
VARIED_ELSEWHERE = {
    **{name: {"dtype"} for name in SUMS},  # the samples are differentiated in float64: below
    "batch_norm": {"moments"},  # is told mean and variance: running ones in test_every_layer.py
    "layer_norm": {"narrow"},  # rounds: tests/unit/nn/test_activation_dtype.py
    "rms_norm": {"narrow"},
    "diff": {"append", "prepend"},  # tensors by keyword: below
    "astype": {"copy", "device"},  # about memory, as the next: below
    "reshape": {"copy"},
    "cholesky": {"upper"},  # these three below
    "matrix_norm": {"keepdims"},
    "vector_norm": {"keepdims"},
    "trace": {"dtype"},
}


@pytest.mark.parametrize("name", sorted(OPS.keys() - ELSEWHERE.keys()))
def test_every_option_is_varied(name: str) -> None:
    """An option that no sample gives another value could be ignored, and nothing would notice."""
    op = OPS[name]
    signature = inspect.signature(op.function)
    defaults = {
        option: parameter.default
        for option, parameter in signature.parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    left = defaults.keys() - VARIED_ELSEWHERE.get(name, set())
    for sample in _samples(op):
        given = signature.bind(*sample.args, **sample.kwargs).arguments
        left -= {
            option
            for option in left & given.keys()
            if isinstance(given[option], np.ndarray) or given[option] != defaults[option]
        }
    assert not left, f"{name}: no sample varies {sorted(left)}"


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize("name", SUMS)
def test_sums_and_products_in_another_dtype(name: str, dtype: str) -> None:
    x = np.random.default_rng(0).integers(1, 5, (3, 4)).astype(np.int32)
    got = OPS[name].function(et.ExTensor(x), axis=0, dtype=dtype)
    theirs = {"cumulative_sum": np.cumsum, "cumulative_prod": np.cumprod}.get(name)
    expected = (theirs or getattr(np, name))(x, axis=0, dtype=dtype)
    np.testing.assert_array_equal(got.numpy(), expected)
    assert got.numpy().dtype == expected.dtype


def test_diff_takes_what_comes_before_and_after() -> None:
    rng = np.random.default_rng(0)
    x, before, after = rng.normal(size=(3, 4)), rng.normal(size=(3, 2)), rng.normal(size=(3, 1))
    got = et.diff(et.ExTensor(x), prepend=et.ExTensor(before), append=et.ExTensor(after), n=2)
    np.testing.assert_array_equal(got.numpy(), np.diff(x, 2, prepend=before, append=after))


def test_options_of_linear_algebra() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 3))
    square = x @ x.swapaxes(-1, -2) + np.eye(3)
    for got, expected in (
        (et.linalg.cholesky(et.ExTensor(square), upper=True), _upper(square)),
        (et.linalg.matrix_norm(et.ExTensor(x), keepdims=True), _norm(x, (-2, -1))),
        (et.linalg.vector_norm(et.ExTensor(x), axis=1, keepdims=True), _norm(x, 1)),
        (et.linalg.trace(et.ExTensor(x), dtype="float32"), x.trace(0, 1, 2).astype(np.float32)),
    ):
        np.testing.assert_allclose(
            got.numpy(), expected, rtol=1e-12 if got.dtype is et.float64 else 4e-7
        )
        assert got.numpy().dtype == expected.dtype


def _upper(x: np.ndarray) -> np.ndarray:
    return np.linalg.cholesky(x).swapaxes(-1, -2)


def _norm(x: np.ndarray, axis: Any) -> np.ndarray:
    return np.sqrt((x * x).sum(axis, keepdims=True))


@pytest.mark.host
def test_copies_are_made_when_asked_for_and_only_then() -> None:
    x = et.zeros((2, 3))
    assert et.astype(x, et.float32, copy=False, device="cpu") is x
    for made in (et.astype(x, et.float32, copy=True), et.reshape(x, (6,), copy=True)):
        assert not np.shares_memory(made.numpy(), x.numpy())
    assert np.shares_memory(et.reshape(x, (6,), copy=False).numpy(), x.numpy())
