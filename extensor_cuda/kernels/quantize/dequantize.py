"""Decodes what the fused quantizers write: codes and scales -> float32."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from extensor.quant.array import QuantArray
from extensor_cuda.kernels.quantize.quantize import THREADS, Plan, element_macros
from extensor_cuda.runtime.compile import Source
from extensor_cuda.runtime.launch import launch

__all__ = ["dequantize", "dequantize_source"]

Array = Any


@lru_cache(maxsize=4096)
def dequantize_source(plan: Plan, whole: bool) -> Source:
    """The decoder's program for one plan."""
    macros = element_macros(plan.spec.row.element) | {
        "QUANT_WHOLE": int(whole),
        "CODEC_BLOCK": plan.block,
        "CODEC_UE4M3": int(not plan.spec.is_mx),
    }
    return Source.read(Path(__file__).with_suffix(".cu"), macros)


def dequantize(q: QuantArray, plan: Plan, xp: Any) -> Array:
    """Codes and scales -> float32 of the plan's shape, without waiting."""
    values = xp.empty(plan.shape, dtype=xp.float32)
    codes, scales = xp.ascontiguousarray(q.codes), xp.ascontiguousarray(q.scales)
    aligned = codes.data.ptr % 4 == 0 and scales.data.ptr % 4 == 0
    whole = aligned and plan.length % plan.block == 0
    threads = plan.outer * plan.scales_shape[plan.spec.axis] * (plan.block // 4)
    sizes: tuple[int, ...] = (plan.outer, plan.length)
    if plan.columns:
        whole = whole and plan.inner % 4 == 0
        threads *= -(-plan.inner // 4)
        sizes = (*sizes, plan.inner)
    kernel = "dequantize_columns" if plan.columns else "dequantize_rows"
    arrays = codes, scales, q.tensor_scale, values
    source, blocks = dequantize_source(plan, whole), -(-threads // THREADS)
    launch(source, kernel, blocks, THREADS, *arrays, *map(np.int64, sizes))
    return values
