"""Operands under float scales have the reference's codes, scales and counts, on both axes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.quant import reference
from extensor.quant.spec import QuantSpec
from extensor.random import Stream
from extensor_cuda.kernels.prepare import float_scaled_operand
from extensor_cuda.kernels.quantize import float_scaled_blocks
from tests.unit.cuda import emulator
from tests.unit.cuda.places import PLACES, place
from tests.unit.cuda.preparing import FLOAT_SCALES, gap
from tests.unit.cuda.preparing import made as made_by
from tests.unit.cuda.test_compile import check_compiles

E4M3, E5M2, INT8 = QuantSpec("fp8_e4m3"), QuantSpec("fp8_e5m2"), QuantSpec("int8")
SPECS = (
    E4M3,
    E5M2.replace(tile="channel"),
    E4M3.replace(tile=(1, 128)),
    E4M3.replace(tile=(128, 128)),
    INT8,
    INT8.replace(tile="tensor"),
    INT8.replace(rounding="stochastic"),
    E5M2.replace(tile=(1, 128), rounding="stochastic"),
)
SHAPES = ((64, 256), (208, 272), (70, 19), (1, 300), (300, 130), (129, 1))
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def name(value: object) -> str:
    if not isinstance(value, QuantSpec):
        return str(value)
    return f"{value.format}-{value.tile}-{value.rounding}"


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_no_kernel_spills(spec: QuantSpec) -> None:
    for axis in (0, 1):
        for dtype, arch in (("float32", "sm_80"), ("bfloat16", "sm_90a")):
            check_compiles(
                float_scaled_operand.scaled_source(spec.replace(axis=axis).resolve(2), dtype), arch
            )


@pytest.fixture(params=PLACES)
def xp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = [float_scaled_operand, float_scaled_blocks]
    return place(request, monkeypatch, [], hopper=False, quantizing=made)


def data(shape: tuple[int, int], dtype: str, kind: str) -> np.ndarray:
    rng = np.random.default_rng(shape[1])
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-12, 3, shape))
    if kind == "special":
        x[0, 0], x[-1, -1] = -0.0, np.nan
        x[shape[0] // 2] = 0
        x[:, shape[1] // 2] = 0
        x[shape[0] // 3, shape[1] // 3] = -np.inf
    elif kind == "tiny":
        x *= 2.0 ** (-138 if dtype != "float16" else -14)
    return x.astype(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_operands_are_the_references(xp: Any, spec: QuantSpec, axis: int, dtype: str) -> None:
    resolved = spec.replace(axis=axis).resolve(2)
    stream = Stream(3, 1, 4, 1, bool(axis)) if spec.rounding == "stochastic" else None
    wide = dtype == "float32"  # the others differ in how they are read alone
    for shape in SHAPES if wide else SHAPES[1:4]:
        for kind in ("normal", "special", "tiny") if wide else ("special",):
            x = data(shape, dtype, kind)
            assert gap(FLOAT_SCALES, x, resolved) is None
            q, stats = reference.quantize(x, resolved, stream)
            ((side, counts),) = made_by(FLOAT_SCALES, xp.asarray(x), [resolved], [stream], xp)
            k = shape[axis]
            expected = q.codes[:, :k] if axis else q.codes[:k].T
            got = np.asarray(side.codes.get())
            assert got.shape == expected.shape and side.codes.strides[0] % 16 == 0
            np.testing.assert_array_equal(got, expected, err_msg=f"{shape} {kind}")
            scales = q.scales.T if axis else q.scales
            np.testing.assert_array_equal(np.asarray(side.scale.grid.get()), scales)
            assert counts() == stats, (shape, kind)
            decoded = reference.dequantize(q)
            values, decoded = side.values(xp).get(), decoded if axis else decoded.T
            if not isinstance(xp, emulator.Cupy):  # cupy flushes what is below the normal numbers
                values, decoded = (np.where(abs(a) < 2.0**-126, 0, a) for a in (values, decoded))
            np.testing.assert_array_equal(values, decoded)


@pytest.mark.parametrize("spec", [E4M3, E4M3.replace(tile="channel")], ids=name)
def test_both_ways_at_once(xp: Any, spec: QuantSpec) -> None:
    """The scale of a tensor is found once."""
    x = xp.asarray(data((208, 272), "bfloat16", "normal"))
    both = [spec.replace(axis=axis).resolve(2) for axis in (1, 0)]
    for (side, _), one in zip(made_by(FLOAT_SCALES, x, both, [None, None], xp), both, strict=True):
        ((alone, _),) = made_by(FLOAT_SCALES, x, [one], [None], xp)
        np.testing.assert_array_equal(side.codes.get(), alone.codes.get())
        np.testing.assert_array_equal(side.scale.grid.get(), alone.scale.grid.get())


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (QuantSpec("mxfp4"), "8-bit codes under float scales"),
        (INT8.replace(symmetric=False), "zero points"),
        (E4M3.replace(tile=(1, 64)), "tiles (1, 64)"),
        (INT8.replace(tile=(1, 128)), "tiles (1, 128) of int8"),
        (INT8.replace(rounding="stochastic", rbits=8), "8 bits"),
        (E4M3.replace(tile=(128, 128), rounding="stochastic"), "stochastic rounding in tiles"),
        (E4M3.replace(scale_dtype="float16"), "float16 scales"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_the_kernel_does_not_cover_is_named(spec: QuantSpec, words: str) -> None:
    x = np.ones((64, 256), dtype=np.float32)
    assert words in str(gap(FLOAT_SCALES, x, spec.replace(axis=1).resolve(2)))
    plain = E4M3.replace(axis=1).resolve(2)
    assert "fewer than" in str(gap(FLOAT_SCALES, x, plain, 1, "90"))
    assert "capability 80" in str(gap(FLOAT_SCALES, x, plain, 1 << 40, "80"))
