"""Quantization of plain arrays: specs, the exact reference, recipes."""

from extensor.quant.array import QuantArray, QuantStats
from extensor.quant.spec import Hadamard, QuantSpec

__all__ = ["Hadamard", "QuantArray", "QuantSpec", "QuantStats"]


def __dir__() -> list[str]:
    return sorted([*__all__, "recipe"])
