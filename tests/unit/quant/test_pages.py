"""Packed weights that share large pages."""

from __future__ import annotations

import numpy as np

import extensor as et
from extensor.quant.pages import in_large_pages


def test_weights_follow_each_other_in_one_array() -> None:
    weights = [et.ones((64, width)).to_mxfp4().data for width in (256, 544)]
    moved = [in_large_pages(weight) for weight in weights]
    for before, after in zip(weights, moved, strict=True):
        assert after.spec == before.spec and after.parts.keys() == before.parts.keys()
        for name, part in after.parts.items():
            assert part.flags.c_contiguous and part.dtype == before.parts[name].dtype
            np.testing.assert_array_equal(part, before.parts[name])
    first, second = (weight.codes for weight in moved)
    assert first.base is second.base and first.base is not None
    assert first.ctypes.data % 64 == second.ctypes.data % 64 == 0
    end = first.ctypes.data + first.nbytes
    assert end <= second.ctypes.data < end + 64


def test_a_weight_larger_than_a_shared_array_has_its_own() -> None:
    codes = np.arange(17 << 20, dtype=np.uint32).astype(np.uint8).reshape(1 << 10, -1)
    stored = et.quant.QuantArray(
        codes, np.ones((1 << 10, 1), np.float32), et.QuantSpec("int8", tile="channel", axis=1),
        codes.shape,
    )  # fmt: skip
    np.testing.assert_array_equal(in_large_pages(stored).codes, codes)


def test_quantized_layers_lie_together() -> None:
    rng = np.random.default_rng(0)
    model = et.quantize_model(
        et.nn.Sequential(et.nn.Linear(256, 64, rng=rng), et.nn.Linear(64, 256, rng=rng)),
        "mxfp4_weights",
    )
    first, second = (layer.weight.data.codes for layer in model)
    assert first.base is second.base and first.base is not None
