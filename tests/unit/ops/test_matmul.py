"""Matrix products: shapes, and dtypes that differ."""

from __future__ import annotations

import numpy as np
import pytest

import extensor as et


def test_matmul_conventions() -> None:
    a, b = et.ones((2, 3)), et.ones((3,))
    assert (a @ b).shape == (2,)
    assert (b @ a.T).shape == (2,)
    assert (b @ b).shape == ()
    assert (et.ones((5, 1, 2, 3)) @ et.ones((4, 3, 2))).shape == (5, 4, 2, 2)
    with pytest.raises(ValueError, match="expected 3 rows on the right"):
        a @ a


def test_mixed_dtypes_promote_and_gradients_come_back_in_their_own() -> None:
    x = et.ones((2, 3), "bfloat16", requires_grad=True)
    w = et.ones((3, 2), requires_grad=True)
    y = x @ w
    assert y.dtype is et.float32
    y.sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    assert x.grad.dtype is et.bfloat16
    assert w.grad.dtype is et.float32
    x, n = et.ones(3, requires_grad=True), et.arange(3)
    (x * n).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 2]


def test_a_gradient_has_its_tensors_dtype_whatever_the_other_operand() -> None:
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        x = et.ones((4, 32), dtype, requires_grad=True)
        w = et.randn(8, 32, seed=0, requires_grad=True)
        (x @ w.T * w.to_mxfp4().sum()).sum().backward()
        assert x.grad.dtype is x.dtype
        assert w.grad.dtype is et.float32


@pytest.mark.parametrize(
    "shapes", [((3,), (3,)), ((2, 3), (3,)), ((2, 4, 3), (5, 3)), ((0,), (0,))]
)
def test_inner_sums_over_the_last_axes(shapes: tuple[tuple[int, ...], ...]) -> None:
    a, b = (np.random.default_rng(i).normal(size=shape) for i, shape in enumerate(shapes))
    found = et.inner(et.ExTensor(a), et.ExTensor(b)).numpy()
    np.testing.assert_allclose(found, np.inner(a, b), rtol=1e-12)
    with pytest.raises(ValueError, match="inner: expected equal last axes"):
        et.inner(et.ExTensor(a), et.ones((*shapes[0], 7)))


@pytest.mark.parametrize("equation", ["ba", "ca,ab", "zx,xa", "b,a", "cab,a", "ab,bc,cd", "ji,kj"])
def test_an_implicit_einsum_sorts_its_letters(equation: str) -> None:
    """Letters that occur once, in alphabetical order, whatever the order of the terms."""
    sizes = {letter: size for size, letter in enumerate("abcdijkxz", start=2)}
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=[sizes[c] for c in term]) for term in equation.split(",")]
    found = et.einsum(equation, *map(et.ExTensor, arrays)).numpy()
    expected = np.einsum(equation, *arrays)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("shapes", [((3, 4), (4, 2)), ((2, 3, 4), (4, 2)), ((2, 3, 4), (2, 4, 5))])
def test_one_operand_has_the_gradient_that_it_has_beside_the_others(
    shapes: tuple[tuple[int, ...], ...],
) -> None:
    def grads(needs: tuple[bool, bool]) -> list[np.ndarray | None]:
        cases = zip(shapes, needs, range(2), strict=True)
        pair = [et.randn(*shape, seed=i, requires_grad=need) for shape, need, i in cases]
        (pair[0] @ pair[1]).square().sum().backward()
        return [None if x.grad is None else x.grad.numpy() for x in pair]

    both = grads((True, True))
    left, right = grads((True, False)), grads((False, True))
    assert left[1] is None and right[0] is None
    np.testing.assert_array_equal(left[0], both[0])
    np.testing.assert_array_equal(right[1], both[1])
