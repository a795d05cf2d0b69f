"""Block scales chosen by their errors, where these are equal, nearly so, or beyond float32's range.

The kernels tell most options apart by errors that are off by a little, and take the reference's
where that does not decide: so what decides little is what is tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.formats import ELEMENTS
from extensor.quant import reference
from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.quantize import quantize as kernels
from tests.oracle.compare import same_bytes
from tests.oracle.samples import KINDS, sample
from tests.unit.cuda.places import PLACES, place

F = np.float32
SEARCHES = {
    "four_over_six": QuantSpec("nvfp4", scale_rule="four_over_six"),
    "least_error": QuantSpec("nvfp4_fp8exact"),
}
TOPS = {"four_over_six": 1536, "least_error": 2688}
"""Largest scale times 6: a tensor of this maximum has the scale 1."""


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return place(request, monkeypatch, (), hopper=False, quantizing=(kernels,))


def check(xp: Any, x: np.ndarray, spec: QuantSpec, context: str, stats: bool = True) -> None:
    spec = spec.resolve(x.ndim)
    plan = kernels.plan_of(spec, x.shape)
    assert isinstance(plan, kernels.Plan), plan
    done = kernels.quantize_raw(xp.asarray(x), plan, None, xp, stats=stats)
    expected, counts = reference.quantize(x, spec)
    assert done.q is not None
    for name in ("scales", "codes"):
        same_bytes(name, done.q.parts[name].get(), expected.parts[name], f"{context}: {spec}")
    if stats:
        assert done.stats(plan.count)() == counts, context


def check_blocks(xp: Any, blocks: np.ndarray, rule: str, context: str) -> None:
    """(n, 16) blocks of one tensor rowwise and columnwise."""
    blocks = blocks[: len(blocks) // 8 * 8]
    for axis in (1, 0):
        x = blocks.reshape(-1, 128) if axis else blocks.reshape(-1, 8, 16).swapaxes(1, 2)
        x = np.ascontiguousarray(x.reshape(-1, 128) if axis else x.reshape(-1, 8))
        check(xp, x, SEARCHES[rule].replace(axis=axis), context)


def scales_of(blocks: np.ndarray, rule: str) -> np.ndarray:
    q, _ = reference.quantize(blocks, SEARCHES[rule].replace(axis=1))
    return np.asarray(q.scales).reshape(-1)


def under(top: float, blocks: np.ndarray) -> np.ndarray:
    """Blocks after one that has the tensor's largest value."""
    first = np.zeros((8, blocks.shape[1]), blocks.dtype)
    first[0, 0] = top
    return np.concatenate([first, blocks])


@pytest.mark.parametrize("rule", SEARCHES)
def test_equal_errors(xp: Any, rule: str) -> None:
    """0.75 and 1 beside 6 cost a scale of 6 what they cost one of 4; lone values, many scales."""
    rng = np.random.default_rng(3)
    steps = np.array([0.75, 1, 0.75, 1, 2.5, 5, 1.25, 1.75, 3.5, 0, 0, 0, 2, 3, 4.5, 2.25], F)
    units = np.array(ELEMENTS["e4m3"].values, F)[1:120]
    for top in (TOPS[rule], TOPS[rule] / 1024, 3.0):
        blocks = rng.choice(steps, (len(units), 16)) * rng.choice(np.array([-1, 1], F), 16)
        blocks[::3, 2:] = 0
        blocks[:, 5] = 6
        x = blocks.astype(F) * (units * F(top / TOPS[rule]))[:, None]
        x = under(top, x[np.abs(x).max(1) <= top])
        check_blocks(xp, x.astype(F), rule, f"top {top}")
        check_blocks(xp, x.astype(ml_dtypes.bfloat16), rule, f"top {top}, bfloat16")


@cache
def flips(rule: str) -> np.ndarray:
    """Blocks on both sides of where the chosen scale changes, as near as float32 has them."""
    rng = np.random.default_rng(8)
    top = F(5.3)
    x = rng.standard_normal((2000, 16)).astype(F)
    x[np.abs(x) > 5] = 1
    low, high = x, x.copy()
    moved = rng.integers(16, size=len(x))
    rows = np.arange(len(x))
    high[rows, moved] = rng.standard_normal(len(x)).astype(F)
    at = scales_of(under(top, low), rule)[8:]
    changed = at != scales_of(under(top, high), rule)[8:]
    low, high, at = low[changed], high[changed], at[changed]
    moved, rows = moved[changed], np.arange(changed.sum())
    for _ in range(40):
        middle = low.copy()
        middle[rows, moved] = ((low + high) / 2)[rows, moved]
        same = (scales_of(under(top, middle), rule)[8:] == at)[:, None]
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    assert len(low) > 200
    near = []
    for blocks in (low, high):
        for toward in (-np.inf, np.inf):
            step = blocks
            for _ in range(3):
                near.append(step)
                step = step.copy()
                step[rows, moved] = np.nextafter(step[rows, moved], F(toward))
    return under(top, np.concatenate(near))


@pytest.mark.parametrize("rule", SEARCHES)
def test_nearly_equal_errors(xp: Any, rule: str) -> None:
    check_blocks(xp, flips(rule), rule, "next to a change of scale")


def test_a_scale_that_cuts_the_largest_value(xp: Any) -> None:
    """It costs 2.25 at least: the others' errors must come to more, which they seldom do."""
    rng = np.random.default_rng(6)
    worth = np.array([7.52, 6, 6, 6, 4, *([0.5] * 11)], F)
    for spread in (0, 0.02, 0.05):
        blocks = worth * (1 + spread * rng.standard_normal((200, 16)))
        blocks[:, 0] = np.maximum(blocks[:, 0], 7.51)
        power = rng.integers(-5, 6, 200)
        blocks = rng.permuted(blocks, axis=1) * np.exp2(power)[:, None]
        x = under(TOPS["least_error"], blocks.astype(F))
        cut = scales_of(x, "least_error")[8:] == 8 * (power + 7)  # else 1.25, 1.5 or 2 times that
        assert 0.1 < cut.mean() and (cut.mean() == 1) == (spread == 0)
        check_blocks(xp, x, "least_error", f"spread {spread}")


@pytest.mark.parametrize("rule", SEARCHES)
def test_ties_of_values(xp: Any, rule: str) -> None:
    """All values halfway between codes under one of the scales, or a bit beside."""
    rng = np.random.default_rng(5)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], F)
    units = np.array(ELEMENTS["e4m3"].values, F)[8:120]
    blocks = (rng.choice(ties, (len(units), 16)) * units[:, None]).astype(F)
    for top in (TOPS[rule], 1.7):
        x = blocks * F(top / TOPS[rule])
        x = x[np.abs(x).max(1) <= top]
        for beside in (0, -np.inf, np.inf):
            y = np.nextafter(x, F(beside)) if beside else x
            check_blocks(xp, under(top, y), rule, f"top {top}, beside {beside}")


def extremes() -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(9)
    normal = rng.standard_normal((128, 16)).astype(F)
    for power in (-126, -100, -60, -51, -50, -49, 0, 49, 50, 51, 60, 100, 125):
        with np.errstate(under="ignore", over="ignore"):
            yield f"all near 2**{power}", np.ldexp(normal / 4, power).astype(F)
    falling = np.ldexp(normal, -np.arange(128)[:, None] // 2).astype(F)
    yield "blocks from 1 to 2**-64", falling
    yield "blocks from 2**90 to 2**26", np.ldexp(falling, 90).astype(F)
    apart = np.ldexp(normal, -rng.integers(0, 40, normal.shape)).astype(F)
    yield "values that are far apart", apart
    lone = np.zeros((128, 16), F)
    lone[np.arange(128), np.arange(128) % 16] = np.linspace(0.001, 3, 128)
    yield "lone values and zeros", lone
    yield "zeros", np.zeros((16, 16), F)
    odd = normal.copy()
    odd[::5, 3], odd[1::5, 7], odd[2::5] = np.nan, -np.inf, 0
    yield "NaN, infinities and zeros among others", odd
    yield "negative zeros", np.where(np.abs(normal) < 0.5, F(-0.0), normal)


@pytest.mark.parametrize("rule", SEARCHES)
def test_extremes(xp: Any, rule: str) -> None:
    for name, x in extremes():
        for dtype in (F, ml_dtypes.bfloat16):
            with np.errstate(under="ignore", over="ignore"):
                check_blocks(xp, x.astype(dtype), rule, f"{name}, {np.dtype(dtype).name}")


@pytest.mark.parametrize("stats", [True, False])
@pytest.mark.parametrize("rule", SEARCHES)
def test_every_bfloat16(xp: Any, rule: str, stats: bool) -> None:
    """In blocks of one binade, and beside a largest that is up to 2**9 as large."""
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 16)
    apart = bits.copy()
    apart[:, 7] = np.minimum((apart[:, 7] & 0x7FFF) + (np.arange(4096) % 9 << 7), 0x7F7F)
    x = np.concatenate([bits, apart]).astype(np.uint16).view(ml_dtypes.bfloat16).reshape(-1, 256)
    usual = np.abs(x.astype(F)) < 2.0**20  # else all scales are the least there is
    for y in (x, np.where(usual, x, x.dtype.type(0))):
        check(xp, y, SEARCHES[rule].replace(axis=1), "every bfloat16", stats)


@pytest.mark.parametrize("axis", [1, 0])
@pytest.mark.parametrize("rule", SEARCHES)
def test_square_tiles(xp: Any, rule: str, axis: int) -> None:
    spec = SEARCHES[rule].replace(axis=axis, tile=(16, 16))
    for shape in ((96, 64), (70, 19)):
        for kind in KINDS:
            x = sample(shape, axis, kind, seed=4)
            for dtype in (F, ml_dtypes.bfloat16):
                with np.errstate(over="ignore"):
                    check(xp, x.astype(dtype), spec, kind)
    # All rows alike: the tile's errors are equal where the row's are.
    rows = flips(rule)[:320]
    x = np.concatenate([np.broadcast_to(r, (16, 16)) for r in rows], axis=axis)
    check(xp, np.ascontiguousarray(x), spec, "next to a change of scale")
