"""What the checks of kernels share: the backends, arrays of every kind, comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from extensor.backends import cpu
from extensor.backends.generic import GenericBackend

BACKEND = cpu.make_backend()
CORE = BACKEND.core
GENERIC = GenericBackend("generic", np)
UNIT = 2.0**-24
SECOND = 1.02
"""Covers the products of two errors in a bound of first order."""

Case = tuple[Any, ...]
Check = Callable[[cpu.CpuBackend], None]
Bounded = Iterator[tuple[Case, list[np.ndarray], list[np.ndarray]]]
"""Arguments, exact results in float64, and the bounds on the errors of float32 ones."""


LEVELS = CORE.levels() if CORE else ["numpy only"]


@contextmanager
def forced(level: str | None = None, threads: int | None = None) -> Iterator[None]:
    """The core at an instruction set and on a number of threads; as before afterwards."""
    before = (CORE.level(), CORE.threads()) if CORE else None
    try:
        if CORE and level:
            CORE.set_level(level)
        if CORE and threads:
            CORE.set_threads(threads)
        yield
    finally:
        if CORE and before:
            CORE.set_level(before[0])
            CORE.set_threads(before[1])


def plain(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Normal values over a dozen binades."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, shape))
    return values.astype(np.float32)


def special(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Zero blocks, NaN, infinities, signed zeros, subnormals and the ends of float32 among them."""
    rng = np.random.default_rng(seed)
    x = plain(shape, seed)
    flat = x.reshape(-1)
    if flat.size:
        for value in (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-39, 3.4e38, -3e38):
            flat[rng.integers(0, flat.size, max(1, flat.size // 150))] = value
    flat[: min(40, flat.size // 2)] = 0.0
    return x


def tiny(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Magnitudes about the smallest scale."""
    return plain(shape, seed) * np.float32(1e-38)


def ties(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Multiples of a quarter: halfway cases on every small grid."""
    return (np.random.default_rng(seed).integers(-32, 33, shape) / 4).astype(np.float32)


def narrow(x: np.ndarray, dtype: str) -> np.ndarray:
    """In another float type; beyond float16's range there are infinities."""
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def misaligned(x: np.ndarray) -> np.ndarray:
    raw = np.empty(x.nbytes + 1, dtype=np.uint8)
    raw[1:] = np.frombuffer(x.tobytes(), dtype=np.uint8)
    view = raw[1:].view(x.dtype).reshape(x.shape)
    assert not view.size or not view.flags.aligned
    return view


def read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "strided": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "reversed": lambda x: x[..., ::-1],
    "transposed": lambda x: np.asfortranarray(x),
    "misaligned": misaligned,
    "read-only": read_only,
}


def arrays(shape: tuple[int, ...], count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(shape[-1])
    return [3 * rng.standard_normal(shape).astype(np.float32) for _ in range(count)]


def normals(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def assert_bytes(got: Any, expected: Any, what: object) -> None:
    """One dtype, one shape and the same bytes; else the first place and both values there."""
    assert got.dtype == expected.dtype, what
    assert got.shape == expected.shape, what
    assert got.flags.c_contiguous, what
    if got.tobytes() != expected.tobytes():
        bits = [a.view(f"u{a.itemsize}") for a in (got, expected)]
        at = tuple(int(i) for i in np.argwhere(bits[0] != bits[1])[0])
        raise AssertionError(f"{what}: at {at} got {got[at]!r}, expected {expected[at]!r}")


def check_bounded(name: str, cases: Callable[[], Bounded]) -> Check:
    made: list[Any] = []

    def check(backend: cpu.CpuBackend) -> None:
        made.extend([] if made else cases())
        method = getattr(backend, name)
        for case, exact, bounds in made:
            what = (name, case[0].shape, backend.path(name, *case))
            assert CORE is None or what[-1].startswith("core ("), what
            result = method(*case)
            results = result if isinstance(result, tuple) else (result,)
            for got, expected, bound in zip(results, exact, bounds, strict=True):
                assert got.dtype == np.float32, what
                assert got.shape == expected.shape, what
                assert (np.abs(got - expected) <= bound).all(), what
            for view in VIEWS.values() if case[0].size < 10_000 else ():
                if view is VIEWS["reversed"]:
                    continue
                seen = method(*[view(a) if isinstance(a, np.ndarray) else a for a in case])
                for one, two in zip(
                    seen if isinstance(seen, tuple) else (seen,), results, strict=True
                ):
                    # attention's output has its heads side by side in memory
                    assert_bytes(np.ascontiguousarray(one), np.ascontiguousarray(two), what)

    return check
