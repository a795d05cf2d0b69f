"""The decoded corner is the corner of the decoded whole, read from a few bytes."""

import dataclasses

import numpy as np
import pytest

import extensor as et
from extensor.formats import FORMATS
from extensor.quant import QuantSpec
from extensor.quant.corner import code_shares, corner
from extensor.quant.reference import dequantize, quantize
from extensor.quant.rounding import unpack
from extensor.quant.scale_encoders import scale_values

PLAIN = [name for name, row in FORMATS.items() if not row.outliers]
PACKED = list({(FORMATS[n].element.bits, FORMATS[n].scale): n for n in reversed(PLAIN)}.values())
"""A format for each width of codes and kind of scale: what is read depends on these alone."""
SHAPES = [((70,), 0), ((3,), 0), ((9, 100), 1), ((100, 9), 0), ((2, 40, 5), 1), ((3, 2, 33), -1)]
SHAPES += [((33, 2, 3), 0)]


def quantized(shape, spec, seed=0):
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return quantize(x, spec)[0]


def expected(q):
    """The corner of the whole."""
    seen = corner(q)
    key = [slice(0, 1)] * len(q.shape)
    for axis in seen.axes:
        key[axis] = slice(0, 8 if axis == q.spec.axis else 4)
    whole = dequantize(q)[tuple(key)]
    return seen, whole.reshape([whole.shape[axis] for axis in seen.axes][-2:] or -1)


TILES = [None, (1, 3), (1, 16), (1, 48), (4, 16), (2, 8), "channel", "tensor"]
CASES = [
    (shape, axis, tile)
    for shape, axis in SHAPES
    for tile in TILES
    if len(shape) > 1 or not isinstance(tile, tuple) or tile[0] == 1
]
"""Tiles of several rows need two axes."""


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(("shape", "axis", "tile"), CASES)
def test_it_is_the_corner_of_the_whole(name, shape, axis, tile):
    q = quantized(shape, QuantSpec(name, axis=axis, tile=tile))
    seen, whole = expected(q)
    np.testing.assert_array_equal(np.squeeze(seen.values), np.squeeze(whole))
    assert seen.axes == tuple(sorted(seen.axes)) and q.spec.axis in seen.axes


@pytest.mark.parametrize(
    "spec",
    [
        QuantSpec("mxfp4", transform=et.Hadamard(32, "random", 3)),
        QuantSpec("nvfp4", transform=et.Hadamard(64)),
        QuantSpec("int8", symmetric=False),
        QuantSpec("int4", symmetric=False, tile=(1, 16)),
        QuantSpec("mxfp8_e4m3", rebased=True),
    ],
)
@pytest.mark.parametrize("shape", [(9, 200), (200, 9)])
def test_transforms_and_zero_points(spec, shape):
    seen, whole = expected(quantized(shape, spec))
    np.testing.assert_array_equal(np.squeeze(seen.values), np.squeeze(whole))


def test_scales_are_those_of_the_values_shown():
    q = quantized((100, 9), QuantSpec("mxfp4", axis=0, tile=(1, 4)))
    seen = corner(q)
    assert seen.axes == (0, 1) and seen.values.shape == (8, 4) and seen.scales.shape == (2, 4)
    np.testing.assert_array_equal(seen.scales, q.scales[:2, :4])
    numbers = scale_values(seen.scales, q.spec, np)
    assert (np.abs(seen.values) <= 6 * np.repeat(numbers, 4, axis=0)).all()


def test_outliers_and_empty_arrays_have_no_corner():
    assert corner(quantized((4, 64), QuantSpec("outlier"))) is None
    assert corner(quantized((0, 64), QuantSpec("mxfp4"))) is None


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("axis", [0, 1])
def test_shares_of_codes(name, axis):
    q = quantized((37, 21), QuantSpec(name, axis=axis))
    codes = unpack(np.moveaxis(q.codes, axis, -1), q.spec.row.element.bits, q.shape[axis])
    values = np.asarray(q.spec.row.element.values)[codes]
    rows, count = code_shares(q, 10_000)
    assert count == 37 * 21 and len(rows) <= 32
    assert sum(share for _, share in rows) == pytest.approx(1.0)
    assert [float(name.split(" ")[0]) for name, _ in rows] == sorted(
        float(name.split(" ")[0]) for name, _ in rows
    )
    if q.spec.row.element.bits == 4:
        assert {float(n): s for n, s in rows if s} == pytest.approx(
            {v: float((values == v).mean()) for v in np.unique(values + 0.0)}
        )
    assert code_shares(q, 100)[1] <= 100


def test_values_that_no_code_has_have_a_share_of_zero():
    rows, _ = code_shares(quantized((32, 32), QuantSpec("mxfp4")), 10_000)
    zeros, count = code_shares(quantize(np.zeros((4, 32), np.float32), QuantSpec("mxfp4"))[0], 200)
    assert [name for name, _ in zeros] == [name for name, _ in rows] and len(rows) == 15
    assert [share for _, share in zeros] == [float(n == 7) for n in range(15)] and count == 128


class Device:
    """An array that is not on the host; counts the bytes that are copied from it."""

    copied = 0

    def __init__(self, array):
        self.array, self.shape, self.size = array, array.shape, array.size
        self.dtype, self.nbytes = array.dtype, array.nbytes

    def __getitem__(self, key):
        return Device(self.array[key])

    def get(self):
        Device.copied += self.array.nbytes
        return self.array.copy()


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("shape", [(512, 2048), (4, 65_536)])
def test_only_a_few_bytes_leave_a_device(name, shape):
    q = quantized(shape, QuantSpec(name))
    away = {part: Device(array) for part, array in q.parts.items()}
    Device.copied = 0
    moved = dataclasses.replace(q, **away)
    np.testing.assert_array_equal(corner(moved).values, corner(q).values)
    assert Device.copied < 200
    Device.copied = 0
    assert code_shares(moved, 4096) == code_shares(q, 4096)
    assert 0 < Device.copied <= 4096
