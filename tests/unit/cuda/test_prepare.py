"""The table of preparers: which row takes a matrix, and that a row is all a new one needs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.backends.protocol import CastSpec
from extensor.backends.unsupported import Unsupported
from extensor.quant.spec import QuantSpec
from extensor_cuda.matmul import prepare as preparing
from extensor_cuda.matmul.operand import GemmOperand, Scale
from extensor_cuda.matmul.prepare import GemmPreparation, Preparer, prepare
from extensor_cuda.matmul.product import product, values_of
from tests.unit.cuda.emulator import Cupy
from tests.unit.cuda.places import place

WORK = 1 << 40


@pytest.fixture(params=["emulated"])
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cupy:
    """What decides which row it is needs no GPU."""
    return place(request, monkeypatch, [])


def chosen(xp: Any, specs: list[Any], work: int = WORK) -> GemmPreparation | Unsupported:
    x = xp.asarray(np.ones((64, 128), dtype=np.float32))
    return prepare(x, specs, [None] * len(specs), work, xp)


@pytest.mark.parametrize(
    ("spec", "name", "compact"),
    [
        (QuantSpec("mxfp4"), "fused", True),
        (QuantSpec("mxfp8_e4m3", scale_rule="rceil", rebased=True), "fused", True),
        (QuantSpec("mxint8"), "fused", True),
        (QuantSpec("fp8_e4m3", tile=(1, 128)), "float scales", False),
        (QuantSpec("mxfp6_e2m3"), "expanded", False),
        (QuantSpec("nvfp4"), "expanded", False),
        (CastSpec("bfloat16", 1), "bf16", True),
    ],
)
def test_each_format_has_its_row(xp: Cupy, spec: Any, name: str, compact: bool) -> None:
    specs = [
        CastSpec(spec.dtype, axis)
        if isinstance(spec, CastSpec)
        else spec.replace(axis=axis).resolve(2)
        for axis in (1, 0)
    ]
    found = chosen(xp, specs)
    assert isinstance(found, GemmPreparation)
    assert found.preparer.name == name and found.compact is compact
    batched = found.batch_key is not None
    assert batched == (isinstance(spec, QuantSpec) and spec.format == "mxfp4")


def test_equal_keys_are_of_one_dtype_and_the_same_specs(xp: Cupy) -> None:
    specs = [QuantSpec("mxfp4", axis=axis).resolve(2) for axis in (1, 0)]
    one, other, narrow = (chosen(xp, s) for s in (specs, specs, specs[:1]))
    assert one and other and narrow
    assert one.batch_key == other.batch_key != narrow.batch_key


def test_what_has_no_row_says_why(xp: Cupy) -> None:
    for specs, work, words in (
        ([QuantSpec("mxfp4", axis=1).resolve(2)], 7, "fewer than"),
        ([QuantSpec("int4", axis=1).resolve(2)], WORK, "scales"),
        ([CastSpec("float32", 1)], WORK, "float32 operands"),
    ):
        found = chosen(xp, specs, work)
        assert isinstance(found, Unsupported) and words in found.reason


def test_a_row_is_all_that_a_new_storage_format_needs(
    xp: Cupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INT4, say, as bfloat16 codes under one factor."""

    def supports(x: Any, spec: QuantSpec) -> QuantSpec | Unsupported:
        return spec if spec.format == "int4" else Unsupported("another format")

    def run(x: Any, plans: Any, streams: Any, xp: Any, state: Any) -> Any:
        bits = xp.asarray(x.get().astype(ml_dtypes.bfloat16).view(np.uint16))
        factor = xp.asarray(np.full(1, 0.5, np.float32))
        return [(GemmOperand(bits, "bf16", Scale(factor=factor)), None) for _ in plans]

    row = Preparer("fused", "new kernel", False, True, supports, run)
    monkeypatch.setattr(preparing, "PREPARERS", (row, *preparing.PREPARERS))
    rng, made = np.random.default_rng(0), []
    for rows in (40, 24):
        x = rng.integers(-7, 8, (rows, 64)).astype(np.float32)
        found = prepare(xp.asarray(x), [QuantSpec("int4", axis=1).resolve(2)], [None], WORK, xp)
        assert isinstance(found, GemmPreparation) and found.path == "new kernel"
        ((operand, _),) = found.run()
        np.testing.assert_array_equal(values_of(operand, xp).get(), x / 2)
        made.append((operand, x / 2))
    (a, va), (b, vb) = made
    got = product(a, b, "float32", xp)
    assert not isinstance(got, Unsupported)
    np.testing.assert_array_equal(got.get(), va @ vb.T)
