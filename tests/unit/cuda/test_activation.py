"""Activations that are quantized as they are made: the bytes of two kernels."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.backends.unsupported import Unsupported
from extensor.quant.spec import Hadamard, QuantSpec
from extensor_cuda import quantize
from extensor_cuda.kernels.nn import elementwise
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.kernels.quantize import rowwise_columnwise
from extensor_cuda.kernels.quantize.quantize import SLOTS
from extensor_cuda.runtime.counters import OperandCounts
from tests.oracle.compare import same_bytes
from tests.unit.cuda.places import PLACES, place
from tests.unit.cuda.test_compile import check_compiles

HALF = ml_dtypes.bfloat16
NAMES = ("mxfp4", "mxfp8_e4m3")
WHOLE, RAGGED = SHAPES = ((128, 256), (37, 70))
CASES = (
    ("relu", QuantSpec("mxfp4"), WHOLE),
    ("gelu", QuantSpec("mxfp4", axis=0), RAGGED),
    ("gelu", QuantSpec("mxfp8_e4m3"), RAGGED),
    ("relu", QuantSpec("nvfp4", axis=0), WHOLE),  # the tensor's maximum is the activation's
    ("gelu", QuantSpec("mxfp6_e2m3", transform=Hadamard(16)), WHOLE),
    ("gelu", QuantSpec("mxfp8_e4m3", tile=(32, 32)), RAGGED),
    ("relu", QuantSpec("mxfp8_e4m3", axis=0, tile=(32, 32)), RAGGED),
)


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    quantizing = (kernels, rowwise_columnwise)
    return place(request, monkeypatch, (elementwise,), hopper=False, quantizing=quantizing)


def values(shape: tuple[int, int]) -> np.ndarray:
    """Of every size, with numbers that are not."""
    rng = np.random.default_rng(shape[1])
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-6, 4, shape))).astype(HALF)
    x[3, 5], x[7, 40:], x[9, 2], x[11, 3] = np.nan, 0, np.inf, -np.inf
    return np.asarray(x)


def same_parts(q: Any, expected: Any, context: str) -> None:
    for name, part in expected.parts.items():
        got = q.parts[name]
        if hasattr(got, "get"):  # the emulator's scale of a tensor is a number
            got, part = got.get(), part.get()
        same_bytes(name, got, part, context)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("name", NAMES)
def test_no_kernel_spills(name: str) -> None:
    for axis in (0, 1):
        for shape in SHAPES:
            plan = kernels.plan_of(QuantSpec(name, axis=axis), shape, False, "gelu")
            assert isinstance(plan, kernels.Plan)
            whole = kernels.is_whole(plan, 0, "bfloat16")
            source = kernels.quantize_source(plan, "bfloat16", "codes", whole, True)
            check_compiles(source, "sm_80", "sm_89", "sm_90a")
    for whole in (True, False):
        source = rowwise_columnwise.row_column_source(
            both_of(name, (256, 512), "gelu"), "bfloat16", "codes", whole, True
        )
        check_compiles(source, "sm_80", "sm_89", "sm_90a")
    plan = kernels.plan_of(QuantSpec(name).resolve(1), (1 << 20,), False, "gelu")
    assert isinstance(plan, kernels.Plan)
    beside = (("QUANT_BESIDE", 1),)
    check_compiles(
        kernels.quantize_source(plan, "bfloat16", "codes", True, False, beside), "sm_90a"
    )


def both_of(name: str, shape: tuple[int, int], activation: str) -> rowwise_columnwise.RowColumnPlan:
    specs = (QuantSpec(name, axis=1).resolve(2), QuantSpec(name, axis=0).resolve(2))
    plan = rowwise_columnwise.row_column_plan(specs, shape, activation)
    assert isinstance(plan, rowwise_columnwise.RowColumnPlan)
    return plan


@pytest.mark.parametrize(("activation", "spec", "shape"), CASES, ids=str)
def test_bytes_are_those_of_two_kernels(
    xp: Any, activation: str, spec: QuantSpec, shape: tuple[int, int]
) -> None:
    x, made = xp.asarray(values(shape)), []
    for given, before in ((x, activation), (elementwise.unary(activation, x, xp), "")):
        plan = kernels.plan_of(spec, shape, False, before)
        assert isinstance(plan, kernels.Plan)
        made.append(kernels.quantize(given, plan, None, xp))
    (q, stats), (want, expected) = made
    same_parts(q, want, f"{activation}, {spec} of {shape}")
    assert stats() == expected()


@pytest.mark.parametrize(("name", "size"), [("mxfp8_e4m3", 8480), ("mxfp4", 4096)])
def test_gelu_beside_what_is_packed(xp: Any, name: str, size: int) -> None:
    x = xp.asarray(np.resize(values(WHOLE), size).reshape(2, size // 2))
    spec = QuantSpec(name).resolve(1)
    q, y = quantize.gelu_and_pack(xp, x, spec)()
    same_parts(q, quantize.pack(xp, x.reshape(-1), spec)(), name)
    got, expected = (np.asarray(a.get()) for a in (y, elementwise.unary("gelu", x, xp)))
    live = ~np.isnan(expected)
    assert got.shape == x.shape and np.isnan(got[~live]).all()
    np.testing.assert_array_equal(got[live].view(np.uint16), expected[live].view(np.uint16))


def test_what_is_not_packed_beside_gelu(xp: Any) -> None:
    spec = QuantSpec("mxfp8_e4m3").resolve(1)
    for x in (np.ones(64, np.float32), np.ones(40, HALF), np.ones((64, 64), HALF).T):
        assert not quantize.gelu_and_pack(xp, xp.asarray(x) if x.ndim == 1 else x, spec)
    assert not quantize.gelu_and_pack(xp, xp.asarray(np.ones(64, HALF)), QuantSpec("nvfp4"))


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_columns_in_one_reading(xp: Any, name: str) -> None:
    for shape in ((64, 512), (37, 70)):
        x = xp.asarray(values(shape))
        y = elementwise.unary("gelu", x, xp)
        made = []
        for given, activation in ((x, "gelu"), (y, "")):
            plan = both_of(name, shape, activation)
            made.append(rowwise_columnwise.quantize_raw(given, plan, (None, None), xp))
        (both, counters), (expected, others) = made
        for q, want in zip(both, expected, strict=True):
            same_parts(q, want, f"{name} of {shape}")
        for c in (0, 2 * SLOTS):
            part = (c, c + 2 * SLOTS)
            assert OperandCounts(counters, part, x.size)() == OperandCounts(others, part, x.size)()


def test_what_has_no_kernel_is_said() -> None:
    found = kernels.plan_of(QuantSpec("mxfp4"), (64, 64), False, "tanh")
    assert isinstance(found, Unsupported)
    assert "tanh" in found.reason and "gelu" in found.reason
    plan = kernels.plan_of(QuantSpec("mxfp4"), (64, 64), False, "relu")
    assert isinstance(plan, kernels.Plan)
    with pytest.raises(ValueError, match="relu .* bfloat16 arrays, not float32"):
        kernels.quantize_source(plan, "float32", "codes", True, True)
