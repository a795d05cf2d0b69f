"""Kernels of Quartet's and Quartet II's operands against the reference, byte for byte.

Scale rules mse and quest, MS-EDEN's block scales, and clip masks, under Hadamard transforms.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.backends.generic import GenericBackend
from extensor.errors import CaptureError
from extensor.quant import reference
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import DeviceClock, Stream
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.kernels.quantize import rowwise_columnwise as paired
from extensor_cuda.kernels.quantize import straight_through as through
from tests.oracle.compare import same_bytes
from tests.oracle.samples import KINDS, sample
from tests.unit.cuda.emulator import Cupy
from tests.unit.cuda.places import PLACES, place
from tests.unit.cuda.test_compile import check_compiles

STREAM = Stream(seed=0x123456789ABCDEF0, step=7, tensor=3, slot=2, column=True)
RANDOM = Hadamard(128, "random", seed=5)
SPECS = {
    "mse": QuantSpec("mxfp4", scale_rule="mse"),
    "mse blocks of 64": QuantSpec("mxfp6_e2m3", scale_rule="mse", tile=(1, 64)),
    "mse mxint8": QuantSpec("mxint8", scale_rule="mse"),
    "mse mxfp8": QuantSpec("mxfp8_e4m3", scale_rule="mse"),
    "quest": QuantSpec("mxfp4", scale_rule="quest", transform=Hadamard(32, "none")),
    "eden": QuantSpec("nvfp4", rounding="stochastic", transform=RANDOM, eden=True),
    "eden 32": QuantSpec(
        "nvfp4", rounding="stochastic", transform=Hadamard(32, "random", seed=1), eden=True
    ),
    "signs of a step": QuantSpec(
        "mxfp4", transform=Hadamard(64, "per_step", seed=1 << 40, step=9, stream=257)
    ),
}
SHAPES = (((6, 256), 1), ((5, 70), 1), ((128, 66), 0), ((71, 19), 0))


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return place(request, monkeypatch, (through,), hopper=False, quantizing=(kernels, paired))


def arrays(shape: tuple[int, int], axis: int) -> list[np.ndarray]:
    """Of one dtype: each is a program of its own."""
    found = [sample(shape, axis, kind, seed=3) for kind in KINDS]
    x = np.random.default_rng(4).standard_normal(shape).astype(np.float32)
    found += [x, (x * np.exp2(np.arange(shape[0]) % 40 - 20)[:, None]).astype(np.float32)]
    found += [np.zeros(shape, np.float32), (x * np.float32(1e-40)).astype(np.float32)]
    if shape[0] % 2:
        return found
    with np.errstate(over="ignore"):
        return [y.astype(ml_dtypes.bfloat16) for y in found]


def host(part: Any) -> np.ndarray:
    return np.asarray(part.get() if hasattr(part, "get") else part)


def shapes(xp: Any) -> Any:
    """All on a GPU; on the emulator one of rows and one of columns, since programs are compiled."""
    return SHAPES[1:3] if isinstance(xp, Cupy) else SHAPES


def check(xp: Any, x: np.ndarray, spec: QuantSpec, masked: bool = False) -> None:
    spec = spec.resolve(2)
    plan = kernels.plan_of(spec, x.shape)
    assert isinstance(plan, kernels.Plan), plan
    stream = STREAM if spec.rounding == "stochastic" else None
    context = f"{spec} of {x.dtype} {x.shape}"
    if masked:
        expected, counts, bits = reference.quantize_clipped(x, spec, stream)
        got, counted, mask = kernels.quantize_clipped(xp.asarray(x), plan, stream, xp)
        same_bytes("mask", mask.get(), bits, context)
    else:
        expected, counts = reference.quantize(x, spec, stream)
        got, counted = kernels.quantize(xp.asarray(x), plan, stream, xp)
    for name, part in expected.parts.items():
        same_bytes(name, host(got.parts[name]), part, context)
    assert counted() == counts, context
    if not masked and x.shape[0] == 5:
        values, again = kernels.fake_quantize(xp.asarray(x), plan, stream, xp)
        same_bytes("values", values.get(), reference.fake_quantize(x, spec, stream)[0], context)
        assert again() == counts, context


@pytest.mark.parametrize("name", SPECS)
def test_scales_that_read_a_blocks_values(xp: Any, name: str) -> None:
    for shape, axis in shapes(xp):
        for x in arrays(shape, axis):
            check(xp, x, SPECS[name].replace(axis=axis))


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_signs_of_the_step_that_a_clock_shows(xp: Any, name: str) -> None:
    """Of values rounded to nearest, whose stream tells the step alone; NVFP4's maximum, too."""
    x = np.random.default_rng(2).standard_normal((5, 70)).astype(np.float32)
    transform = SPECS["signs of a step"].transform
    spec = QuantSpec(name, scale_rule="rceil" if name == "mxfp4" else "amax", transform=transform)
    spec = spec.resolve(2)
    clock = DeviceClock(xp.asarray(np.array(3 + (2 << 32), np.uint64)))
    plan = kernels.plan_of(spec, x.shape)
    got, _ = kernels.quantize(xp.asarray(x), plan, replace(STREAM, clock=clock), xp)
    shown = spec.replace(transform=replace(spec.transform, step=3))
    for name, part in reference.quantize(x, shown)[0].parts.items():
        same_bytes(name, host(got.parts[name]), part)


def test_signs_of_each_step_need_a_clock_in_a_capture(
    xp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "current_capture", object)
    spec = SPECS["signs of a step"].resolve(2)
    with pytest.raises(CaptureError, match="signs='per_step' would be the same in each replay"):
        kernels.quantize(xp.zeros((5, 70), np.float32), kernels.plan_of(spec, (5, 70)), None, xp)


MASKED = {
    "quartet": SPECS["quest"],
    "plain": QuantSpec("mxfp4", scale_rule="floor"),
    "nvfp4": QuantSpec("nvfp4", scale_rule="four_over_six"),
    "mxfp8": QuantSpec("mxfp8_e4m3", scale_rule="floor", rounding="stochastic"),
}


@pytest.mark.parametrize("name", MASKED)
def test_clip_masks(xp: Any, name: str) -> None:
    for shape, axis in shapes(xp):
        if axis == 0:  # clip masks are of rows
            continue
        for x in arrays(shape, axis):
            check(xp, x, MASKED[name].replace(axis=axis), masked=True)


@pytest.mark.parametrize("name", ["plain", "nvfp4 amax"])
def test_clip_masks_beside_both_ways(xp: Any, name: str) -> None:
    """Of two values at a time, and of one; rows that a tile fills, and others."""
    spec = {**MASKED, "nvfp4 amax": QuantSpec("nvfp4")}[name]
    specs = spec.replace(axis=1).resolve(2), spec.replace(axis=0).resolve(2)
    for shape in ((64, 512), (37, 70)):
        plan = paired.row_column_plan(specs, shape)
        assert isinstance(plan, paired.RowColumnPlan), plan
        for x in arrays(shape, 1)[: 2 if isinstance(xp, Cupy) else None]:
            for values in (x.astype(np.float32), x.astype(ml_dtypes.bfloat16)):
                row, column = paired.quantize_clipped(xp.asarray(values), plan, (None, None), xp)
                context = f"{name} of {values.dtype} {shape}"
                expected, counts, bits = reference.quantize_clipped(values, specs[0])
                same_bytes("mask", row[2].get(), bits, context)
                other = reference.quantize(values, specs[1])
                for (got, counted), (q, stats) in (
                    (row[:2], (expected, counts)),
                    (column, other),
                ):
                    for part, bytes_of in q.parts.items():
                        same_bytes(part, host(got.parts[part]), bytes_of, context)
                    assert counted() == stats, context


@pytest.mark.parametrize("signs", ["none", "random"])
@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_what_a_mask_lets_through(xp: Any, size: int, signs: Any) -> None:
    """Masked in the transform's domain and taken back: the generic bits, NaN's sign aside."""
    transform, cpu = Hadamard(size, signs, seed=3), GenericBackend("generic", np)
    rng = np.random.default_rng(size)
    for rows, length in ((5, size), (7, 3 * size - 5), (300, 2 * size)):
        g = rng.standard_normal((rows, -(-length // size) * size)).astype(np.float32)
        g[0, 1], g[1, 3], g[2] = np.inf, np.nan, 0
        bits = rng.integers(0, 256, (rows, g.shape[1] // 8)).astype(np.uint8)
        for mask in (None, bits):
            there = None if mask is None else xp.asarray(mask)
            got = through.straight_through(xp.asarray(g), there, transform, length, xp).get()
            expected = cpu.straight_through(g, mask, transform, length)
            lost = np.isnan(expected)
            assert (np.isnan(got) == lost).all()
            same_bytes("through", np.where(lost, 0, got), np.where(lost, 0, expected), str(size))


def test_ties_between_a_scale_and_half_of_it(xp: Any) -> None:
    """Blocks on a coarse grid; where 3.5 is the one inexact value, both scales cost the same."""
    steps = np.array([0, 0.25, 0.5, 0.75, 1, 1.5, 2.5, 3, 3.5, 5, 6], np.float32)
    rng = np.random.default_rng(5)
    x = rng.choice(steps, (511, 32)) * rng.choice(np.array([-1, 1], np.float32), (511, 32))
    x[:99] = rng.choice(np.array([0, 0.5, -1, 1.5, 2, -3], np.float32), (99, 32))
    x[:99, 7] = 3.5
    check(xp, x.astype(np.float32), SPECS["mse"].replace(axis=1))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("name", ["mse", "quest", "eden", "signs of a step"])
def test_no_kernel_spills(name: str) -> None:
    for axis in (0, 1):
        plan = kernels.plan_of(SPECS[name].replace(axis=axis).resolve(2), (256, 1024))
        assert isinstance(plan, kernels.Plan)
        check_compiles(kernels.quantize_source(plan, "bfloat16", "codes", True, True), "sm_90a")
    masked = kernels.quantize_source(plan, "bfloat16", "codes", True, True, kernels.MASKED)
    check_compiles(masked, "sm_90a")
    check_compiles(through.source(32, True), "sm_90a")
    for spec in (QuantSpec("mxfp4"), QuantSpec("nvfp4")):
        both = paired.row_column_plan(
            (spec.replace(axis=1).resolve(2), spec.replace(axis=0).resolve(2)), (256, 1024)
        )
        assert isinstance(both, paired.RowColumnPlan)
        for dtype in ("bfloat16", "float32"):
            check_compiles(
                paired.row_column_source(both, dtype, "codes", True, True, True), "sm_90a"
            )


def test_what_the_kernels_leave_to_the_cpu() -> None:
    quest = QuantSpec("mxfp4", scale_rule="quest")
    for spec, shape, reason in (
        (quest, (4, 40), "a block that is not whole"),
        (SPECS["mse"].replace(tile=(32, 32)), (64, 64), "square tiles"),
        (SPECS["eden"].replace(rbits=8), (4, 128), "8 random bits"),
    ):
        found = kernels.plan_of(spec, shape)
        assert not found and reason in found.reason
    columns = kernels.plan_of(SPECS["quest"].replace(axis=0), (64, 64))
    assert isinstance(columns, kernels.Plan)
    assert "blocks of rows" in kernels.clip_gap(columns).reason
