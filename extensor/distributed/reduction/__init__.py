"""The sum of gradients over micro-batches and ranks: in float32, or in fewer bytes, or order-free.

Floating-point addition is not associative, so that the sum of a gradient depends on the algorithm
of the collective, on the bucket, on the number of ranks. Sums of integers do not. `Exact` turns
each micro-batch's gradient into fixed-point integers, so that the mean of N micro-batches has the
same bits on any number of ranks (docs/adr/0022-order-free-gradient-sums.md proves the bound).
`Mxint` sends 8- or 16-bit integers with one exponent for 32 values.
"""

from __future__ import annotations

from extensor.distributed.reduction.base import (
    BLOCK,
    GradientReduction,
    ReductionWork,
    padded_size,
)
from extensor.distributed.reduction.exact import Exact
from extensor.distributed.reduction.float_sum import Bfloat16, Float32
from extensor.distributed.reduction.mxint import Mxint
from extensor.distributed.reduction.table import GRAD_COMM, make_reduction

__all__ = [
    "BLOCK",
    "GRAD_COMM",
    "Bfloat16",
    "Exact",
    "Float32",
    "GradientReduction",
    "Mxint",
    "ReductionWork",
    "make_reduction",
    "padded_size",
]
