"""Training kernels on arrays of bfloat16: float32's results, rounded once."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from extensor.backends.generic import GenericBackend
from extensor.backends.protocol import AttentionForward
from extensor_cuda.kernels.nn import softmax
from tests.kernels import nn as cases
from tests.oracle.compare import same_bytes
from tests.unit.cuda.test_multi_tensor import shifted
from tests.unit.cuda.test_nn import ELEMENTS, UNIT, strided

CPU = GenericBackend("cpu", np)
HALF = np.dtype(ml_dtypes.bfloat16)
COUNTS = (1, 7, 8, 4095, 4096, 4097, 9001)


def widened(a: Any) -> np.ndarray:
    return np.asarray(a.get() if hasattr(a, "get") else a).astype(np.float64)


def bfloat16_bits(seed: int, count: int) -> np.ndarray:
    """Of every kind: subnormals, zeros of both signs, infinities, NaN, ties of sums."""
    bits = np.random.default_rng(seed).integers(0, 1 << 16, count, dtype=np.uint16)
    return bits.view(HALF)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("count", COUNTS)
def test_sums_casts_and_relu_of_both_dtypes_have_the_cpus_bits(
    trainer: Any, count: int, offset: int
) -> None:
    here, kinds = trainer.xp, (np.dtype(np.float32), HALF)
    rng = np.random.default_rng(count)
    wild = rng.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
    tame = (rng.standard_normal(count) * 4).astype(np.float32)
    with np.errstate(all="ignore"):
        for x in (wild, tame, bfloat16_bits(count, count)):
            there = shifted(here, x, offset)
            for dtype in kinds:
                if dtype != x.dtype:
                    assert trainer.path("cast", there, dtype) == "fused kernel"
                expected = CPU.cast(x, dtype)
                if dtype != x.dtype and dtype == HALF:  # which NaN is ml_dtypes' own business
                    expected = CPU.bfloat16_values(x).astype(HALF)
                same_bytes("cast", trainer.cast(there, dtype).get(), expected)
        for a, b in itertools.product((tame, tame.astype(HALF)), repeat=2):
            b = b[::-1].copy()
            pair = [shifted(here, side, offset) for side in (a, b)]
            expected = CPU.add(a, b)
            assert trainer.path("add", *pair) == "fused kernel"
            got = trainer.add(*pair)
            assert got.dtype == expected.dtype == (a.dtype if a.dtype == b.dtype else np.float32)
            same_bytes("add", got.get(), expected)
        for g, out in itertools.product((wild, bfloat16_bits(1, count)), repeat=2):
            expected = CPU.relu_grad(*(side.astype(np.float32) for side in (g, out)))
            got = trainer.relu_grad(shifted(here, g, offset), shifted(here, out, offset))
            assert got.dtype == g.dtype
            same_bytes("relu_grad", got.get(), expected.astype(g.dtype))
        for x in (wild, bfloat16_bits(2, count)):
            expected = CPU.relu(x.astype(np.float32)).astype(x.dtype)
            got = trainer.relu(shifted(here, x, offset))
            assert got.dtype == x.dtype
            number = widened(expected) == widened(expected)
            same_bytes("relu", got.get()[number], expected[number])
            assert np.isnan(widened(got)[~number]).all()


@pytest.mark.parametrize("name", ELEMENTS)
def test_gelu_and_softmax_of_bfloat16_are_rounded_once(trainer: Any, name: str) -> None:
    for case, _, _ in ELEMENTS[name]():
        if case[0].size > 60_000 or not np.isfinite(case[0]).all():
            continue
        arrays = [a for a in case if isinstance(a, np.ndarray)][: 2 if "grad" in name else 1]
        narrow = [a.astype(HALF) for a in arrays]
        axis = () if name.startswith("gelu") else (narrow[0].ndim - 1,)
        there = [trainer.xp.asarray(a) for a in narrow]
        more = (None,) if name == "gelu_grad" else axis
        fits = not axis or narrow[0].shape[-1] <= softmax.MAX_LENGTH
        path = trainer.path(name, *there, *more)
        assert path.startswith("fused kernel" if fits else "generic: rows of"), path
        made = getattr(trainer, name)(*there, *more)
        got = made[0] if isinstance(made, tuple) else made
        assert got.dtype == (HALF if fits else np.float32)
        wide = [a.astype(np.float64) for a in narrow]
        done = getattr(CPU, name)
        expected = done(*wide, None) if name == "gelu_grad" else done(*wide, *axis)
        expected = expected[0] if isinstance(expected, tuple) else expected
        # Half a unit of bfloat16, and of float32 what the bounds allow of values this large: of a
        # difference (softmax's gradient, gelu's below 0) that is relative to its terms.
        n = narrow[0].shape[-1] if axis else 150
        size = np.abs(wide[-1 if name == "softmax_grad" else 0])
        terms = size * np.abs(wide[0]).max() if name == "softmax_grad" else np.maximum(size, 1)
        bound = np.abs(expected) * 2.0**-8 + 2 * (n + 32) * UNIT * terms + 2.0**-126
        assert (np.abs(widened(got) - expected) <= bound).all(), (name, case[0].shape)


def test_gelu_below_0_keeps_its_digits_in_bfloat16(trainer: Any) -> None:
    """Relative to itself, also where Phi is tiny: 1 - erf would lose all of it."""
    x = np.linspace(-9, 0, 5000).astype(HALF)
    wide = x.astype(np.float64)
    exact = wide * cases.normal_below(wide)
    got, kept = trainer.gelu(trainer.xp.asarray(x))
    assert kept is None
    off = 2 * wide * wide * UNIT + 2.0**-16
    allowed = np.abs(exact) * (2.0**-8 + off) + 2.0**-133
    assert (np.abs(widened(got) - exact) <= allowed).all()


@pytest.mark.parametrize("shape", [(40, 100), (9, 1500)])
def test_norms_round_to_bfloat16_and_read_its_gradient(trainer: Any, shape: Any) -> None:
    rng = np.random.default_rng(shape[1])
    x, w, b = (rng.standard_normal(s).astype(np.float32) for s in (shape, shape[1:], shape[1:]))
    g = rng.standard_normal(shape).astype(HALF)
    there, half = [trainer.xp.asarray(a) for a in (x, w, b)], trainer.xp.asarray(g)
    wide = trainer.xp.asarray(g.astype(np.float32))
    for rounded, full in (
        (trainer.layer_norm(*there, 1e-5, True), trainer.layer_norm(*there, 1e-5)),
        (trainer.rms_norm(*there[:2], 1e-5, True), trainer.rms_norm(*there[:2], 1e-5)),
    ):
        same_bytes("norm", rounded[0].get(), CPU.bfloat16_values(full[0].get()).astype(HALF))
        for one, two in zip(rounded[1:], full[1:], strict=True):
            same_bytes("kept", one.get(), two.get())
        name = "layer_norm_grad" if len(full) == 3 else "rms_norm_grad"
        assert trainer.path(name, half, *there[:2], *full[1:]) == "fused kernel"
        grad = getattr(trainer, name)
        for one, two in zip(
            grad(half, *there[:2], *full[1:]), grad(wide, *there[:2], *full[1:]), strict=True
        ):
            same_bytes("gradient", one.get(), two.get())


def test_rms_norm_of_bfloat16_is_that_of_its_float32_values(trainer: Any) -> None:
    """Rounded once where x and the weight are bfloat16, float32 where only one is."""
    rng = np.random.default_rng(1)
    x, w, g = (rng.standard_normal(s).astype(HALF) for s in ((9, 1500), (1500,), (9, 1500)))
    half = [trainer.xp.asarray(a) for a in (x, w, g)]
    full = [trainer.xp.asarray(a.astype(np.float32)) for a in (x, w, g)]
    exact, rstd = trainer.rms_norm(*full[:2], 1e-5)
    for given, dtype in (
        (half[:2], HALF),
        ((half[0], full[1]), np.float32),
        ((full[0], half[1]), np.float32),
    ):
        assert trainer.path("rms_norm", *given, 1e-5) == "fused kernel"
        got, kept = trainer.rms_norm(*given, 1e-5)
        same_bytes("norm", got.get(), exact.get().astype(dtype))
        same_bytes("rstd", kept.get(), rstd.get())
        made = trainer.rms_norm_grad(half[2], *given, rstd)
        for one, two in zip(made, trainer.rms_norm_grad(half[2], *full[:2], rstd), strict=True):
            same_bytes("gradient", one.get(), two.get())


@pytest.mark.parametrize("shape", [(33, 10), (12, 64), (3, 1032), (2, 1027)])
def test_cross_entropy_of_bfloat16_scores(trainer: Any, shape: Any) -> None:
    rng = np.random.default_rng(shape[1])
    x = (rng.standard_normal(shape) * 5).astype(HALF)
    labels = rng.integers(0, shape[1], shape[0])
    there = trainer.xp.asarray(x), trainer.xp.asarray(labels)
    assert trainer.path("cross_entropy", *there, 0.1) == "fused kernel"
    losses, kept = trainer.cross_entropy(*there, 0.1)
    wide = trainer.xp.asarray(x.astype(np.float32))
    exact, same = trainer.cross_entropy(wide, there[1], 0.1)
    assert losses.dtype == np.float32
    same_bytes("losses", losses.get(), exact.get())  # the same values in the same order
    weight = trainer.xp.asarray(np.float32(0.7).reshape(()))
    got = trainer.cross_entropy_grad(weight, *there, kept, 0.1)
    full = trainer.cross_entropy_grad(weight, wide, there[1], same, 0.1)
    same_bytes("gradient", got.get(), full.get().astype(HALF))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_bfloat16_is_computed_in_float32(trainer: Any, causal: bool) -> None:
    """Where no kernel takes bfloat16: float32's result, rounded once by who asked."""
    rng = np.random.default_rng(4)
    q, k, v, g = ((rng.standard_normal((2, 3, 20, 8))).astype(HALF) for _ in range(4))
    there = [strided(trainer.xp.asarray(a)) for a in (q, k, v)]
    got, kept = trainer.attention(*there, causal, 0.3)
    wide = [a.astype(np.float64) for a in (q, k, v)]
    out, stats = CPU.attention(*wide, causal, 0.3)
    assert got.dtype == np.float32
    sums = (20 + 60) * UNIT  # of rows of 20 keys in float32: test_training
    np.testing.assert_allclose(widened(got), out, rtol=0, atol=sums * np.abs(wide[2]).max())
    back = tuple(trainer.xp.empty(a.shape, HALF) for a in (q, k, v))
    half = trainer.xp.asarray(out.astype(HALF))
    forward = AttentionForward(*there, half, kept, causal, 0.3)
    trainer.attention_grad(trainer.xp.asarray(g), forward, back)
    into = tuple(np.empty_like(a) for a in wide)
    rounded = out.astype(HALF).astype(np.float64)
    forward = AttentionForward(*wide, rounded, stats, causal, 0.3)
    CPU.attention_grad(g.astype(np.float64), forward, into)
    for ours, exact in zip(back, into, strict=True):
        assert ours.dtype == HALF
        bound = np.abs(exact) * 2.0**-8 + 40 * sums * (np.abs(exact).max() + 1)
        assert (np.abs(widened(ours) - exact) <= bound).all()
