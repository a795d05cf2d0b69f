"""Convolutions of exact bfloat16 values: pairs of them where the CPU multiplies those faster."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.backends.protocol import Window
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream
from tests.kernels.conv_pool import EDEN, WINDOWS, window_arrays
from tests.kernels.inputs import BACKEND, CORE, GENERIC, UNIT

PAIRS, FLOATS = "avx512_bf16", "avx512_vnni"
TESTED = [n for n, (shape, outs, groups, _) in enumerate(WINDOWS) if shape[0] and outs >= 8]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = CORE.gemm_level() if CORE else None
    yield
    if CORE:
        CORE.set_gemm_level(before)


def levels() -> list[str]:
    """With pairs, and without them; one level where the CPU has none."""
    if CORE is None:
        return ["numpy only"]
    return [PAIRS, FLOATS] if PAIRS in CORE.gemm_levels() else [CORE.gemm_level()]


def at(level: str, name: str, *case: Any) -> np.ndarray:
    if CORE:
        CORE.set_gemm_level(level)
    got: Any = getattr(BACKEND, name)(*case)
    return got[0] if isinstance(got, tuple) else got


def rounded(number: int) -> tuple[np.ndarray, ...]:
    arrays = window_arrays(number)
    return tuple(a.astype(ml_dtypes.bfloat16).astype(np.float32) for a in arrays)


def nvfp4_values(x: np.ndarray) -> np.ndarray:
    """Of blocks along the last axis, with one tensor scale."""
    values: np.ndarray = GENERIC.fake_quantize(x, QuantSpec("nvfp4"))[0]
    return values


def cases(number: int) -> dict[str, tuple[tuple[Any, ...], int]]:
    """Calls, and how many terms their sums have."""
    x, w, g = rounded(number)
    _, _, groups, window = WINDOWS[number]
    bias = np.linspace(-1, 1, len(w), dtype=np.float32)
    made = {
        "conv2d": ((x, w, window, groups, bias), w[0].size + 1),
        "conv2d_grad_x": ((g, w, x.shape, window, groups), w[:, 0].size // groups),
    }
    x, w, g = (nvfp4_values(a) for a in (x, w, g))  # factors are known to 2**-21
    return {
        **made,
        "conv2d, nvfp4": ((x, w, window, groups, bias), w[0].size + 23),
        "conv2d_grad_x, nvfp4": ((g, w, x.shape, window, groups), w[:, 0].size // groups + 22),
    }


@pytest.mark.parametrize("kind", cases(1))
def test_sums_of_pairs_are_within_the_bound(kind: str) -> None:
    others, name = 0, kind.split(",", maxsplit=1)[0]
    for number in TESTED:
        case, terms = cases(number)[kind]
        wide = [a.astype(np.float64) if isinstance(a, np.ndarray) else a for a in case]
        exact = getattr(GENERIC, name)(*wide)
        sizes = getattr(GENERIC, name)(
            *(np.abs(a) if isinstance(a, np.ndarray) else a for a in wide)
        )
        results = [at(level, name, *case) for level in levels()]
        for got in results:
            assert (np.abs(got - exact) <= (terms + 4) * UNIT * (1 + 1e-4) * sizes).all(), number
        others += any((got != results[0]).any() for got in results)
    # The order of sums differs, so pairs were summed.
    assert others or len(levels()) == 1


def quantized(number: int) -> dict[str, tuple[Any, ...]]:
    """A forward product, two weight gradients and a clipped one, patches in MXFP4 or NVFP4."""
    x, w, g = rounded(number)
    x, g, window = x[:7], g[:7], WINDOWS[number][3]
    signs = Hadamard(32, "random", 5)
    nearest = QuantSpec("mxfp4", scale_rule="rceil", axis=0).resolve(2)
    ragged = QuantSpec("mxfp4", tile=(1, 16), axis=1).resolve(2)
    drawn = QuantSpec("mxfp4", rounding="stochastic", transform=signs, axis=1).resolve(2)
    plain = np.ascontiguousarray(g.swapaxes(0, 1)).reshape(len(w), -1)
    rows = np.pad(plain, [(0, 0), (0, -plain.shape[1] % 32)])
    kernels = w.reshape(len(w), -1)
    nvfp4, eden = QuantSpec("nvfp4", axis=0).resolve(2), EDEN.replace(axis=1).resolve(2)
    random = EDEN.replace(axis=1, eden=False).resolve(2)
    long = np.pad(plain, [(0, 0), (0, -plain.shape[1] % 128)])
    return {
        "quantized_conv2d, nvfp4": (x, nvfp4_values(kernels), nvfp4, None, w.shape, window),
        "quantized_conv2d_grad_w, nvfp4": (
            nvfp4_values(long),
            x,
            random,
            Stream(3, 1),
            w.shape,
            window,
        ),
        "quantized_conv2d_grad_w, eden": (
            nvfp4_values(long),
            x,
            eden,
            Stream(3, 1),
            w.shape,
            window,
            nvfp4,
        ),
        "quantized_conv2d": (x, w.reshape(len(w), -1), nearest, None, w.shape, window),
        "quantized_conv2d_grad_w": (rows, x, drawn, Stream(3, 1), w.shape, window),
        "quantized_conv2d_grad_w, ragged": (plain, x, ragged, None, w.shape, window),
        "clipped_conv2d_grad_x": (
            plain,
            np.pad(w.reshape(len(w), -1), [(0, 0), (0, -w[0].size % 32)]),
            x,
            QuantSpec("mxfp4", scale_rule="quest", transform=signs, axis=0).resolve(2),
            window,
        ),
    }


@pytest.mark.parametrize("kind", quantized(1))
def test_products_of_patches_are_those_of_float32(kind: str) -> None:
    others, name = 0, kind.split(",", maxsplit=1)[0]
    for number in TESTED:
        if WINDOWS[number][2] > 1:
            continue
        case = quantized(number)[kind]
        expected: Any = getattr(GENERIC, name)(*case)
        expected = expected[0] if isinstance(expected, tuple) else expected
        results = [at(level, name, *case) for level in levels()]
        for got in results:
            # A thousand roundings of sums whose terms are of the size of the largest result.
            bound = 1024 * UNIT * max(np.abs(expected).max(), 1.0)
            assert (np.abs(got - expected) <= bound).all(), number
        others += any((got != results[0]).any() for got in results)
    assert others or len(levels()) == 1


@pytest.mark.parametrize("factor", [2.0**-62, 2.0**-130, 2.0**60, np.nan, np.inf])
def test_sums_out_of_range_stay_in_float32(factor: float) -> None:
    """Dot products of pairs read and write subnormals as zero."""
    x, w, _ = rounded(1)
    if np.isfinite(factor):
        x, w = x * np.float32(factor), w * np.float32(max(factor, 2.0**-62))
    else:
        x[:, 0, 0, 0] = factor
    bias = np.linspace(-1, 1, len(w), dtype=np.float32)
    for added in (None, bias, bias * np.float32(2.0**-130)):
        results = [at(level, "conv2d", x, w, WINDOWS[1][3], 1, added) for level in levels()]
        assert len({got.tobytes() for got in results}) == 1
        assert np.isfinite(results[0]).mean() > 0.5


@pytest.mark.parametrize("value", [0.0, 1.5])
def test_a_bias_is_added_in_float32(value: float) -> None:
    """Were it a term, one that is subnormal would be lost, and a large one would overflow a sum."""
    x, w = np.full((1, 2, 8, 8), value, np.float32), np.ones((9, 2, 1, 1), np.float32)
    bias = np.array([1e-40, -1e-45, 2.0**-126, 3e38, -3e38, np.inf, -0.0, 1, 0.1], np.float32)
    expected = np.broadcast_to((np.float32(2 * value) + bias)[:, None, None], (1, 9, 8, 8))
    for level in levels():
        got = at(level, "conv2d", x, w, Window((1, 1)), 1, bias)
        assert np.array_equal(got, expected), level


def test_subnormal_values_are_no_multiples_of_a_factor() -> None:
    """Of these rounding to the nearest subnormal looks exact."""
    x = np.zeros((1, 2, 8, 8), np.float32)
    x[:, :, :4] = np.float32(0.3) * np.float32(2.0**-30)
    x[0, 0, 7, 7] = 5 * 2.0**-149
    w = np.full((8, 2, 1, 1), 2.0**12, np.float32)
    results = [at(level, "conv2d", x, w, Window((1, 1)), 1) for level in levels()]
    for got in results:
        assert (got[0, :, 7, 7] == 5 * 2.0**-137).all()


def test_the_level_may_change_during_a_convolution() -> None:
    """By another thread: the pointer to the kernels of pairs was read again, when it was null."""
    if CORE is None:
        pytest.skip("no C++ core")
    x, w = (np.ones(shape, np.float32) for shape in ((4, 64, 32, 32), (64, 64, 3, 3)))
    x[1] = np.float32(0.25)
    case, results = (x, w, Window((3, 3)), 1), []
    expected = {at(level, "conv2d", *case).tobytes() for level in levels()}
    worker = threading.Thread(
        target=lambda: results.extend(BACKEND.conv2d(*case).tobytes() for _ in range(12))
    )
    worker.start()
    while worker.is_alive():
        for level in levels():
            CORE.set_gemm_level(level)
            worker.join(0.002)
    assert len(results) == 12 and set(results) <= expected


def test_one_value_that_is_no_bfloat16_is_not_cut() -> None:
    x, w, _ = rounded(1)
    window = Window((1, 1))
    for t in (0, 77):
        y, k = x[:1].copy(), w[:, :, :1, :1].copy()
        y.reshape(-1)[t] = np.float32(1 + 2.0**-9)
        results = [at(level, "conv2d", y, k, window, 1) for level in levels()]
        expected = GENERIC.conv2d(y.astype(np.float64), k.astype(np.float64), window, 1)
        for got in results:
            assert (np.abs(got - expected) <= 8 * UNIT * (np.abs(expected) + 8)).all()
