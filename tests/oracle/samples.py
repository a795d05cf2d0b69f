"""Arrays that exercise blocks: plain ones, wild finite ones, and ones with NaN and Inf."""

from __future__ import annotations

import numpy as np

F = np.float32
EDGES = (6.0, 6.0000005, 7.0, 3.5, 1.75, 448.0, 464.0, 464.00003, 28.0, 30.0, 7.5, 7.75)
EDGES += (57344.0, 61440.0, 1.984375, 1.9843751, 1.9921875, 127.5, 0.25, 0.75, 2.5, 5.0)

SHAPES = (((1,), 0), ((37,), 0), ((3, 70), -1), ((70, 3), 0), ((5, 32), 1), ((2, 33, 5), 1))
SHAPES += (((4, 3, 34), 2), ((34, 2, 3), 0))
TILES = ((1, 1), (1, 5), (1, 16), (1, 64), (1, 128), (16, 16), (32, 32), (3, 7), (4, 1))
KINDS = ("normal", "finite", "special")


def _piece(rng: np.random.Generator, kind: int, n: int) -> np.ndarray:
    """A few neighbouring values of one kind; kinds from 10 on are not all finite."""
    plain = rng.standard_normal(n).astype(F)
    if kind == 0:
        return plain
    if kind == 1:
        return plain * F(2.0 ** rng.integers(-40, 40))
    if kind == 2:
        return np.where(rng.random(n) < 0.5, F(0), F(-0.0)).astype(F)
    if kind == 3:  # float32 subnormals
        return rng.integers(-(2**12), 2**12, n).astype(F) * F(2.0**-149)
    if kind == 4:
        return plain * F(2.0**-120)
    if kind == 5:
        return np.clip(plain, -1, 1) * F(3.4028234e38)
    if kind == 6:  # powers of two
        return np.ldexp(F(1), rng.integers(-10, 10, n)).astype(F) * np.sign(plain)
    if kind == 7:  # the grids' corners
        return rng.choice(np.array(EDGES, F), n) * np.sign(plain)
    if kind == 8:  # one value far above the others
        plain[rng.integers(n)] *= F(1000)
        return plain
    if kind == 9:  # midpoints of e2m1 under a largest value of 6
        values = rng.choice(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.0], F), n)
        values[rng.integers(n)] = 6.0
        return values * np.sign(plain)
    plain[rng.integers(n)] = (F("nan"), F("inf"), F("-inf"))[kind % 3]
    if kind == 13:
        plain[rng.integers(n)] = F("nan")
    return plain


def sample(shape: tuple[int, ...], axis: int, kind: str, seed: int) -> np.ndarray:
    """A float32 array whose neighbours along the axis are of one kind, 8 or 16 at a time."""
    rng = np.random.default_rng(seed)
    if kind == "normal":
        return rng.standard_normal(shape).astype(F)
    moved = np.zeros(np.moveaxis(np.empty(shape), axis, -1).shape, F)
    for line in np.ndindex(moved.shape[:-1]):
        start = 0
        while start < moved.shape[-1]:
            n = min(int(rng.choice([8, 16])), moved.shape[-1] - start)
            special = kind == "special" and rng.random() < 0.3
            which = int(rng.integers(10, 14) if special else rng.integers(10))
            moved[(*line, slice(start, start + n))] = _piece(rng, which, n)
            start += n
    return np.ascontiguousarray(np.moveaxis(moved, -1, axis))
