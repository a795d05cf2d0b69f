"""What decides whether a quantizer has a kernel for an array under a spec."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from extensor.backends.unsupported import Unsupported
from extensor.quant.rebase import rebase_tiles
from extensor.quant.spec import QuantSpec
from extensor.random import Stream
from extensor_cuda.kernels.quantize import quantize as kernels
from extensor_cuda.kernels.quantize.dequantize import dequantize
from extensor_cuda.runtime.counters import Counters, OperandCounts

__all__ = ["fake_quantize_rebased", "input_gap"]

Array = Any


def input_gap(x: Array, spec: QuantSpec, stream: Stream | None) -> Unsupported | None:
    """Why no kernel quantizes x, whatever its shape; None where one may."""
    if x.dtype.kind != "f" and x.dtype.name != "bfloat16":
        return Unsupported(f"{x.dtype} array")
    if (stream is None) == (spec.rounding == "stochastic"):
        return Unsupported("the stream does not go with the rounding")
    return _dialect_gap(spec)


@lru_cache(maxsize=1024)
def _dialect_gap(spec: QuantSpec) -> Unsupported | None:
    """What of the dialect no kernel covers, so that the CPU runs it; None if nothing."""
    dialect = spec.dialect_row
    gaps = {
        f"zeros' signs of dialect {dialect.name}": spec.row.element.is_float
        and spec.zero_sign != "kept",
        f"special blocks of dialect {dialect.name}": spec.is_mx
        and (dialect.mx_inf_byte is None or dialect.mx_least_divisor != -127),
        f"the order of operations of dialect {dialect.name}": spec.rule == "amax"
        and spec.row.tensor_scale
        and dialect.nvfp4_order != "transformer_engine",
    }
    found = next((phrase for phrase, is_open in gaps.items() if is_open), None)
    return None if found is None else Unsupported(found)


def fake_quantize_rebased(
    x: Array, spec: QuantSpec, stream: Stream | None, xp: Any
) -> tuple[Array, OperandCounts]:
    """The decoded float32 values under a spec with ``rebased``, and counts, without waiting.

    Args:
        x: C-contiguous array in a dtype that the quantizers read, and a shape that they cover.
        spec: resolved.
        stream: given exactly under stochastic rounding.
        xp: cupy.
    """
    plan = kernels.plan_of(spec.replace(rebased=False), tuple(x.shape))
    assert isinstance(plan, kernels.Plan), plan
    done = kernels.quantize_raw(x, plan, stream, xp)
    assert done.q is not None and done.counters is not None
    q, changed, gone = rebase_tiles(done.q, xp)
    lost = Counters(2, xp)
    lost.array[0] += changed.astype(np.uint64)
    lost.array[1] += gone.astype(np.uint64)
    counts = OperandCounts(
        done.counters, (0, 2 * kernels.SLOTS), plan.count, rebased=(lost, (0, 2))
    )
    return dequantize(q, plan, xp), counts
