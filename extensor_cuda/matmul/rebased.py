"""Float activations times packed MXFP4 on FP8 tensor cores: MXFP8 that is rebased, made on the way.

Activations are quantized to the codes that a tile of 128 x 128 shares a scale for, in one reading
and without packed storage. Weights become E5M2 under one power of two for the matrix, exactly where
their scales span no more than `extensor_cuda.matmul.rebase` says. `extensor_cuda.matmul.product`
has the bound of the product, given both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from extensor.backends.unsupported import Unsupported
from extensor.quant.array import QuantArray
from extensor.quant.recipe_state import Counts
from extensor.quant.spec import REBASE_TILE, QuantSpec
from extensor_cuda.matmul import fused, tuned
from extensor_cuda.matmul.expand import expand
from extensor_cuda.matmul.operand import GemmOperand, Scale
from extensor_cuda.matmul.product import product
from extensor_cuda.matmul.rebase import held_by, is_mxfp4
from extensor_cuda.matmul.stored import TOO_WIDE
from extensor_cuda.quantize import readable
from extensor_cuda.runtime import driver

__all__ = ["rebased_matmul"]

Array = Any

_FITS_FP8: WeakKeyDictionary[QuantArray, bool] = WeakKeyDictionary()
"""Whether E5M2 holds all of a matrix under one power of two."""


def rebased_matmul(
    xp: Any, x: Array, spec: QuantSpec, w: QuantArray, dtype: str = "float32"
) -> Callable[[], tuple[Array, Counts]] | Unsupported:
    """X w^T and what the quantizer counted. Waits for the GPU the first time that w is seen.

    Args:
        xp: cupy.
        x: (M, K), a float.
        spec: MXFP8 that is rebased, along K.
        w: (N, K), blocked along K.
        dtype: "float32" or "bfloat16".
    """
    gap = tuned.hopper_gap(driver.capability(xp.cuda.runtime.getDevice()))
    if gap is None and not (is_mxfp4(w.spec) and w.spec.axis == 1 and not w.spec.transform):
        gap = Unsupported(f"weights in {w.spec.format}; the product reads MXFP4 along K")
    if gap is not None:
        return gap
    x = readable(xp, x)
    plan = fused.supports(x, spec)
    if isinstance(plan, Unsupported):
        return plan
    weights = _weights(w, xp)
    if weights is None:
        return TOO_WIDE

    def call() -> tuple[Array, Counts]:
        ((left, counts),) = fused.run(x, [plan], [None], xp, None)
        out = product(left, weights, dtype, xp)
        assert not isinstance(out, Unsupported) and counts is not None
        return out, counts

    return call


def _weights(w: QuantArray, xp: Any) -> GemmOperand | None:
    """MXFP4 as E5M2 under scales of tiles, all alike; None if that does not hold every value."""
    flag = None if w in _FITS_FP8 else xp.zeros(1, dtype=np.uint32)
    if not _FITS_FP8.get(w, True):
        return None
    made = expand(w, held_by(w.spec)[0], flag, xp)
    if flag is not None:
        _FITS_FP8[w] = not int(flag[0])
        if not _FITS_FP8[w]:
            return None
    rows, k = made.shape
    blocks = xp.empty((-(-k // REBASE_TILE), fused.pitch(rows)), dtype=np.float32)
    blocks[...] = made.scale.factor
    return replace(made, scale=Scale(blocks=blocks, group_k=REBASE_TILE))
