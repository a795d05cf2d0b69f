"""Training steps: the exact value in float64 beside the bound.

Bounds are those that extensor.backends.cpu_training states, or, for the norms, the first-order
bound of the formula with any order of additions (1% for the rest).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from extensor.backends import cpu
from tests.kernels.inputs import CORE, GENERIC, UNIT, Bounded, arrays, assert_bytes, plain

ROWS = ((1, 1), (3, 5), (7, 16), (2, 4, 33), (40, 128), (5, 1000), (70000, 3), (3, 20001))
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


FACTORS = {
    "keep": 0.999, "take1": 0.1, "keep2": 0.99, "take2": 0.01, "widen": 1.7, "eps": 1e-8,
    "rate": 0.01,
}  # fmt: skip


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
