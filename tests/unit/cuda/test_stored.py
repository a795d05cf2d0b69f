"""Products of blocked matrices on tensor cores: against float64, within the bounds of gemm.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.quant import reference
from extensor.quant.array import QuantArray
from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.prepare import rebase
from extensor_cuda.matmul.product import Product
from extensor_cuda.matmul.stored import matmul, stored_gap
from extensor_cuda.runtime.compile import compile_cubin
from tests.unit.cuda.test_compile import properties

FORMATS = (
    "mxfp4",
    "mxfp8_e4m3",
    "mxfp8_e5m2",
    "mxfp6_e2m3",
    "mxfp6_e3m2",
    "mxint8",
    "nvfp4",
    "nvfp4_fp8exact",
)
SHAPES = ((1, 7, 16), (300, 200, 1000), (129, 193, 2050))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_rebasing_compiles_without_spills(block: int) -> None:
    code, log = compile_cubin(rebase.mxfp4_source(block), "sm_90a")
    assert "warning" not in log.lower(), log
    assert all(numbers["stack"] == 0 for numbers in properties(code).values())


def test_what_the_kernel_does_not_cover_is_named() -> None:
    x = np.ones((32, 64), dtype=np.float32)
    rows, columns = (
        reference.quantize(x, QuantSpec("mxfp4", axis=i).resolve(2))[0] for i in (1, 0)
    )
    plain = reference.quantize(x, QuantSpec("int8", axis=1).resolve(2))[0]
    assert stored_gap(rows, rows, "90") is None
    for q, capability, words in (
        (rows, "80", "compute capability 80"),
        (columns, "90", "axis 0"),
        (plain, "90", "scales"),
    ):
        assert words in str(stored_gap(rows, q, capability))


def made(rng: Any, shape: tuple[int, int], spread: int, name: str) -> QuantArray:
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-spread, spread + 1, shape))
    return reference.quantize(x.astype(np.float32), QuantSpec(name, axis=1).resolve(2))[0]


def sent(q: QuantArray, xp: Any) -> QuantArray:
    return replace(q, **{name: xp.asarray(part) for name, part in q.parts.items()})


WINDOWS = {"mxfp4": 28, "mxfp6_e2m3": 11, "mxfp6_e3m2": 23, "nvfp4_fp8exact": 11}
"""Binades of a tensor's scales that FP8 holds with every value; more where values allow it."""


def binades(q: QuantArray) -> int:
    """How far the largest scale lies above the smallest that is not zero."""
    scales = np.exp2(q.scales.astype(np.float64) - 127)
    if not q.spec.is_mx:
        scales = q.scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return int(np.ptp(np.floor(np.log2(scales[scales > 0]))))


def bound(a: np.ndarray, b: np.ndarray, path: str) -> np.ndarray:
    k = a.shape[1]
    relative = min(k, 512) * 34 / 32 * 2.0**-13 + 2.0**-20
    if path.startswith("bf16"):
        relative = k * 2.0**-22
    return (relative + 2.0**-22) * (np.abs(a) @ np.abs(b).T) + k * 2.0**-126


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("spread", [0, 5])
def test_products_are_within_the_bound(
    hopper_gpu: Any, name: str, shape: tuple[int, int, int], spread: int
) -> None:
    m, n, k = shape
    rng = np.random.default_rng(m + spread)
    a, b = made(rng, (m, k), spread, name), made(rng, (n, k), spread, name)
    va, vb = (reference.dequantize(q, np).astype(np.float64) for q in (a, b))
    sides = sent(a, hopper_gpu.xp), sent(b, hopper_gpu.xp)
    path = hopper_gpu.path("block_scaled_matmul", *sides)
    if name not in WINDOWS:
        assert path.startswith("bf16")
    elif max(binades(q) for q in (a, b)) <= WINDOWS[name]:
        assert path.startswith("FP8")
    got = hopper_gpu.block_scaled_matmul(*sides).get()
    assert (np.abs(got - va @ vb.T) <= bound(va, vb, path)).all()
    wide = matmul(*sides, hopper_gpu.xp, accumulate="bf16", out_dtype="bfloat16")
    assert isinstance(wide, Product)
    error = np.abs(wide.out.get().astype(np.float64) - va @ vb.T)
    assert (error <= bound(va, vb, "bf16") * 2 + 2.0**-8 * np.abs(va @ vb.T)).all()


def test_nan_blocks_zero_blocks_and_wide_rows(hopper_gpu: Any) -> None:
    rng = np.random.default_rng(1)
    a, b = made(rng, (70, 300), 0, "mxfp4"), made(rng, (50, 300), 0, "mxfp4")
    a.codes[3, :48] = 0
    a.scales[3, :3] = (0, 254, 1)  # of zero blocks: they count for nothing
    a.codes[4], b.scales[5, 2] = 0, 255
    expected = (
        reference.dequantize(a, np).astype(float) @ reference.dequantize(b, np).astype(float).T
    )
    sides = sent(a, hopper_gpu.xp), sent(b, hopper_gpu.xp)
    assert hopper_gpu.path("block_scaled_matmul", *sides) == "FP8 tensor cores"
    np.testing.assert_allclose(
        hopper_gpu.block_scaled_matmul(*sides).get(), expected, rtol=2**-12, atol=2**-12
    )
    a.scales[3, 1] = 1  # bfloat16 has a window of its own, below the largest scale of all
    for span, path in ((28, "FP8"), (29, "bf16 tensor cores: a row's scales span")):
        a.codes[7, :32] = 0x22  # ones, in two blocks
        a.scales[7] = 120
        a.scales[7, 1] = 120 - span
        va, vb = (reference.dequantize(q, np).astype(float) for q in (a, b))
        sides = sent(a, hopper_gpu.xp), sent(b, hopper_gpu.xp)
        assert hopper_gpu.path("block_scaled_matmul", *sides).startswith(path)
        got, live = hopper_gpu.block_scaled_matmul(*sides).get(), np.arange(50) != 5
        assert np.isnan(got[:, 5]).all()
        error = np.abs(got - va @ vb.T)[:, live]
        assert (error <= bound(va, vb[live], path)).all()


def test_every_scale_of_the_window_is_exact(hopper_gpu: Any) -> None:
    """One value a row against the identity: E5M2 holds each under each shift."""
    xp, codes = hopper_gpu.xp, np.arange(16, dtype=np.uint8)
    for shift in range(29):
        x = np.zeros((16, 64), dtype=np.float32)
        x[:, 0], x[:, 32] = 6, 1
        a = reference.quantize(x, QuantSpec("mxfp4", axis=1).resolve(2))[0]
        a.codes[:, 16:] = 0
        a.codes[:, 16] = codes
        a.scales[:, 0], a.scales[:, 1] = 130, 130 - shift
        pick = np.zeros((1, 64), dtype=np.float32)
        pick[0, 32] = 1
        b = reference.quantize(pick, QuantSpec("mxfp4", axis=1).resolve(2))[0]
        got = hopper_gpu.block_scaled_matmul(sent(a, xp), sent(b, xp)).get()[:, 0]
        np.testing.assert_array_equal(got, reference.dequantize(a, np)[:, 32])


def test_bad_options_are_refused(hopper_gpu: Any) -> None:
    q = sent(made(np.random.default_rng(0), (4, 32), 0, "mxfp4"), hopper_gpu.xp)
    with pytest.raises(ValueError, match="accumulate"):
        matmul(q, q, hopper_gpu.xp, accumulate="other")
