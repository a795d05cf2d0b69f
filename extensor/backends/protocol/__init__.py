"""What a backend provides beyond its array module.

Ordinary operations use only the array module (numpy or cupy). The methods here are the ones worth
a kernel, one module for each family: matmul, experts, quantize, conv_pool, nn, optim, reduction.
`GenericBackend` implements all of them on the array module. A backend overrides the hot ones, and
`tests/test_every_kernel.py` finds each override and compares it with the generic method.
"""

from typing import Protocol

from extensor.backends.protocol.conv_pool import ConvPoolMethods, FirstSpec
from extensor.backends.protocol.core import Array, CoreMethods, MemoryLog, Window
from extensor.backends.protocol.experts import ExpertMethods, GatedExperts
from extensor.backends.protocol.matmul import (
    CastSpec,
    MatmulMethods,
    OperandSpec,
    PackedOperand,
    Preparation,
    Prepared,
)
from extensor.backends.protocol.nn import AttentionForward, AttentionOptions, NnMethods, TokenMemory
from extensor.backends.protocol.optim import FiniteQuery, OptimMethods
from extensor.backends.protocol.quantize import QuantizeMethods, SpecPair, StreamPair
from extensor.backends.protocol.reduction import ReductionMethods

__all__ = [
    "Array",
    "AttentionForward",
    "AttentionOptions",
    "Backend",
    "CastSpec",
    "FiniteQuery",
    "FirstSpec",
    "GatedExperts",
    "MemoryLog",
    "OperandSpec",
    "PackedOperand",
    "Preparation",
    "Prepared",
    "SpecPair",
    "StreamPair",
    "TokenMemory",
    "Window",
]


class Backend(
    MatmulMethods,
    ExpertMethods,
    QuantizeMethods,
    ConvPoolMethods,
    NnMethods,
    OptimMethods,
    ReductionMethods,
    CoreMethods,
    Protocol,
):
    """One device's arrays and kernels."""
