"""Element grids as lists of values, and rounding to them one number at a time.

Every float32 is a whole multiple of 2**-149, so magnitudes here are Python ints
in that unit: comparisons with grid values and midpoints are exact, whatever the
exponents. A grid lists the magnitudes of its codes in order, followed by the one
value that a wider format would have next; reaching that one is saturating.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from fractions import Fraction
from typing import NamedTuple

import numpy as np

UNIT = 2**149
HUGE = 2**4096
"""Stands for infinity among magnitudes."""


def bits_of(x: object) -> int:
    """The 32 bits of a float32."""
    return struct.unpack("<I", np.float32(x).tobytes())[0]


def from_bits(bits: int) -> np.float32:
    """The float32 with these bits."""
    return np.frombuffer(struct.pack("<I", bits), dtype="<f4")[0]


def magnitude(x: object) -> int:
    """|x| in units of 2**-149, exactly."""
    bits = bits_of(x)
    exponent, mantissa = bits // 2**23 % 256, bits % 2**23
    if exponent == 255:
        if mantissa:
            raise ValueError("a NaN has no magnitude")
        return HUGE
    return mantissa if exponent == 0 else (2**23 + mantissa) * 2 ** (exponent - 1)


def negative(x: object) -> bool:
    """The sign bit, set for -0.0 as well."""
    return bits_of(x) >= 2**31


class Grid(NamedTuple):
    """One element grid."""

    bits: int
    signed_integer: bool
    mantissa: int
    values: tuple[Fraction, ...]
    beyond: Fraction
    emax: int

    @property
    def top(self) -> Fraction:
        """The largest finite value."""
        return self.values[-1]


def _f(*texts: object) -> tuple[Fraction, ...]:
    return tuple(Fraction(str(t)) for t in texts)


def _binades(first: int, last: int, steps: int, count: int | None = None) -> list[Fraction]:
    """Normal values of the binades 2**first .. 2**last, ``steps`` to each."""
    out = [
        Fraction(2) ** e * Fraction(steps + k, steps)
        for e in range(first, last + 1)
        for k in range(steps)
    ]
    return out[:count]


E2M1 = Grid(4, False, 1, _f(0, 0.5, 1, 1.5, 2, 3, 4, 6), Fraction(8), 2)
E2M3 = Grid(
    6,
    False,
    3,
    _f(0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
    + _f(1, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875)
    + _f(2, 2.25, 2.5, 2.75, 3, 3.25, 3.5, 3.75)
    + _f(4, 4.5, 5, 5.5, 6, 6.5, 7, 7.5),
    Fraction(8),
    2,
)
E3M2 = Grid(
    6,
    False,
    2,
    _f(0, 0.0625, 0.125, 0.1875)
    + _f(0.25, 0.3125, 0.375, 0.4375, 0.5, 0.625, 0.75, 0.875)
    + _f(1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5)
    + _f(4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28),
    Fraction(32),
    4,
)
E4M3 = Grid(
    8,
    False,
    3,
    tuple([Fraction(k, 512) for k in range(8)] + _binades(-6, 8, 8, 15 * 8 - 1)),
    Fraction(480),
    8,
)
E5M2 = Grid(
    8,
    False,
    2,
    tuple([Fraction(k, 65536) for k in range(4)] + _binades(-14, 15, 4)),
    Fraction(65536),
    15,
)
INT8_MX = Grid(8, True, 6, tuple(Fraction(k, 64) for k in range(128)), Fraction(2), 0)
INT8 = Grid(8, True, 0, tuple(Fraction(k) for k in range(128)), Fraction(128), 6)
INT4 = Grid(4, True, 0, tuple(Fraction(k) for k in range(8)), Fraction(8), 2)
INT5 = Grid(5, True, 0, tuple(Fraction(k) for k in range(16)), Fraction(16), 3)
INT6 = Grid(6, True, 0, tuple(Fraction(k) for k in range(32)), Fraction(32), 4)

GRIDS = {
    "e2m1": E2M1,
    "e2m3": E2M3,
    "e3m2": E3M2,
    "e4m3": E4M3,
    "e5m2": E5M2,
    "int8_mx": INT8_MX,
    "int8": INT8,
    "int4": INT4,
    "int5": INT5,
    "int6": INT6,
}

_STEPS = {
    name: [int(v * UNIT) for v in (*grid.values, grid.beyond)] for name, grid in GRIDS.items()
}


def _goes_up(a: int, low: int, high: int, odd: bool, word: int | None, ties: str) -> bool:
    """Whether ``a`` in [low, high) rounds to ``high``; a word means stochastically."""
    if word is not None:
        return (a - low) * 2**32 > word * (high - low)
    twice, middle = 2 * a, low + high
    if twice != middle:
        return twice > middle
    return {"even": odd, "away": True, "zero": False}[ties]


def encode(x: object, name: str, word: int | None = None, ties: str = "even") -> tuple[int, bool]:
    """The code of one float32 on a grid, and whether it saturated."""
    grid, steps = GRIDS[name], _STEPS[name]
    last = len(steps) - 1
    a = magnitude(x)
    index = bisect_right(steps, a) - 1
    if index < last and _goes_up(a, steps[index], steps[index + 1], index % 2 == 1, word, ties):
        index += 1
    saturated = index == last
    if saturated:
        index = last - 1
    if grid.signed_integer:
        return (-index if negative(x) else index) % 2**grid.bits, saturated
    return index + (2 ** (grid.bits - 1) if negative(x) else 0), saturated


def decode(code: int, name: str) -> np.float32:
    """The value of one finite code, with its sign, as a float32."""
    grid = GRIDS[name]
    half = 2 ** (grid.bits - 1)
    if grid.signed_integer:
        value = code - 2 * half if code >= half else code
        step = grid.values[1]
        return np.float32(float(value * step))
    value = np.float32(float(grid.values[code % half]))
    return -value if code >= half else value


def round_integer(x: object, word: int | None = None, ties: str = "even") -> int:
    """A float32 to an integer without bounds."""
    a = magnitude(x)
    low = a // UNIT
    up = _goes_up(a, low * UNIT, (low + 1) * UNIT, low % 2 == 1, word, ties)
    return -(low + up) if negative(x) else low + up


def e4m3_byte(x: object) -> int:
    """The byte of a non-negative float32 as a block scale: nearest even, at most 448."""
    return encode(x, "e4m3")[0]
