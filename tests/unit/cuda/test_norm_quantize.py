"""Norms that are quantized as they are made: bytes of the reference from the kernel's own sums."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.quant import reference
from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.quantize import norm_quantize as fused
from extensor_cuda.kernels.quantize import rowwise_columnwise
from extensor_cuda.kernels.quantize.quantize import SLOTS
from extensor_cuda.runtime.counters import OperandCounts
from tests.oracle.compare import same_bytes
from tests.unit.cuda.emulator import Cupy
from tests.unit.cuda.fields import check_fields
from tests.unit.cuda.places import PLACES, place
from tests.unit.cuda.test_compile import check_compiles

NAMES = ("mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxint8")
HALF = ml_dtypes.bfloat16
CASES = (
    ((64, 256), np.float32),  # whole: of one block, of groups, of the most columns
    ((96, 512), HALF),
    ((96, 4096), HALF),
    ((64, 8192), np.float32),
    ((64, 16384), HALF),
    ((50, 84), np.float32),  # ragged
    ((1000, 72), HALF),  # more tiles than stages for each block of the emulator
    ((330, 520), HALF),  # more tiles for a group of two than it has places for sums
    ((33, 5000), HALF),
)
EPS = 1e-5


def plan_of(name: str, shape: tuple[int, ...], **options: Any) -> rowwise_columnwise.RowColumnPlan:
    specs = (QuantSpec(name, axis=axis, **options).resolve(2) for axis in (1, 0))
    plan = rowwise_columnwise.row_column_plan(tuple(specs), shape)  # type: ignore[arg-type]
    assert isinstance(plan, rowwise_columnwise.RowColumnPlan)
    return plan


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return place(request, monkeypatch, ())


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("name", NAMES)
def test_no_kernel_spills(name: str) -> None:
    for shape, centred, dtype in (
        ((64, 512), True, "float32"),
        ((64, 16384), False, "bfloat16"),
        ((37, 5000), True, "bfloat16"),
    ):
        for only_rows in (False, True):
            plan = plan_of(name, shape)
            source = fused.norm_quantize_source(plan, dtype, centred, centred, only_rows, True)
            check_compiles(source, "sm_90a")


def test_the_structure_is_the_kernels(compiler: str, tmp_path: Path) -> None:
    source = fused.norm_quantize_source(
        plan_of("mxfp4", (64, 512)), "float32", False, False, False, True
    )
    check_fields(source.text, "Norm", fused._parameters(), compiler, tmp_path)


@pytest.mark.parametrize("only_rows", [False, True])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_the_rounded_norm(
    xp: Any, name: str, centred: bool, only_rows: bool
) -> None:
    if isinstance(xp, Cupy) and name not in NAMES[:2]:
        pytest.skip("the emulator is slow")
    rng = np.random.default_rng(3)
    for shape, dtype in CASES:
        if isinstance(xp, Cupy) and shape[1] > 520:
            continue  # the emulator is slow
        x = (rng.standard_normal(shape) * 3 + 0.5).astype(dtype)
        x[1, 3], x[5, 7:40], x[7] = np.nan, 0, 0
        weight = rng.uniform(0.5, 2, shape[1]).astype(np.float32)
        bias = rng.standard_normal(shape[1]).astype(np.float32) if centred else None
        plan, wide = plan_of(name, shape), x.astype(np.float64)
        there, *terms = (None if a is None else xp.asarray(a) for a in (x, weight, bias))
        norm = fused.Norm(*terms, EPS, centred)
        assert fused.unsupported(there, norm, plan, "90") is None
        *made, mean, rstd, counters = fused.norm_quantize(
            there, norm, plan, xp, only_rows=only_rows
        )
        found = np.zeros((shape[0], 1), np.float32) if mean is None else mean.get()
        mu = wide.mean(axis=1, keepdims=True) if centred else 0.0
        scale = 1 / np.sqrt(((wide - mu) ** 2).mean(axis=1, keepdims=True) + EPS)
        good = np.isfinite(wide).all(axis=1)
        # a sum of n terms is off by n 2**-24 of theirs, the rest by a few roundings
        bound = (shape[1] + 8) * 2.0**-24
        spread = np.abs(wide).mean(axis=1, keepdims=True)
        assert (np.abs(found - mu)[good] <= bound * spread[good]).all()
        assert (np.abs(rstd.get() / scale - 1)[good] <= 8 * bound).all()
        y = x.astype(np.float32) - found
        y = y * rstd.get() * weight
        y = (y if bias is None else y + bias).astype(ml_dtypes.bfloat16)
        assert (made[1] is None) == only_rows
        for side, q, start in zip((plan.rowwise, plan.columnwise), made, (0, 1), strict=True):
            if q is None:
                continue
            expected, stats = reference.quantize(y, side.spec)
            for part in ("codes", "scales"):
                context = f"{name} of {dtype.__name__} {shape}, axis {side.spec.axis}"
                same_bytes(part, q.parts[part].get(), expected.parts[part], context)
            half = (2 * SLOTS * start, 2 * SLOTS * (start + 1))
            assert OperandCounts(counters, half, side.count)() == stats


def test_what_has_no_kernel_has_a_reason() -> None:
    xp = Cupy()
    x, weight = xp.zeros((64, 512), np.float32), xp.asarray(np.ones(512, np.float32))
    plan = plan_of("mxfp4", (64, 512))
    activated = replace(plan, rowwise=replace(plan.rowwise, activation="relu"))
    for changed, word in (
        ((x, fused.Norm(weight), plan, "80"), "capability"),
        ((x.astype(np.float16), fused.Norm(weight), plan, "90"), "float16"),
        ((xp.zeros((64, 510), np.float32), fused.Norm(weight), plan, "90"), "expected (510,)"),
        ((xp.zeros((64, 6), np.float32), fused.Norm(weight[:6]), plan, "90"), "multiple of 4"),
        (
            (xp.zeros((1, 8196), np.float32), fused.Norm(xp.ones(8196, np.float32)), plan, "90"),
            "8192",
        ),
        ((x, fused.Norm(weight[:256]), plan, "90"), "expected (512,)"),
        ((x, fused.Norm(xp.zeros(1024, np.float32)[::2]), plan, "90"), "not contiguous"),
        ((x, fused.Norm(weight), activated, "90"), "relu"),
        ((x, fused.Norm(weight), plan_of("nvfp4", (64, 512)), "90"), "largest"),
        (
            (x, fused.Norm(weight), plan_of("mxfp4", (64, 512), rounding="stochastic"), "90"),
            "random",
        ),
    ):
        assert word in str(fused.unsupported(*changed))
    assert fused.unsupported(x, fused.Norm(weight), plan, "90") is None
