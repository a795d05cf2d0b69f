"""Layer kernels: elementwise ones by their bytes, sums over images within their bounds."""

from __future__ import annotations

import math

import numpy as np

from extensor.backends import cpu
from tests.kernels.inputs import (
    CORE,
    GENERIC,
    UNIT,
    VIEWS,
    Bounded,
    Check,
    arrays,
    assert_bytes,
    plain,
    special,
)

IMAGES = ((3, 2, 4, 4), (2, 5), (17, 3, 2, 2), (1, 2, 3, 7), (20, 9, 33, 31), (2, 40, 64, 65))


def elementwise(name: str, count: int) -> Check:
    """Same bytes as the generic method, whatever is in the arrays."""

    def check(backend: cpu.CpuBackend) -> None:
        for shape in ((0,), (1,), (5, 3), (31, 33), (300, 129)):
            made = [special(shape, seed) for seed in range(count)]
            with np.errstate(all="ignore"):
                wanted = getattr(GENERIC, name)(*made)
                what = (name, shape, backend.path(name, *made))
                assert_bytes(getattr(backend, name)(*made), wanted, what)
                for view in VIEWS.values():
                    seen = [view(a) for a in made]
                    got, wanted = (getattr(b, name)(*seen) for b in (backend, GENERIC))
                    assert_bytes(np.ascontiguousarray(got), np.ascontiguousarray(wanted), what)

    return check


def check_all_finite(backend: cpu.CpuBackend) -> None:
    for n in (1, 15, 16, 33, 70_000):
        x = np.full(n, np.finfo(np.float32).max)
        assert backend.all_finite(x)
        for bad in (np.nan, np.inf, -np.inf):
            for at in {0, n // 2, n - 1}:
                y = x.copy()
                y[at] = bad
                assert not backend.all_finite(y), (n, bad, at)


def channels_of(x: np.ndarray) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def across(x: np.ndarray, value: np.ndarray) -> np.ndarray:
    return value.reshape(-1, *(1,) * (x.ndim - 2)).astype(np.float64)


def channel_sum_cases() -> Bounded:
    for shape in IMAGES:
        x = arrays(shape, 1)[0]
        bound = (math.prod(shape[2:]) + 12) * UNIT * np.abs(x.astype(np.float64))
        axes = channels_of(x)
        yield (x,), [x.astype(np.float64).sum(axis=axes)], [bound.sum(axis=axes)]


def batch_norm_cases() -> Bounded:
    for shape in IMAGES:
        x = arrays(shape, 1)[0] + np.float32(2)
        weight, bias = arrays(shape[1:2], 2)
        wide, axes, eps = x.astype(np.float64), channels_of(x), float(np.float32(1e-2))
        terms = math.prod(shape[2:]) + 12
        mean, var = wide.mean(axis=axes), wide.var(axis=axes)
        rstd = 1 / np.sqrt(var + eps)
        off = terms * UNIT * np.abs(wide).mean(axis=axes)  # of the mean
        centred = wide - across(x, mean)
        # A shift of the mean adds its square alone to the variance.
        var_off = 1.01 * (terms + 4) * UNIT * (var + eps) + 2 * off * off
        relative = var_off * rstd * rstd / 2 + 4 * UNIT
        h = centred * across(x, rstd * weight)
        size = (np.abs(centred) + across(x, off)) * across(x, rstd * np.abs(weight))
        bound = 1.01 * (across(x, off * rstd * np.abs(weight)) + size * across(x, relative + UNIT))
        bound += 2 * UNIT * (np.abs(h) + across(x, np.abs(bias)))
        yield (x, weight, bias, eps), [h + across(x, bias), mean, var], [bound, off, var_off]


def batch_norm_grad_cases() -> Bounded:
    for (x, weight, _, eps), (_, mean, var), _ in batch_norm_cases():
        g, axes = np.cos(x), channels_of(x)
        mean, var = mean.astype(np.float32), var.astype(np.float32)
        wide, count = g.astype(np.float64), x.size // x.shape[1]
        terms = math.prod(x.shape[2:]) + 16
        rstd = 1 / np.sqrt(var.astype(np.float64) + eps)
        d = x.astype(np.float64) - across(x, mean)
        gb, gw = wide.sum(axis=axes), (wide * d).sum(axis=axes) * rstd
        gb_off = terms * UNIT * np.abs(wide).sum(axis=axes)
        gw_off = terms * UNIT * np.abs(wide * d).sum(axis=axes) * rstd
        slope, off = across(x, gw * rstd / count), across(x, gw_off * rstd / count)
        scale = across(x, weight * rstd)
        gx = scale * (wide - across(x, gb / count) - d * slope)
        parts = np.abs(wide) + across(x, np.abs(gb) / count) + np.abs(d * slope)
        bound = across(x, gb_off / count) + np.abs(d) * off + 8 * UNIT * parts
        bound = 1.01 * np.abs(scale) * bound
        yield (g, x, weight, mean, var, eps), [gx, gw, gb], [bound, 1.01 * gw_off, gb_off]


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
