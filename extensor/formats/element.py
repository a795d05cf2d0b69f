"""Element grids: how one number is stored in 4 to 8 bits.

Each grid is one frozen row. Everything else about a grid (its largest value, its smallest
subnormal, the value of each code) is derived from the row, for the reference, the C++ core, the
CUDA kernels, the docs and the tests alike. The C++ build reads these rows, so this module needs the
standard library only.

Source: OCP Microscaling Formats (MX) v1.0, sections 5.3 and 5.4; OCP FP8 v1.0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal

__all__ = ["ELEMENTS", "ElementFormat"]

Specials = Literal["none", "nan", "ieee"]


@dataclass(frozen=True)
class ElementFormat:
    """One element grid.

    A floating-point grid has ``exponent_bits > 0``: sign, exponent, mantissa, from the high bit
    down. A fixed-point grid has ``exponent_bits == 0``: a two's complement integer times
    ``2**-mantissa_bits``.

    Attributes:
        name: the grid's name, in `ELEMENTS`.
        bits: of a code.
        exponent_bits: 0 for fixed point.
        mantissa_bits: without the implicit leading one.
        bias: of the exponent.
        specials: which codes are not numbers: ``"none"``; ``"nan"``, the all-ones code of either
            sign is NaN and there is no infinity (e4m3fn); ``"ieee"``, the top exponent holds
            infinities and NaNs (e5m2).
        doc: one line for tables.
        has_kernels: False for codes that only the reference quantizes and decodes; the CPU's
            products with float32 rows read them, too.

    >>> grid = et.ELEMENTS["e2m1"]
    >>> grid.values[:8]
    (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    >>> et.ELEMENTS["e4m3"].max, et.ELEMENTS["e4m3"].min_positive == 2**-9
    (448.0, True)
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials
    doc: str
    has_kernels: bool = True

    @property
    def is_float(self) -> bool:
        """True for a floating-point grid, False for a fixed-point one."""
        return self.exponent_bits > 0

    @property
    def sign_mask(self) -> int:
        """The bit that holds the sign of a floating-point code."""
        return 1 << (self.bits - 1)

    @property
    def max_magnitude_code(self) -> int:
        """The code, without its sign, of the largest finite value."""
        top = (1 << (self.bits - 1)) - 1
        if self.specials == "nan":
            return top - 1
        if self.specials == "ieee":
            return top - (1 << self.mantissa_bits)
        return top

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value; 0 for fixed point."""
        return 1 - self.bias if self.is_float else 0

    @property
    def grid_exponent(self) -> int:
        """Exponent of the finest spacing: the smallest nonzero value is ``2**grid_exponent``."""
        return self.min_exponent - self.mantissa_bits

    @property
    def emax(self) -> int:
        """Exponent of the largest finite value, as the E8M0 scale rules use it.

        Fixed-point grids use the exponent of their largest power of two below
        the top (0 for MXINT8, whose values reach 127/64).
        """
        return math.frexp(self.max)[1] - 1

    @cached_property
    def max(self) -> float:
        """The largest finite value."""
        return self.decode(self.max_magnitude_code)

    @property
    def min_normal(self) -> float:
        """The smallest normal value (the unit step for fixed point)."""
        return math.ldexp(1.0, self.min_exponent if self.is_float else self.grid_exponent)

    @property
    def min_positive(self) -> float:
        """The smallest positive value."""
        return math.ldexp(1.0, self.grid_exponent)

    @property
    def nan_code(self) -> int | None:
        """A code that decodes to NaN, or None where the grid has none."""
        return None if self.specials == "none" else (1 << (self.bits - 1)) - 1

    def decode(self, code: int) -> float:
        """The exact value of one code; float64 holds every grid value.

        Args:
            code: 0 to 2**bits - 1.

        Returns:
            The value; NaN and infinities where the grid has them.

        Raises:
            ValueError: for a code out of range.

        >>> et.ELEMENTS["e2m1"].decode(0b1101)
        -3.0
        """
        if not 0 <= code < 1 << self.bits:
            raise ValueError(
                f"{self.name}: expected a code in 0..{(1 << self.bits) - 1}, got {code}"
            )
        if not self.is_float:
            signed = code - (1 << self.bits) if code & self.sign_mask else code
            return math.ldexp(float(signed), self.grid_exponent)
        sign = -1.0 if code & self.sign_mask else 1.0
        magnitude = code & (self.sign_mask - 1)
        exponent, mantissa = (
            magnitude >> self.mantissa_bits,
            magnitude & ((1 << self.mantissa_bits) - 1),
        )
        if self.specials == "nan" and magnitude == self.sign_mask - 1:
            return math.nan
        if self.specials == "ieee" and exponent == (1 << self.exponent_bits) - 1:
            return math.nan if mantissa else sign * math.inf
        if exponent == 0:
            return sign * math.ldexp(float(mantissa), self.grid_exponent)
        significand = (1 << self.mantissa_bits) + mantissa
        return sign * math.ldexp(float(significand), self.grid_exponent + exponent - 1)

    @cached_property
    def values(self) -> tuple[float, ...]:
        """The value of every code, in code order."""
        return tuple(self.decode(code) for code in range(1 << self.bits))


_ROWS = (
    ElementFormat("e2m1", 4, 2, 1, 1, "none", "FP4: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives"),
    ElementFormat("e2m3", 6, 2, 3, 1, "none", "FP6 with more precision: steps of 1/8, up to 7.5"),
    ElementFormat("e3m2", 6, 3, 2, 3, "none", "FP6 with more range: steps of 1/16, up to 28"),
    ElementFormat("e4m3", 8, 4, 3, 7, "nan", "FP8 with more precision (e4m3fn): up to 448"),
    ElementFormat("e5m2", 8, 5, 2, 15, "ieee", "FP8 with more range: up to 57344"),
    ElementFormat("int8_mx", 8, 0, 6, 0, "none", "MXINT8: two's complement times 2**-6, +-127/64"),
    ElementFormat("int8", 8, 0, 0, 0, "none", "integers -127..127; -128 only with a zero point"),
    ElementFormat("int4", 4, 0, 0, 0, "none", "integers -7..7; -8 only with a zero point"),
    ElementFormat("int5", 5, 0, 0, 0, "none", "integers -15..15; -16 only with a minimum", False),
    ElementFormat("int6", 6, 0, 0, 0, "none", "integers -31..31", False),
)

ELEMENTS: MappingProxyType[str, ElementFormat] = MappingProxyType({row.name: row for row in _ROWS})
"""Every element grid, by name."""
