"""Complex tensors: what they are for, and what they refuse."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import extensor as et

Z = np.array([[1 + 2j, -3.5j], [0, 4 - 1j]])


@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_a_round_trip(name: str) -> None:
    x = et.asarray(Z, dtype=name, copy=True)
    assert x.dtype.name == name and x.tolist() == Z.tolist()
    assert complex(x[0, 0]) == 1 + 2j and x[0, 0].item() == 1 + 2j
    for twin in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), et.from_dlpack(x)):
        assert twin.dtype is x.dtype and twin.tolist() == x.tolist()
    assert np.shares_memory(np.from_dlpack(x), x.data)
    assert name in repr(x) and name in x._repr_html_()
    x[1] = 2j
    assert x[1].tolist() == [2j, 2j]


def test_parts() -> None:
    x = et.asarray(Z)
    assert et.real(x).tolist() == Z.real.tolist() and et.imag(x).tolist() == Z.imag.tolist()
    assert et.conj(x).tolist() == Z.conj().tolist()
    assert et.abs(x).dtype is et.float64
    part = et.real(x)
    part[0, 0] = 9.0  # memory of its own
    assert x[0, 0].item() == 1 + 2j


def test_python_numbers_become_complex64() -> None:
    assert et.ExTensor([1j, 2.0]).dtype is et.complex64
    assert et.full(2, 1 + 1j).dtype is et.complex64
    assert et.zeros(2, complex).dtype is et.complex64


def test_no_gradients_and_no_silent_loss() -> None:
    x, z = et.ones(2, requires_grad=True), et.asarray(Z[0])
    with pytest.raises(TypeError, match="expected a floating-point tensor"):
        z.requires_grad = True
    for made in (lambda: x * z, lambda: x + 1j, lambda: x.astype("complex64"),
                 lambda: et.fft.fft(x), lambda: et.matmul(x, z)):  # fmt: skip
        with pytest.raises(TypeError, match=r"no gradients here.*x\.detach\(\)|x\.detach\(\)"):
            made()
    with et.no_grad():
        assert (x * z).dtype is et.complex128
    with pytest.raises(TypeError, match=r"imaginary part; use et\.real"):
        z.astype("float32")
    with pytest.raises(TypeError, match="complex128 values do not fit a float32 tensor"):
        et.ones(2)[:] = z
    with pytest.raises(TypeError):
        float(z[0])
    with pytest.raises(ValueError, match="float32 can hold"):
        et.full(2, 1j, "float32")
    assert x.grad is None


def test_blocked_formats_refuse_them() -> None:
    with pytest.raises(TypeError, match="complex"):
        et.asarray(Z).to_mxfp4()
    q = et.ones((1, 32)).to_mxfp4()
    assert (q * 1j).dtype is et.complex64  # a blocked tensor computes as float32
