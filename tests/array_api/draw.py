"""Arguments drawn at random, and the table of what draws them for each function.

Arguments are numpy arrays and `Named` dtypes, so that the same call can be put to any array
library. ARRAY_API_TESTS_SKIP_DTYPES names unsigned dtypes that a library has not, with commas
between, as in the consortium's own test suite.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

B = ("bool",)
SIGNED = ("int8", "int16", "int32", "int64")
SKIPPED = os.environ.get("ARRAY_API_TESTS_SKIP_DTYPES", "").split(",")
UNSIGNED = tuple(d for d in ("uint8", "uint16", "uint32", "uint64") if d not in SKIPPED)
Z = SIGNED + UNSIGNED
F = ("float32", "float64")
C = ("complex64", "complex128")
R, FC = Z + F, F + C
N = R + C
A = B + N
ODD = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 0.5, -2.5, 3.0, 1e-30, 1e30]

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Named(str):
    """A dtype, by name: becomes the attribute of that name of the namespace."""

    __slots__ = ()


class Draw:
    """Arguments, from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def one(self, values: Any) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def maybe(self) -> bool:
        return bool(self.rng.integers(2))

    def shape(self, least: int = 0, most: int = 3, side: int = 0, top: int = 4) -> tuple[int, ...]:
        """Axes of a few places; at times of more, for what loops over vectors and has a tail."""
        count = int(self.rng.integers(least, most + 1))
        top = 4 * top + 3 if self.rng.random() < 0.1 else top
        return tuple(int(n) for n in self.rng.integers(side, top + 1, count))

    def array(self, kinds: Any, shape: Any = None, odd: bool = False, **range_: Any) -> Any:
        """An array: ``low`` and ``high`` bound its values; ``odd`` mixes in infinities and such."""
        dtype = np.dtype(self.one(kinds))
        shape = self.shape() if shape is None else shape
        low, high = range_.get("low", -8), range_.get("high", 9)
        if dtype.kind == "b":
            return np.asarray(self.rng.integers(0, 2, shape)).astype(bool)
        if dtype.kind in "iu":
            low = max(low, 0) if dtype.kind == "u" else low
            near = np.asarray(self.rng.integers(low, high, shape)).astype(dtype)
            ends = np.iinfo(dtype)
            far = self.rng.integers(ends.min, ends.max, shape, dtype, endpoint=True)
            return np.where(self.rng.random(shape) < 0.4, far, near) if odd and not range_ else near
        parts = []
        for _ in range(2 if dtype.kind == "c" else 1):
            part = np.asarray(self.rng.uniform(low, high, shape))
            if odd:
                part = np.where(self.rng.random(shape) < 0.4, self.rng.choice(ODD, shape), part)
            parts.append(part)
        if dtype.kind == "f":
            return parts[0].astype(dtype)
        whole = np.empty(shape, dtype)
        whole.real, whole.imag = parts  # no product with 1j, which makes NaN of infinities
        return whole

    def pair(self, kinds: Any, **options: Any) -> tuple[Any, Any]:
        """Two arrays that broadcast, of dtypes that promote; at times a Python number for one."""
        shape = self.shape()
        other = tuple(1 if self.rng.random() < 0.3 else n for n in shape)
        other = other[int(self.rng.integers(len(shape) + 1)) :]
        first = self.one(kinds)
        a = self.array((first,), shape, **options)
        second = self.one([k for k in kinds if promotes(first, k)])
        b = self.array((second,), other, **options)
        if self.rng.random() < 0.2:
            kind = a.dtype.kind
            number = int(self.rng.integers(max(0, options.get("low", 0)), 9))
            b = bool(number % 2) if kind == "b" else number if kind in "iu" else number + 0.5
        return (a, b) if self.maybe() else (b, a)

    def axis(self, ndim: int, none: bool = True) -> Any:
        if none and self.maybe():
            return None
        return int(self.rng.integers(-ndim, ndim)) if ndim else None

    def axes(self, ndim: int) -> Any:
        if ndim and self.maybe():
            count = int(self.rng.integers(1, ndim + 1))
            return tuple(int(a) for a in self.rng.permutation(ndim)[:count])
        return self.axis(ndim)

    def matrices(self, kinds: Any = FC, square: bool = True, side: int = 0) -> Any:
        rows, columns = (int(n) for n in self.rng.integers(side, 5, 2))
        lead = self.shape(0, 2, 0, 3)
        return self.array(kinds, (*lead, rows, rows if square else columns))

    def good(self) -> Any:
        """Square matrices far from singular."""
        x = self.matrices()
        return x + np.asarray(40 * np.eye(x.shape[-1]), x.dtype)

    def hermitian(self) -> Any:
        x = self.good()
        return (x + x.conj().swapaxes(-1, -2)) / np.asarray(2, x.dtype)


def promotes(a: str, b: str) -> bool:
    """Whether the standard has a promotion for two dtypes."""
    kinds = [np.dtype(d).kind for d in (a, b)]
    if "b" in kinds:
        return kinds == ["b", "b"]
    whole = [k in "iu" for k in kinds]
    if any(whole):
        return all(whole) and np.promote_types(a, b).kind in "iu"
    return True


class Calls(dict[str, Callable[[Draw], Call]]):
    """What draws the arguments of each function."""

    def of(self, *names: str) -> Callable[[Callable[[Draw], Any]], Callable[[Draw], Any]]:
        """Register what draws those of ``names``."""

        def register(function: Callable[[Draw], Any]) -> Callable[[Draw], Any]:
            for name in names:
                assert name not in self
                self[name] = function
            return function

        return register
