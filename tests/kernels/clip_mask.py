"""Quantizing with a clip mask, rowwise and both ways: the core against the generic methods."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from extensor.backends import cpu
from extensor.quant.spec import Hadamard, QuantSpec
from extensor.random import Stream
from tests.kernels.inputs import GENERIC

SPECS = (
    QuantSpec("mxfp4"),
    QuantSpec("mxfp4", scale_rule="quest", transform=Hadamard(32, "random", 3)),
    QuantSpec("mxfp4", scale_rule="mse", tile=(1, 16)),
    QuantSpec("mxfp8_e4m3", transform=Hadamard(128, "none")),
    QuantSpec("mxfp6_e2m3"),
    QuantSpec("nvfp4", scale_rule="four_over_six"),
    QuantSpec("nvfp4", rounding="stochastic"),
    QuantSpec("int8", tile=(1, 32)),
)
SHAPES = ((7, 96), (3, 2048), (5, 61), (2, 3, 160))


def sample(shape: tuple[int, ...], seed: int = 0, dtype: str = "float32") -> Any:
    """Values over several binades, one of them NaN."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-4, 4, shape))
    x.flat[7 % x.size] = np.nan
    return x.astype(np.float32).astype(dtype)


@cache
def cases() -> list[tuple[Any, QuantSpec, Stream | None]]:
    found = []
    for number, spec in enumerate(SPECS):
        for shape in SHAPES:
            for dtype in ("float32", "bfloat16"):
                stream = Stream(1) if spec.rounding == "stochastic" else None
                found.append((sample(shape, number, dtype), spec.resolve(len(shape)), stream))
    return found


def same(found: Any, expected: Any, context: object) -> None:
    """Codes, scales, counts and, where there is one, the mask."""
    assert np.array_equal(found[0].codes, expected[0].codes), context
    assert found[0].scales.tobytes() == expected[0].scales.tobytes(), context
    assert found[1] == expected[1], context
    assert all(np.array_equal(a, b) for a, b in zip(found[2:], expected[2:], strict=True)), context


def check_quantize_clipped(backend: cpu.CpuBackend) -> None:
    for case in cases():
        same(backend.quantize_clipped(*case), GENERIC.quantize_clipped(*case), case[1])


def check_quantize_rowwise_columnwise_clipped(backend: cpu.CpuBackend) -> None:
    for x, spec, stream in cases():
        if x.ndim != 2:
            continue
        pair = spec, spec.replace(axis=0).resolve(2)
        streams = stream, None if stream is None else Stream(2)
        found = backend.quantize_rowwise_columnwise_clipped(x, pair, streams)
        expected = GENERIC.quantize_rowwise_columnwise_clipped(x, pair, streams)
        for mine, theirs in zip(found, expected, strict=True):
            same(mine, theirs, (spec, x.shape))


def check_straight_through(backend: cpu.CpuBackend) -> None:
    """Bit for bit, for ragged rows, with and without a mask and a transform."""
    rng = np.random.default_rng(0)
    for transform in (None, *(Hadamard(size, "random", size) for size in (16, 32, 64, 128))):
        for rows, length in ((1, 1), (3, 37), (5, 128), (2, 300)):
            padded = length if transform is None else length + -length % transform.size
            g = (rng.standard_normal((rows, padded)) * 8).astype(np.float32)
            g.flat[rows * padded // 2] = -0.0
            mask = np.packbits(rng.random((rows, padded)) < 0.7, axis=-1, bitorder="little")
            for bits in (None, mask):
                expected = GENERIC.straight_through(g, bits, transform, length)
                found = backend.straight_through(g, bits, transform, length)
                assert found.tobytes() == np.ascontiguousarray(expected).tobytes(), transform
