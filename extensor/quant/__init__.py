"""Quantization: specs, the exact reference, recipes. No tensors, no gradients."""

from extensor.quant.array import QuantArray, QuantStats
from extensor.quant.spec import Hadamard, QuantSpec

__all__ = ["Hadamard", "QuantArray", "QuantSpec", "QuantStats"]
