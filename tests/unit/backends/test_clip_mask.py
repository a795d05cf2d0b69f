"""Clip masks by definition, and through `clip_gradient`; the core's: tests/kernels/clip_mask.py."""

from __future__ import annotations

import numpy as np
import pytest

import extensor as et
from extensor.quant import reference
from extensor.quant.spec import Hadamard, QuantSpec
from tests.kernels.clip_mask import SPECS, sample
from tests.kernels.inputs import BACKEND
from tests.oracle import hadamard as slow_hadamard
from tests.oracle import quantize as oracle


def bits(mask: np.ndarray, length: int) -> np.ndarray:
    return np.unpackbits(mask, axis=-1, bitorder="little")[..., :length].astype(bool)


@pytest.mark.parametrize("spec", SPECS[:2], ids=str)
def test_a_bit_says_whether_the_value_fits_its_block(spec: QuantSpec) -> None:
    """In float64, from the scales of the scalar oracle."""
    x = sample((5, 70))
    mask = reference.quantize_clipped(x, spec)[2]
    coded = x if spec.transform is None else slow_hadamard.hadamard(x, 1, spec.transform)
    scales = oracle.quantize(x, spec).scales.astype(np.float64).repeat(32, axis=1)
    limit = np.where(scales == 255, np.nan, 6 * np.exp2(scales - 127))[:, : coded.shape[1]]
    expected = np.abs(coded.astype(np.float64)) <= limit
    found = bits(mask, coded.shape[1])
    assert np.array_equal(found, expected)
    assert 0.5 < found[1:].mean() < 1 and not found[0, :32].any()  # the block with the NaN


def test_what_has_no_mask() -> None:
    for spec in (QuantSpec("int8", symmetric=False), QuantSpec("outlier")):
        with pytest.raises(ValueError, match="clip mask: expected symmetric"):
            BACKEND.quantize_clipped(sample((4, 64)), spec.resolve(2))
    columns = QuantSpec("mxfp4", axis=0).resolve(2)
    assert "clip mask of columns" in BACKEND.path(
        "quantize_clipped", sample((64, 4)), columns, None
    )


def test_clipped_gradients_under_a_transform() -> None:
    """With y = x T, the gradient is ((g T) * m) T^T; T written out as a matrix."""
    spec = QuantSpec("mxfp4", scale_rule="quest", transform=Hadamard(32, "random", 3))
    rng = np.random.default_rng(0)
    data, g = (rng.standard_normal((6, 64)).astype(np.float32) for _ in range(2))
    matrix = slow_hadamard.hadamard(np.eye(64, dtype=np.float32), 1, spec.transform)
    x = et.from_numpy(data.copy())
    x.requires_grad = True
    x.quantize(spec, clip_gradient=True).dequantize().backward(et.from_numpy(g))
    inside = bits(reference.quantize_clipped(data, spec)[2], 64)
    expected = ((g.astype(np.float64) @ matrix) * inside) @ matrix.T
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=0, atol=1e-5)
    assert not np.allclose(x.grad.numpy(), g, atol=1e-2)  # something was clipped


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_mask_lies_along_the_axis_of_the_blocks(axis: int) -> None:
    """Of each matrix of a stack as of the matrix alone; and so do the gradients it clips."""
    x = np.random.default_rng(0).standard_normal((40, 48, 36)).astype(np.float32)
    spec = QuantSpec("mxfp4", scale_rule="quest")
    mask = reference.quantize_clipped(x, spec.replace(axis=axis))[2]
    turned = np.moveaxis(x, axis, -1)
    alone = reference.quantize_clipped(turned.reshape(-1, turned.shape[-1]), spec)[2]
    np.testing.assert_array_equal(np.moveaxis(mask, axis, -1).reshape(alone.shape), alone)
    for transform in (None, Hadamard(32)):
        one = spec.replace(axis=axis, transform=transform).resolve(3)
        last = spec.replace(transform=transform).resolve(2)
        mask = reference.quantize_clipped(x, one)[2]
        found = np.moveaxis(reference.clipped_gradient(x, mask, one), axis, -1)
        rows = turned.reshape(-1, turned.shape[-1])
        expected = reference.clipped_gradient(rows, reference.quantize_clipped(rows, last)[2], last)
        np.testing.assert_array_equal(found.reshape(expected.shape), expected)
