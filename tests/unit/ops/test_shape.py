"""Shapes, order and indexing; values of all: tests/test_every_reference.py."""

from __future__ import annotations

import numpy as np
import pytest

import extensor as et


def test_shape_conventions() -> None:
    x = et.zeros((2, 3, 4))
    assert x.T.shape == (4, 3, 2)
    assert x.transpose().shape == (4, 3, 2)
    assert x.transpose(0, 1).shape == (3, 2, 4)
    assert x.transpose(1, 0, 2).shape == (3, 2, 4)
    assert x.permute(2, 0, 1).shape == (4, 2, 3)
    assert x.reshape(-1, 4).shape == (6, 4)
    assert x.reshape((-1,)).shape == (24,)
    assert x.flatten(1).shape == (2, 12)
    assert x[:, None, ..., 0].shape == (2, 1, 3)
    assert x.unsqueeze(0).squeeze(0).shape == x.shape
    assert et.zeros((0, 3)).reshape(3, -1).shape == (3, 0)
    assert [p.shape for p in x.split(2, -1)] == [(2, 3, 2)] * 2
    assert et.stack([x, x], -1).shape == (2, 3, 4, 2)
    assert et.zeros((2, 3)).transpose(0, 1).shape == (3, 2)


def test_sorting_is_stable_both_ways() -> None:
    x = et.ExTensor([2, 1, 2, 1])
    assert x.sum().item() == 6
    assert et.argsort(x).tolist() == [1, 3, 0, 2]
    assert et.argsort(x, descending=True).tolist() == [0, 2, 1, 3]
    values, positions = et.topk(et.ExTensor([1.0, 9.0, 5.0]), 2)
    assert values.tolist() == [9, 5]
    assert positions.tolist() == [1, 2]


def test_repeated_rows_add_up_in_an_embedding() -> None:
    table = et.zeros((5, 3), "float64", requires_grad=True)
    index = np.array([[0, 4, 4], [-1, 2, 0]])
    g = np.random.default_rng(0).normal(size=(2, 3, 3))
    et.take(table, index).backward(et.ExTensor(g))
    expected = np.zeros((5, 3))
    np.add.at(expected, index, g)
    assert table.grad is not None
    np.testing.assert_allclose(
        table.grad.numpy(), expected, rtol=0, atol=4 * 2**-53 * np.abs(g).max()
    )
    assert et.take(table, np.zeros(0, int)).shape == (0, 3)


def test_an_empty_axis_has_any_number_of_parts_that_can_be_made() -> None:
    assert [part.shape for part in et.split(et.zeros((0, 2)), 3)] == [(0, 2)] * 3
    with pytest.raises(ValueError, match="65536 at most of an empty axis"):
        et.split(et.zeros((0,)), 2**63 - 1)


@pytest.mark.parametrize("dtype", [et.float16, et.bfloat16], ids=lambda d: d.name)
@pytest.mark.parametrize(
    ("shape", "result"),
    [((), (3000,)), ((1,), (3000,)), ((4,), (3000, 4)), ((4, 1), (4, 3000)), ((1, 4), (3000, 4)),
     ((1, 4), (50, 60, 4)), ((1, 2, 1), (30, 2, 100))],
)  # fmt: skip
def test_broadcast_gradients_of_16_bit_floats_are_summed_in_float32(
    dtype: et.dtype, shape: tuple[int, ...], result: tuple[int, ...]
) -> None:
    """3,000 ones are 3,000, up to one rounding; sums in bfloat16 end at 256."""
    for spread in (lambda x: et.broadcast_to(x, result), lambda x: x + et.zeros(result, dtype)):
        x = et.ones(shape, dtype).detach()
        x.requires_grad = True
        spread(x).backward(et.ones(result, dtype))
        expected = np.full(shape, 3000, np.float32).astype(dtype.numpy)
        assert x.grad.dtype is dtype
        np.testing.assert_array_equal(x.grad.numpy(), expected)


@pytest.mark.parametrize(("shape", "most"), [((), 0), ((4,), 2), ((2, 6), 3)])
def test_rotary_embedding_says_how_many_angles_fit(shape: tuple[int, ...], most: int) -> None:
    angles = et.ones((2, 4))
    with pytest.raises(ValueError, match=f"at most {most} angles for each"):
        et.rotary_embedding(et.ones(shape), angles, angles)
