"""`et.linalg` and `et.fft` beside what tests/test_array_api_peer.py compares: dtypes, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import extensor as et
from extensor.autograd.primitive import OPS
from extensor.backends.generic import GenericBackend
from extensor.testing import gradcheck

RNG = np.random.default_rng(5)
GOOD = RNG.normal(size=(3, 3)) + 4 * np.eye(3)
SYMMETRIC = GOOD @ GOOD.T
FACTORS = ["eigh", "eigvalsh", "eig", "eigvals", "qr", "svd", "svdvals", "pinv", "matrix_rank"]


def _first(result: Any) -> et.ExTensor:
    return result if isinstance(result, et.ExTensor) else result[0]


@pytest.mark.parametrize("name", FACTORS)
def test_without_a_rule_a_gradient_is_refused(name: str) -> None:
    function = getattr(et.linalg, name)
    x = et.ExTensor(SYMMETRIC, requires_grad=True)
    with pytest.raises(TypeError, match=r"x\.detach\(\)"):
        function(x)
    assert not _first(function(x.detach())).requires_grad
    with et.no_grad():
        function(x)


@pytest.mark.parametrize("name", [n for n in et.linalg.__all__ if n not in
                                  ("cross", "outer", "tensordot", "vecdot", "matmul",
                                   "solve", "matrix_power")])  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int64"])
def test_16_bit_floats_round_once_and_integers_become_float32(name: str, dtype: str) -> None:
    function = getattr(et.linalg, name)
    x = et.ExTensor(np.rint(SYMMETRIC)).astype("float32").astype(dtype)
    got, wide = _first(function(x)), _first(function(x.astype("float32")))
    if name in ("diagonal", "trace", "matrix_transpose"):  # of any numbers, as they are
        assert got.dtype.name == dtype or (name, dtype) == ("trace", "int64")
    elif wide.dtype is not et.float32 or dtype == "int64":
        assert got.dtype is wide.dtype
    else:
        assert got.dtype.name == dtype
    assert got.tolist() == wide.astype(got.dtype).tolist()


def test_a_sum_of_squares_beyond_16_bits_has_a_norm() -> None:
    for value in (300.0, 1e-4):
        x = et.ExTensor(np.full((2, 2), value)).astype("float16")
        assert et.linalg.vector_norm(x).item() == 2 * x[0, 0].item()
        assert et.linalg.matrix_norm(x).item() == 2 * x[0, 0].item()


def test_the_norm_of_nothing_has_gradient_zero() -> None:
    x = et.ExTensor(np.array([[0.0, 0.0], [3.0, 4.0]]), requires_grad=True)
    et.linalg.vector_norm(x, axis=1).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[0.0, 0.0], pytest.approx([0.6, 0.8])]


def test_power_zero_is_one_whatever_the_matrix_holds() -> None:
    for requires in (False, True):
        x = et.ExTensor(np.array([[np.inf, 1.0], [0.0, np.nan]]), requires_grad=requires)
        assert et.linalg.matrix_power(x, 0).tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_blocked_tensors_are_decoded() -> None:
    q = et.ExTensor(np.eye(32) * 4, "float32").to_mxfp8()
    assert et.linalg.inv(q).tolist() == (np.eye(32) / 4).tolist()
    assert et.linalg.svdvals(q).tolist() == [4.0] * 32
    assert et.fft.rfft(q).dtype is et.complex64


def test_factors_make_the_matrix_again() -> None:
    x = et.ExTensor(RNG.normal(size=(2, 4, 3)))
    u, s, vh = et.linalg.svd(x, full_matrices=False)
    np.testing.assert_allclose(((u * s.expand_dims(-2)) @ vh).numpy(), x.numpy(), atol=1e-13)
    q, r = et.linalg.qr(x, mode="complete")
    assert q.shape == (2, 4, 4)
    np.testing.assert_allclose((q @ r).numpy(), x.numpy(), atol=1e-13)
    values, vectors = et.linalg.eigh(et.ExTensor(SYMMETRIC))
    np.testing.assert_allclose(
        (vectors * values @ vectors.mT).numpy(), SYMMETRIC, rtol=1e-12, atol=1e-12
    )
    upper = et.linalg.cholesky(et.ExTensor(SYMMETRIC), upper=True)
    np.testing.assert_allclose((upper.mT @ upper).numpy(), SYMMETRIC, rtol=1e-12, atol=1e-12)
    assert upper.tolist() == et.triu(upper).tolist()


def test_gradient_of_slogdet() -> None:
    gradcheck(lambda x: et.linalg.slogdet(x).logabsdet, [et.ExTensor(GOOD, requires_grad=True)])
    x = et.ExTensor(GOOD, requires_grad=True)
    assert not et.linalg.slogdet(x).sign.requires_grad


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: et.linalg.inv(et.zeros((2, 3))), "expected square matrices"),
        (lambda: et.linalg.slogdet(et.zeros(3)), "expected matrices"),
        (lambda: et.linalg.slogdet([[1.0]]), "expected an ExTensor"),
        (lambda: et.linalg.qr(et.eye(2), mode="raw"), "'reduced' or 'complete'"),
        (lambda: et.fft.fft(et.ones(3), norm="none"), "expected one of backward"),
        (lambda: et.fft.fft(et.ones(3), n=0), "n: expected 1 or more"),
        (lambda: et.fft.rfft(et.ones(3).astype("complex64")), "use fft"),
        (lambda: et.fft.fftn(et.ones((2, 2)), s=(2,), axes=(0, 1)), "as many sizes as axes"),
        (lambda: et.fft.fftfreq(0), "n of 1 or more"),
        (lambda: et.fft.fft([1.0]), "expected an ExTensor"),
    ],
)
def test_refusals(made: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        made()


def test_shift_and_back() -> None:
    x = et.arange(15).reshape(3, 5)
    assert et.fft.ifftshift(et.fft.fftshift(x)).tolist() == x.tolist()
    assert et.fft.fftshift(et.arange(5)).tolist() == [3, 4, 0, 1, 2]
    gradcheck(et.fft.fftshift, [et.ExTensor(GOOD, requires_grad=True)])


def test_an_array_module_that_gives_nan_is_asked_to_raise() -> None:
    """As cupy: silent unless told, and then in words of its own."""
    told: list[bool] = []

    class Quiet(GenericBackend):
        @contextmanager
        def raising(self) -> Iterator[None]:
            told.append(True)
            yield
            told.pop()

    def inverse(x: np.ndarray) -> np.ndarray:
        if told:
            raise np.linalg.LinAlgError("Error reported by getrf in cuSOLVER. devInfo = 2.")
        return np.full_like(x, np.nan)

    linalg = SimpleNamespace(inv=inverse)
    backend = Quiet("quiet", SimpleNamespace(__name__="quiet", linalg=linalg))
    primitive = OPS["inv"].primitive
    assert primitive is not None
    with pytest.raises(np.linalg.LinAlgError, match="^inv: Singular matrix$"):
        primitive.forward(backend, np.zeros((2, 2)))
