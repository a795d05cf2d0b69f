"""Products of bfloat16 matrices as they lie, such as a language model's head."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from extensor.backends.unsupported import Unsupported
from extensor_cuda.kernels.prepare.cast_bf16 import round_to_bf16
from extensor_cuda.matmul import tuned
from extensor_cuda.matmul.operand import GemmOperand
from extensor_cuda.matmul.product import product
from extensor_cuda.runtime import driver

__all__ = ["dense_product"]

Array = Any


def dense_product(a: Array, b: Array, bias: Array | None, xp: Any) -> Array | Unsupported:
    """A b + bias on the tensor cores, bfloat16 (M, N): float32 sums, rounded once.

    `extensor_cuda.matmul.product` has the bound. Does not wait.

    Args:
        a: (M, K), bfloat16.
        b: (K, N), bfloat16, whose columns are contiguous: a weight (N, K), transposed.
        bias: (N,), a float, or None.
        xp: cupy.
    """
    if not a.dtype == b.dtype == ml_dtypes.bfloat16:
        return Unsupported(f"arrays of {a.dtype} and {b.dtype}")
    if a.ndim != 2 or b.ndim != 2 or 0 in (*a.shape, *b.shape):
        return Unsupported(f"shapes {a.shape} and {b.shape}")
    weight = b.T
    if not weight.flags.c_contiguous or weight.shape[1] % 8 or weight.data.ptr % 16:
        return Unsupported("columns that are not contiguous, or not a multiple of 16 bytes apart")
    if (refused := tuned.hopper_gap(driver.capability(xp.cuda.runtime.getDevice()))) is not None:
        return refused
    rows = round_to_bf16(xp.ascontiguousarray(a), xp)
    sides = GemmOperand(rows, "bf16"), GemmOperand(weight.view(np.uint16), "bf16")
    added = None if bias is None else bias.astype(np.float32, copy=False)
    return product(*sides, "bfloat16", xp, added)
