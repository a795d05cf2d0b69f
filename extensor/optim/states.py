"""How optimizers store their state between steps: float32, bfloat16, or MXFP8 blocks.

A running average with a long memory changes by less than narrow formats can represent. With
beta2 = 0.999 a step changes it by a thousandth, while half a step of bfloat16 is 1/512 to 1/256 of
the value: under rounding to nearest the average would never change. So both narrow kinds round
stochastically. Their random bits are a function of (step, parameter, slot), so that a resumed run
repeats an uninterrupted one.

Averages of squares span twice the binades of the gradients, and updates divide by their roots. In
8-bit blocks the roots are stored. A root above zero never becomes zero, which would make the next
update one of 1 / eps: it keeps the least code of its block, 2^-17 to 2^-18 of the block's largest.
The root is right on average, but its square is too large by the variance: about 5% for
beta2 = 0.999, which makes steps 2 to 3% smaller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from extensor.dtypes import bfloat16
from extensor.formats import FORMATS
from extensor.quant.array import QuantArray
from extensor.quant.spec import QuantSpec
from extensor.random import Stream

__all__ = [
    "STATES",
    "WEIGHT_SLOT",
    "Blocks",
    "StateKind",
    "Stored",
    "block_spec",
    "state_stream",
    "tensor_number",
]

Array = Any
Stored = Any
"""The stored state of a slot: an array, or a QuantArray."""

FIRST_TENSOR = 1 << 23
"""Parameters' streams are numbered from here; those of layers count up from 0."""
WEIGHT_SLOT = 127
"""The slot of a parameter that is itself rounded stochastically; states count up from 0."""


def state_stream(step: int, parameter: int, slot: int) -> Stream:
    """The random stream of a slot of a parameter in a step, all given by number."""
    return Stream(0, step, tensor_number(parameter), slot)


def tensor_number(parameter: int) -> int:
    """The number in a `Stream` of the parameter with this number."""
    return FIRST_TENSOR + parameter


def block_spec(name: str) -> QuantSpec:
    """How updates round values into blocks of an MX format, along one axis."""
    return QuantSpec(name, scale_rule="rceil", rounding="stochastic").resolve(1)


class StateKind(ABC):
    """How flat float arrays are stored.

    Attributes:
        doc: one line.
    """

    doc: str

    @abstractmethod
    def pack(self, backend: Any, values: Array, stream: Stream, square: bool) -> Stored:
        """Store flat values; those of a ``square`` slot are 0 or more."""

    @abstractmethod
    def unpack(self, backend: Any, stored: Stored, square: bool) -> Array:
        """Read stored values as float32; whole states of float64 parameters as float64."""


class FullPrecision(StateKind):
    """Stored in the precision of the update."""

    doc = "float32 (float64 for float64 parameters), 4 bytes a value"

    def pack(self, backend: Any, values: Array, stream: Stream, square: bool) -> Stored:
        """The values themselves."""
        return values

    def unpack(self, backend: Any, stored: Stored, square: bool) -> Array:
        """The array itself, which updates write to."""
        return stored


class Bfloat16(StateKind):
    """Stored as bfloat16, rounded stochastically by adding 16 random bits before truncation."""

    doc = "bfloat16, rounded stochastically, 2 bytes a value"

    def pack(self, backend: Any, values: Array, stream: Stream, square: bool) -> Stored:
        """Float -> bfloat16."""
        return backend.stochastic_bfloat16(values, stream)

    def unpack(self, backend: Any, stored: Stored, square: bool) -> Array:
        """Bfloat16 -> float32, exact."""
        return stored.astype(np.float32)


class Blocks(StateKind):
    """Stored as MXFP8 E4M3 along the flat parameter, with rceil scales, which saturate no value."""

    doc = "MXFP8 E4M3 in blocks of 32, rounded stochastically, 33/32 bytes a value"
    row = next(
        row
        for row in FORMATS.values()
        if row.scale.name == "e8m0" and (row.element.bits, row.element.mantissa_bits) == (8, 3)
    )
    spec = block_spec(row.name)

    def pack(self, backend: Any, values: Array, stream: Stream, square: bool) -> Stored:
        """Quantize the values, or the roots of squares, where no root above zero becomes zero."""
        xp = backend.xp
        roots = xp.sqrt(values) if square else values
        q, _ = backend.quantize(roots.astype(np.float32), self.spec, stream)
        if square:
            codes = q.codes[: values.size]
            codes[(codes == 0) & (roots > 0)] = 1
        return q

    def unpack(self, backend: Any, stored: QuantArray, square: bool) -> Array:
        """Dequantize to float32, and square roots again."""
        values = backend.dequantize(stored)
        return values * values if square else values


STATES: Mapping[str, StateKind] = MappingProxyType(
    {"float32": FullPrecision(), bfloat16.name: Bfloat16(), Blocks.row.name: Blocks()}
)
"""Every kind of state, by the dtype's name that an optimizer's ``states`` takes."""
