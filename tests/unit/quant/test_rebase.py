"""Scales rebased by tiles of 128 x 128: which tiles, and what lies beside a recipe's operands."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from extensor.quant.kept import packs
from extensor.quant.rebase import rebased_values
from extensor.quant.recipe import Gemm
from extensor.quant.reference import dequantize, quantize
from extensor.quant.spec import QuantSpec

REBASED = QuantSpec("mxfp8_e4m3", rebased=True)


@pytest.mark.parametrize("shape", [(300,), (130, 70), (2, 129, 33)])
def test_tiles_lie_in_the_block_axis_and_the_axis_of_rows(shape: tuple[int, ...]) -> None:
    """Rows are the last axis, or the last but one where blocks lie in the last."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 9, shape)).astype(np.float32)
    for axis in range(len(shape)):
        found = dequantize(quantize(x, REBASED.replace(axis=axis))[0])
        rows = -1 if axis < len(shape) - 1 else -2
        order = (rows, axis), (-2, -1)
        if len(shape) == 1:
            matrices, values = x[None, None], found[None, None]
        else:
            matrices, values = (np.moveaxis(a, *order) for a in (x, found))
        matrices = matrices.reshape(-1, *matrices.shape[-2:])
        values = values.reshape(matrices.shape)
        for matrix, value in zip(matrices, values, strict=True):
            for top in range(0, matrix.shape[0], 128):
                for left in range(0, matrix.shape[1], 128):
                    tile = matrix[top : top + 128, left : left + 128]
                    alone = dequantize(quantize(tile, REBASED)[0])
                    np.testing.assert_array_equal(
                        value[top : top + 128, left : left + 128], alone, err_msg=f"axis {axis}"
                    )


def test_a_tile_has_the_exponent_of_its_largest_block() -> None:
    """Values are multiples of its smallest code, rounded to nearest, ties to even."""
    x = np.zeros((2, 64), np.float32)
    x[0, :32], x[1, 32:] = 256.0, np.arange(32) / 1024
    found = dequantize(quantize(x, REBASED)[0])
    step = math.ldexp(1.0, 0 - 9)  # the tile's scale is 1, the smallest e4m3 number 2^-9
    np.testing.assert_array_equal(found[0], x[0])
    small = x[1, 32:]
    normal = small >= 2.0**-6
    expected = np.where(normal, small, np.rint(small / step) * step)
    np.testing.assert_array_equal(found[1, 32:][~normal], expected[~normal])
    plain = dequantize(quantize(x, QuantSpec("mxfp8_e4m3"))[0])
    changed, flushed = found != plain, (found == 0) & (plain != 0)
    stats = quantize(x, REBASED)[1]
    assert stats.rebase_changed == changed.sum() > flushed.sum() > 0
    assert stats.flushed == ((x != 0) & (found == 0)).sum()
    rows = rebased_values(quantize(x, QuantSpec("mxfp8_e4m3"))[0], tiles=True)
    assert rows.shares == (changed.sum() / x.size, flushed.sum() / x.size)


@pytest.mark.parametrize("power", [-135, -127, -126, 0, 118])
def test_a_tile_of_equal_scales_keeps_its_values(power: int) -> None:
    """The scale of 2^-127 too, whose stored byte is 0, as that of a tile of zeros."""
    x = np.ldexp(np.arange(-128, 128, dtype=np.float32).reshape(8, 32) % 9 - 4, power + 2)
    x[:, 0] = np.ldexp(np.float32(256), power)
    stored = quantize(x, QuantSpec("mxfp8_e4m3"))[0]
    for values in (dequantize(stored), dequantize(quantize(x, REBASED)[0])):
        np.testing.assert_array_equal(values, x)
    for tiles in (False, True):
        found = rebased_values(stored, tiles)
        exponents = found.exponents.reshape(8, 1)
        np.testing.assert_array_equal(np.ldexp(found.values, exponents), x)
        assert not found.changed.any()


def test_blocks_of_zeros_have_no_say_in_a_tiles_exponent() -> None:
    """Whatever their scales are; a tile of zeros has the exponent 0."""
    x = np.zeros((2, 64), np.float32)
    x[0, 32:] = np.arange(-16, 16)
    stored = quantize(x, QuantSpec("mxfp8_e4m3"))[0]
    scales = stored.scales.copy()
    scales[:, 0], scales[1] = 200, 90
    other = dataclasses.replace(stored, scales=scales)
    for tiles in (False, True):
        mine, theirs = (rebased_values(q, tiles) for q in (other, stored))
        np.testing.assert_array_equal(mine.values, theirs.values)
        np.testing.assert_array_equal(mine.exponents, theirs.exponents)
        assert mine.exponents.reshape(2, 1)[1] == (0 if not tiles else mine.exponents.max())


def test_both_operands_of_a_gemm_are_rebased_or_none() -> None:
    plain = QuantSpec("mxfp8_e4m3")
    assert Gemm(REBASED, REBASED).a == REBASED and Gemm(plain, plain).b == plain
    for a, b in ((REBASED, plain), (plain, REBASED), ("float32", REBASED)):
        with pytest.raises(ValueError, match="both operands of a GEMM are rebased or none"):
            Gemm(a, b)


@pytest.mark.parametrize(
    ("operand", "dtype", "expected"),
    [
        ("bfloat16", "float32", True), ("bfloat16", "float16", False),
        ("float32", "float32", False), (QuantSpec("outlier"), "float16", True),
        (QuantSpec("mxfp8_e4m3"), "float16", True), (QuantSpec("mxfp8_e4m3"), "int8", False),
    ],
)  # fmt: skip
def test_what_is_kept_packed(operand: QuantSpec | str, dtype: str, expected: bool) -> None:
    spec = operand if isinstance(operand, str) else operand.resolve(2)
    assert packs(spec, (64, 64), np.dtype(dtype)) is expected
