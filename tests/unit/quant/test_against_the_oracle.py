"""Every format with specs of every kind, on small arrays, against the scalar oracle.

Hypothesis draws many more in test_quantize_properties.py; these are the same in each run.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

from extensor.formats import DIALECTS, FORMATS
from extensor.quant.reference import dequantize, fake_quantize, quantize
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream
from tests.oracle import quantize as oracle
from tests.oracle.compare import same_bytes, same_stored

F = np.float32
COUNT = 14
EDEN = [
    QuantSpec("nvfp4", rounding="stochastic", transform=Hadamard(size, "random", 5), eden=True)
    for size in (16, 32, 128)
]


def drawn_spec(name: str, ndim: int, rng: np.random.Generator) -> QuantSpec:
    """A spec with fields of any kind; those that do not go together are drawn again."""
    row = FORMATS[name]
    while True:
        fields: dict[str, Any] = {
            "axis": int(rng.integers(-ndim, ndim)),
            "rounding": rng.choice(["nearest_even", "stochastic"]),
            "rbits": int(rng.choice([8, 32])),
            "dialect": rng.choice(list(DIALECTS)),
            "element_scale": float(rng.choice([1.0, 1.0, 0.75])),
            "scale_rule": rng.choice([None, *row.scale_rules]),
            "scale_window": rng.choice([None, 4, 200]),
            "scale_dtype": rng.choice([None, "float16"]),
            "symmetric": bool(rng.integers(4)),
            "statistic": rng.choice(["amax", "amax", "percentile", "running"]),
            "percentile": float(rng.choice([1.0, 60.0, 99.9])),
        }
        tiles: list[Any] = [None, None, "channel", "tensor", (1, 7), (1, 32), (2, 16)]
        fields["tile"] = tiles[rng.integers(len(tiles))]
        transforms = [None, None, Hadamard(16), Hadamard(32, "random", 9)]
        fields["transform"] = transforms[rng.integers(len(transforms))]
        kept = {
            key: value for key, value in fields.items() if rng.integers(3) and value is not None
        }
        try:
            return QuantSpec(name, **kept).resolve(ndim)
        except ValueError:
            continue


def drawn_array(rng: np.random.Generator) -> np.ndarray:
    """Ordinary values; in some arrays zeros, ties, very small and very large ones, no numbers."""
    shapes = [(70,), (70,), (2, 40), (2, 40), (40, 2), (2, 17, 3), (2, 17, 3), (3, 0)]
    shape = shapes[rng.integers(len(shapes))]
    x = rng.standard_normal(shape).astype(F) * F(2.0 ** rng.integers(-6, 7))
    special = [0.0, -0.0, 1.5, 2.5, 6.0, 448.0, 1e-38, 1e-42, -3e38, 2.0**-127, np.inf, np.nan]
    count = int(rng.choice([0, len(x.reshape(-1)) // 8, len(x.reshape(-1)) // 2]))
    places = rng.choice(x.size, count, replace=False) if x.size else []
    x.reshape(-1)[places] = rng.choice(special[: rng.choice([6, 10, 12])], count)
    return np.where(rng.random(shape) < 0.2, F(0), x) if rng.integers(2) else x


def same_as_the_oracle(x: np.ndarray, spec: QuantSpec, rng: np.random.Generator) -> None:
    stream = Stream(seed=int(rng.integers(1 << 62)), slot=3)
    stream_or_none = stream if spec.rounding == "stochastic" else None
    previous = None
    if spec.statistic == "running" and rng.integers(2):
        previous = np.full(quantize(x, spec, stream_or_none)[0].scales.shape, 3, F)
    expected = oracle.quantize(x, spec, stream_or_none, previous)
    q, stats = quantize(x, spec, stream_or_none, previous)
    same_stored(q, stats, expected)
    same_bytes("dequantized", dequantize(q), expected.values)
    if previous is None:
        same_bytes("operand", fake_quantize(x, spec, stream_or_none)[0], expected.operand)


@pytest.mark.parametrize("number", range(COUNT))
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_values_and_counts(name: str, number: int) -> None:
    rng = np.random.default_rng(zlib.crc32(f"{name} {number}".encode()))
    x = drawn_array(rng)
    spec = QuantSpec(name) if number == 0 else drawn_spec(name, x.ndim, rng)
    same_as_the_oracle(x, spec, rng)


@pytest.mark.parametrize("spec", EDEN, ids=lambda spec: str(spec.transform.size))
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30, 0.0])
def test_nvfp4_with_corrected_scales(spec: QuantSpec, size: float) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((2, 3, 40)) * size).astype(F)
    x[0, 1] = 0
    same_as_the_oracle(x, spec, rng)
    x[1, 2, 5] = np.nan
    same_as_the_oracle(x, spec, rng)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e2m3", "mxfp8_e4m3"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_smallest_scales(name: str, dialect: str) -> None:
    """Each rule, about the block whose scale would be 2^-127: half of each block is small."""
    row, rng = FORMATS[name], np.random.default_rng(0)
    for rule in [None] if DIALECTS[dialect].mx_scale_rule else row.scale_rules:
        x = rng.integers(-8, 9, (9, 32)).astype(F) * F(2.0**-129)
        x[:, 0] = row.element.max * 2.0 ** (-128 + np.arange(9) / 3)
        x[:, 1] = x[:, 0] * 1.05
        same_as_the_oracle(x, QuantSpec(name, scale_rule=rule, dialect=dialect), rng)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", FORMATS)
def test_zeros(name: str, dialect: str) -> None:
    rng = np.random.default_rng(0)
    same_as_the_oracle(np.zeros((2, 40), F), QuantSpec(name, dialect=dialect), rng)
