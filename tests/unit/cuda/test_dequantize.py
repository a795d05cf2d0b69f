"""Decoded values in both dtypes: those of the reference, by their bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from extensor.quant import reference
from extensor.quant.spec import QuantSpec
from extensor_cuda import quantize
from extensor_cuda.kernels.quantize import dequantize
from tests.unit.cuda.places import PLACES, place
from tests.unit.cuda.test_prepare_expanded import sent

FORMATS = ("mxfp8_e4m3", "mxfp6_e2m3", "mxfp4", "nvfp4")


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The array module of a GPU, or of the kernels' sources on the CPU."""
    return place(request, monkeypatch, [dequantize])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("shape", "axis", "square"),
    [
        ((4096,), 0, False),
        *(((3, 70), 1, s) for s in (False, True)),
        *(((70, 8), 0, s) for s in (False, True)),
    ],
    ids=str,
)
def test_values_in_float32_and_bfloat16(
    xp: Any, shape: tuple[int, ...], axis: int, square: bool, format: str
) -> None:
    rng = np.random.default_rng(len(shape))
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-140, 9, shape))).astype(np.float32)
    x.reshape(-1)[5] = np.nan
    spec = QuantSpec(format, axis=axis, tile=(16, 16) if square else None)
    q = reference.quantize(x, spec.resolve(len(shape)))[0]
    for dtype in ("float32", "bfloat16", "float16"):
        run = quantize.dequantize(xp, sent(q, xp), dtype)
        assert callable(run), run
        expected = reference.round_to(reference.dequantize(q), dtype)
        got = np.asarray(run().get())
        assert got.dtype == expected.dtype
        live = ~np.isnan(expected)  # a GPU's NaN has other bits
        np.testing.assert_array_equal(np.isnan(got), ~live)
        np.testing.assert_array_equal(got[live].view(np.uint8), expected[live].view(np.uint8))
