"""Angles of rotary embeddings against the formulas of their sources, pair by pair, and tables."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.nn import Rope, RopeScaling, RotaryTable

SCALINGS = {
    "none": None,
    "linear": RopeScaling("linear", 3.0),
    "dynamic": RopeScaling("dynamic", 3.0, 10),
    "llama3": RopeScaling("llama3", 8.0, 512, low=1.5, high=5.0),
    "yarn": RopeScaling("yarn", 1.5, 512, fast=20.0, slow=0.5),
    "yarn, its defaults": RopeScaling("yarn", 40.0, 4096),
    "yarn, pairs not rounded": RopeScaling("yarn", 4.0, 512, whole=False),
    "yarn, nothing in between": RopeScaling("yarn", 4.0, 512, fast=8.0, slow=8.0, whole=False),
    "yarn, beyond both ends": RopeScaling("yarn", 4.0, 64, fast=64.0, slow=1e-9),
    "yarn, nothing longer": RopeScaling("yarn", 0.5, 512),
    "yarn, its factor given": RopeScaling("yarn", 4.0, 512, attention=1.25),
}


def angle(rope: Rope, pair: int, length: int) -> float:
    """The angle of one pair, by the sources of `RopeScaling`."""
    size, scaling, plain = rope.size, rope.scaling, rope.base ** (-2 * pair / rope.size)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "dynamic":
        if length <= scaling.context:
            return plain
        grown = scaling.factor * length / scaling.context - (scaling.factor - 1)
        return (rope.base * grown ** (size / (size - 2))) ** (-2 * pair / size)
    if scaling.kind == "llama3":
        wavelength = 2 * math.pi / plain
        if wavelength < scaling.context / scaling.high:
            return plain
        if wavelength > scaling.context / scaling.low:
            return plain / scaling.factor
        smooth = (scaling.context / wavelength - scaling.low) / (scaling.high - scaling.low)
        return (1 - smooth) * plain / scaling.factor + smooth * plain

    def turning(turns: float) -> float:
        return size * math.log(scaling.context / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = turning(scaling.fast), turning(scaling.slow)
    if scaling.whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = float(pair > low) if low == high else min(max((pair - low) / (high - low), 0), 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("size", "base"), [(16, 10000.0), (2 + 4, 100.0), (64, 5e5)])
def test_angles_by_the_formulas(name: str, size: int, base: float) -> None:
    rope = Rope(size, base, scaling=SCALINGS[name])
    for length in (1, 10, 11, 700):
        found, factor = rope.angles(length)
        expected = [angle(rope, pair, length) for pair in range(size // 2)]
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        scaling = rope.scaling
        if scaling is None or scaling.kind != "yarn":
            assert factor == 1.0
        elif scaling.attention is not None:
            assert factor == scaling.attention
        else:
            assert factor == pytest.approx(0.1 * math.log(max(scaling.factor, 1.0)) + 1, rel=1e-15)


@pytest.mark.parametrize("name", ["none", "dynamic", "yarn, its factor given"])
@pytest.mark.parametrize("lengths", [(3, 9, 10, 11, 12, 70, 5, 10, 200), (80, 9, 1, 64, 65)])
def test_a_table_holds_the_angles_of_the_longest_text(name: str, lengths: Any) -> None:
    """Whatever was asked for before; a number is no other for being looked up again."""
    rope = Rope(8, 100.0, scaling=SCALINGS[name])
    table = RotaryTable(rope)
    for length in lengths:
        cos, sin = table.rows(slice(0, length), length, et.ones(1))
        step, factor = rope.angles(length)
        angles = np.arange(length)[:, None] * step
        np.testing.assert_array_equal(cos.numpy(), (factor * np.cos(angles)).astype(np.float32))
        np.testing.assert_array_equal(sin.numpy(), (factor * np.sin(angles)).astype(np.float32))


def test_a_table_grows_by_doubling_and_never_shrinks() -> None:
    table, sizes = RotaryTable(Rope(4)), []
    for length in (1, 64, 65, 10, 300):
        table.rows(slice(0, 1), length, et.ones(1))
        sizes.append(table._length)
    assert sizes == [64, 64, 128, 128, 300]


@pytest.mark.parametrize(
    ("size", "base"), [(0, 1.0), (-2, 1.0), (3, 1.0), (4, 0.0), (4, -1.0), (4, math.inf)]
)
def test_a_rope_that_cannot_be(size: int, base: float) -> None:
    Rope(2, 1e-9)
    with pytest.raises(
        ValueError, match=f"expected an even size and a base above 0, got {size} and"
    ):
        Rope(size, base)


def test_dynamic_scaling_of_one_pair_divides_by_zero() -> None:
    with pytest.raises(ValueError, match="expects a size of 4 or more, got 2"):
        Rope(2, scaling=SCALINGS["dynamic"])
    assert Rope(4, scaling=SCALINGS["dynamic"]).angles(20)[0].shape == (2,)
