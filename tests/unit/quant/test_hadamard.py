"""The Hadamard transform: its bits, its algebra, and that it cancels in a GEMM."""

from __future__ import annotations

import numpy as np
import pytest

from extensor.backends.generic.matmul import coded_values
from extensor.quant.hadamard import hadamard, hadamard_signs, inverse_hadamard
from extensor.quant.reference import fake_quantize, quantize
from extensor.quant.spec import Hadamard, QuantSpec
from tests.oracle.compare import same_bytes
from tests.oracle.hadamard import hadamard as oracle
from tests.oracle.philox import hadamard_sign

TE = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
ALL = [Hadamard(d, s, seed=77) for d in (16, 32, 64, 128) for s in ("none", "fixed", "random")]
ALL += [Hadamard(d, "per_step", 77, step=2**32 - 1, stream=d) for d in (16, 32, 64, 128)]


def sylvester(size: int) -> np.ndarray:
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h


@pytest.mark.parametrize("transform", ALL, ids=str)
def test_bits(transform: Hadamard) -> None:
    x = np.random.default_rng(0).standard_normal((3, 150)).astype(np.float32)
    y = hadamard(x, transform)
    assert y.shape == (3, -(-150 // transform.size) * transform.size)
    same_bytes("transformed", y, oracle(x, -1, transform))
    same_bytes(
        "undone", inverse_hadamard(y, transform, 150), oracle(y, -1, transform, True)[:, :150]
    )


@pytest.mark.parametrize("transform", ALL, ids=str)
def test_algebra(transform: Hadamard) -> None:
    """x diag(s) H / sqrt(d), and back."""
    d = transform.size
    x = np.random.default_rng(1).standard_normal((5, d)).astype(np.float32)
    matrix = np.diag(hadamard_signs(transform).astype(np.float64)) @ sylvester(d) / np.sqrt(d)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(d), atol=1e-12)
    y = hadamard(x, transform)
    np.testing.assert_allclose(y, x.astype(np.float64) @ matrix, atol=1e-5)
    np.testing.assert_allclose(inverse_hadamard(y, transform, d), x, atol=1e-5)


def test_signs() -> None:
    np.testing.assert_array_equal(hadamard_signs(Hadamard(16, "none")), np.ones(16))
    np.testing.assert_array_equal(hadamard_signs(Hadamard(16, "fixed")), TE)
    np.testing.assert_array_equal(hadamard_signs(Hadamard(64, "fixed")), TE * 4)
    seen = set()
    for seed in (0, 1, 1 << 32, 0xFFFFFFFFFFFFFFFF):
        got = hadamard_signs(Hadamard(128, "random", seed))
        np.testing.assert_array_equal(got, [hadamard_sign(k, seed) for k in range(128)])
        assert 40 < (got > 0).sum() < 88
        seen.add(got.tobytes())
    assert len(seen) == 4


def test_signs_of_each_step() -> None:
    """A draw for each seed, step and stream, the shorter ones a beginning of the longest."""
    names = [(s, step, stream) for s in (0, 1 << 32) for step in (0, 1) for stream in (0, 256)]
    seen = [hadamard_signs(Hadamard(128, "per_step", *name)) for name in names]
    assert len({one.tobytes() for one in seen}) == len(names)
    assert all(40 < (one > 0).sum() < 88 for one in seen)
    for size in (16, 32, 64):
        got = hadamard_signs(Hadamard(size, "per_step", *names[5]))
        np.testing.assert_array_equal(got, seen[5][:size])


def test_the_default_is_transformer_engines() -> None:
    assert Hadamard() == Hadamard(16, "fixed", 0)


def test_a_power_of_two_size_is_an_exact_scale() -> None:
    """1/sqrt(16) and 1/sqrt(64) are exact, so a unit vector stays exact."""
    x = np.zeros(64, np.float32)
    x[3] = 1
    for size, value in ((16, 0.25), (64, 0.125)):
        y = hadamard(x, Hadamard(size, "none"))
        assert set(np.abs(y[:size])) == {np.float32(value)}


def test_it_cancels_when_both_operands_carry_it() -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((n, 100)).astype(np.float32) for n in (7, 5))
    for transform in ALL:
        spec = QuantSpec("mxfp8_e4m3", transform=transform)
        exact = hadamard(a, transform) @ hadamard(b, transform).T
        np.testing.assert_allclose(exact, a @ b.T, atol=1e-4)
        left, right = fake_quantize(a, spec)[0], fake_quantize(b, spec)[0]
        assert left.shape[1] % transform.size == 0
        error = left @ right.T - a @ b.T
        assert np.linalg.norm(error) < 0.06 * np.linalg.norm(a @ b.T)


def test_an_outlier_is_spread() -> None:
    """Why it is there: one large value no longer flushes its neighbours."""
    x = np.full((1, 32), 0.1, np.float32)
    x[0, 5] = 30.0
    plain, _ = fake_quantize(x, QuantSpec("mxfp4"))
    assert (plain[0, np.arange(32) != 5] == 0).all()
    spread, _ = fake_quantize(x, QuantSpec("mxfp4", transform=Hadamard(32)))
    assert (spread != 0).all()


@pytest.mark.parametrize("size", [16, 32])
def test_a_signalling_nan_makes_its_block_nan_without_a_warning(size: int) -> None:
    x = np.ones((2, 32), np.float32)
    x.view(np.uint32)[0, 3] = 0x7F800001
    for y in (hadamard(x, Hadamard(size)), inverse_hadamard(x, Hadamard(size), 32)):
        assert np.isnan(y[0, 3]) and np.isfinite(y[1]).all()


def test_an_operand_without_its_transform_is_kept_whatever_the_signs_of_a_step() -> None:
    x = np.ones((4, 64), np.float32)
    specs = [QuantSpec("mxfp4", transform=Hadamard(32, "per_step", step=n)) for n in (1, 2)]
    first, second = (coded_values(quantize(x, spec.resolve(2))[0]).spec for spec in specs)
    assert first is second and first.transform is None
