"""Our gguf records against the gguf package's: the same bytes and the same numbers."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from extensor.io import layouts
from extensor.quant.reference import dequantize, quantize
from extensor.quant.spec import QuantSpec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    gguf = pytest.importorskip("gguf")

F = np.float32


def values() -> np.ndarray:
    rng = np.random.default_rng(0)
    spread = np.exp2(rng.integers(-120, 100, (32, 16)).repeat(32, axis=1))
    x = (rng.standard_normal((32, 512)) * spread).astype(F)
    x[0, :64] = 0.0
    return x


def test_mxfp4() -> None:
    q, _ = quantize(values(), QuantSpec("mxfp4"))
    decoded = gguf.quants.dequantize(layouts.to_gguf_mxfp4(q), gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(decoded, dequantize(q))


def test_mxfp4_of_theirs() -> None:
    """Their quantizer's records, decoded by us and by them."""
    records = gguf.quants.quantize(values(), gguf.GGMLQuantizationType.MXFP4)
    decoded = gguf.quants.dequantize(records, gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(dequantize(layouts.from_gguf_mxfp4(records)), decoded)


def test_mxfp4_quantized_as_they_do() -> None:
    """Byte for byte; ties and the signs of zeros included."""
    x = np.concatenate([values(), (np.arange(-8192, 8192) / 1024).astype(F).reshape(32, 512)])
    x[1, :40] = -0.0
    records = gguf.quants.quantize(x, gguf.GGMLQuantizationType.MXFP4)
    q, _ = quantize(x, QuantSpec("mxfp4", dialect="gguf"))
    assert layouts.to_gguf_mxfp4(q).tobytes() == records.tobytes()


def test_nvfp4() -> None:
    kind = getattr(gguf.GGMLQuantizationType, "NVFP4", None)
    if kind is None:
        pytest.skip("this gguf has no NVFP4")
    q, _ = quantize(values(), QuantSpec("nvfp4"))
    records, tensor_scale = layouts.to_gguf_nvfp4(q)
    decoded = gguf.quants.dequantize(records, kind) * tensor_scale
    assert np.array_equal(decoded, dequantize(q))
