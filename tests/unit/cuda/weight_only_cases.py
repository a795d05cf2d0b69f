"""What tests of products with packed weights share: weights, activations, the bound."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.quant import reference
from extensor.quant.array import QuantArray
from extensor.quant.spec import QuantSpec
from extensor_cuda.kernels.weight_only import (
    w4a16_sm90_resident,
    w4w8a16_sm80,
    w4w8a16_sm90_wgmma,
)
from extensor_cuda.matmul.weight_only import few_tokens_gap, weight_only_matmul
from extensor_cuda.runtime import counters
from tests.kernels.matmul_cases import exact
from tests.unit.cuda import emulator as emulation
from tests.unit.cuda.bounds import check_product, sent
from tests.unit.cuda.places import place

INT4, INT8 = QuantSpec("int4"), QuantSpec("int8")

WEIGHTS = (
    QuantSpec("mxfp4"),
    QuantSpec("mxfp4", tile=(1, 16)),
    QuantSpec("mxfp4", tile=(1, 128)),
    QuantSpec("nvfp4"),
    QuantSpec("nvfp4", scale_rule="four_over_six"),
    INT4,
    INT4.replace(tile=(1, 64), scale_dtype="float16"),
    INT4.replace(tile=(1, 128), symmetric=False),
    INT4.replace(tile="channel", symmetric=False),
    INT8,
    INT8.replace(symmetric=False),
    INT8.replace(tile="tensor", symmetric=False),
    INT8.replace(tile=(1, 32)),
    INT8.replace(tile=(1, 128), scale_dtype="float16", symmetric=False),
)

INTEGERS = (
    INT4.replace(tile="channel"),
    INT4.replace(tile="channel", symmetric=False),
    INT4.replace(tile=(1, 128)),
    INT4.replace(tile=(1, 128), symmetric=False, scale_dtype="float16"),
    INT4.replace(tile=(1, 256), symmetric=False),
    INT4.replace(tile="tensor", symmetric=False, scale_dtype="float16"),
    INT8,
    INT8.replace(symmetric=False, scale_dtype="float16"),
    INT8.replace(tile="tensor", symmetric=False),
    INT8.replace(tile=(1, 128), symmetric=False, scale_dtype="float16"),
    INT8.replace(tile=(1, 256), scale_dtype="float16"),
)
"""What `w4w8a16_sm90_wgmma.cu` has of integers."""


def name(value: object) -> str:
    if not isinstance(value, QuantSpec):
        return str(value)
    return f"{value.format}-{value.tile}-{value.rule}-{value.scale_name}-{value.symmetric}"


def weights(spec: QuantSpec, shape: tuple[int, int], seed: int = 0) -> QuantArray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-4, 5, shape)) + 0.3
    return reference.quantize(x.astype(np.float32), spec.replace(axis=1).resolve(2))[0]


def placed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The array module of a fixture with `PLACES` as params; counters are new."""
    counters._zeros.cache_clear()
    products = [w4w8a16_sm90_wgmma]
    return place(
        request, monkeypatch, [w4w8a16_sm80, w4a16_sm90_resident], hopper=False, products=products
    )


def emulated(xp: Any) -> bool:
    return isinstance(xp, emulation.Cupy)


def activations(shape: tuple[int, int], dtype: str) -> np.ndarray:
    rng = np.random.default_rng(shape[1])
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, shape))
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)


def product_of(x: Any, w: QuantArray, out: str, xp: Any) -> Any:
    """The product of what lies on the host."""
    done = weight_only_matmul(xp.asarray(x), sent(w, xp), out, xp)
    assert done
    return done.out


def check(x: np.ndarray, w: QuantArray, out: str, xp: Any) -> np.ndarray:
    assert few_tokens_gap(x, w, "80") is None
    got = product_of(x, w, out, xp)
    a, b = x.astype(np.float64), exact(w)
    k = x.shape[1]
    groups = w.scales.shape[1] if w.spec.scale_name.startswith("float") else 0
    splits = 64  # at most, of these shapes
    check_product(got, a, b, k * 2.0**-22 + (splits + groups + 8) * 2.0**-24, k * 2.0**-126)
    result = np.asarray(got.get())
    assert result.dtype.name == out
    return result
