"""The compressed_tensors dialect against compressed-tensors' compressors on CPU, byte for byte."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from extensor.quant.array import QuantArray
from extensor.quant.reference import quantize
from extensor.quant.spec import QuantSpec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    schemes = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    mxfp4_base = pytest.importorskip("compressed_tensors.compressors.mxfp4.base")
    nvfp4_base = pytest.importorskip("compressed_tensors.compressors.nvfp4.base")

pytestmark = pytest.mark.filterwarnings("ignore")

F = np.float32
SHAPE = (64, 512)
KINDS = {
    "mxfp4": ("MXFP4A16", 32, mxfp4_base.MXFP4PackedCompressor),
    "nvfp4": ("NVFP4A16", 16, nvfp4_base.NVFP4PackedCompressor),
}


def samples() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    spread = np.exp2(rng.integers(-6, 6, (64, 16)).repeat(32, axis=1))
    normal = (rng.standard_normal(SHAPE) * spread).astype(F)
    zeros = normal.copy()
    zeros[0, :32], zeros[1, 5], zeros[2, :32], zeros[3, 5] = 0.0, 0.0, -0.0, -0.0
    return {"normal": normal, "zeros": zeros, "ties": (rng.integers(-32, 33, SHAPE) / 4).astype(F)}


def theirs(x: np.ndarray, name: str) -> dict[str, Any]:
    preset, block, compressor = KINDS[name]
    scheme = schemes.preset_name_to_scheme(preset, ["Linear"])
    weight = torch.from_numpy(x)
    groups = weight.reshape(len(x), -1, block)
    state = {"weight": weight}
    tensor = None
    if name == "nvfp4":
        tensor = helpers.generate_gparam(weight.amin(), weight.amax())
        state["weight_global_scale"] = tensor
    low, high = groups.amin(-1), groups.amax(-1)
    state["weight_scale"], _ = helpers.calculate_qparams(low, high, scheme.weights, tensor)
    return compressor.compress(state, scheme)


def ours(x: np.ndarray, name: str) -> QuantArray:
    return quantize(x, QuantSpec(name, dialect="compressed_tensors"))[0]


@pytest.mark.parametrize("kind", ["normal", "zeros", "ties"])
@pytest.mark.parametrize("name", KINDS)
def test_scales_and_codes(name: str, kind: str) -> None:
    x = samples()[kind]
    q, state = ours(x, name), theirs(x, name)
    assert state["weight_scale"].view(torch.uint8).numpy().tobytes() == q.scales.tobytes()
    assert state["weight_packed"].numpy().tobytes() == q.codes.tobytes()
    if name == "nvfp4":  # a divisor, the reciprocal of ours
        divisor = state["weight_global_scale"].numpy()[0]
        assert F(1) / divisor == q.tensor_scale
