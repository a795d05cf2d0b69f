"""Float minimums and super-blocks: by hand, against exact arithmetic, and what is refused."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import extensor as et
from extensor.io import load_checkpoint, save_checkpoint
from extensor.quant import QuantSpec
from extensor.quant.array import QuantArray
from extensor.quant.reference import dequantize, fake_quantize, quantize
from extensor.quant.rounding import unpack

F = np.float32
MINIMUM = QuantSpec("int4", tile=(1, 32), scale_dtype="float16", minimum=True)
SPECS = [
    MINIMUM,
    QuantSpec("int8", tile=(1, 16), minimum=True),
    QuantSpec("int4", tile=(1, 32), minimum=True, super_block=256),
    QuantSpec("int5", tile=(1, 32), minimum=True, super_block=256),
    QuantSpec("int6", tile=(1, 16), super_block=256),
]
IDS = [f"{s.format}-{s.minimum}-{s.super_block}" for s in SPECS]


def exact(q: QuantArray) -> np.ndarray:
    """A stored matrix decoded one number at a time, in fractions; blocks along the last axis."""
    spec, (rows, columns) = q.spec, q.shape
    bits, size = spec.row.element.bits, spec.tile[1]
    codes = unpack(q.codes, bits, columns).astype(int)
    out = np.empty(q.shape)
    for i, j in np.ndindex(rows, columns):
        b = j // size
        code = codes[i, j] - (1 << bits) * (codes[i, j] >= 1 << (bits - 1))
        scale, low = Fraction(float(q.scales[i, b])), Fraction(0)
        if spec.minimum:
            code += 1 << (bits - 1)
            low = Fraction(float(q.minimums[i, b]))
        if spec.super_block:
            s = j // spec.super_block
            scale *= Fraction(float(q.super_scales[i, s]))
            low *= -Fraction(float(q.super_minimums[i, s])) if spec.minimum else 0
        out[i, j] = float(code * scale + low)
    return out


def test_a_block_by_hand() -> None:
    x = np.array([[-1.0, 14.0, 0.4, 0.6]], F)
    q, stats = quantize(x, MINIMUM.replace(tile=(1, 4)))
    assert float(q.scales[0, 0]) == 1.0 and float(q.minimums[0, 0]) == -1.0
    assert q.codes.tobytes().hex() == "78a9"  # -8 7, -7 -6 in two's complement: 0 15, 1 2
    assert dequantize(q).tolist() == [[-1.0, 14.0, 0.0, 1.0]]
    assert stats.saturated == 0


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
@pytest.mark.parametrize("columns", [256, 600])
def test_decodes_exactly_and_stays_near(spec: QuantSpec, columns: int) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((3, columns)) * 2.0 ** rng.integers(-3, 4, (3, 1)) + 0.3).astype(F)
    q, _ = quantize(x, spec)
    values = dequantize(q)
    assert np.abs(values - exact(q)).max() <= np.abs(values).max() * 2.0**-22
    noise = np.square(values - x).sum() / np.square(x).sum()
    assert noise < 4.0 ** -(spec.row.element.bits - 0.5) * 4
    assert np.array_equal(fake_quantize(x, spec)[0], values)


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_along_another_axis_and_cut_to_whole_blocks(spec: QuantSpec) -> None:
    x = np.random.default_rng(1).standard_normal((512, 6)).astype(F)
    q = et.ExTensor(x).quantize(spec.replace(axis=0))
    other = et.ExTensor(np.ascontiguousarray(x.T)).quantize(spec)
    assert np.array_equal(q.dequantize().numpy().T, other.dequantize().numpy())
    assert np.array_equal(q.T.dequantize().numpy(), other.dequantize().numpy())
    cut = other[1:3, 256:]
    assert np.array_equal(cut.dequantize().numpy(), other.dequantize().numpy()[1:3, 256:])
    if spec.super_block:
        with pytest.raises(ValueError, match="cuts blocks of 256"):
            other[:, 32:]


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_a_special_value_is_never_a_number(spec: QuantSpec, special: float) -> None:
    x = np.ones((2, 512), F)
    x[1, 40] = special
    values = dequantize(quantize(x, spec)[0])
    size = spec.super_block or spec.tile[1]
    first = 40 // size * size
    assert np.isnan(values[1, first : first + size]).all()
    values[1, first : first + size] = 1
    assert np.allclose(values, 1, atol=1e-3)


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
@pytest.mark.parametrize("value", [0.0, -3.0, 5.0])
def test_constant_blocks(spec: QuantSpec, value: float) -> None:
    values = dequantize(quantize(np.full((2, 256), value, F), spec)[0])
    assert np.abs(values - value).max() <= abs(value) * 2.0**-6


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_checkpoint_and_products(spec: QuantSpec, tmp_path: object) -> None:
    x = np.random.default_rng(2).standard_normal((8, 512)).astype(F)
    q = quantize(x, spec)[0]
    save_checkpoint(f"{tmp_path}/w.safetensors", {"w": q})
    back = load_checkpoint(f"{tmp_path}/w.safetensors").tensors["w"]
    assert isinstance(back, QuantArray) and back.spec == q.spec
    assert {n: p.tobytes() for n, p in back.parts.items()} == {
        n: p.tobytes() for n, p in q.parts.items()
    }
    a = np.random.default_rng(3).standard_normal((3, 512)).astype(F)
    w = et.ExTensor(q)
    got = et.matmul(et.ExTensor(a), w.T).numpy()
    np.testing.assert_allclose(got, a @ dequantize(q).T, rtol=1e-5, atol=1e-4)
    assert "QuantArray" not in repr(w) and repr(w)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "mxfp4", "minimum": True}, "an integer format with float scales"),
        ({"format": "int4", "minimum": True, "symmetric": False}, "symmetric=True"),
        ({"format": "int4", "minimum": True, "tile": "channel"}, r"expected tile \(1, n\)"),
        ({"format": "int4", "super_block": 48}, "a multiple of the block's 32"),
        ({"format": "int4", "super_block": 256, "scale_dtype": "float32"}, "times a float16"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantSpec(**fields)
