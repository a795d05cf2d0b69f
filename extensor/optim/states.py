"""How optimizers store their state between steps: float32, bfloat16, or 8-bit blocks.

An average that forgets slowly moves by less than a narrow format can show: with beta2 = 0.999 a
step is a thousandth of the value, bfloat16's half step 1/512 to 1/256, so under rounding to nearest
the average stands still. Both narrow kinds therefore round stochastically, with bits that are a
function of (step, parameter, slot): the average moves right in the mean, and a resumed run repeats
an uninterrupted one.

Averages of squares span twice the binades of the gradients, and divide. In 8-bit blocks their roots
are stored, and a root above zero never becomes zero: it stays at the least code of its block (2^-17
to 2^-18 of the block's largest), where a zero would turn the next update into one of 1 / eps. The
root is right in the mean, its square too large by the variance: about 5% for beta2 = 0.999, so
steps are 2 to 3% smaller.
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
from extensor.random import Stream, random_words

__all__ = ["STATES", "Blocks", "StateKind", "Stored", "state_stream", "tensor_number"]

Array = Any
Stored = Any
"""What is kept of a slot: an array, or a QuantArray."""

FIRST_TENSOR = 1 << 23
"""Parameters' streams are numbered from here; those of layers count up from 0."""
PER_CALL = 1 << 12
"""Random words drawn as one block."""


def state_stream(step: int, parameter: int, slot: int) -> Stream:
    """The random bits of a slot of the numbered parameter in its numbered step."""
    return Stream(0, step, tensor_number(parameter), slot)


def tensor_number(parameter: int) -> int:
    """Whose random bits those of the numbered parameter are, in a `Stream`."""
    return FIRST_TENSOR + parameter


class StateKind(ABC):
    """A way of storing flat float arrays.

    Attributes:
        doc: one line.
    """

    doc: str

    @abstractmethod
    def pack(self, backend: Any, values: Array, stream: Stream, square: bool) -> Stored:
        """What is stored of flat values; those of a ``square`` slot are 0 or more."""

    @abstractmethod
    def unpack(self, backend: Any, stored: Stored, square: bool) -> Array:
        """The float32 values of what is stored (float32 state of a float64 parameter: float64)."""


class Whole(StateKind):
    """In the precision of the update."""

    doc = "float32 (float64 for float64 parameters), 4 bytes a value"

    def pack(self, backend: Any, values: Array, stream: Stream, square: bool) -> Stored:
        """The values themselves."""
        return values

    def unpack(self, backend: Any, stored: Stored, square: bool) -> Array:
        """The very array, which updates write to."""
        return stored


class Half(StateKind):
    """bfloat16, rounded stochastically: the 16 bits that are cut carry one up so often."""

    doc = "bfloat16, rounded stochastically, 2 bytes a value"

    def pack(self, backend: Any, values: Array, stream: Stream, square: bool) -> Stored:
        """Float -> bfloat16."""
        xp = backend.xp
        bits = values.astype(np.float32).view(np.uint32)
        blocks = -(-values.size // (2 * PER_CALL))
        words = random_words(stream, xp.arange(blocks), PER_CALL, 32, xp)
        low, high = words & xp.uint32(0xFFFF), words >> xp.uint32(16)
        noise = xp.stack([low, high], axis=-1).reshape(-1)[: values.size]
        finite = (bits & xp.uint32(0x7F800000)) != xp.uint32(0x7F800000)
        rounded = bits + noise * finite.astype(np.uint32)
        return (rounded >> xp.uint32(16)).astype(np.uint16).view(bfloat16.numpy)

    def unpack(self, backend: Any, stored: Stored, square: bool) -> Array:
        """Bfloat16 -> float32, exact."""
        return stored.astype(np.float32)


class Blocks(StateKind):
    """MXFP8 E4M3 along the flat parameter, 32 values to a scale that saturates none."""

    doc = "MXFP8 E4M3 in blocks of 32, rounded stochastically, 33/32 bytes a value"
    row = next(
        row
        for row in FORMATS.values()
        if row.scale.name == "e8m0" and (row.element.bits, row.element.mantissa_bits) == (8, 3)
    )
    spec = QuantSpec(row.name, scale_rule="rceil", rounding="stochastic").resolve(1)

    def pack(self, backend: Any, values: Array, stream: Stream, square: bool) -> Stored:
        """Float -> codes and scales; of a square, the root's, never zero for what is above."""
        xp = backend.xp
        kept = xp.sqrt(values) if square else values
        q, _ = backend.quantize(kept.astype(np.float32), self.spec, stream)
        if square:
            codes = q.codes[: values.size]
            codes[(codes == 0) & (kept > 0)] = 1
        return q

    def unpack(self, backend: Any, stored: QuantArray, square: bool) -> Array:
        """Codes and scales -> float32."""
        values = backend.dequantize(stored)
        return values * values if square else values


STATES: Mapping[str, StateKind] = MappingProxyType(
    {"float32": Whole(), bfloat16.name: Half(), Blocks.row.name: Blocks()}
)
"""By the name that an optimizer's ``states`` takes: a dtype's."""
