"""Optimizer steps: the bytes of the generic methods."""

from __future__ import annotations

import numpy as np

from extensor.backends import cpu
from extensor.random import Stream
from tests.kernels.inputs import CORE, GENERIC, assert_bytes, plain

FACTORS = {
    "keep": 0.999, "take1": 0.1, "keep2": 0.99, "take2": 0.01, "widen": 1.7, "eps": 1e-8,
    "rate": 0.01,
}  # fmt: skip


def check_sgd(backend: cpu.CpuBackend) -> None:
    for n in (0, 1, 17, 40_000):
        for options in ((0.1, 0.0, 0.0, False), (0.1, 0.9, 0.0, False), (0.3, 0.9, 0.01, True)):
            state = [plain((n,), seed) for seed in range(3)]
            if not options[1]:
                state[2] = None
            mine, generic = ([None if a is None else a.copy() for a in state] for _ in range(2))
            for _ in range(3):
                backend.sgd(*mine, *options)
                GENERIC.sgd(*generic, *options)
            for one, two in zip(mine, generic, strict=True):
                if one is not None:
                    assert_bytes(one, two, (n, options, backend.path("sgd", *mine, *options)))
    strided = plain((34,))[::2]
    assert (
        "strided" in backend.path("sgd", strided, strided, None, 0.1, 0.0, 0.0, False) or not CORE
    )


def check_adam(backend: cpu.CpuBackend) -> None:
    for n in (0, 1, 17, 40_000):
        weight, grad, mean, square = (plain((n,), seed) for seed in range(4))
        square = square * square
        mine, generic = ([a.copy() for a in (weight, grad, mean, square)] for _ in range(2))
        for _ in range(3):
            backend.adam(*mine, FACTORS)
            GENERIC.adam(*generic, FACTORS)
        for one, two in zip(mine, generic, strict=True):
            assert_bytes(one, two, (n, backend.path("adam", *mine, FACTORS)))
    state = [plain((34,), seed)[::2] for seed in range(4)]
    assert "strided" in backend.path("adam", *state, FACTORS) or CORE is None


def check_lion(backend: cpu.CpuBackend) -> None:
    factors = {"keep": 0.99, "momentum": 0.9, "take1": 0.1, "keep2": 0.98, "take2": 0.02, "lr": 0.1}
    for n in (0, 1, 17, 40_000):
        state = [plain((n,), seed) for seed in range(3)]
        for a in state[1:]:
            a[::5] = 0  # no sign
        mine, generic = ([a.copy() for a in state] for _ in range(2))
        for _ in range(3):
            backend.lion(*mine, factors)
            GENERIC.lion(*generic, factors)
        for one, two in zip(mine, generic, strict=True):
            assert_bytes(one, two, (n, backend.path("lion", *mine, factors)))
    state = [plain((34,), seed)[::2] for seed in range(3)]
    assert "strided" in backend.path("lion", *state, factors) or CORE is None


def check_stochastic_bfloat16(backend: cpu.CpuBackend) -> None:
    rng = np.random.default_rng(0)
    for n in (0, 1, 17, 8192, 40_001):
        x = (rng.standard_normal(n) * np.exp2(rng.integers(-149, 127, n))).astype(np.float32)
        x[n // 2 : n // 2 + 3] = np.array([np.inf, np.nan, -np.inf])[: n - n // 2]
        stream = Stream(n << 31, 3, 5, 127)
        got, expected = (b.stochastic_bfloat16(x, stream) for b in (backend, GENERIC))
        assert got.dtype == expected.dtype
        same = got.view(np.uint16) == expected.view(np.uint16)
        assert same.all(), (n, backend.path("stochastic_bfloat16", x, stream))


def check_all_finite(backend: cpu.CpuBackend) -> None:
    for n in (1, 15, 16, 33, 70_000):
        x = np.full(n, np.finfo(np.float32).max)
        assert backend.all_finite(x) and GENERIC.all_finite(x)  # though their sum is not
        for bad in (np.nan, np.inf, -np.inf):
            for at in {0, n // 2, n - 1}:
                y = x.copy()
                y[at] = bad
                assert not backend.all_finite(y), (n, bad, at)
                assert not GENERIC.all_finite(y), (n, bad, at)
    for one in (backend, GENERIC):
        assert not one.all_finite(np.array([np.inf, -np.inf], np.float32))  # whose sum is NaN
