"""The model_optimizer dialect against NVIDIA Model-Optimizer's quantizers on CPU, byte for byte.

Its E8M0 scales come from a float32 logarithm, ours from the float's bits; they may differ where
amax is within two places of a power of two times the format's largest value, and only there.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from extensor.quant.reference import quantize
from extensor.quant.spec import QuantSpec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("modelopt.torch.quantization.qtensor.mxfp4_tensor")
    mxfp8 = pytest.importorskip("modelopt.torch.quantization.qtensor.mxfp8_tensor")
    nvfp4 = pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor")

pytestmark = pytest.mark.filterwarnings("ignore")

F = np.float32
SHAPE = (64, 512)


def samples() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    spread = np.exp2(rng.integers(-12, 12, (64, 16)).repeat(32, axis=1))
    normal = (rng.standard_normal(SHAPE) * spread).astype(F)
    zeros = normal.copy()
    zeros[0, :32], zeros[1, 5], zeros[2, :32], zeros[3, 5] = 0.0, 0.0, -0.0, -0.0
    ties = (rng.integers(-24, 25, SHAPE) / 4).astype(F)
    ties[:, ::32] = 6.0
    return {
        "normal": normal,
        "zeros": zeros,
        "ties": ties,
        "bf16": torch.from_numpy(normal).bfloat16().float().numpy(),
    }


KINDS = list(samples())


def same(got: np.ndarray, expected: np.ndarray) -> None:
    got, expected = got.reshape(-1), np.ascontiguousarray(expected).reshape(-1)
    assert got.dtype == expected.dtype
    differs = np.flatnonzero(got != expected)
    assert not differs.size, f"{differs.size} differ, first {differs[0]}: {got[differs[0]]}"


@pytest.mark.parametrize("kind", KINDS)
def test_mxfp4(kind: str) -> None:
    x = samples()[kind]
    q, _ = quantize(x, QuantSpec("mxfp4", dialect="model_optimizer"))
    tensor, scales = mxfp4.MXFP4QTensor.quantize(torch.from_numpy(x.copy()), 32)
    same(q.scales, scales.numpy())
    same(q.codes, tensor._quantized_data.numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_mxfp8(kind: str) -> None:
    x = samples()[kind]
    q, _ = quantize(x, QuantSpec("mxfp8_e4m3", dialect="model_optimizer"))
    tensor, scales = mxfp8.MXFP8QTensor.quantize(torch.from_numpy(x.copy()))
    same(q.scales, scales.numpy())
    same(q.codes, tensor._quantized_data.view(torch.uint8).numpy())


@pytest.mark.parametrize("kind", [*KINDS, "wide"])
def test_nvfp4(kind: str) -> None:
    rng = np.random.default_rng(2)
    spread = np.exp2(rng.integers(-20, 20, (64, 32)).repeat(16, axis=1))
    x = (samples() | {"wide": (rng.standard_normal(SHAPE) * spread).astype(F)})[kind]
    q, _ = quantize(x, QuantSpec("nvfp4", dialect="model_optimizer"))
    tensor, scales, tensor_scale = nvfp4.NVFP4QTensor.quantize(torch.from_numpy(x.copy()), 16)
    assert q.tensor_scale == tensor_scale.numpy()
    same(q.scales, scales.view(torch.uint8).numpy())
    same(q.codes, tensor._quantized_data.numpy())
