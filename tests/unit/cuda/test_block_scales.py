"""Scales laid out for the GEMM: the kernel against numpy, on the emulator and on a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from extensor_cuda.kernels.gemm import block_scales as laid
from extensor_cuda.kernels.gemm.block_scales import Stored, block_scales
from tests.unit.cuda.emulator import Cupy, Device
from tests.unit.cuda.places import PLACES, place
from tests.unit.cuda.test_compile import ARCHITECTURES, check_compiles

ROWS = (1, 3, 33, 64, 100, 128, 130, 257, 515)
BLOCKS = (1, 2, 7, 31, 32, 33, 70)
EACH = (1, 2, 3, 16, 32, 64, 100, 128, 515)
LAYOUTS = ("across", "transposed", "apart", "backwards")
TILE = 256  # columns of the GEMM's widest


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return place(request, monkeypatch, [laid])


def some(rng: np.random.Generator, shape: tuple[int, int], dtype: Any) -> np.ndarray:
    """Of every magnitude that the dtype has, subnormal ones too, and what is no number."""
    low, high = (-24, 16) if dtype == np.float16 else (-149, 128)
    values = np.ldexp(rng.uniform(-1, 1, shape), rng.integers(low, high, shape)).astype(dtype)
    values[rng.random(shape) < 0.02] = np.nan
    values[rng.random(shape) < 0.02] = np.inf
    return values


def lying(xp: Any, a: np.ndarray, layout: str) -> Any:
    """The same numbers there, with other strides."""
    if layout == "transposed":  # as a QuantArray's
        return xp.asarray(np.ascontiguousarray(a.T)).T
    if layout == "backwards":
        return xp.asarray(np.ascontiguousarray(a[::-1, ::-1]))[::-1, ::-1]
    if layout == "apart":
        wide = np.full((2 * a.shape[0], 3 * a.shape[1]), 77, a.dtype)
        wide[::2, ::3] = a
        return xp.asarray(wide)[::2, ::3]
    return xp.asarray(a)


def odd(xp: Any) -> Any:
    """An array module whose empty arrays are NaN on a GPU too."""
    return SimpleNamespace(empty=lambda shape, dtype: xp.asarray(np.full(shape, np.nan, dtype)))


def check(got: Any, scales: np.ndarray, blocks: int, each: int, whole: int = 1) -> None:
    rows = scales.shape[1] * each
    groups, pitch = got.shape
    assert got.dtype == np.float32 and got.data.ptr % 16 == 0
    assert groups == -(-blocks // whole) * whole and pitch % 4 == 0 and pitch >= rows + TILE
    expected = np.zeros((groups, pitch), np.float32)
    for block in range(blocks):
        for row in range(rows):
            expected[block, row] = scales[block % len(scales), row // each]
    np.testing.assert_array_equal(got.get().view(np.uint32), expected.view(np.uint32))


def drawn(rng: np.random.Generator, dtype: Any) -> tuple[np.ndarray, int, int]:
    """Scales, blocks along K and rows that share one."""
    rows, blocks, each = (int(rng.choice(sizes)) for sizes in (ROWS, BLOCKS, EACH))
    held = 1 if rng.random() < 0.25 else blocks
    return some(rng, (held, -(-rows // each)), dtype), blocks, each


@pytest.mark.usefixtures("nvrtc")
def test_the_kernel_compiles_without_spills() -> None:
    check_compiles(laid.source(), *ARCHITECTURES)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_lie_at_their_rows(xp: Any, layout: str, dtype: Any) -> None:
    rng = np.random.default_rng(LAYOUTS.index(layout))
    for whole in (1, 2, 1, 2, 1):
        scales, blocks, each = drawn(rng, dtype)
        stored = Stored(lying(xp, scales, layout), blocks, each)
        (got,) = block_scales([stored], odd(xp), whole)
        check(got, scales, blocks, each, whole)


def test_both_sides_go_in_one_launch(xp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, launch, launched = np.random.default_rng(0), laid.launch, []

    def counted(*given: Any, **options: Any) -> None:
        launched.append(given[1])
        launch(*given, **options)

    monkeypatch.setattr(laid, "launch", counted)
    for _ in range(20):
        drawings = [drawn(rng, rng.choice([np.float32, np.float16])) for _ in range(2)]
        sides = [
            Stored(lying(xp, scales, str(rng.choice(LAYOUTS))), blocks, each)
            for scales, blocks, each in drawings
        ]
        launched.clear()
        made = block_scales(sides, odd(xp))
        assert launched == ["block_scales"]
        for got, (scales, blocks, each) in zip(made, drawings, strict=True):
            check(got, scales, blocks, each)


@pytest.mark.parametrize("axis", [0, 1])
def test_scales_lie_beyond_32_bits(xp: Any, tmp_path: Path, axis: int) -> None:
    apart = (1 << 31) + 5
    if isinstance(xp, Cupy):  # a file of holes
        held: Any = np.memmap(tmp_path / "scales", np.float16, "w+", shape=apart + 1).view(Device)
    elif xp.cuda.Device().mem_info[0] > 1 << 33:
        held = xp.zeros(apart + 1, dtype=np.float16)
    else:
        pytest.skip("wants 8 GiB of the GPU's memory")
    scales = np.array([[1.5], [-2.5]], np.float16)
    held[::apart] = xp.asarray(scales[:, 0])
    scales, view = (scales, held[::apart, None]) if axis == 0 else (scales.T, held[None, ::apart])
    (got,) = block_scales([Stored(view, len(scales), 40)], odd(xp))
    check(got, scales, len(scales), 40)


def test_other_scales_are_refused(xp: Any) -> None:
    scales = xp.zeros((2, 3), np.float32)
    for stored in (Stored(scales, 3, 1), Stored(scales.astype(np.float64), 2, 1)):
        with pytest.raises(ValueError, match="expected float32 or float16 scales of"):
            block_scales([stored], xp)
