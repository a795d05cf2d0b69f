"""The torchao dialect against torchao's own quantizers on CPU, byte for byte.

Scales and codes agree on everything finite, infinities under the MX formats included. Blocks with
NaN agree in their scale; ours hold codes 0.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from extensor.io.layouts import to_swizzled_scales
from extensor.quant.reference import quantize
from extensor.quant.rounding import unpack
from extensor.quant.spec import QuantSpec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    nvfp4_tensor = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    constants = pytest.importorskip("torchao.prototype.mx_formats.constants")
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")

pytestmark = pytest.mark.filterwarnings("ignore")

F = np.float32
ELEMENTS = {
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp6_e2m3": constants.DTYPE_FP6_E2M3,
    "mxfp6_e3m2": constants.DTYPE_FP6_E3M2,
    "mxfp4": torch.float4_e2m1fn_x2,
}
SHAPE = (64, 512)


def samples() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    spread = np.exp2(rng.integers(-40, 40, (64, 16)).repeat(32, axis=1))
    normal = (rng.standard_normal(SHAPE) * spread).astype(F)
    zeros = normal.copy()
    zeros[0, :32], zeros[1, :64], zeros[2, 5] = 0.0, -0.0, -0.0
    ties = (rng.integers(-32, 33, SHAPE) / 4).astype(F)
    huge = np.clip(rng.standard_normal(SHAPE), -1, 1).astype(F) * F(3.4e38)
    return {"normal": normal, "zeros": zeros, "ties": ties, "huge": huge}


def theirs(x: np.ndarray, name: str, rule: str) -> tuple[np.ndarray, np.ndarray]:
    mode = mx_tensor.ScaleCalculationMode[rule.upper()]
    scales, codes = mx_tensor.to_mx(torch.from_numpy(x), ELEMENTS[name], 32, mode)
    return scales.view(torch.uint8).numpy(), codes.view(torch.uint8).numpy().reshape(len(x), -1)


def ours(x: np.ndarray, name: str, rule: str) -> tuple[np.ndarray, np.ndarray]:
    dialect = {"dialect": "torchao"} if rule == "floor" else {"scale_rule": rule}
    q, _ = quantize(x, QuantSpec(name, **dialect))
    # torchao keeps six-bit codes one to a byte.
    return q.scales, unpack(q.codes, 6, x.shape[1]) if "fp6" in name else q.codes


@pytest.mark.parametrize("kind", ["normal", "zeros", "ties", "huge"])
@pytest.mark.parametrize("rule", ["floor", "rceil", "ceil", "even"])
@pytest.mark.parametrize("name", ELEMENTS)
def test_mx_scales_and_codes(name: str, rule: str, kind: str) -> None:
    x = samples()[kind]
    for got, expected in zip(ours(x, name, rule), theirs(x, name, rule), strict=True):
        assert got.tobytes() == np.ascontiguousarray(expected).tobytes()


@pytest.mark.parametrize("name", ELEMENTS)
def test_a_nan_makes_the_block_nan(name: str) -> None:
    x = samples()["normal"]
    x[3, 40] = np.nan
    assert theirs(x, name, "floor")[0].tobytes() == ours(x, name, "floor")[0].tobytes()


@pytest.mark.parametrize("name", ELEMENTS)
def test_infinities_and_blocks_below_the_smallest_scale(name: str) -> None:
    x = samples()["normal"]
    x[3, 40], x[4, 0], x[4, 31] = np.inf, -np.inf, np.inf
    x[5] = np.random.default_rng(1).standard_normal(512) * 2.0**-135
    x[6] = np.random.default_rng(2).standard_normal(512) * 2.0**-126
    scales, codes = ours(x, name, "floor")
    assert (scales[5] == 0).all()
    assert scales[3, 1] == 255 - {"mxfp8_e4m3": 8, "mxfp8_e5m2": 15, "mxfp6_e3m2": 4}.get(name, 2)
    for got, expected in zip((scales, codes), theirs(x, name, "floor"), strict=True):
        assert got.tobytes() == np.ascontiguousarray(expected).tobytes()


@pytest.mark.parametrize("kind", ["normal", "zeros", "ties", "huge", "tiny", "wide", "bf16"])
def test_nvfp4(kind: str) -> None:
    rng = np.random.default_rng(2)
    spread = np.exp2(rng.integers(-20, 20, (64, 32)).repeat(16, axis=1))
    more = {
        "tiny": (rng.standard_normal(SHAPE) * 1e-30).astype(F),
        "wide": (rng.standard_normal(SHAPE) * spread).astype(F),
        "bf16": torch.from_numpy(rng.standard_normal(SHAPE)).bfloat16().float().numpy(),
    }
    x = (samples() | more)[kind]
    q, _ = quantize(x, QuantSpec("nvfp4", dialect="torchao"))
    amax = torch.from_numpy(x).abs().max()
    tensor_scale = nvfp4_tensor.per_tensor_amax_to_scale(amax)
    scales, codes = nvfp4_tensor.nvfp4_quantize(torch.from_numpy(x), 16, tensor_scale)
    assert q.tensor_scale == tensor_scale.numpy()
    assert scales.view(torch.uint8).numpy().tobytes() == q.scales.tobytes()
    assert codes.numpy().tobytes() == q.codes.tobytes()


def test_swizzled_scales() -> None:
    for shape in ((128, 4), (200, 10), (1, 1), (300, 33)):
        scales = np.random.default_rng(0).integers(0, 255, shape).astype(np.uint8)
        expected = utils.to_blocked(torch.from_numpy(scales)).numpy()
        assert to_swizzled_scales(scales).tobytes() == expected.tobytes()
