"""Activations, norms, losses and sums: exact values in float64 beside bounds, or bytes.

Bounds are those that extensor.backends.cpu.nn states, or, for the norms, the first-order
bound of the formula with any order of additions (1% for the rest).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

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
    normals,
    special,
)

ROWS = ((1, 1), (3, 5), (7, 16), (2, 4, 33), (40, 128), (5, 1000), (70000, 3), (3, 20001))
IMAGES = ((3, 2, 4, 4), (2, 5), (17, 3, 2, 2), (1, 2, 3, 7), (20, 9, 33, 31), (2, 40, 64, 65))
normal_below = np.vectorize(lambda x: 0.5 * math.erfc(-x / math.sqrt(2)), otypes=[np.float64])


def gelu_cases() -> Bounded:
    for x in (np.linspace(-16, 16, 50001, dtype=np.float32), *(arrays(s, 1)[0] for s in ROWS[:5])):
        wide = x.astype(np.float64)
        phi = normal_below(wide)
        relative = (wide * wide / 2 + 16) * UNIT
        exact = [wide * phi, phi]
        yield (x,), exact, [relative * np.abs(value) + 2.0**-144 for value in exact]


def gelu_grad_cases() -> Bounded:
    for (x,), (_, phi), _ in gelu_cases():
        g, below = np.cos(x), phi.astype(np.float32)
        wide = x.astype(np.float64)
        slope = wide * np.exp(-wide * wide / 2) / math.sqrt(2 * math.pi)
        bound = (wide * wide / 2 + 16) * UNIT * (below + np.abs(slope)) + 2.0**-144
        yield (g, x, below), [g * (below + slope)], [np.abs(g) * bound + 2.0**-144]


def gated_inputs() -> Iterator[tuple[np.ndarray, ...]]:
    """g, gate, up, alpha, limit; and exactly: clipped gate, up plus shift, z, sigmoid, silu."""
    wide = np.linspace(-90, 90, 4001, dtype=np.float32)
    for x in (wide, *(3 * arrays(s, 1)[0] for s in ROWS[:5])):
        up, g = np.cos(x) * 2, np.sin(x + 1)
        for alpha, limit in ((1.0, None), (1.702, 1.5)):
            a, u = x.astype(np.float64), up.astype(np.float64)
            if limit is not None:
                a, u = np.minimum(a, limit), (np.clip(u, -limit, limit) + 1)
            z = np.float64(np.float32(alpha)) * a
            s = 1 / (1 + np.exp(-z))
            yield (g, x, up, alpha, limit), a, u, z, s


def gated_silu_cases() -> Bounded:
    for (_, gate, up, alpha, limit), a, u, z, s in gated_inputs():
        y = a * s * u
        bound = (np.abs(z) + 16) * UNIT * np.abs(a * s) * (np.abs(u) + (limit or 0)) + 2.0**-126
        yield (gate, up, alpha, limit), [y], [bound]


def gated_silu_grad_cases() -> Bounded:
    for given, a, u, z, s in gated_inputs():
        g, gate, up, _, limit = given
        ggate = g * u * (s + z * s * (1 - s))
        gup = g * a * s
        if limit is not None:
            ggate, gup = np.where(gate > limit, 0, ggate), np.where(np.abs(up) > limit, 0, gup)
        size = np.abs(g) * (np.abs(u) + (limit or 0))
        yield (
            given,
            [ggate, gup],
            [
                (np.abs(z) + 24) * UNIT * size * s * (1 + np.abs(z)) + 2.0**-126 * (1 + size),
                (np.abs(z) + 16) * UNIT * np.abs(g * a * s) + 2.0**-126 * (1 + np.abs(g)),
            ],
        )


def check_rotary(backend: cpu.CpuBackend) -> None:
    """Bytes, for heads cut out of rows, tables of each sequence, and components that stay."""
    for number, (shape, table) in enumerate((
        ((2, 3, 5, 16), (5, 8)),
        ((2, 3, 5, 22), (2, 1, 5, 9)),
        ((7, 64), (7, 32)),
        ((1, 2), (1, 1)),
        ((2, 40, 3, 34), (1, 16)),
    )):  # fmt: skip
        x, cos, sin = normals(number, shape, table, table)
        for view in (np.asarray, VIEWS["strided"], VIEWS["transposed"], VIEWS["misaligned"]):
            for interleaved in (False, True):
                case = (view(x), view(cos), view(sin), interleaved)
                path = backend.path("rotary", *case)
                assert CORE is None or path.startswith("core ("), path
                expected = GENERIC.rotary(*case)
                assert_bytes(backend.rotary(*case), expected, (shape, path))
                mixed = (case[0], cos.copy(), *case[2:])  # tables of two layouts
                assert_bytes(backend.rotary(*mixed), expected, (shape, path))


class Rows:
    """Float32 scores, some of them ``least``, and exactly: -d, p = softmax, log sum e^-d."""

    def __init__(self, shape: tuple[int, ...], least: float) -> None:
        self.x = arrays(shape, 1)[0] * np.float32(5)
        self.x[0, ..., shape[-1] // 2] = least if shape[-1] > 1 else 2.0
        self.top = self.x.max(axis=-1, keepdims=True).astype(np.float64)
        self.below = self.x - self.top
        each = np.exp(self.below)
        self.sums = each.sum(axis=-1, keepdims=True)
        self.p, self.log_sum = each / self.sums, np.log(self.sums)
        self.depth = np.where(self.p > 0, -self.below, 0)
        self.mean_depth = (self.p * self.depth).sum(axis=-1, keepdims=True)

    @property
    def p_bound(self) -> np.ndarray:
        spread = self.depth + self.mean_depth + self.x.shape[-1] + 16
        return spread * UNIT * self.p + 2.0**-126

    @property
    def log_bound(self) -> np.ndarray:
        sums = self.mean_depth + self.x.shape[-1] + 8
        return UNIT * (sums + 4 * (self.log_sum - self.below))


def softmax_cases() -> Bounded:
    for shape in ROWS:
        rows = Rows(shape, -np.inf)
        yield (rows.x, rows.x.ndim - 1), [rows.p], [rows.p_bound]


def softmax_grad_cases() -> Bounded:
    for (x, axis), (p,), _ in softmax_cases():
        g, out = np.sin(x + 1, where=np.isfinite(x), out=np.ones_like(x)), p.astype(np.float32)
        each = g.astype(np.float64) * out
        exact = out * (g - each.sum(axis=-1, keepdims=True))
        size = np.abs(g) + np.abs(each).sum(axis=-1, keepdims=True)
        yield (g, out, axis), [exact], [(x.shape[-1] + 4) * UNIT * out * size + 2.0**-126]


def log_softmax_cases() -> Bounded:
    for shape in ROWS:
        rows = Rows(shape, -1e30)
        yield (rows.x, rows.x.ndim - 1), [rows.below - rows.log_sum], [rows.log_bound]


def log_softmax_grad_cases() -> Bounded:
    for (x, axis), (exact,), _ in log_softmax_cases():
        g, out = np.sin(x + 1), exact.astype(np.float32)
        p, wide = np.exp(out.astype(np.float64)), g.astype(np.float64)
        sums, sizes = (a.sum(axis=-1, keepdims=True) for a in (wide, np.abs(wide)))
        bound = (x.shape[-1] + 16) * UNIT * p * sizes + 2 * UNIT * np.abs(g)
        yield (g, out, axis), [wide - p * sums], [bound + 2.0**-126 * (1 + sizes)]


def labelled() -> Iterator[tuple[Rows, np.ndarray, float, np.ndarray]]:
    """Rows, a label each, smoothing, and what the backend keeps for the gradient."""
    for number, shape in enumerate(ROWS):
        rows = Rows((math.prod(shape[:-1]), shape[-1]), -1e30)
        labels = np.random.default_rng(number).integers(0, shape[-1], len(rows.x))
        kept = np.concatenate([rows.top, rows.sums], axis=1) if CORE else rows.p
        for smoothing in (0.0, 0.1, 1.0):
            yield rows, labels, smoothing, kept


def cross_entropy_cases() -> Bounded:
    for rows, labels, s, kept in labelled():
        n, at = rows.x.shape[1], (np.arange(len(labels)), labels)
        losses, bound = (rows.log_sum - rows.below)[at], rows.log_bound[at]
        if s:
            log_sum, mean = rows.log_sum[:, 0], -rows.below.mean(axis=1)
            losses = (1 - s) * losses + s * (log_sum + mean)
            bound = bound + UNIT * s * (4 * (log_sum + mean) + (n + 3) * mean)
        sums = (rows.mean_depth + n + 8) * UNIT * rows.sums
        kept_bound = np.concatenate([0 * sums, sums], axis=1) if CORE else rows.p_bound
        yield (rows.x, labels, s), [losses, kept], [bound, kept_bound]


def cross_entropy_grad_cases() -> Bounded:
    for rows, labels, s, kept in labelled():
        target = np.full(rows.x.shape, s / rows.x.shape[1])
        target[np.arange(len(labels)), labels] += 1 - s
        for weight in (np.float32(-0.7), np.cos(rows.x[:, :1])):
            bound = rows.p_bound + 4 * UNIT * (rows.p + target) + 2.0**-126
            wide = np.asarray(weight, dtype=np.float64)
            case = weight, rows.x, labels, kept.astype(np.float32), s
            yield case, [(rows.p - target) * wide], [bound * np.abs(wide) + 2.0**-149]


def norm_cases(centred: bool) -> Bounded:
    for shape in ROWS:
        n = shape[-1]
        x = arrays(shape, 1)[0] + np.float32(2)
        weight, bias = arrays(shape[-1:], 2)
        wide, eps = x.astype(np.float64), float(np.float32(1e-3))
        mean = wide.mean(axis=-1, keepdims=True) if centred else 0.0
        rstd = 1 / np.sqrt(((wide - mean) ** 2).mean(axis=-1, keepdims=True) + eps)
        h = (wide - mean) * rstd
        shift = bias if centred else np.float32(0)
        off = (n + 4) * UNIT * np.abs(wide).max(axis=-1, keepdims=True) * centred
        relative = off * rstd + (n + 8) * UNIT
        bound = np.abs(weight) * (rstd * off + np.abs(h) * relative)
        bound = 1.01 * bound + 5 * UNIT * (np.abs(h * weight) + np.abs(shift))
        if centred:
            values = [h * weight + bias, mean, rstd]
            yield (x, weight, bias, eps), values, [bound, off, rstd * relative * 1.01]
        else:
            yield (x, weight, eps), [h * weight, rstd], [bound, rstd * relative * 1.01]


def norm_grad_cases(centred: bool) -> Bounded:
    for case, values, _ in norm_cases(centred):
        x, weight = case[:2]
        g = np.cos(x)
        kept = [v.astype(np.float32) for v in values[1:]]
        n, count, lead = x.shape[-1], x.size // x.shape[-1], tuple(range(x.ndim - 1))
        wide, rstd = x.astype(np.float64), kept[-1].astype(np.float64)
        mean = kept[0].astype(np.float64) if centred else np.zeros_like(rstd)
        h, e = (wide - mean) * rstd, g.astype(np.float64) * weight
        off = 3 * UNIT * (np.abs(wide) + np.abs(mean)) * rstd

        def over_row(v: np.ndarray) -> np.ndarray:
            return v.mean(axis=-1, keepdims=True)

        a, b = over_row(e) * centred, over_row(e * h)
        a_off = (n + 2) * UNIT * over_row(np.abs(e)) * centred
        b_off = over_row(np.abs(e) * off) + (n + 3) * UNIT * over_row(np.abs(e * h))
        terms = np.abs(e) + np.abs(a) + np.abs(h * b)
        exact = [rstd * (e - a - h * b), (g * h).sum(axis=lead)]
        bounds = [rstd * (a_off + np.abs(h) * b_off + off * np.abs(b) + 6 * UNIT * terms) * 1.01]
        weights = (np.abs(g) * off).sum(axis=lead)
        bounds.append(1.01 * (weights + (count + 4) * UNIT * np.abs(g * h).sum(axis=lead)))
        if centred:
            exact.append(g.astype(np.float64).sum(axis=lead))
            bounds.append((count + 4) * UNIT * 1.01 * np.abs(g).sum(axis=lead))
        yield (g, x, weight, *kept), exact, bounds


def elementwise(name: str, count: int) -> Check:
    """Same bytes as the generic method, whatever is in the arrays."""

    def check(backend: cpu.CpuBackend) -> None:
        for shape in ((0,), (1,), (5, 3), (31, 33), (300, 129)):
            made = [special(shape, seed) for seed in range(count)]
            with np.errstate(all="ignore"):
                expected = getattr(GENERIC, name)(*made)
                what = (name, shape, backend.path(name, *made))
                assert_bytes(getattr(backend, name)(*made), expected, what)
                for view in VIEWS.values():
                    seen = [view(a) for a in made]
                    got, expected = (getattr(b, name)(*seen) for b in (backend, GENERIC))
                    assert_bytes(np.ascontiguousarray(got), np.ascontiguousarray(expected), what)

    return check


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
